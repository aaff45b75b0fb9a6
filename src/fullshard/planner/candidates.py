"""The ways in which a model can be trained on so many ranks, and what of each can be told without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard.disk.speed import TYPICAL, DiskSpeed
from fullshard.errors import ConfigError
from fullshard.fully_shard import shard_in_place
from fullshard.integrations.placing import repeated_layers
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import Hardware
from fullshard.policy.offload import CPUOffloadPolicy, Offload, OffloadPolicy
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import MixedPrecisionPolicy
from fullshard.policy.strategy import Placement, Placements, resolve_placements
from fullshard.train.model import GPT
from fullshard.wrap import wrapped_modules

__all__ = [
    "CHECKPOINTING",
    "PRECISIONS",
    "STRATEGIES",
    "Candidate",
    "Cluster",
    "Program",
    "checkpointed",
    "programs",
    "sharded",
    "share_rows",
    "units_of",
]

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hsdp_zero2", "hfsdp")
"""The named ones; hpz is zero3 with secondary shards within a host, hfsdp gathers across hosts once a step."""

CHECKPOINTING = ("none", "selective", "every-2", "every-1")
"""What is kept up to backward: all; products of matrices and attention; all of every other block; inputs of blocks."""

PRECISIONS = {
    "bf16": (torch.bfloat16, torch.float32),
    "bf16-reduce": (torch.bfloat16, torch.bfloat16),
    "fp32": (None, None),
}
"""Dtypes of compute and of gradient sums; parameters at rest and the optimizer keep the model's own."""

T = TypeVar("T")

_GPU_BYTES_APART = 2.0e9  # CUDA's context, NCCL's buffers (some 0.5 GB each), cuBLAS's workspaces, and a margin
_CPU_BYTES_APART = 0.45e9  # of a process: Python, torch and their libraries


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of one kind.

    Args:
        hardware: the kind.
        hosts: how many.
        per_host: ranks on each.
        share: of an accelerator's memory that may be used; None to leave room for what takes memory besides tensors.
        disk: of each host.
    """

    hardware: Hardware
    hosts: int
    per_host: int
    share: float | None = None
    disk: DiskSpeed = TYPICAL

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.per_host

    @property
    def usable_bytes(self) -> float:
        """What a rank's tensors, and what the allocator holds beyond them, may take."""
        whole = self.hardware.memory_bytes
        if self.hardware.kind == "cpu":
            return (self.share or 0.95) * whole / self.per_host - _CPU_BYTES_APART
        return whole * self.share if self.share is not None else whole - _GPU_BYTES_APART

    @property
    def holder(self) -> str:
        """What holds memory beyond that of tensors."""
        return "process" if self.hardware.kind == "cpu" else "caching allocator"

    @property
    def why_usable(self) -> str:
        """The room that is left, and why."""
        whole, usable = self.hardware.memory_bytes / 1e9, self.usable_bytes / 1e9
        if self.hardware.kind == "cpu":
            return (
                f"{usable:.1f} GB of each rank's part of {whole:.1f} GB: {_CPU_BYTES_APART / 1e9:.2f} GB a process are "
                "left for Python and torch"
            )
        if self.share is not None:
            return f"{usable:.1f} of {whole:.1f} GB, as --gpu-memory {self.share:g} says"
        return (
            f"{usable:.1f} of {whole:.1f} GB: {_GPU_BYTES_APART / 1e9:.0f} GB are left for CUDA's context, NCCL's "
            "buffers and cuBLAS's workspaces (--gpu-memory says otherwise)"
        )

    def costs(self, dtype: str) -> Costs:
        """The costs of a rank's tape, where products of matrices are of `dtype`. Ranks share the cores of a CPU."""
        return costs_of(self.hardware, dtype=dtype, ranks=self.per_host)

    def with_hosts(self, hosts: int) -> Cluster:
        """As many hosts of the same kind."""
        return replace(self, hosts=hosts)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What decides on the operations of a step, other than how many rows there are.

    Args:
        strategy: one of `STRATEGIES`, or "own" for a model that the user's function shards.
        checkpointing: one of `CHECKPOINTING`.
        precision: one of `PRECISIONS`, or "own".
        offload: whether shards, their gradients and the optimizer's step are on the CPU.
        prefetch_depth: how many units are gathered ahead.
        accumulates: whether a step has several microbatches.
        syncs_each: whether gradients are reduced after each of them, instead of once (`no_sync` before that).
        gather_wire: encoding of parameters in gathers; None for none.
        reduce_wire: of gradients in reductions.
        cpu: how much of the optimizer's state is on the CPU, which steps it. Of a program that is to be looked at, 1:
            as much of it as is needed.
        disk: how much of the optimizer's state rests on the disk of each host. Of a program that is to be looked at, 1:
            as much of it as is needed.
    """

    strategy: str
    checkpointing: str = "none"
    precision: str = "bf16"
    offload: bool = False
    prefetch_depth: int = 1
    accumulates: bool = False
    syncs_each: bool = False
    gather_wire: str | None = None
    reduce_wire: str | None = None
    cpu: float = 0.0
    disk: float = 0.0

    def __str__(self) -> str:
        parts = [self.strategy]
        if self.checkpointing != "none":
            parts.append(f"checkpoints {self.checkpointing}")
        if self.offload:
            parts.append("offload")
        if self.cpu:
            parts.append(f"{self.cpu:.0%} of states on the CPU")
        if self.disk:
            parts.append(f"{self.disk:.0%} of states on disk")
        if self.prefetch_depth != 1:
            parts.append(f"{self.prefetch_depth} ahead")
        if self.accumulates:
            parts.append("sums each microbatch" if self.syncs_each else "no_sync")
        return ", ".join(parts)

    def placements(self, per_host: int) -> Placements:
        """Where each state lives."""
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

    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes and encodings."""
        param, reduce = PRECISIONS[self.precision]
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, gather_wire=self.gather_wire, reduce_wire=self.reduce_wire
        )

    def offload_policy(self) -> OffloadPolicy | None:
        """What is on the CPU. What is on a disk is added to what a run without it takes."""
        if self.offload:
            return CPUOffloadPolicy()
        return Offload(optimizer={"cpu": self.cpu}) if self.cpu else None

    def options(self, per_host: int) -> ShardOptions:
        """What units are made with."""
        return replace(
            ShardOptions.of(
                self.placements(per_host),
                mp_policy=self.policy(),
                offload_policy=self.offload_policy(),
            ),
            prefetch_depth=self.prefetch_depth,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A program, with the rows of a microbatch on a rank and the microbatches of a step."""

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
    wires: tuple[str | None, str | None] = (None, None),
) -> Iterator[Program]:
    """All programs that make sense on `cluster`: hybrid ones take several hosts, and sharded ones several ranks.

    zero1 and zero2 differ in what they keep of gradients between microbatches. Where that is nothing, there is one of
    them: zero1 without microbatches to add up, and zero2, which frees parameters sooner, where each is reduced.
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
                            continue  # which is for microbatches that gather within hosts
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
                                gather_wire=wires[0] if strategy != "ddp" else None,
                                reduce_wire=wires[1],
                            )


