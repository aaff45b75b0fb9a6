"""Parameters of an optimizer that no unit has, such as those of a head or an adapter outside of the model."""

from __future__ import annotations

import weakref

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.late_params import number_of_registrations, refuse_changed_modules
from fullshard.engine.managed import is_ignored, managed_by
from fullshard.engine.root_state import state_of_last_backward
from fullshard.engine.runtime import runtime_or_none

__all__ = ["check_modules", "note_outside"]

_noted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The number of parameters of each optimizer at the last check."""
_found_unchanged: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The number of registrations at the last check of the units of each optimizer."""


def check_modules(optimizer: Optimizer) -> None:
    """Raise if modules that `optimizer` steps got other or further parameters after sharding.

    The check runs only after something was registered in a module.

    Raises:
        StateError: a parameter was replaced by one that no unit has, or a trained one was added.
    """
    if _found_unchanged.get(optimizer) != number_of_registrations():
        found = (managed_by(param) for group in optimizer.param_groups for param in group["params"])
        refuse_changed_modules(list(dict.fromkeys(managed.unit for managed in found if managed is not None)))
        _found_unchanged[optimizer] = number_of_registrations()


def note_outside(optimizer: Optimizer) -> None:
    """Make ranks compare the parameters of `optimizer` that no unit has, whose gradients might not be averaged.

    They are compared if the optimizer trains units too, or if their gradients may come from a backward through units.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _noted.get(optimizer) == count:
        return
    _noted[optimizer] = count
    params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
    managed = next(filter(None, map(managed_by, params)), None)
    outside = [param for param in params if param.requires_grad and not _is_looked_after(param)]
    if managed is None:
        state = state_of_last_backward()
        outside = [param for param in outside if param.grad is not None]
    else:
        runtime = runtime_or_none(managed.unit)
        state = None if runtime is None else runtime.state
    if state is not None and outside:
        state.microbatches.late_params.check(again=True)
        state.microbatches.compare_outside(outside)


def _is_looked_after(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) or managed_by(param) is not None or is_ignored(param)
