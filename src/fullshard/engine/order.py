"""The order in which units are needed, and what to prefetch.

Pure rules over small integers that stand for units. A microbatch is expected to need units in the order of the one
before; where it does not, nothing is prefetched and nothing breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Follower"]


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
