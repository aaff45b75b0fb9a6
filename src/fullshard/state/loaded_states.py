"""Loading of state dicts by `optimizer.load_state_dict`: each rank takes its shards of full states.

Shards of another rank raise an error. An optimizer is often created and loaded before it is used with this package. So
its states are checked in its first step, or when they are saved, if that is earlier. After that, a hook of the
optimizer checks loaded states.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import holds_tensors, loads_whole_states
from fullshard.comm.mesh import check_local_shard
from fullshard.engine.comparison import check_same_names
from fullshard.engine.hooks import is_in_use
from fullshard.engine.late_params import refuse_changed_modules
from fullshard.engine.managed import Managed, in_model_order, managed_by
from fullshard.engine.residency import ACTIVE
from fullshard.errors import StateError
from fullshard.state.optim_kinds import block_states
from fullshard.state.optim_state import placed_like

if TYPE_CHECKING:
    from fullshard.state.block_states import BlockStates

_accepting: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def accept_whole_states(optimizer: Optimizer) -> None:
    """Replace full states of sharded parameters in `optimizer` by this rank's shards, now and whenever a state dict is
    loaded.

    Raises:
        CheckpointError: A state is a shard of another rank, or of a different number of ranks.
        StateError: A state is full, and the optimizer encodes states in blocks.
    """
    if optimizer in _accepting:
        return
    if optimizer.state:
        own = _own_states(optimizer, optimizer.state.items())
        for param, values in own.items():
            optimizer.state[param] = values
    _accepting.add(optimizer)
    optimizer.register_load_state_dict_pre_hook(_take_shards)


def prepare_to_save(optimizer: Optimizer) -> None:
    """Prepare `optimizer` for `state_dict()`: accept loaded states, sort them by parameter, and reshard units.

    `torch.distributed.checkpoint` looks for the sharded parameters in the model, so units that the user has unsharded
    are resharded.

    Raises:
        StateError: `torch.distributed.checkpoint` loads full states, and the optimizer does not have states.
        RankMismatchError: `torch.distributed.checkpoint` loads full states, and ranks have different orders of
            parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [managed for managed in map(_sharded, params) if managed is not None]
    units = list(dict.fromkeys(managed.unit for managed in found))
    if not units:
        return
    accept_whole_states(optimizer)
    if loads_whole_states():
        _check_loading(optimizer, found)
    for unit in units:
        if unit.residency.state in ACTIVE and not is_in_use(unit):
            unit.residency.hand_over_shards()
    refuse_changed_modules(units)
    for param in in_model_order(list(optimizer.state)):  # so that all ranks gather states in the same order
        optimizer.state[param] = optimizer.state.pop(param)


def _check_loading(optimizer: Optimizer, found: Sequence[Managed]) -> None:
    """Raise if `torch.distributed.checkpoint` cannot load full states into `optimizer`. This is a collective."""
    values = (value for state in optimizer.state.values() for value in state.values())
    if not any(isinstance(value, Tensor) and value.ndim for value in values):
        raise StateError(
            f"{type(optimizer).__name__} has no state, and torch.distributed.checkpoint cannot load full states into "
            "an optimizer without state, whether the model is sharded or not. Leave out full_state_dict when you "
            "load the optimizer: set_optimizer_state_dict(model, optimizer, states) sets the options of its groups. "
            "Load the model by set_model_state_dict."
        )
    first = min(found, key=lambda managed: managed.param.number)
    check_same_names(
        [_name(managed) for managed in found],
        first.unit,
        type(optimizer).__name__,
        reason="torch.distributed.checkpoint loads full states in this order, one parameter at a time.",
        instead="Or load them with FullyShardedDataParallel.optim_state_dict_to_load.",
    )


def _take_shards(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict` with this rank's shards of full states. This is a pre-hook of `load_state_dict`."""
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(saved) != len(params):
        return state_dict  # torch raises an error
    numbers = {id(param): number for number, param in zip(saved, params, strict=True)}
    state = state_dict["state"]
    given = [(param, state[number]) for number, param in zip(saved, params, strict=True) if number in state]
    own = _own_states(optimizer, given)
    return {**state_dict, "state": {**state, **{numbers[id(param)]: values for param, values in own.items()}}}


def _own_states(
    optimizer: Optimizer, states: Iterable[tuple[Any, Mapping[str, Any]]]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the `states` of sharded parameters in the form that the optimizer uses."""
    found = [(managed, param, values) for param, values in states if (managed := _sharded(param)) is not None]
    counters = {"step", "mu_product", "eta", "mu"}  # plain tensors in torch.optim, even for 0-dim parameters
    for _, param, values in found:
        if param.ndim:
            counters |= {name for name, value in values.items() if isinstance(value, Tensor) and not value.ndim}
    blocks = block_states(optimizer)
    return {
        param: {
            name: value
            if name in counters or not isinstance(value, Tensor)
            else _own(f"{name!r} of {_name(managed)}", param, value, blocks)
            for name, value in values.items()
        }
        for managed, param, values in found
    }


def _sharded(param: Any) -> Managed | None:
    managed = managed_by(param) if isinstance(param, DTensor) else None
    return None if managed is None or holds_tensors(managed.param.local) else managed


def _name(managed: Managed) -> str:
    return f"{managed.unit.name}.{managed.param.fqn}".removeprefix(".")


def _own(name: str, param: DTensor, value: Tensor, blocks: BlockStates | None) -> Tensor:
    """Return this rank's shard of the state `value` of `param`."""
    if isinstance(value, DTensor):
        check_local_shard(name, value, param.device_mesh)
        return value
    is_whole = type(value) is Tensor and value.shape == param.shape
    if not is_whole or (blocks is not None and value.shape == param._local_tensor.shape):
        return value
    if blocks is not None:
        raise StateError(
            f"{name} is a full tensor of shape {tuple(value.shape)}, but the optimizer encodes states in blocks that "
            "belong to one rank each. Load the result of FullyShardedDataParallel.optim_state_dict_to_load."
        )
    return placed_like(param, value)
