"""Statistics of a run over its steps, so that rules need not handle noise.

The first step is excluded if it was recorded, because it allocates what later steps reuse. For the others, the median
is the usual value, and the lower quartile is the value that holds in three of four steps. A rule compares the quartile
with its threshold, so that a burst of other activity on the machine is not a cause, and reports the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fullshard.report.run import PARTS, RankFacts, Run, UnitTimes

__all__ = ["ENOUGH_STEPS", "Late", "RunFigures", "Waits", "amount", "listed", "milliseconds", "named", "percent"]

Seconds = NDArray[np.float64]

ENOUGH_STEPS = 4
"""The minimum number of steps after the first for statements about time, because of the quartile."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """Ranks that take longer than the others in nine of ten steps.

    Args:
        ranks: The indices of the ranks.
        latest: The index of the slowest one.
        lost: Its delay as a fraction of a step.
        took_s: Its time in the median step.
        others_s: The median time of the others.
    """

    ranks: tuple[int, ...]
    latest: int
    lost: float
    took_s: float
    others_s: float


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits for communication, excluding waits for slow ranks, as fractions of a step.

    Args:
        steady: The fraction in three of four steps.
        usual: The fraction in the median step.
        by_unit: The fractions of the all-gathers and of the reductions of each unit.
    """

    steady: float
    usual: float
    by_unit: tuple[tuple[float, float], ...]

    @property
    def gathers(self) -> float:
        """The fraction for all all-gathers."""
        return sum(gather for gather, _ in self.by_unit)

    @property
    def reductions(self) -> float:
        """The fraction for all reductions."""
        return sum(reduce for _, reduce in self.by_unit)


