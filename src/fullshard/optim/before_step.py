"""Preparation of an optimizer before a step.

Parameters from before sharding are replaced by the sharded ones. The parameters outside of units are checked, and so is
the order of parameters, which must be identical on all ranks.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import in_backward
from fullshard.engine.comparison import check_same_names
from fullshard.engine.late_params import number_of_registrations, refuse_changed_modules
from fullshard.engine.managed import in_model_order, is_ignored, managed_by
from fullshard.engine.root_state import state_of_last_backward
from fullshard.engine.runtime import runtime_or_none
from fullshard.errors import StateError


def point_to_shards(optimizer: Optimizer) -> None:
    """Replace parameters of `optimizer` that were sharded after its creation by the sharded parameters.

    This is called automatically before each `step()`.

    Raises:
        StateError: the optimizer has state for a parameter from before it was sharded, or state that was loaded while
            it was unsharded.
    """
    for group in optimizer.param_groups:
        pointed = [_sharded(param, optimizer) for param in group["params"]]
        if any(new is not old for new, old in zip(pointed, group["params"], strict=True)):
            group["params"] = list(dict.fromkeys(pointed))  # tied weights are one parameter


def _sharded(param: Any, optimizer: Optimizer) -> Any:
    managed = managed_by(param) if isinstance(param, nn.Parameter) else None
    if managed is None:
        return param
    unit, sharded = managed.unit, managed.param
    if param is not sharded.sharded and optimizer.state.get(param):
        what = f"{type(optimizer).__name__} has state for {sharded.fqn} of {unit.name or 'the root'}"
        names = ", ".join(optimizer.state[param])
        if param is sharded.unsharded:  # loading has cast the states to the compute dtype
            raise StateError(
                f"{what} that was loaded while the parameters were unsharded: {names}. Create the optimizer and load "
                "its state while parameters are sharded: call reshard() after unshard(), and abandon_step() after an "
                "exception in a step."
            )
        raise StateError(
            f"{what} from before sharding: {names}. Create the optimizer after sharding, and load the old state by "
            "FQN with FullyShardedDataParallel.optim_state_dict_to_load."
        )
    return sharded.sharded


_TRAINED = attrgetter("requires_grad")
_noted: weakref.WeakKeyDictionary[Optimizer, list[tuple[int, bool]]] = weakref.WeakKeyDictionary()
"""The parameters of each optimizer at the last check, by id, and whether they were trained."""
_found_unchanged: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The number of registrations at the last check of the units of each optimizer."""


def check_modules(optimizer: Optimizer) -> None:
    """Raise if parameters of the modules that `optimizer` updates were replaced or added after sharding.

    The check runs only after a parameter or module was registered in any module.

    Raises:
        StateError: A parameter was replaced by one outside of units, or a trained parameter was added.
    """
    if _found_unchanged.get(optimizer) != number_of_registrations():
        found = (managed_by(param) for group in optimizer.param_groups for param in group["params"])
        refuse_changed_modules(list(dict.fromkeys(managed.unit for managed in found if managed is not None)))
        _found_unchanged[optimizer] = number_of_registrations()


def register_outside_params(optimizer: Optimizer) -> None:
    """Let ranks compare the parameters of `optimizer` that are outside of units, whose gradients might not be averaged.

    They are compared if the optimizer also trains units, or if their gradients may come from a backward through units.
    """
    params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
    found = [*zip(map(id, params), map(_TRAINED, params), strict=True)]
    if _noted.get(optimizer) == found:
        return
    _noted[optimizer] = found
    managed = next(filter(None, map(managed_by, params)), None)
    outside = [
        param
        for param in params
        if param.requires_grad
        and not (isinstance(param, DTensor) or managed_by(param) is not None or is_ignored(param))
    ]
    if managed is None:
        state = state_of_last_backward()
        outside = [param for param in outside if param.grad is not None]
    else:
        runtime = runtime_or_none(managed.unit)
        state = None if runtime is None else runtime.state
    if state is not None and outside:
        state.microbatches.late_params.check(again=True, among=outside if managed is None else None)
        state.microbatches.compare_outside(outside)


_checked: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
"""The parameters whose order was compared between ranks, by id."""


def check_same_order(optimizer: Optimizer) -> None:
    """Compare the order of the sharded parameters of `optimizer` between ranks. This is a collective.

    They are compared in the first step, and again after parameters were added.

    Raises:
        RankMismatchError: The orders differ, so collectives would combine different parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    ids = [*map(id, params)]
    if _checked.get(optimizer) == ids:
        return
    params = [param for param in params if managed_by(param) is not None]
    if len(params) < 2:
        return
    found = [managed_by(param) for param in params]
    first = managed_by(in_model_order(params)[0])
    if first is None or runtime_or_none(first.unit) is None:
        return  # the model has not run yet, so there are no gradients
    names = [f"{item.unit.name}.{item.param.fqn}".removeprefix(".") for item in found if item is not None]
    check_same_names(
        names,
        first.unit,
        type(optimizer).__name__,
        reason="It steps DTensors one parameter at a time in this order, and DTensor operations can run collectives.",
        instead="If it treats each element separately, call fullshard.optim.step_shards(optimizer).",
    )
    _checked[optimizer] = ids


_FIRST_COMPARISON, _COMPARISON_INTERVAL = 16, 1024
_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def count_step(optimizer: Optimizer) -> None:
    """Count a step of `optimizer`. In some steps, ranks publish their hyperparameters, and compare them one step later.

    They do so in step 16, whenever the number of steps has doubled, and every 1024 steps. Steps within a backward are
    not compared: there can be an optimizer per parameter. Comparisons use the store and never wait for another rank,
    because ranks may take different numbers of steps.
    """
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if step < _FIRST_COMPARISON or not (_is_compared(step) or _is_compared(step - 1)) or in_backward():
        return
    from fullshard.optim.hyperparameters import compare_published, publish  # imported here, because few steps need them

    if _is_compared(step):
        publish(optimizer, step)
    else:
        compare_published(optimizer, step - 1)


def _is_compared(step: int) -> bool:
    return step >= _FIRST_COMPARISON and (step.bit_count() == 1 or step % _COMPARISON_INTERVAL == 0)


def leave_uncompared(optimizer: Optimizer) -> None:
    """Stop comparing the hyperparameters of `optimizer`. Its steps in CUDA graphs are not counted."""
    _steps[optimizer] = -(1 << 62)
