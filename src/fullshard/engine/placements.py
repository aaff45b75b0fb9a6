"""The choice of units to offload under policies with a fraction. See `policy.offload.StatePlacement`.

[Note: the last units are offloaded first]
Backward reaches the last unit first. So its gradients are the first on the CPU, while the rest of backward still runs.
The next forward needs this unit last. So copies and CPU steps of the last unit have the most time to overlap with the
device's work. The root is chosen last, because its forward encloses all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, count, pairwise
from math import floor

from fullshard.device.accelerator import accelerator_for
from fullshard.disk.interface import MOST_WRITING, aligned
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.unit import Unit
from fullshard.policy.offload import Offload, StatePlacement


def placements_of(units: Sequence[Unit]) -> dict[Unit, StatePlacement]:
    """Return the placement of each unit of a root, given in order. Units with the same policy share a fraction.

    Units that a root has placed before keep their placement.
    """
    placements = {unit: unit.shards.destination for unit in units}
    policies: list[Offload] = []
    for unit in units:
        policy = unit.options.offload.in_full
        if policy not in policies:
            policies.append(policy)
            identical = [other for other in units if other.options.offload.in_full == policy]
            is_open = policy.budget is not None
            there = (
                _worth_storing_on_disk(identical) if is_open else [unit for unit in identical if unit.shards.is_on_disk]
            )
            requested = _requested(identical, policy, there)
            placements |= {
                unit: unit.shards.destination if unit.runtime is not None else requested[unit] for unit in identical
            }
    return placements


def place_as_requested(units: Sequence[Unit], policy: Offload) -> None:
    """Move `units` according to the fractions of `policy`, which they share. Call it between steps.

    Among units on a disk, the fewest that make up the disk's fraction stay there.

    Raises:
        DiskError: units cannot be read from the disk.
    """
    whole = _first(units_on_disk(units), lambda unit: unit.whole_nbytes, policy.parameters.get("disk", 0.0), units)
    for unit, destination in _requested(units, policy, whole).items():
        unit.shards.move_to(destination)


def units_on_disk(units: Sequence[Unit]) -> list[Unit]:
    """Return the units that are on a disk, in the order of priority for staying there under a budget.

    The root is last: it is likely the largest, and would need the largest buffers.
    """
    return sorted((unit for unit in units if unit.shards.is_on_disk), key=lambda unit: unit.is_root)


def _worth_storing_on_disk(units: Sequence[Unit]) -> list[Unit]:
    """Return the units on a disk for which the disk frees the most memory.

    Buffers can need more memory than is freed: for a few units, or if one unit is much larger than the others.
    """
    in_turn = units_on_disk(units)
    counts = range(len(in_turn) + 1)
    return in_turn[: max(counts, key=lambda count: (_freed_on_disk(in_turn[:count]), -count))]


def _freed_on_disk(units: Sequence[Unit]) -> int:
    """Return the bytes of shards minus the staging buffers for them and their gradients."""
    shards = [[aligned(_shard_nbytes(param_group)) for param_group in unit.param_groups] for unit in units]
    if not units:
        return 0
    reads = (1 + max(unit.options.prefetch_depth for unit in units)) * max(map(len, shards))
    writes = 2 * max(sum(param_group.is_trained for param_group in unit.param_groups) for unit in units)
    return sum(map(sum, shards)) - (reads + writes + MOST_WRITING) * max(map(max, shards))


def _shard_nbytes(param_group: ParamGroup) -> int:
    return param_group.plan.layout.shard_numel * param_group.plan.contract.stored.itemsize


def units_steppable_on_cpu(units: Sequence[Unit]) -> list[Unit]:
    """Return the units whose optimizer states can be on the CPU, in the order of moving there."""
    return [unit for unit in reversed(units) if unit.trained_nbytes and not unit.shards.is_on_disk]


def fractions_of(units: Sequence[Unit]) -> list[float]:
    """Return the fractions of the optimizer state that place 1, 2, ..., all units on the CPU.

    Among equivalent fractions, the one with the fewest digits is used.
    """
    ends = list(accumulate((unit.trained_nbytes for unit in units_steppable_on_cpu(units)), initial=0))
    return [_fraction_between(low, high, ends[-1]) for low, high in pairwise(ends)]


def _fraction_between(low: int, high: int, total: int) -> float:
    """Return a fraction of `total` that is more than `low` bytes and at most `high` bytes."""
    scales = (10.0**digits for digits in count(2))
    fractions = ((floor(high / total * scale) - less) / scale for scale in scales for less in (0, 1))
    return next(fraction for fraction in fractions if low < round(fraction * total) <= high)


def _requested(units: Sequence[Unit], policy: Offload, on_disk: Collection[Unit]) -> dict[Unit, StatePlacement]:
    alongside = accelerator_for(units[0].device).has_streams
    there = [unit for unit in reversed(units) if not unit.shards.is_on_disk]
    whole = _first(there, lambda unit: unit.whole_nbytes, policy.parameters.get("cpu", 0.0), units)
    in_turn, fraction = units_steppable_on_cpu(units), policy.states_on_cpu(alongside=alongside)
    stepped = _first(in_turn, lambda unit: unit.trained_nbytes, fraction, units)
    placements = {}
    for unit in units:
        on_cpu = (
            StatePlacement.CPU
            if unit in whole
            else StatePlacement.STEPPED_ON_CPU
            if unit in stepped
            else StatePlacement.DEVICE
        )
        placements[unit] = StatePlacement.DISK if unit in on_disk else on_cpu
    return placements


def _first(in_turn: Sequence[Unit], nbytes: Callable[[Unit], int], fraction: float, of: Sequence[Unit]) -> set[Unit]:
    """Return the first units of `in_turn` that have at least `fraction` of the bytes of all units `of`."""
    wanted = round(fraction * sum(map(nbytes, of)))  # rounded, so that a fraction computed from bytes is exact
    taken, chosen = 0, set()
    for unit in in_turn:
        if taken < wanted:
            taken += nbytes(unit)
            chosen.add(unit)
    return chosen


def open_budget(unit: Unit) -> Offload | None:
    """Return the policy of `unit` if it is a budget without chosen fractions."""
    policy = unit.options.offload
    return policy if isinstance(policy, Offload) and policy.budget is not None else None
