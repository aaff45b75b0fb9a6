"""Which units rest on the CPU, of those that were asked for a fraction, see `policy.offload.StatePlacement`.

[Note: from the last unit on]
Backward comes to the last unit first. So its gradients are the first on the CPU, with all of backward still to run; and
the next forward needs it last, when all others have computed. Whatever the CPU does for a unit, its copies and its
step, has the most time beside the device's work if the unit is the last. The root is the last to be taken: its forward
is around all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, count, pairwise
from math import floor

from fullshard.device.accelerator import accelerator_for
from fullshard.disk.buffers import MOST_WRITING
from fullshard.disk.files import aligned
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.unit import Unit
from fullshard.policy.offload import Offload, StatePlacement

__all__ = ["fractions_of", "on_disk_in_turn", "place_as_requested", "placements_of", "stepped_on_cpu_in_turn"]


def placements_of(units: Sequence[Unit]) -> dict[Unit, StatePlacement]:
    """The home of each of the units of a root, which are in order. Those that were asked for the same share a fraction.

    Units that a root has settled before stay where they are.
    """
    placements = {unit: unit.destination for unit in units}
    policies: list[Offload] = []
    for unit in units:
        policy = unit.options.offload.in_full
        if policy not in policies:
            policies.append(policy)
            identical = [other for other in units if other.options.offload.in_full == policy]
            is_open = policy.budget is not None
            there = _pays_on_disk(identical) if is_open else [unit for unit in identical if unit.is_on_disk]
            requested = _requested(identical, policy, there)
            placements |= {
                unit: unit.destination if unit.state.runtime is not None else requested[unit] for unit in identical
            }
    return placements


def place_as_requested(units: Sequence[Unit], policy: Offload) -> None:
    """Have `units`, which share the fractions of `policy` from now on, rest where these have them. Between steps.

    Of those that are on a disk, as few stay there as have the fraction.

    Raises:
        DiskError: those that come from the disk cannot be read.
    """
    whole = _first(on_disk_in_turn(units), lambda unit: unit.whole_nbytes, policy.parameters.get("disk", 0.0), units)
    for unit, destination in _requested(units, policy, whole).items():
        unit.move_to(destination)


def on_disk_in_turn(units: Sequence[Unit]) -> list[Unit]:
    """Those of `units` that rest on a disk, in the order in which a budget has them stay there: the root last, which
    is likely the largest, and so would need the largest buffers.
    """
    return sorted((unit for unit in units if unit.is_on_disk), key=lambda unit: unit.state.is_root)


def _pays_on_disk(units: Sequence[Unit]) -> list[Unit]:
    """Those that rest on a disk, or as many of them as free the most: a few alone need larger buffers than they free,
    and so may many beside one that is much larger.
    """
    in_turn = on_disk_in_turn(units)
    counts = range(len(in_turn) + 1)
    return in_turn[: max(counts, key=lambda count: (_freed_on_disk(in_turn[:count]), -count))]


def _freed_on_disk(units: Sequence[Unit]) -> int:
    """Bytes of shards, less the buffers that they and gradients pass through in forward and backward."""
    shards = [[aligned(_shard_nbytes(param_group)) for param_group in unit.param_groups] for unit in units]
    if not units:
        return 0
    reads = (1 + max(unit.options.prefetch_depth for unit in units)) * max(map(len, shards))
    writes = 2 * max(sum(param_group.is_trained for param_group in unit.param_groups) for unit in units)
    return sum(map(sum, shards)) - (reads + writes + MOST_WRITING) * max(map(max, shards))


def _shard_nbytes(param_group: ParamGroup) -> int:
    return param_group.plan.layout.shard_numel * param_group.plan.contract.stored.itemsize


def stepped_on_cpu_in_turn(units: Sequence[Unit]) -> list[Unit]:
    """Those of `units` that have states which can be on the CPU, in the order in which they go there."""
    return [unit for unit in reversed(units) if unit.trained_nbytes and not unit.is_on_disk]


def fractions_of(units: Sequence[Unit]) -> list[float]:
    """The fractions of the optimizer's state with which one of these units is stepped on the CPU, two, and so on to
    all: of those that do the same the one with the fewest digits.
    """
    ends = list(accumulate((unit.trained_nbytes for unit in stepped_on_cpu_in_turn(units)), initial=0))
    return [_fraction_between(low, high, ends[-1]) for low, high in pairwise(ends)]


def _fraction_between(low: int, high: int, total: int) -> float:
    """That asks `_first` for more than `low` bytes of `total`, and no more than `high`."""
    scales = (10.0**digits for digits in count(2))
    fractions = ((floor(high / total * scale) - less) / scale for scale in scales for less in (0, 1))
    return next(fraction for fraction in fractions if low < round(fraction * total) <= high)


def _requested(units: Sequence[Unit], policy: Offload, on_disk: Collection[Unit]) -> dict[Unit, StatePlacement]:
    alongside = accelerator_for(units[0].device).has_streams
    there = [unit for unit in reversed(units) if not unit.is_on_disk]
    whole = _first(there, lambda unit: unit.whole_nbytes, policy.parameters.get("cpu", 0.0), units)
    in_turn, fraction = stepped_on_cpu_in_turn(units), policy.states_on_cpu(alongside=alongside)
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
    """The first of `in_turn` that have at least that fraction of the bytes `of` all."""
    wanted = round(fraction * sum(map(nbytes, of)))  # a fraction that was made of bytes gives these again
    taken, chosen = 0, set()
    for unit in in_turn:
        if taken < wanted:
            taken += nbytes(unit)
            chosen.add(unit)
    return chosen
