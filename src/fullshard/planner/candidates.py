"""The possible programs for a number of ranks, and the properties that are known without simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard.disk.speed import TYPICAL, DiskSpeed
from fullshard.errors import ConfigError
from fullshard.fsdp_module import shard_in_place
from fullshard.integrations.placing import repeated_layers
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import Hardware
from fullshard.policy.offload import CPUOffloadPolicy, Offload, OffloadPolicy
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.policy.strategy import Placement, Placements, resolve_placements
from fullshard.train.model import GPT
from fullshard.wrap import wrapped_modules

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hsdp_zero2", "hfsdp")
"""The named strategies. hpz is zero3 with secondary shards within a host; hfsdp gathers across hosts once per step."""

CHECKPOINTING = ("none", "selective", "every-2", "every-1")
"""Tensors kept until backward: all; matrix product and attention outputs; all of every other block; block inputs."""

PRECISIONS = {
    "bf16": (torch.bfloat16, torch.float32),
    "bf16-reduce": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float32),
    "fp32": (None, None),
}
"""Compute and reduce dtypes. Stored parameters and the optimizer keep the model's dtype. fp16 has loss scaling."""

_MOST_ROWS = 1 << 20  # per rank, of a global batch

T = TypeVar("T")

MEMORY_ERROR = {"gpu": 0.06, "cpu": 0.11}
"""The largest share by which a measured peak has exceeded its prediction: docs/plan.md, "How good it is"."""

