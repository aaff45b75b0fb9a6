"""Formulas for the bytes of unsharded parameters of all units of a root, under any placements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fullshard.engine.unit import Unit
from fullshard.policy.strategy import Placement, Placements


def kept_between_steps(units: Sequence[Unit], group_size: int | None, placements: Placements) -> int:
    """Return the bytes of unsharded parameters, or of secondary shards, that are kept between steps."""
    if placements.parameters is Placement.SHARDED:
        return 0
    if placements.parameters is Placement.WHOLE:
        return sum(unit.unsharded_nbytes for unit in units)
    return sum(_secondary_nbytes(unit, group_size, placements) for unit in units)


def _secondary_nbytes(unit: Unit, group_size: int | None, placements: Placements) -> int:
    """Return the bytes of this rank's secondary shards of `unit`."""
    plans = (param_group.plan.under(group_size, placements) for param_group in unit.param_groups)
    return sum(plan.secondary_numel * plan.contract.compute.itemsize for plan in plans)


def gathered_peak(units: Sequence[Unit], group_size: int | None, placements: Placements) -> int:
    """Return the peak bytes of unsharded parameters beyond those kept between steps: see `plan/ledger.py`."""
    if placements.parameters is Placement.WHOLE:
        return 0
    nbytes = [unit.unsharded_nbytes for unit in units]
    if placements.parameters_in_step is Placement.WHOLE:
        return sum(nbytes)
    kept = [0] * len(units)
    if placements.parameters is Placement.SHARDED and placements.parameters_in_step is Placement.GROUPED:
        kept = [_secondary_nbytes(unit, group_size, placements) for unit in units]
    root, inner = nbytes[0], nbytes[1:]
    pairs = (sum(pair) + sum(kept[: last + 1]) for last, pair in enumerate(pairwise(inner), 2))
    return root + max(pairs, default=sum(inner) + sum(kept))