def share_rows(global_batch: int, world: int) -> list[int]:
    """The rows that a microbatch of a rank may have, if a step learns from `global_batch` of them.

    Raises:
        ConfigError: the ranks cannot share them evenly.
    """
    if global_batch < 1 or global_batch % world:
        below, above = global_batch // world * world, (global_batch // world + 1) * world
        near = f"{below} or {above}" if below > 0 else f"{above}"
        raise ConfigError(
            f"--global-batch {global_batch}: {world} ranks cannot share {global_batch} rows evenly. Take {near}."
        )
    mine = global_batch // world
    return [rows for rows in range(1, mine + 1) if mine % rows == 0]


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules below `model` that become units: the blocks of its lists; of the trainer's GPT, as it shards it."""
    if isinstance(model, GPT):
        return list(model.blocks)
    return list(wrapped_modules(model, repeated_layers(model)))


def sharded(model: nn.Module, program: Program, per_host: int) -> nn.Module:
    """`model` itself, checkpointed and sharded as `program` says."""
    units = units_of(model)
    for unit in checkpointed(units, program.checkpointing):
        unit.forward = partial(checkpoint, unit.forward, **_how(program.checkpointing))
    options = program.options(per_host)
    for unit in (*units, model):
        shard_in_place((unit,), options)
    return model


def checkpointed(units: Sequence[T], kept: str) -> Sequence[T]:
    """Those of `units` that run again in backward."""
    if kept == "none":
        return ()
    return units[1::2] if kept == "every-2" else units


def _how(kept: str) -> dict[str, Any]:
    if kept != "selective":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_products)}


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of selective checkpointing: what products of matrices and attention give is kept, the rest is not."""
    names = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")
    kept = any(str(operation._overloadpacket).removeprefix("aten.").startswith(name) for name in names)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