_GPU_BYTES_SEPARATE = 2.0e9  # CUDA's context, NCCL's buffers (about 0.5 GB each), cuBLAS's workspaces, and a margin
_CPU_BYTES_SEPARATE = 0.45e9  # of a process: Python, torch and their libraries


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of one kind."""

    hardware: Hardware
    hosts: int
    per_host: int  # the number of ranks per host
    # The share of an accelerator's memory that may be used. If None, memory is reserved for everything except tensors.
    share: float | None = None
    disk: DiskSpeed = TYPICAL

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.hosts * self.per_host

    @property
    def usable_bytes(self) -> float:
        """The bytes available for a rank's tensors and the overhead of the allocator."""
        whole = self.hardware.memory_bytes
        if self.hardware.kind == "cpu":
            return (self.share or 0.95) * whole / self.per_host - _CPU_BYTES_SEPARATE
        return whole * self.share if self.share is not None else whole - _GPU_BYTES_SEPARATE

    @property
    def memory_error(self) -> float:
        """The maximum relative error of a rank's predicted memory."""
        return MEMORY_ERROR[self.hardware.kind]

    @property
    def safe_bytes(self) -> float:
        """The largest prediction that fits even if the measured memory is larger by `memory_error`."""
        return self.usable_bytes / (1 + self.memory_error)

    def limit_for(self, least_bytes: float) -> float:
        """Return `safe_bytes`, or `usable_bytes` if the smallest possible prediction is larger than that."""
        return self.safe_bytes if least_bytes <= self.safe_bytes else self.usable_bytes

    @property
    def holder(self) -> str:
        """The name of what holds memory in addition to tensors."""
        return "process" if self.hardware.kind == "cpu" else "caching allocator"

    @property
    def why_usable(self) -> str:
        """The usable memory with an explanation."""
        whole, usable = self.hardware.memory_bytes / 1e9, self.usable_bytes / 1e9
        if self.hardware.kind == "cpu":
            return (
                f"{usable:.1f} GB of each rank's part of {whole:.1f} GB: {_CPU_BYTES_SEPARATE / 1e9:.2f} GB per "
                "process are reserved for Python and torch"
            )
        if self.share is not None:
            return f"{usable:.1f} of {whole:.1f} GB, as --gpu-memory {self.share:g} says"
        return (
            f"{usable:.1f} of {whole:.1f} GB: {_GPU_BYTES_SEPARATE / 1e9:.0f} GB are reserved for the CUDA context, "
            "NCCL buffers and cuBLAS workspaces (--gpu-memory changes this)"
        )

    def costs(self, dtype: str) -> Costs:
        """Return the costs of a rank's trace, with matrix products in `dtype`. Ranks share the cores of a CPU."""
        return costs_of(self.hardware, dtype=dtype, ranks=self.per_host)

    def with_hosts(self, hosts: int) -> Cluster:
        """Return a cluster with a different number of hosts of the same kind."""
        return replace(self, hosts=hosts)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that determines the operations of a step, except the number of rows."""

    strategy: str  # one of `STRATEGIES`, or "own" for a model that the user's function shards
    checkpointing: str = "none"  # one of `CHECKPOINTING`
    precision: str = "bf16"  # one of `PRECISIONS`, or "own"
    shard_hosts: int = 1  # under hsdp and hsdp_zero2: the number of hosts over whose ranks states are sharded
    offload: bool = False  # whether shards, their gradients and the optimizer step are on the CPU
    prefetch_depth: int = 1  # the number of units to prefetch
    blocks_per_unit: int = 1  # the number of consecutive blocks that form a unit
    accumulates: bool = False  # whether a step has several microbatches
    # Whether gradients are reduced after each microbatch instead of once (`no_sync` before that).
    syncs_each: bool = False
    gather_wire: str | None = None  # the encoding of parameters in all-gathers, or None
    reduce_wire: str | None = None  # the encoding of gradients in reductions, or None
    compiled: bool = False  # whether each block is compiled with `torch.compile`
    # The fraction of the optimizer state that is on the CPU and updated there. Before the search, 1 means as much as
    # needed.
    cpu: float = 0.0
    # The fraction of the optimizer state on the disk of each host. Before the search, 1 means as much as needed.
    disk: float = 0.0

    def __str__(self) -> str:
        parts = [self.strategy]
        if self.shard_hosts != 1:
            parts.append(f"shards over {self.shard_hosts} hosts")
        if self.checkpointing != "none":
            parts.append(f"checkpoints {self.checkpointing}")
        if self.offload:
            parts.append("offload")
        if self.cpu:
            parts.append(f"{self.cpu:.0%} of states on the CPU")
        if self.disk:
            parts.append(f"{self.disk:.0%} of states on disk")
        if self.compiled:
            parts.append("compiled blocks")
        if self.prefetch_depth != 1:
            parts.append(f"{self.prefetch_depth} ahead")
        if self.blocks_per_unit != 1:
            parts.append(f"units of {self.blocks_per_unit} blocks")
        if self.accumulates:
            parts.append("sums each microbatch" if self.syncs_each else "no_sync")
        return ", ".join(parts)

    def placements(self, per_host: int) -> Placements:
        """Return the placement of each state."""
        grouped, sharded = Placement.GROUPED, Placement.SHARDED
        if self.strategy == "hpz":
            return Placements(
                parameters=sharded, parameters_in_step=grouped, gradients=sharded, optimizer=sharded, group=per_host
            )
        if self.strategy == "hfsdp":
            return Placements(
                parameters=grouped, parameters_in_step=grouped, gradients=grouped, optimizer=sharded, group=per_host
            )
        return resolve_placements(self.strategy)

    @property
    def is_replicated(self) -> bool:
        """True if groups of hosts hold replicas of the states."""
        return self.strategy in ("hsdp", "hsdp_zero2")

    def mesh_shape(self, cluster: Cluster) -> tuple[int, int]:
        """Return the number of replicas of the states, and the number of ranks that share a replica."""
        shards = self.shard_hosts * cluster.per_host if self.is_replicated else cluster.world
        return cluster.world // shards, shards

    @property
    def scales_loss(self) -> bool:
        """True if a gradient scaler keeps gradients within the range of fp16."""
        return self.precision == "fp16"

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes and encodings."""
        param, reduce = PRECISIONS[self.precision]
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, gather_wire=self.gather_wire, reduce_wire=self.reduce_wire
        )

    def offload_policy(self) -> OffloadPolicy | None:
        """Return the policy for offload to the CPU. The effect of a disk is added to the results of the simulation."""
        if self.offload:
            return CPUOffloadPolicy()
        return Offload(optimizer={"cpu": self.cpu}) if self.cpu else None

    def options(self, per_host: int) -> ShardOptions:
        """Return the options of the units."""
        groups = self.strategy == "hpz"  # the root is resharded too, as by `fully_shard(reshard_after_forward=8)`
        found = ShardOptions.of(
            "zero3" if groups else self.placements(per_host),
            reshard_after_forward=per_host if groups else None,
            mp_policy=self.policy(),
            offload_policy=self.offload_policy(),
        )
        return replace(found, prefetch_depth=self.prefetch_depth)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A program with the rows per microbatch and rank and the microbatches per step."""

    program: Program
    rows: int
    microbatches: int


def programs(
    cluster: Cluster,
    *,
    strategies: Sequence[str] = STRATEGIES,
    checkpointing: Sequence[str] = CHECKPOINTING,
    precisions: Sequence[str] = ("bf16",),
    offloads: Sequence[bool] = (False,),
    accumulates: Sequence[bool] = (False, True),
    encodings: tuple[str | None, str | None] = (None, None),
) -> Iterator[Program]:
    """Yield all useful programs for `cluster`. Hybrid strategies need several hosts, and sharded ones several ranks.

    zero1 and zero2 differ in the gradients that they keep between microbatches. If there are none, only one of them is
    considered: zero1 without accumulation, and zero2, which frees parameters sooner, if each microbatch is reduced.
    """
    reduces_once = ("ddp", "zero1") if "zero2" in strategies else ("ddp",)
    for strategy in strategies:
        if strategy in ("hpz", "hsdp", "hsdp_zero2", "hfsdp") and (cluster.hosts < 2 or cluster.per_host < 2):
            continue
        if strategy != "ddp" and cluster.world < 2:
            continue
        for kept in checkpointing:
            for precision in precisions:
                for offload in offloads:
                    if offload and strategy in ("ddp", "zero1"):
                        continue
                    for several in accumulates:
                        if strategy == "hfsdp" and not several:
                            continue  # hfsdp is for microbatches that gather within hosts
                        if strategy == "zero2" and not several and "zero1" in strategies:
                            continue
                        for each in (False, True) if several and strategy not in reduces_once else (False,):
                            yield Program(
                                strategy=strategy,
                                checkpointing=kept,
                                precision=precision,
                                offload=offload,
                                accumulates=several,
                                syncs_each=each,
                                gather_wire=encodings[0] if strategy != "ddp" else None,
                                reduce_wire=encodings[1],
                            )


def usual_precision(hardware: Hardware) -> str:
    """Return the default precision of plans: fp32 on CPUs, else bf16, or fp16 if that is faster."""
    rates = hardware.flops_per_s
    if hardware.kind == "cpu":
        return "fp32"
    return "fp16" if rates.get("float16", 0.0) > rates.get("bfloat16", 0.0) else "bf16"


def share_rows(global_batch: int, world: int) -> list[int]:
    """Return the possible rows per microbatch and rank for a global batch."""
    if global_batch < 1 or global_batch % world:
        below, above = global_batch // world * world, (global_batch // world + 1) * world
        near = f"{below} or {above}" if below > 0 else f"{above}"
        raise ConfigError(
            f"--global-batch {global_batch}: {world} ranks cannot share {global_batch} rows evenly. Use {near}."
        )
    local = global_batch // world
    if local > _MOST_ROWS:
        raise ConfigError(
            f"--global-batch {global_batch}: must be at most {_MOST_ROWS * world}, {_MOST_ROWS} per rank."
        )
    return [rows for rows in range(1, local + 1) if local % rows == 0]


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules below `model` that become units: the blocks of its lists, or of the trainer's GPT."""
    if isinstance(model, GPT):
        return list(model.blocks)
    return list(wrapped_modules(model, repeated_layers(model)))


