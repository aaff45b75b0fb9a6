"""The order of units in a pass, and the units to prefetch.

Each microbatch is expected to use units in the order of the previous one. If it does not, nothing is prefetched.
Results do not depend on the order.
"""

from __future__ import annotations

from collections.abc import Container, Sequence


class OrderTracker:
    """Records the order of units, and predicts the next ones from an earlier order."""

    def __init__(self, expected: Sequence[int] = ()) -> None:
        self.expected = tuple(expected)
        self.visited: list[int] = []
        self._known = 0  # position in `expected` after the last unit that was found there
        self._is_lost = False  # the last unit was not found in the rest of `expected`

    def record(self, unit: int) -> None:
        """Record that `unit` is needed now, and find it in the remaining expected order.

        If it is not found, `following` returns nothing until a later unit is found.
        """
        self.visited.append(unit)
        try:
            self._known = self.expected.index(unit, self._known) + 1
        except ValueError:
            self._is_lost = True
        else:
            self._is_lost = False

    def following(self, depth: int) -> tuple[int, ...]:
        """Return up to `depth` units that come next, the next one first; empty if they are not known."""
        return () if self._is_lost else self.expected[self._known : self._known + depth]

    @property
    def is_at_end(self) -> bool:
        """True if no more units are expected, because all units of the previous order were visited."""
        return not self._is_lost and 0 < len(self.expected) == self._known

    def agrees_on(self, units: Container[int]) -> bool:
        """Return True if `units` were visited in the expected order."""
        return [unit for unit in self.visited if unit in units] == [unit for unit in self.expected if unit in units]
