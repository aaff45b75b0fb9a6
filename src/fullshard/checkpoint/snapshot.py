"""Snapshots: copies of one rank's shards in host memory, which can be restored in place.

Unlike a checkpoint, a snapshot is local to one rank. It does not need communication and does not change the model, so a
rank can take one independently of other ranks. It can only be restored on a rank with the same shards: this rank, or
its counterpart in another replica.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import tree_map
from fullshard.checkpoint.contents import HasState
from fullshard.checkpoint.fitting import Misfit
from fullshard.checkpoint.plain import plain_copy
from fullshard.device.accelerator import accelerator_for
from fullshard.device.current import finish_copies
from fullshard.engine.hooks import check_idle
from fullshard.engine.late_params import LateParams
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.engine.residency import INACTIVE, UnitState
from fullshard.state.optim_kinds import SavedOptions, kinds_of_groups
from fullshard.state.optim_state import StateTemplate, params_by_fqn, sharded_optim_state_dict

_WHAT = "the snapshot"
_REMEDY = "Take and restore a snapshot with the same model, optimizer, strategy and number of ranks, on the same rank."


def snapshot(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    extra: Any = None,
) -> dict[str, Any]:
    """Copy this rank's part of a run to host memory, and return it as plain values and plain tensors in dicts.

    This function does not communicate, and does not change the model. It can be called on some ranks only, and during
    forward or backward, because weights and optimizer states change only in the optimizer step. (Buffers have their
    values at that point of forward.) Later steps do not change the snapshot. It takes as much host memory as this
    rank's shards and its part of the optimizer state, and the time to copy them.

    Args:
        model: The model, sharded or not. The snapshot has its shards, other parameters and persistent buffers.
        optimizer: An optimizer of parameters of `model`.
        scheduler: An object with `state_dict()`.
        extra: Other plain values and plain tensors.

    Raises:
        CheckpointError: `extra` or the state of the scheduler contains a value that cannot be loaded without executing
            code.
        ConfigError: The optimizer has a parameter that is not in the model.
        StateError: A parameter was replaced after sharding, or a trained one was added.
    """
    units = units_in(model)
    for unit in units:
        if unit.residency.state in INACTIVE:
            unit.check_replacements()
        elif unit.residency.state is UnitState.UNSHARDED:
            unit.refuse_replacements()  # a snapshot must not reshard the unit
    LateParams(units).check()
    taken: dict[str, Any] = {"model": {fqn: _copied(tensor) for fqn, tensor in _own_tensors(model).items()}}
    if optimizer is not None:
        named = sharded_optim_state_dict(model, optimizer)
        taken["optimizer"] = {
            "state": tree_map(
                lambda item: (_copied(item), tuple(item.shape)) if isinstance(item, Tensor) else item, named["state"]
            ),
            "param_groups": tree_map(
                lambda item: _copied(item) if isinstance(item, Tensor) else item, named["param_groups"]
            ),
            "kinds": kinds_of_groups(optimizer),
        }
    remaining = {"extra": extra, **({} if scheduler is None else {"scheduler": scheduler.state_dict()})}
    finish_copies()
    return {**taken, "rest": plain_copy(remaining, "the snapshot's ")}


def restore_snapshot(
    taken: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
) -> Any:
    """Restore a `snapshot` in place, between steps, and return its `extra`.

    Existing tensors of the model and of the optimizer state keep their memory. Ranks do not communicate, but every rank
    of the mesh must restore its snapshot of the same step before the next step.

    Args:
        taken: The snapshot of this rank, or of its counterpart in another replica. It is neither changed nor kept.
        model: The model, as for `snapshot`.
        optimizer: The optimizer, as for `snapshot`. It need not have taken a step.
        scheduler: The scheduler, as for `snapshot`.

    Raises:
        CheckpointError: The snapshot does not match. Nothing is overwritten in this case.
        DiskError: The disk has too little free space for the optimizer state.
        StateError: A forward or backward is in progress.
    """
    units = units_in(model)
    for unit in units:
        check_idle(unit, "to be restored from a snapshot")
        unit.residency.reshard()
        unit.check_replacements()
    tensors = _own_tensors(model)
    _check_fits(taken, tensors, model, optimizer, scheduler)
    with torch.no_grad():
        for fqn, value in taken["model"].items():
            tensors[fqn].copy_(value)
    for unit in units:
        for param_group in unit.param_groups:
            param_group.gather.note_changed_shards()
    if optimizer is not None:
        _restore_optimizer(taken["optimizer"], model, optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(copy.deepcopy(taken["rest"]["scheduler"]))
    return copy.deepcopy(taken["rest"]["extra"])


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every parameter and persistent buffer, by FQN (the first FQN of tied parameters)."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, Tensor] = {}
    owned: set[tuple[int, str]] = set()  # parameters of units, by module and name
    for unit in units_in(model):
        for param in unit.params:
            places = [(id(owner.module), owner.name) for owner in param.owners]
            owned.update(places)
            fqns = [f"{names[module]}.{name}" for module, name in places if module in names]
            if fqns:  # empty if another weight was tied after sharding
                found[clean_fqn(fqns[0]).removeprefix(".")] = param.local
    visited: set[int] = set()
    for prefix, module in model.named_modules():
        others: list[tuple[str, Tensor | None]] = [
            *((name, param) for name, param in module._parameters.items() if (id(module), name) not in owned),
            *(
                (name, buffer)
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            ),
        ]
        for name, tensor in others:
            if tensor is not None and id(tensor) not in visited:
                visited.add(id(tensor))
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                found[clean_fqn(f"{prefix}.{name}").removeprefix(".")] = local
    return found


def _copied(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return accelerator_for(local.device).to_host(local.detach())


def _is_copied_state(value: Any) -> bool:
    """Return True if `value` is a pair that represents a state tensor: this rank's shard and the global shape."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)


