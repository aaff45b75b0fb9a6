"""Comparison of the hyperparameters of an optimizer, such as learning rates, between ranks."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fullshard._compat import default_store
from fullshard.engine.managed import managed_by
from fullshard.engine.unit import Unit

_log = logging.getLogger(__name__)

SAME_SCHEDULE = (
    "Use the same schedule on every rank: average a metric over the ranks before you pass it to ReduceLROnPlateau."
)


def publish(optimizer: Optimizer, step: int) -> None:
    """Write the hyperparameters of this step of `optimizer` to the store, for `compare_published`."""
    unit, key = _unit_and_key(optimizer)
    if unit is not None:
        value = {"step": step, "groups": list(map(_numbers, optimizer.param_groups))}
        default_store().set(f"{key}/{dist.get_rank()}", json.dumps(value))


def compare_published(optimizer: Optimizer, step: int) -> None:
    """Log a warning on the first rank of a mesh if its ranks have published different hyperparameters of `step`.

    It is called in the next step. Ranks that have published nothing, or another step, are not waited for.
    """
    unit, key = _unit_and_key(optimizer)
    ranks = [] if unit is None else sorted(unit.axes.mesh.mesh.flatten().tolist())
    if not ranks or dist.get_rank() != ranks[0]:
        return
    store, keys = default_store(), [f"{key}/{rank}" for rank in ranks]
    if store.check(keys):
        values = {rank: json.loads(store.get(key)) for rank, key in zip(ranks, keys, strict=True)}
        found = {rank: value["groups"] for rank, value in values.items() if value["step"] == step}
        differing = different_hyperparameter(found) if len(found) > 1 else None
        if differing is not None:
            _log.warning("%s %s", differing, SAME_SCHEDULE)


def _unit_and_key(optimizer: Optimizer) -> tuple[Unit | None, str]:
    """Return a unit that `optimizer` updates on several ranks, and a key for optimizers with the same parameters."""
    managed = [item for group in optimizer.param_groups for param in group["params"] if (item := managed_by(param))]
    if not managed or managed[0].unit.axes.world == 1 or dist.get_backend() == "fake":
        return None, ""
    names = [(item.unit.name, item.param.fqn) for item in managed]
    return managed[0].unit, f"fullshard/hyperparameters/{sha256(repr(names).encode()).hexdigest()}"


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group, and the FQNs of its parameters."""
    found: dict[str, Any] = {}
    for name, value in group.items():  # tensors on an accelerator would have to be waited for
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
