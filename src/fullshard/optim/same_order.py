"""Optimizers whose operations on `DTensor`s run collectives: all ranks must have the parameters in the same order."""

from __future__ import annotations

import weakref

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.comparison import check_same_names
from fullshard.engine.managed import in_model_order, managed_by
from fullshard.engine.runtime import runtime_or_none

__all__ = ["check_same_order"]

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def check_same_order(optimizer: Optimizer) -> None:
    """Compare the order of the sharded parameters of `optimizer` between ranks, once. A collective.

    Raises:
        RankMismatchError: ranks have them in different orders, so that collectives would mix parameters.
    """
    if optimizer in _checked:
        return
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    params = [param for param in params if managed_by(param) is not None]
    if len(params) < 2:
        return
    found = [managed_by(param) for param in params]
    first = managed_by(in_model_order(params)[0])
    if first is None or runtime_or_none(first.unit) is None:
        return  # it has not run yet, so gradients do not exist
    _checked.add(optimizer)
    names = [f"{item.unit.name}.{item.param.fqn}".removeprefix(".") for item in found if item is not None]
    check_same_names(
        names,
        first.unit,
        type(optimizer).__name__,
        reason="It steps DTensors one parameter at a time in this order, and DTensor operations can run collectives.",
        instead="If it treats each element separately, call fullshard.optim.step_shards(optimizer).",
    )
