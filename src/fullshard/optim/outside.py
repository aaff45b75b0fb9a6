"""Parameters that an optimizer trains beside those of units, as of a head that was forgotten."""

from __future__ import annotations

import weakref

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.managed import is_ignored, managed_by
from fullshard.engine.runtime import runtime_or_none

__all__ = ["note_outside"]

_noted: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def note_outside(optimizer: Optimizer) -> None:
    """Have ranks compare what `optimizer` trains and no unit has, if it trains units too: nobody may average that."""
    if optimizer in _noted:
        return
    _noted.add(optimizer)
    params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
    managed = next(filter(None, map(managed_by, params)), None)
    runtime = None if managed is None else runtime_or_none(managed.unit)
    if runtime is not None:
        runtime.microbatches.outside += [it for it in params if it.requires_grad and not _is_looked_after(it)]


def _is_looked_after(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) or managed_by(param) is not None or is_ignored(param)
