"""Plans of the parameter groups of a unit: which parameters form a group, and their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch

from fullshard._compat import inner_tensors
from fullshard.device.memory import MemoryKind, Slot
from fullshard.engine.group_buffers import Region
from fullshard.engine.group_plan import GroupPlan, PayloadPlan
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.param_view import ParamView
from fullshard.engine.sharded_param import Source
from fullshard.errors import ConfigError
from fullshard.layout.offsets import align
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import DtypeContract

_STORAGE_STEP = 256  # alignment of a parameter group in bytes, see MessageRule.start_step_bytes


def by_kind(sources: Sequence[Source]) -> list[list[Source]]:
    """Group the sources by mesh, dtype, `requires_grad` and treatment. Groups keep the order of the sources."""
    meshes = list(dict.fromkeys(source.axes for source in sources))

    def kind(source: Source) -> tuple[int, str, str, bool, bool, bool, bool]:
        treated = source.param.requires_grad, source.view.is_opaque, source.sends_payloads, source.keeps_dtype
        return meshes.index(source.axes), str(source.param.dtype), str(source.grad_dtype or ""), *treated

    return [list(group) for _, group in groupby(sorted(sources, key=kind), key=kind)]


def contract_for(
    options: ShardOptions, view: ParamView, stored: torch.dtype, grad: torch.dtype | None, *, keeps_dtype: bool
) -> DtypeContract:
    """Return the dtypes of parameters stored as `stored`; see `MixedPrecisionPolicy.contract`."""
    if view.is_opaque:
        return DtypeContract(stored=stored, compute=stored, reduce=stored)
    return options.precision.contract(stored, grad, keeps_dtype=keeps_dtype)


def plan_for(kind: Sequence[Source], options: ShardOptions, device: torch.device, memory: MemoryKind) -> GroupPlan:
    """Return the plan of a parameter group of `kind`."""
    first = kind[0]
    contract = contract_for(options, first.view, first.param.dtype, first.grad_dtype, keeps_dtype=first.keeps_dtype)
    shapes, dims = [source.local.shape for source in kind], [source.dim for source in kind]
    if not first.sends_payloads:
        return GroupPlan.of(shapes, dims, contract, options, first.axes, device, memory)
    plan = PayloadPlan.of(shapes, dims, contract, options, first.axes, device, memory)
    if not plan.shards_optimizer and contract.compute != contract.stored:
        raise ConfigError(
            f"param_dtype={contract.compute}, but {first.fqn}, a {type(first.local).__name__}, is never gathered "
            f"(as under strategy='ddp'), so it cannot be cast from {contract.stored}. Leave param_dtype out, or "
            "choose a strategy that shards the optimizer state, such as 'zero1'."
        )
    return replace(
        plan, inner_nbytes=sum(inner_tensor.nbytes for source in kind for inner_tensor in inner_tensors(source.local))
    )


def nbytes_of(plans: Sequence[GroupPlan]) -> int:
    """Return the bytes of the storage that holds the unsharded parameters of groups."""
    return sum(align(plan.unsharded_nbytes, _STORAGE_STEP) for plan in plans)


def are_on_meta(plans: Sequence[GroupPlan]) -> bool:
    """Return True if any of the shards have no memory yet."""
    return any(plan.memory.device.type == "meta" for plan in plans)


def regions_of(slot: Slot, plans: Sequence[GroupPlan]) -> list[Region]:
    """Return the regions of the groups' unsharded buffers, contiguous in `slot`."""
    sizes = [align(plan.unsharded_nbytes, _STORAGE_STEP) for plan in plans]
    return [(slot.storage, start) for start in accumulate(sizes, initial=0)][: len(plans)]


def device_of(sources: Sequence[Source], device: torch.device) -> torch.device:
    """Return the device of unsharded parameters: `device`, or meta while the sources are on it."""
    meta = [source.fqn for source in sources if source.param.is_meta]
    if meta and len(meta) < len(sources):
        real = next(source.fqn for source in sources if not source.param.is_meta)
        raise ConfigError(
            f"{meta[0]} is on the meta device, but {real} in the same unit is not. Build all modules of a unit under "
            'torch.device("meta"), or none of them.'
        )
    return torch.device("meta") if meta else device


def check_one_dtype(param_group: ParamGroup) -> None:
    """Raise `ConfigError` if the current parameters of the modules in `param_group` have different dtypes."""
    values = [param for param in param_group.params if not param.shown.is_meta]
    odd = [param for param in values if param.shown.dtype != values[0].shown.dtype]
    if odd:
        raise ConfigError(
            f"{odd[0].fqn} now has dtype {odd[0].shown.dtype}, but {values[0].fqn} has {values[0].shown.dtype}. They "
            "had the same dtype when their module was sharded, and share a buffer. Change the dtype of all of them, or "
            "change it before sharding."
        )