class RunFigures:
    """The statistics of a run. Arrays over steps, or over ranks and steps, exclude the first step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        known = ~np.isnan(run.parts_s).any((0, 2))  # by all ranks: a rank can be one step ahead, or gone
        later = known & (run.steps > 1)
        self._later = later if later.any() else known
        self.step_s: Seconds = run.step_s[:, self._later].mean(0)
        """Step times as the mean over ranks; shape (steps,)."""

    @property
    def reports_time(self) -> bool:
        """True if there are enough steps for statements about time."""
        return self.step_s.size >= ENOUGH_STEPS

    def of(self, part: str) -> Seconds:
        """Return the seconds of one of `PARTS`; shape (ranks, steps)."""
        return self.run.parts_s[:, self._later, PARTS.index(part)]

    def later(self, values: NDArray[np.float64] | None) -> Seconds | None:
        """Return values recorded by rank and step, without the first step; None if they were not recorded."""
        later = None if values is None else values[:, self._later]
        return None if later is None or np.isnan(later).any() else later

    @cached_property
    def computes(self) -> Seconds:
        """Seconds of forward, backward and optimizer; shape (ranks, steps)."""
        return self.of("forward") + self.of("backward") + self.of("optimizer")

    def of_most_ranks(self, seconds: Seconds) -> Seconds:
        """Return the minimum over three of four ranks, or over both of two; shape (steps,)."""
        most: Seconds = np.quantile(seconds, 0.25, axis=0, method="lower")
        return most

    def steady(self, seconds: Seconds) -> float:
        """Return the fraction of a step that `seconds`, of shape (steps,), take in three of four steps."""
        return _quartile(seconds / self.step_s)

    def usual(self, seconds: Seconds) -> float:
        """Return the fraction of a step that `seconds`, of shape (steps,), take in the median step."""
        return float(np.median(seconds / self.step_s))

    @property
    def usual_step_s(self) -> float:
        """Seconds of the median step."""
        return float(np.median(self.step_s))

    def late(self, seconds: Seconds, least: float) -> Late | None:
        """Return the ranks behind the median of the others by at least `least` of a step; None if there are none.

        `seconds` has shape (ranks, steps), or has hosts instead of ranks.

        The ranks must be behind in nine of ten steps: among many ranks, one is behind in three of four by chance alone.
        """
        if len(seconds) < 2 or not self.reports_time:
            return None
        others = _others(seconds)
        behind = (seconds - others) / self.step_s
        steady = np.quantile(behind, 0.1, axis=1, method="lower")
        found = tuple(int(item) for item in np.flatnonzero(steady >= least))
        if not found:
            return None
        latest = max(found, key=lambda item: float(steady[item]))
        return Late(
            ranks=found,
            latest=latest,
            lost=float(np.median(behind[latest])),
            took_s=float(np.median(seconds[latest])),
            others_s=float(np.median(others[latest])),
        )

    @cached_property
    def starved(self) -> Seconds | None:
        """Seconds during which the program was ready but had no core; shape (ranks, steps); None if unknown."""
        return self.later(self.run.starved_s)

    @cached_property
    def waits(self) -> Waits:
        """The exposed time of collectives due to communication.

        The last rank waits for no other rank, so all of its waits are for communication. So the minimum over the ranks
        counts, minus the time during which another rank had no core meanwhile.
        """
        exposed = (self.of("gather") + self.of("reduce")).min(0)
        if self.starved is not None:
            exposed = np.maximum(exposed - self.starved.max(0), 0)
        usual, units = self.usual(exposed), self.run.units
        of_units = sum(unit.gather_exposed_s + unit.reduce_exposed_s for unit in units)
        scale = usual / of_units if of_units > 0 else 0.0
        return Waits(
            steady=self.steady(exposed),
            usual=usual,
            by_unit=tuple((scale * unit.gather_exposed_s, scale * unit.reduce_exposed_s) for unit in units),
        )

    @cached_property
    def transport_share(self) -> float:
        """The fraction of the time of collectives without waiting for a slow rank."""
        waited = (self.of("gather") + self.of("reduce")).mean(0)
        return min(1.0, self.waits.usual / max(self.usual(waited), 1e-9))

    @cached_property
    def collectives(self) -> float:
        """The all-gathers and reductions of units per step."""
        return sum(unit.gathers + unit.reductions for unit in self.run.units)

    @cached_property
    def moved_bytes(self) -> float:
        """The bytes that a rank sends or receives for units per step."""
        return sum(unit.gathered_bytes + unit.reduced_bytes for unit in self.run.units)

    @cached_property
    def moving_s(self) -> float:
        """Seconds per step during which collectives of units are in progress and no rank is late."""
        return self.transport_share * sum(unit.gather_s + unit.reduce_s for unit in self.run.units)

    @property
    def waited_s(self) -> float:
        """Seconds of the median step in waits for communication."""
        return self.waits.usual * self.usual_step_s

    @property
    def reached_gb_s(self) -> float:
        """The bandwidth that communication reached in the run, in GB/s."""
        return self.moved_bytes / max(self.moving_s, 1e-9) / 1e9

    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the ranks of each host."""
        found: dict[str, tuple[int, ...]] = {}
        for place, rank in enumerate(self.run.ranks):
            found[rank.host] = (*found.get(rank.host, ()), place)
        return found

    def rank(self, place: int) -> RankFacts:
        """Return the rank at an index of the arrays."""
        return self.run.ranks[place]

    def ranks_text(self, places: tuple[int, ...]) -> str:
        """Format ranks, as in "rank 3" or "ranks 1 and 3", with their host if there are several hosts."""
        ranks = [str(self.rank(place).rank) for place in places]
        hosts = {self.rank(place).host for place in places}
        where = f" on {hosts.pop()}" if len(hosts) == 1 and len(self.hosts()) > 1 else ""
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}{where}"

    def used_memory(self) -> tuple[int, int | None] | None:
        """Return the peak bytes of a rank, including memory beyond tensors, and its limit."""
        memory = self.run.memory
        if memory is None or not memory.by_state:
            return None
        return self.tensors_at_peak() + memory.held, memory.limit

    def tensors_at_peak(self) -> int:
        """Return the bytes of tensors at the peak; 0 if unknown."""
        memory = self.run.memory
        return 0 if memory is None else int(sum(values[memory.peak] for values in memory.by_state.values()))


def named(unit: UnitTimes) -> str:
    """Format a unit's FQN for a sentence."""
    return f"`{unit.fqn}`" if unit.fqn else "the root"


def percent(part: float) -> str:
    """Format a fraction, as in "38 %"."""
    return f"{100 * part:.0f} %"


def milliseconds(seconds: float) -> str:
    """Format a time, as in "41 ms" or "2.3 s"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def amount(nbytes: float) -> str:
    """Format a size with three digits and a decimal unit, as in "24 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


def listed(words: list[str]) -> str:
    """Format a list, as in "0, 1 and 2". Long lists are truncated."""
    if len(words) > _SHOWN:
        return f"{', '.join(words[:_SHOWN])} and {len(words) - _SHOWN} more"
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


_SHOWN = 4


def _quartile(values: NDArray[np.float64]) -> float:
    return float(np.quantile(values, 0.25, method="lower"))


def _others(seconds: Seconds) -> Seconds:
    """Return for each rank the median of the others; shape (ranks, steps)."""
    count = len(seconds)
    by_size = np.sort(seconds, axis=0)
    place = np.argsort(np.argsort(seconds, axis=0, kind="stable"), axis=0, kind="stable")
    middle = [at + (place <= at) for at in ((count - 2) // 2, (count - 1) // 2)]  # skip the rank itself
    return (np.take_along_axis(by_size, middle[0], 0) + np.take_along_axis(by_size, middle[1], 0)) / 2
