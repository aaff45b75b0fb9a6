"""What the numbers of a run come to over its steps, so that a rule need not think of noise.

The first step is left out, if it was recorded: it makes what later ones use again. Of the others, a median says what is
usual, and the lower quartile what holds in three steps of four. A rule compares the quartile with its threshold, so
that a burst of whatever else the machine does is no cause, and tells the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fullshard.report.run import PARTS, RankFacts, Run, UnitTimes

__all__ = ["ENOUGH_STEPS", "Figures", "Late", "Waits", "amount", "listed", "milliseconds", "named", "percent"]

Seconds = NDArray[np.float64]

ENOUGH_STEPS = 4
"""Steps beyond the first without which nothing is said of time: a quartile needs as many."""


@dataclass(frozen=True, kw_only=True)
class Late:
    """Ranks that take longer than the others in nine steps of ten.

    Args:
        ranks: the places of the ranks.
        latest: that of the one that is most behind.
        lost: the part of a step by which that one is.
        took_s: what that one takes in the median step.
        others_s: what the median of the others takes.
    """

    ranks: tuple[int, ...]
    latest: int
    lost: float
    took_s: float
    others_s: float


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What a step waits for the wire, and not for ranks that come late. All are parts of a step.

    Args:
        steady: in three steps of four.
        usual: in the median step.
        by_unit: of the gathers, and of the reductions, of each unit.
    """

    steady: float
    usual: float
    by_unit: tuple[tuple[float, float], ...]

    @property
    def gathers(self) -> float:
        """Of all gathers."""
        return sum(gather for gather, _ in self.by_unit)

    @property
    def reductions(self) -> float:
        """Of all reductions."""
        return sum(reduce for _, reduce in self.by_unit)


