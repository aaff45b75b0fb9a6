"""Slots: memory shared by units that are never unsharded at the same time. Pure rules over small integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A unit is unsharded from event `start` up to, not including, event `end` of a microbatch."""

    unit: int
    start: int
    end: int


def assign_slots(intervals: Iterable[Interval], nbytes: Mapping[int, int]) -> dict[int, int]:
    """Return a slot for every unit, such that units which are ever unsharded at the same time have different slots.

    First fit, largest unit first: so the sum of the slots' sizes (each that of its largest unit) stays close to the
    most bytes that are unsharded at the same time.

    Returns:
        The number of a slot by unit, for every unit that has an interval.
    """
    of_unit: dict[int, list[Interval]] = {}
    for interval in intervals:
        of_unit.setdefault(interval.unit, []).append(interval)
    slots: list[list[int]] = []
    assigned: dict[int, int] = {}
    for unit in sorted(of_unit, key=lambda unit: (-nbytes[unit], unit)):
        free = [
            number
            for number, members in enumerate(slots)
            if not any(_overlap(a, b) for other in members for a in of_unit[other] for b in of_unit[unit])
        ]
        if not free:
            slots.append([])
            free = [len(slots) - 1]
        assigned[unit] = free[0]
        slots[free[0]].append(unit)
    return assigned


def _overlap(a: Interval, b: Interval) -> bool:
    return a.start < b.end and b.start < a.end
