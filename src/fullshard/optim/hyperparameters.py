"""Comparison of the hyperparameters of an optimizer, such as learning rates, between ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fullshard.device.accelerator import is_capturing
from fullshard.engine.comparison import gather_if_different
from fullshard.engine.managed import in_model_order, managed_by
from fullshard.engine.runtime import runtime_or_none

_log = logging.getLogger(__name__)

SAME_SCHEDULE = (
    "Use the same schedule on every rank: average a metric over the ranks before you pass it to ReduceLROnPlateau."
)


def compare_hyperparameters(optimizer: Optimizer) -> None:
    """Log a warning if ranks have different hyperparameters of the same parameters. This is a collective.

    It does nothing while a CUDA graph is captured. Tensors on an accelerator are not compared.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if managed_by(param) is not None]
    first = managed_by(in_model_order(params)[0]) if params else None
    if first is None or runtime_or_none(first.unit) is None or is_capturing(first.unit.device):
        return
    found = gather_if_different(list(map(_numbers, optimizer.param_groups)), first.unit, "hyperparameters")
    differing = None if found is None else different_hyperparameter(found)
    if found is not None and differing is not None and dist.get_rank() == min(found):
        _log.warning("%s %s", differing, SAME_SCHEDULE)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group, and the FQNs of its parameters."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            found[name] = value.item()
        elif isinstance(value, int | float | str) or (
            isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
        ):
            found[name] = value
    managed = map(managed_by, group["params"])
    return found | {"params": [f"{item.unit.name}.{item.param.fqn}" if item is not None else None for item in managed]}


def different_hyperparameter(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | None:
    """Return a sentence about the first hyperparameter of which a rank and the first rank have different values.

    Groups of an optimizer are compared where both ranks have the same "params". Return None if nothing differs.
    """
    lead = min(of_ranks)
    for rank, groups in of_ranks.items():
        for number, (first, other) in enumerate(zip(of_ranks[lead], groups, strict=False)):
            names = first if other.get("params") == first.get("params") else ()
            for name in names:
                if not _are_close(first[name], other.get(name)):
                    return (
                        f"ranks train with different hyperparameters: {name} of parameter group {number} is "
                        f"{first[name]} on rank {lead}, but {other.get(name, 'missing')} on rank {rank}."
                    )
    return None


def _are_close(one: Any, other: Any) -> bool:
    """Return whether two values are equal, except for the last digits of floats, which can differ between hosts."""
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return all(map(_are_close, one, other))
    return bool(one == other)
