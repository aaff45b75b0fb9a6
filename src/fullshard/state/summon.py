"""Unsharded parameters that the user can read, initialize or change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullshard._compat import marks_of
from fullshard.device.accelerator import accelerator_for
from fullshard.engine.comparison import barrier
from fullshard.engine.hooks import is_in_use
from fullshard.engine.managed import managed_by
from fullshard.engine.registry import failing_together, is_unit, units_in, unwrapped
from fullshard.engine.residency import UnitState
from fullshard.engine.sharded_param import ShardedParam, full_copy
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError, StateError
from fullshard.policy.arguments import check_flags, check_type
from fullshard.state.state_dict import is_first_rank


@dataclass(frozen=True)
class _Wish:
    """The options of one call of `summon_full_params`."""

    writeback: bool
    offload: bool
    with_grads: bool
    shows: bool  # this rank's modules get the unsharded parameters


@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context manager that unshards the parameters of `module` to plain tensors in their stored dtype.

    Every rank must enter it. Parameters that an outer context has unsharded do not change. Do not use it within forward
    or backward, and do not run these within it. Changes take effect when the context ends, even with an exception.

    Args:
        module: A unit, or a module that contains units.
        recurse: Whether to include the units below `module`.
        writeback: Whether to keep changes to the parameters. Each rank keeps the changes of its shard.
        rank0_only: Whether only the first rank gets unsharded parameters. The others keep their shards. Not supported
            with `writeback`.
        offload_to_cpu: Whether unsharded parameters are moved to the CPU.
        with_grads: Whether gradients are unsharded too. With `writeback`, changes to gradients are kept.

    Raises:
        ConfigError: `rank0_only` and `writeback` are both set.
        StateError: A unit is in forward or backward, or on the meta device. At the end of the context: A parameter has
            a different shape, or its shards were written to within the context.
    """
    check_type("module", module, nn.Module, "a sharded nn.Module")
    check_flags(
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    if rank0_only and writeback:
        raise ConfigError(
            "summon_full_params(rank0_only=True, writeback=True): only rank 0 has the full parameters, so the other "
            "ranks would lose its changes. Pass writeback=False."
        )
    units = _units(module, recurse)
    for unit in units:
        if is_in_use(unit):
            raise StateError(
                f"summon_full_params within a forward or backward of {unit.name or 'the root'}: its parameters "
                "are in use. Call it between steps."
            )
        unit.check_materialized()
        if unit.residency.state is not UnitState.SUMMONED:
            unit.residency.reshard()
            unit.check_replacements()
    barrier(units, "summon_full_params")
    wish = _Wish(writeback, offload_to_cpu, with_grads, shows=not rank0_only or is_first_rank(module))
    with ExitStack() as stack:
        for unit in units:
            if unit.residency.state is not UnitState.SUMMONED:
                stack.enter_context(_unsharded(unit, wish))
        yield


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the units that have parameters of `module`. Without `recurse`, return the unit of `module` only.

    The result includes units outside of `module` that own tied weights, or that contain `module`.
    """
    inner = unwrapped(module)
    found = units_in(module) if recurse else units_in(inner)[:1] if is_unit(inner) else []
    owned = module.parameters() if recurse else (p for unit in found for m in unit.modules for p in m.parameters(False))
    managed = [managed_by(param) for param in owned]
    units = [*found, *(item.unit for item in managed if item is not None)]
    return list({id(unit): unit for unit in units}.values())


@contextmanager
def _unsharded(unit: Unit, wish: _Wish) -> Iterator[None]:
    unit.residency.reshard()
    device = torch.device("cpu") if wish.offload else unit.device
    with failing_together([unit]):
        found = [(param, _summoned(param, device, unit.device, wish)) for param in unit.params if param.owners]
    summoned = [(param, whole, whole._version, param.sharded._version) for param, whole in found if whole is not None]
    for param, whole, _, _ in summoned:
        param.show(whole)
    unit.residency.summon()
    try:
        yield
    finally:
        present = [param.shown for param, _, _, _ in summoned]
        for param, _, _, _ in summoned:
            param.show(param.sharded)
        unit.residency.end_summon()
        if wish.writeback:
            for whole, (param, first, first_version, version) in zip(present, summoned, strict=True):
                is_unchanged = whole is first and whole._version == first_version  # writes to `data` are not detected
                if param.is_encoded:
                    _check_unchanged(param, is_unchanged)
                    continue
                _write_back(param, whole, version, wish.with_grads)
                if is_unchanged:
                    param.counters.ignored += 1


def _summoned(param: ShardedParam, device: torch.device, transport: torch.device, wish: _Wish) -> nn.Parameter | None:
    """Return the unsharded parameter in separate memory on `device`; None on ranks that do not get it."""
    value = _gathered(param, param.local, transport)
    grad = _gathered(param, param.grad, transport) if wish.with_grads and param.grad is not None else None
    if not wish.shows:
        return None
    whole = param.view.make_summoned(value.to(device), requires_grad=param.sharded.requires_grad)
    if grad is not None and grad.dtype != whole.dtype:
        whole.grad_dtype = grad.dtype
    whole.grad = None if grad is None else grad.to(device)
    vars(whole).update(marks_of(param.sharded))  # attributes that users have set
    return whole


def _gathered(param: ShardedParam, shard: Tensor, transport: torch.device) -> Tensor:
    return full_copy(param.placed(accelerator_for(transport).to_device(shard, transport)))


def _check_unchanged(param: ShardedParam, is_unchanged: bool) -> None:
    """Raise if a full parameter was changed in a way that cannot be written back.

    Raises:
        StateError: The full parameter was replaced or written to.
    """
    if not is_unchanged:
        raise StateError(
            f"{param.fqn}, a {type(param.local).__name__} with encoded values, was changed within summon_full_params, "
            "but a rank cannot encode its shard separately. Change it before fully_shard, or pass writeback=False."
        )


@torch.no_grad()
def _write_back(param: ShardedParam, whole: nn.Parameter, version: int, with_grads: bool) -> None:
    if whole.shape != param.sharded.shape:
        raise StateError(
            f"{param.fqn} has the shape {tuple(whole.shape)} within summon_full_params, but was sharded with "
            f"{tuple(param.sharded.shape)}. Change only its values. Change its shape before sharding."
        )
    if param.sharded._version != version:
        raise StateError(
            f"the shards of {param.fqn} were modified within summon_full_params (for example by an optimizer step), "
            "which would be overwritten when the context exits. Run the step outside of it, or pass writeback=False."
        )
    param.write(whole)
    param.sharded.requires_grad_(whole.requires_grad)
    if with_grads and whole.grad is None:
        param.sharded.grad = None
    elif with_grads and whole.grad is not None:
        own = param.take_shard(whole.grad)
        moved = accelerator_for(own.device).alongside(own, param.local)
        param.grad = (own.clone() if moved is own else moved).contiguous()