def _check_fits(
    taken: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
) -> None:
    """Raise a `CheckpointError` unless `taken` fits the model's `tensors`, the optimizer and the scheduler."""
    values, misfit = taken["model"], Misfit()
    misfit.missing += [fqn for fqn in tensors if fqn not in values]
    misfit.unexpected += [fqn for fqn in values if fqn not in tensors]
    misfit.misshapen += [
        f"{fqn} ({_described(values[fqn])} in it, {_described(tensor)} here)"
        for fqn, tensor in tensors.items()
        if fqn in values and _described(values[fqn]) != _described(tensor)
    ]
    if optimizer is not None and "optimizer" not in taken:
        misfit.absent.append("optimizer")
    elif optimizer is not None:
        stepped = [fqn for group in taken["optimizer"]["param_groups"] for fqn in group["params"]]
        params = params_by_fqn(model, optimizer)
        misfit.missing += [f"{fqn} in the optimizer" for fqn in params if fqn not in stepped]
        misfit.unexpected += [f"{fqn} in the optimizer" for fqn in stepped if fqn not in params]
        # Snapshots of earlier versions have no kinds.
        groups = zip(taken["optimizer"]["param_groups"], taken["optimizer"].get("kinds", ()), strict=False)
        kind = StateTemplate(optimizer, params).misfit_of_kind(
            [SavedOptions(group["params"], group, kinds) for group, kinds in groups]
        )
        misfit.kinds += [] if kind is None else [kind]
    if scheduler is not None and "scheduler" not in taken["rest"]:
        misfit.absent.append("scheduler")
    misfit.check(_WHAT, _REMEDY)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _restore_optimizer(named: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    template = StateTemplate(optimizer, params_by_fqn(model, optimizer))
    copied = {
        (fqn, name): (torch.Size(value[1]), value[0].dtype)
        for fqn, values in named["state"].items()
        for name, value in values.items()
        if _is_copied_state(value)
    }
    template.note_counters(key for key, (shape, _) in copied.items() if not shape)
    template.make_room(copied)

    def placed(fqn: str, name: str, value: Any) -> Any:
        if not _is_copied_state(value):
            return value
        part, shape = value
        target = template.destination(fqn, name, torch.Size(shape), part.dtype)
        with torch.no_grad():
            (target._local_tensor if isinstance(target, DTensor) else target).copy_(part)
        return target

    state = {
        fqn: {name: _mapped(partial(placed, fqn, name), value) for name, value in values.items()}
        for fqn, values in named["state"].items()
    }
    optimizer.load_state_dict(template.numbered({"state": state, "param_groups": named["param_groups"]}))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to every copied tensor, also in lists and dicts."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(function, item) for item in value]
    return function(value)
