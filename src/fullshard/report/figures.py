"""Statistics of a run over all of its steps except the first, which allocates the memory that later steps reuse.

Rules and charts use the same numbers: all shares are fractions of the total time of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fullshard.report.account import GROUPS, Loss, find_losses
from fullshard.report.run import PARTS, Finding, Run, UnitTimes

Seconds = NDArray[np.float64]

ENOUGH_STEPS = 4  # the minimum number of steps after the first for statements about time, because of noise


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits for communication in a typical step, excluding waits for slow ranks, as fractions of the total time."""

    share: float  # the fraction for all collectives
    by_unit: tuple[tuple[float, float], ...]  # the fractions of the all-gathers and of the reductions of each unit

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
        self._later = run.settled
        self.step_s: Seconds = run.step_s[:, self._later].mean(0)  # step times as the mean over ranks; shape (steps,)
        self.steps = run.steps[self._later]  # the numbers of these steps
        self.findings: dict[str, Finding | None] = {}  # the results of the rules that have been evaluated, by cause

    @property
    def reports_time(self) -> bool:
        """True if there are enough steps to report on time."""
        return self.step_s.size >= ENOUGH_STEPS

    def of(self, part: str) -> Seconds:
        """Return the seconds of one of `PARTS`; shape (ranks, steps)."""
        return self.run.parts_s[:, self._later, PARTS.index(part)]

    def later(self, values: NDArray[np.float64] | None) -> Seconds | None:
        """Return `values`, recorded by rank and step, without the first step; None if any are missing."""
        later = None if values is None else values[:, self._later]
        return None if later is None or np.isnan(later).any() else later

    def counter(self, *names: str) -> Seconds | None:
        """Return the sum of hardware counters, NaN where unknown; shape (ranks, steps); None if one is not measured."""
        if any(name not in self.run.counters for name in names):
            return None
        return np.asarray(sum(self.run.counters[name][:, self._later] for name in names))

    @cached_property
    def other_cores(self) -> Seconds | None:
        """Cores of each rank's host that processes other than the ranks use; shape (ranks, steps). None if unknown."""
        host, own = self.counter("CPU of the host"), self.counter("CPU of this rank")
        if host is None or own is None:
            return None
        others = host.copy()
        for places in map(list, self.hosts().values()):
            others[places] -= own[places].sum(0)
        return np.maximum(others, 0)

    @cached_property
    def computes(self) -> Seconds:
        """Seconds of forward, backward and optimizer; shape (ranks, steps)."""
        return self.of_group("compute")

    def share(self, seconds: Seconds) -> float:
        """Return the fraction of the total time that `seconds`, of shape (steps,) or (ranks, steps), take."""
        return float(np.atleast_2d(seconds).mean(0).sum() / self.step_s.sum())

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """All losses of time, the largest first."""
        return find_losses({group: self.of_group(group) for group in GROUPS}, self._transport, self.step_s)

    def loss(self, group: str, *, of_all: bool | None = None, in_turn: bool | None = None) -> Loss | None:
        """Return the largest loss in `group`, or None.

        Args:
            group: The group of the loss.
            of_all: If given, only losses that do (True) or do not (False) affect all ranks.
            in_turn: If given, only losses with a different late rank in each step (True) or without (False).
        """
        return next(
            (
                loss
                for loss in self.losses
                if loss.group == group
                and of_all in (None, not loss.ranks and not loss.in_turn)
                and in_turn in (None, loss.in_turn)
            ),
            None,
        )

    @cached_property
    def _transport(self) -> Seconds:
        """Exposed communication of the last rank of each step, without time in which another rank had no core."""
        exposed = (self.of("gather") + self.of("reduce")).min(0)
        return exposed if self.starved is None else np.asarray(np.maximum(exposed - self.starved.max(0), 0))

    @property
    def usual_step_s(self) -> float:
        """Seconds of the median step."""
        return float(np.median(self.step_s))

    @cached_property
    def starved(self) -> Seconds | None:
        """Seconds during which the program was ready but had no core; shape (ranks, steps); None if unknown."""
        return self.later(self.run.starved_s)

    @cached_property
    def waits(self) -> Waits:
        """The exposed time of collectives due to communication, without the excess of unusually slow steps."""
        beyond, units = self.loss("transport"), self.run.units
        share = self.share(self._transport if beyond is None else self._transport - beyond.seconds)
        of_units = sum(unit.gather_exposed_s + unit.reduce_exposed_s for unit in units)
        scale = share / of_units if of_units > 0 else 0.0
        return Waits(
            share=share,
            by_unit=tuple((scale * unit.gather_exposed_s, scale * unit.reduce_exposed_s) for unit in units),
        )

    @cached_property
    def collectives(self) -> float:
        """The all-gathers and reductions of units per step."""
        return sum(unit.gathers + unit.reductions for unit in self.run.units)

    @cached_property
    def moved_bytes(self) -> float:
        """The bytes that a rank sends or receives for units in a step."""
        return sum(unit.gathered_bytes + unit.reduced_bytes for unit in self.run.units)

    @property
    def waited_s(self) -> float:
        """Seconds per step in waits for communication."""
        return self.waits.share * float(self.step_s.mean())

    @property
    def reached_gb_s(self) -> float:
        """The bandwidth of collectives in GB/s, excluding the time that they wait for a slow rank."""
        exposed = self.share(self.of("gather") + self.of("reduce"))
        on_time = min(1.0, self.waits.share / max(exposed, 1e-9))
        moving_s = on_time * sum(unit.gather_s + unit.reduce_s for unit in self.run.units)
        return self.moved_bytes / max(moving_s, 1e-9) / 1e9

    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the ranks of each host."""
        found: dict[str, tuple[int, ...]] = {}
        for place, rank in enumerate(self.run.ranks):
            found[rank.host] = (*found.get(rank.host, ()), place)
        return found

    def ranks_text(self, places: tuple[int, ...]) -> str:
        """Format ranks by index, as in "rank 3" or "ranks 1 and 3", with their host if there are several hosts."""
        ranks = [str(self.run.ranks[place].rank) for place in places]
        hosts = {self.run.ranks[place].host for place in places}
        where = f" on {hosts.pop()}" if len(hosts) == 1 and len(self.hosts()) > 1 else ""
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}{where}"

    def who(self, loss: Loss) -> str:
        """Format the ranks of a loss, as in "rank 3" or "another rank in each step"."""
        if loss.in_turn:
            late = self.of_group(loss.group).argmax(0)[loss.seconds > 0]
            counts = np.bincount(late, minlength=len(self.run.ranks))
            most = np.argsort(-counts, kind="stable")[: max(1, len(counts) // 4)]
            if len(counts) > 2 and len(late) > 2 * len(most) and counts[most].sum() >= 0.9 * len(late):
                return f"{self.ranks_text(tuple(sorted(int(rank) for rank in most)))} in turn"
            return "another rank in each step" if loss.pattern.kind == "steady" else "another rank each time"
        return self.ranks_text(loss.ranks) if loss.ranks else "all ranks"

    def when(self, loss: Loss) -> str:
        """Format the size of a loss and its steps, as in "2.0 s every 8th step" or "80 ms per step since step 151"."""
        pattern, each = loss.pattern, milliseconds(loss.each_s)
        at = np.flatnonzero(pattern.slow)
        first, last = int(self.steps[at[0]]), int(self.steps[at[-1]])
        distance = pattern.period * int(np.median(np.diff(self.steps)))
        end = milliseconds(float(2 * loss.seconds.mean()))
        return {
            "steady": f"{each} per step",
            "every": f"{each} every {ordinal(distance)} step",
            "random": f"{each} in {len(at)} of {len(self.steps)} steps",
            "since": f"{each} per step since step {first}",
            "until": f"{each} per step until step {last}",
            "between": f"{each} per step from step {first} to step {last}",
            "growing": f"growing to {end} per step at step {last}",
        }[pattern.kind]

    def of_group(self, group: str) -> Seconds:
        """Return the seconds of a group of parts; shape (ranks, steps)."""
        return np.asarray(np.sum([self.of(part) for part in GROUPS[group]], axis=0))

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


def listed(words: list[str]) -> str:
    """Format a list, as in "0, 1 and 2". Long lists are truncated."""
    if len(words) > 4:
        return f"{', '.join(words[:4])} and {len(words) - 4} more"
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


def ordinal(number: int) -> str:
    """Format a number, as in "8th"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 * (number // 10 % 10 != 1), "th")
    return f"{number}{ending}"
