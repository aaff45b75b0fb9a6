"""Snapshots: one rank's shards in host memory, to be read while training goes on, and put back in place.

Unlike a checkpoint, a snapshot is one rank's own affair: nothing is sent, and nothing of the model changes, so a rank
may take one while others do something else. In return it fits no rank but those that have the same shards: this one,
or its counterpart in another replica.
"""

from __future__ import annotations

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
from fullshard.device.current import finish_copies
from fullshard.engine.hooks import check_idle
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.engine.unit import Form
from fullshard.state.optim_state import StateTemplate, params_by_fqn, sharded_optim_state_dict

__all__ = ["restore_snapshot", "snapshot"]

_WHAT = "the snapshot"
_REMEDY = "Take it and restore it with the same model, optimizer, strategy and number of ranks, on the same rank."


def snapshot(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    extra: Any = None,
) -> dict[str, Any]:
    """This rank's part of a run as it is now, copied to host memory: plain values and plain tensors, in dicts.

    Nothing is sent, and nothing of the model is changed: it may be called on some ranks only, and during a forward or
    backward too, since weights and the optimizer's state change in the optimizer's step alone. (Buffers are as the
    forward has left them by then.) Later steps do not change what was taken. It costs as much host memory as this
    rank's shards and its part of the optimizer's state, and the time to copy them.

    Args:
        model: sharded or not: the shards of its parameters, its other parameters, its persistent buffers.
        optimizer: steps parameters of `model`.
        scheduler: anything with `state_dict()`.
        extra: anything else, in plain values and plain tensors.

    Raises:
        CheckpointError: `extra` or the scheduler's state has something that takes executing code to be read back.
        ConfigError: the optimizer has a parameter that is not in the model.
    """
    for unit in units_in(model):
        if unit.form is Form.SHARDED and not unit.state.is_summoned:
            unit.check_replacements()
    taken: dict[str, Any] = {"model": {fqn: _copied(tensor) for fqn, tensor in _own_tensors(model).items()}}
    if optimizer is not None:
        named = sharded_optim_state_dict(model, optimizer)
        taken["optimizer"] = {
            "state": tree_map(_copied_state, named["state"]),
            "param_groups": tree_map(
                lambda item: _copied(item) if isinstance(item, Tensor) else item, named["param_groups"]
            ),
        }
    rest = {"extra": extra, **({} if scheduler is None else {"scheduler": scheduler.state_dict()})}
    finish_copies()
    return {**taken, "rest": plain_copy(rest, "the snapshot's ")}


def restore_snapshot(
    taken: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
) -> Any:
    """Put back what `snapshot` gave, between steps, in place: the `extra` that was given then.

    The model's tensors and those of the optimizer's state that are there already keep their memory. Nothing is sent,
    but every rank of the mesh must restore before the next step: of the same step, each its own.

    Args:
        taken: of this rank, or of the rank of the same place in another replica. It is not changed, and not kept.
        model, optimizer, scheduler: as when it was taken. The optimizer need not have stepped.

    Raises:
        CheckpointError: it does not fit. Nothing was overwritten then.
        DiskError: there is no room on the disk where the optimizer's state is to rest.
        StateError: a forward or backward is under way.
    """
    units = units_in(model)
    for unit in units:
        check_idle(unit, "to be restored from a snapshot")
        unit.reshard()
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
        scheduler.load_state_dict(taken["rest"]["scheduler"])
    return taken["rest"]["extra"]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every parameter and persistent buffer, by FQN; tied ones by their first name."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, Tensor] = {}
    owned: set[tuple[int, str]] = set()  # parameters of units, by module and name
    for unit in units_in(model):
        for param in unit.params:
            places = [(id(owner.module), owner.name) for owner in param.owners]
            owned.update(places)
            fqns = [f"{names[module]}.{name}" for module, name in places if module in names]
            if fqns:  # none, where another weight was tied after sharding
                found[clean_fqn(fqns[0]).removeprefix(".")] = param.local
    seen: set[int] = set()
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
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                found[clean_fqn(f"{prefix}.{name}").removeprefix(".")] = local
    return found


def _copied(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def _copied_state(value: Any) -> Any:
    """A tensor of the optimizer's, as this rank's part and the shape of the whole; anything else as it is."""
    return (_copied(value), tuple(value.shape)) if isinstance(value, Tensor) else value


def _is_copied_state(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)


def _check_fits(
    taken: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: HasState | None,
) -> None:
    """Raise a `CheckpointError` unless `taken` is of the same shards."""
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
    if scheduler is not None and "scheduler" not in taken["rest"]:
        misfit.absent.append("scheduler")
    misfit.check(_WHAT, _REMEDY)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _restore_optimizer(named: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    template = StateTemplate(optimizer, params_by_fqn(model, optimizer))
    template.note_counters(
        (fqn, name)
        for fqn, values in named["state"].items()
        for name, value in values.items()
        if _is_copied_state(value) and not value[1]
    )

    template.make_room(
        {
            (fqn, name): (torch.Size(value[1]), value[0].dtype)
            for fqn, values in named["state"].items()
            for name, value in values.items()
            if _is_copied_state(value)
        }
    )

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
    """`function` of every tensor that was copied, in lists and dicts too."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(function, item) for item in value]
    return function(value)
