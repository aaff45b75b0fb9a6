"""Statistics of many rounds: pure arithmetic on numbers in the order of the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Spread", "ratios"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median and the quartiles of some numbers."""

    median: float
    low: float  # the first quartile
    high: float  # the third

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`, at least one."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return ratios round by round, so that a temporarily slow machine affects both."""
    return [value / other for value, other in zip(values, others, strict=True)]
