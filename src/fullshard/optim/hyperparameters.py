"""Comparison of an optimizer between ranks: its hyperparameters, such as learning rates, and its number of steps."""

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
from fullshard.engine.runtime import runtime_or_none
from fullshard.engine.unit import Unit

_log = logging.getLogger(__name__)

SAME_SCHEDULE = (
    "Use the same schedule on every rank: average a metric over the ranks before you pass it to ReduceLROnPlateau."
)
SAME_STEPS = (
    "If a condition decides whether to step, such as a finite loss, all-reduce the condition before you use it. The "
    "shards of these ranks do not belong together anymore: restart from a checkpoint."
)


def publish(optimizer: Optimizer, step: int) -> None:
    """Write the hyperparameters of this step of `optimizer` to the store, for `compare_published`.

    The number of steps of the model is written too, for this step and for the earlier ones that were published.
    """
    unit, key = _unit_and_key(optimizer)
    runtime = None if unit is None else runtime_or_none(unit)
    if runtime is not None:
        store, own = default_store(), f"{key}/{dist.get_rank()}"
        known = json.loads(store.get(own))["steps"] if store.check([own]) else {}
        steps = {taken: trained for taken, trained in known.items() if int(taken) < step}
        steps[str(step)] = runtime.state.microbatches.step
        value = {"step": step, "steps": steps, "groups": list(map(_numbers, optimizer.param_groups))}
        store.set(own, json.dumps(value))


def compare_published(optimizer: Optimizer, step: int) -> None:
    """Log a warning on the first rank of a mesh if its ranks have published different values.

    It is called in the step after `step`. Ranks that have published nothing, or not `step`, are not waited for. So a
    rank that has taken fewer steps than the first is noticed when the first compares next.
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
        unequal = _different_steps({rank: value["steps"] for rank, value in values.items()})
        if unequal is not None:
            _log.warning("%s %s", unequal, SAME_STEPS)


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
    for name, value in group.items():  # reading a tensor on an accelerator would wait for it
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            found[name] = value.item()
        elif isinstance(value, int | float | str) or (
            isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
        ):
            found[name] = value
    managed = map(managed_by, group["params"])
    return found | {"params": [f"{item.unit.name}.{item.param.fqn}" if item is not None else None for item in managed]}


def different_hyperparameter(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> str | None:
    """Return a sentence about the first hyperparameter that has different values on the first rank and on another.

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


def _different_steps(of_ranks: Mapping[int, Mapping[str, int]]) -> str | None:
    """Return a sentence about a rank whose optimizer has taken a different number of steps than the first rank's.

    Args:
        of_ranks: For each rank, the number of steps of the model at some numbers of steps of the optimizer.
    """
    lead = min(of_ranks)
    for rank, steps in of_ranks.items():
        for taken in sorted(steps.keys() & of_ranks[lead].keys(), key=int):
            first, other = of_ranks[lead][taken], steps[taken]
            if other != first:
                return (
                    f"ranks have taken different numbers of optimizer steps: step {taken} followed backward {first} on "
                    f"rank {lead}, but backward {other} on rank {rank}."
                )
    return None


def _are_close(one: Any, other: Any) -> bool:
    """Return whether two values are equal, except for the last digits of floats, which can differ between hosts."""
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return all(map(_are_close, one, other))
    return bool(one == other)