class Figures:
    """The figures of a run. Arrays of steps, or of ranks and steps, are without the first step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        known = ~np.isnan(run.parts_s).any((0, 2))  # by all ranks: one of them may be a step ahead, or gone
        later = known & (run.steps > 1)
        self._later = later if later.any() else known
        self.step_s: Seconds = run.step_s[:, self._later].mean(0)
        """A step, as the mean of the ranks; shape (steps,)."""

    @property
    def tells_time(self) -> bool:
        """True if there are steps enough to say something of time."""
        return self.step_s.size >= ENOUGH_STEPS

    def of(self, part: str) -> Seconds:
        """Seconds of one of `PARTS`; shape (ranks, steps)."""
        return self.run.parts_s[:, self._later, PARTS.index(part)]

    def later(self, values: NDArray[np.float64] | None) -> Seconds | None:
        """What was recorded by rank and step, without the first step; None if it was not."""
        later = None if values is None else values[:, self._later]
        return None if later is None or np.isnan(later).any() else later

    @cached_property
    def computes(self) -> Seconds:
        """Forward, backward and optimizer; shape (ranks, steps)."""
        return self.of("forward") + self.of("backward") + self.of("optimizer")

    def of_most_ranks(self, seconds: Seconds) -> Seconds:
        """What three ranks of four have at least, of two both; shape (steps,)."""
        most: Seconds = np.quantile(seconds, 0.25, axis=0, method="lower")
        return most

    def steady(self, seconds: Seconds) -> float:
        """The part of a step that `seconds`, of shape (steps,), are in three steps of four."""
        return _quartile(seconds / self.step_s)

    def usual(self, seconds: Seconds) -> float:
        """The part of a step that `seconds`, of shape (steps,), are in the median step."""
        return float(np.median(seconds / self.step_s))

    @property
    def usual_step_s(self) -> float:
        """Seconds of the median step."""
        return float(np.median(self.step_s))

    def late(self, seconds: Seconds, least: float) -> Late | None:
        """The ranks that are behind the median of the others by the part `least` of a step; None if there are none.

        `seconds` are of shape (ranks, steps), or of hosts in place of ranks.

        They are so in nine steps of ten: of many ranks, chance alone has one behind in three of four.
        """
        if len(seconds) < 2 or not self.tells_time:
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
        """Seconds that the program was ready and had no core; shape (ranks, steps); None where nobody knows."""
        return self.later(self.run.starved_s)

    @cached_property
    def waits(self) -> Waits:
        """What is exposed of collectives for the wire's sake.

        The rank that comes last waits for nobody: what it waits all the same is for the wire. So of the ranks the least
        counts, less what another rank was kept from its core meanwhile.
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
    def wire_share(self) -> float:
        """The part of its time on the way that a collective was not waiting for a late rank."""
        waited = (self.of("gather") + self.of("reduce")).mean(0)
        return min(1.0, self.waits.usual / max(self.usual(waited), 1e-9))

    @cached_property
    def collectives(self) -> float:
        """Gathers and reductions of units in a step."""
        return sum(unit.gathers + unit.reductions for unit in self.run.units)

    @cached_property
    def moved_bytes(self) -> float:
        """That a rank sends or receives for units in a step."""
        return sum(unit.gathered_bytes + unit.reduced_bytes for unit in self.run.units)

    @cached_property
    def moving_s(self) -> float:
        """Seconds a step in which units' collectives are on the way, and no rank is late."""
        return self.wire_share * sum(unit.gather_s + unit.reduce_s for unit in self.run.units)

    @property
    def waited_s(self) -> float:
        """Seconds of the median step that wait for the wire."""
        return self.waits.usual * self.usual_step_s

    @property
    def reached_gb_s(self) -> float:
        """What the wire gave in the run."""
        return self.moved_bytes / max(self.moving_s, 1e-9) / 1e9

    def hosts(self) -> dict[str, tuple[int, ...]]:
        """The places of the ranks of each host."""
        found: dict[str, tuple[int, ...]] = {}
        for place, rank in enumerate(self.run.ranks):
            found[rank.host] = (*found.get(rank.host, ()), place)
        return found

    def rank(self, place: int) -> RankFacts:
        """The rank at a place of the arrays."""
        return self.run.ranks[place]

    def ranks_said(self, places: tuple[int, ...]) -> str:
        """Such as "rank 3" or "ranks 1 and 3", with their host where there are several hosts."""
        ranks = [str(self.rank(place).rank) for place in places]
        hosts = {self.rank(place).host for place in places}
        where = f" on {hosts.pop()}" if len(hosts) == 1 and len(self.hosts()) > 1 else ""
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}{where}"

    def used_memory(self) -> tuple[int, int | None] | None:
        """Bytes that a rank needs at its peak, with what is held beyond tensors, and what it may have."""
        memory = self.run.memory
        if memory is None or not memory.by_state:
            return None
        return self.tensors_at_peak() + memory.held, memory.limit

    def tensors_at_peak(self) -> int:
        """Bytes of tensors at the peak; 0 if nothing is known of it."""
        memory = self.run.memory
        return 0 if memory is None else int(sum(values[memory.peak] for values in memory.by_state.values()))


def named(unit: UnitTimes) -> str:
    """A unit's FQN as a sentence has it."""
    return f"`{unit.fqn}`" if unit.fqn else "the root"


def percent(part: float) -> str:
    """Such as "38 %"."""
    return f"{100 * part:.0f} %"


def milliseconds(seconds: float) -> str:
    """Such as "41 ms" or "2.3 s"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def amount(nbytes: float) -> str:
    """Such as "24 MB": three digits, of powers of ten."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


def listed(words: list[str]) -> str:
    """Such as "0, 1 and 2"; of many, the first."""
    if len(words) > _SHOWN:
        return f"{', '.join(words[:_SHOWN])} and {len(words) - _SHOWN} more"
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


_SHOWN = 4


def _quartile(values: NDArray[np.float64]) -> float:
    return float(np.quantile(values, 0.25, method="lower"))


def _others(seconds: Seconds) -> Seconds:
    """For each rank the median of the others; shape (ranks, steps)."""
    count = len(seconds)
    by_size = np.sort(seconds, axis=0)
    place = np.argsort(np.argsort(seconds, axis=0, kind="stable"), axis=0, kind="stable")
    middle = [at + (place <= at) for at in ((count - 2) // 2, (count - 1) // 2)]  # a rank's own place is passed over
    return (np.take_along_axis(by_size, middle[0], 0) + np.take_along_axis(by_size, middle[1], 0)) / 2
