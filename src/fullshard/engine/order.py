"""The order in which units are needed, and what is gathered ahead.

A microbatch is expected to need units in the order of the one before; where it does not, nothing is prefetched and
nothing breaks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["OrderTracker"]


class OrderTracker:
    """Records the order in which units are needed, and tells from an earlier one which come next.

    Args:
        expected: the numbers of the units in the order in which they were needed last time.
    """

    def __init__(self, expected: Sequence[int] = ()) -> None:
        self.expected = tuple(expected)
        self.visited: list[int] = []
        self._known = 0  # how much of `expected` is past
        self._is_lost = False  # whether the last unit was not expected

    def record(self, unit: int) -> None:
        """Note that `unit` is needed now.

        A unit that was not expected here is looked for further on. If it is not there either, nothing is known until
        one appears that is.
        """
        self.visited.append(unit)
        try:
            self._known = self.expected.index(unit, self._known) + 1
        except ValueError:
            self._is_lost = True
        else:
            self._is_lost = False

    def following(self, depth: int) -> tuple[int, ...]:
        """Up to `depth` units that come next, nearest first; none where that is not known."""
        return () if self._is_lost else self.expected[self._known : self._known + depth]

    @property
    def is_at_end(self) -> bool:
        """True if no further unit is expected, since all have come that came last time."""
        return not self._is_lost and 0 < len(self.expected) == self._known

    def agrees_on(self, units: Container[int]) -> bool:
        """Return True if `units` were seen in the order in which they were expected."""
        return [unit for unit in self.visited if unit in units] == [unit for unit in self.expected if unit in units]
