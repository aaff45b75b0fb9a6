"""The order in which units are needed, and what follows from it: what to prefetch, and which units share memory.

Pure rules over small integers that stand for units. A microbatch is expected to need units in the order of the one
before; where it does not, nothing is prefetched and nothing breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Follower", "Interval", "assign_slots"]


class Follower:
    """Follows a recorded order, and records the order that it sees.

    Args:
        expected: the units in the order in which they were needed last time.
    """

    def __init__(self, expected: Sequence[int] = ()) -> None:
        self.expected = tuple(expected)
        self.seen: list[int] = []
        self._next = 0

    def use(self, unit: int, ahead: int = 1) -> tuple[int, ...]:
        """Note that `unit` is needed now; up to `ahead` units that come next, nearest first.

        A unit that was not expected here is looked for further on. If it is not there either, nothing is known until
        one appears that is.
        """
        self.seen.append(unit)
        try:
            self._next = self.expected.index(unit, self._next) + 1
        except ValueError:
            return ()
        return self.expected[self._next : self._next + ahead]

    @property
    def agrees(self) -> bool:
        """Whether what was seen is what was expected."""
        return tuple(self.seen) == self.expected


@dataclass(frozen=True)
class Interval:
    """A unit is whole from event `start` up to, not including, event `end` of a microbatch."""

    unit: int
    start: int
    end: int


def assign_slots(intervals: Iterable[Interval], nbytes: Mapping[int, int]) -> dict[int, int]:
    """A slot for every unit, such that no two units that are ever whole at once have the same one.

    First fit, largest unit first: so the sum of the slots' sizes (each that of its largest unit) stays close to the
    most bytes that are whole at once.

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