def sharded(model: nn.Module, program: Program, cluster: Cluster) -> nn.Module:
    """Apply activation checkpointing and sharding to `model` in place, as `program` describes, and return it."""
    units = units_of(model)
    for unit in checkpointed(units, program.checkpointing):
        unit.forward = partial(checkpoint, unit.forward, **_how(program.checkpointing))
    options, mesh = program.options(cluster.per_host), None
    if program.shard_hosts > 1:
        names = "replicate", "shard"
        mesh = init_device_mesh("cpu", program.mesh_shape(cluster), mesh_dim_names=names)  # a dry run is on the CPU
    for first in range(0, len(units), program.blocks_per_unit):
        shard_in_place(units[first : first + program.blocks_per_unit], options, mesh=mesh)
    shard_in_place((model,), options, mesh=mesh)
    return model


def checkpointed(units: Sequence[T], kept: str) -> Sequence[T]:
    """Return those of `units` that are recomputed in backward."""
    if kept == "none":
        return ()
    return units[1::2] if kept == "every-2" else units


def _how(kept: str) -> dict[str, Any]:
    if kept != "selective":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_products)}


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Select the outputs to save in selective checkpointing: those of matrix products and attention."""
    names = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")
    kept = any(str(operation._overloadpacket).removeprefix("aten.").startswith(name) for name in names)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
