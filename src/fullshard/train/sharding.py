"""Creation and sharding of the GPT of a run by its settings."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import FSDPModule, MixedPrecisionPolicy, Offload, fully_shard
from fullshard.train.model import GPT, initialize, shape_of
from fullshard.train.parallelism import replicas_of
from fullshard.train.ranks import Rank
from fullshard.train.settings import MemorySettings, OptimizationSettings, TrainSettings


class ShardedGPT(FSDPModule, GPT):
    """The class of a `GPT` after `fully_shard`, for type annotations."""


def sharded_gpt(settings: TrainSettings, rank: Rank) -> ShardedGPT:
    """Return the GPT with initial weights, one unit per block and one for the rest.

    The weights do not depend on the number of ranks.
    """
    model = GPT(shape_of(settings.model), checkpoint_blocks=settings.memory.activation_checkpointing)
    initialize(model, settings.run.seed).to(rank.device)
    return shard(model, settings, mesh_of(settings, rank), rank.device.type)


def shard(model: GPT, settings: TrainSettings, mesh: DeviceMesh, device_type: str) -> ShardedGPT:
    """Shard `model` over `mesh` by the settings, for a device of that type, and return it."""
    policy = precision_of(settings.memory, torch.device(device_type))
    offload = offload_of(settings.memory)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, strategy=settings.parallelism.strategy, mp_policy=policy, offload_policy=offload)
    return cast(ShardedGPT, model)


def mesh_of(settings: TrainSettings, rank: Rank) -> DeviceMesh:
    """Return a mesh with a shard axis; for hybrid strategies, also with a replicate axis across machines."""
    replicas = replicas_of(settings.parallelism, rank.world, rank.machines)
    if replicas is None:
        return init_device_mesh(rank.device.type, (rank.world,), mesh_dim_names=("shard",))
    shape = (replicas, rank.world // replicas)
    return init_device_mesh(rank.device.type, shape, mesh_dim_names=("replicate", "shard"))


def precision_of(settings: MemorySettings, device: torch.device) -> MixedPrecisionPolicy:
    """Return the dtypes of compute and of gradient sums, and the encodings. Stored parameters stay float32."""
    compute = dtype_of(settings, device)
    return MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=getattr(torch, settings.reduce_dtype),
        gather_wire=settings.gather_wire,
        reduce_wire=settings.reduce_wire,
    )


def offload_of(settings: MemorySettings) -> Offload:
    """Return the offload policy of the settings."""
    if settings.offload_budget is not None:
        return Offload(budget=settings.offload_budget, folder=settings.offload_folder)
    return Offload(
        optimizer={"cpu": settings.offload_optimizer_cpu, "disk": settings.offload_optimizer},
        parameters={"cpu": settings.offload_parameters_cpu, "disk": settings.offload_parameters},
        activations={"cpu": settings.offload_activations_cpu, "disk": settings.offload_activations},
        folder=settings.offload_folder,
    )


def dtype_of(settings: MemorySettings, device: torch.device) -> torch.dtype:
    """Return the dtype of compute: as set, or by default bfloat16 on a GPU and float32 on a CPU."""
    named = settings.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, named)
    return dtype


def optimizer_of(model: GPT, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Return AdamW over the sharded parameters, with weight decay for matrices of the blocks and the head only."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        decays = parameter.dim() == 2 and "embedding" not in name
        (decayed if decays else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
