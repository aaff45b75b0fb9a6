"""Execution of all systems in turn, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.bench.floor import FLOOR, Floor, FloorSeconds
from benchmarks.bench.plain import Plain
from benchmarks.bench.report import BenchReport, Failure, SystemResult
from benchmarks.bench.team import Team, TeamFailed
from benchmarks.bench.training import WATCHED_STEPS, Training
from benchmarks.bench.turns import Span
from benchmarks.bench.workload import Workload
from fullshard.amounts import in_bytes
from fullshard.device.host_memory import available_bytes
from fullshard.plan.memory_used import PeakBytes

__all__ = ["Plan", "Report", "measure"]

_BYTES_OF_A_COPY = 4  # of a parameter, in float32

Report = Callable[[str, str], None]
"""A function to call with the stage and its next action."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The systems to measure, and how often."""

    workload: Workload
    systems: Sequence[str]
    rounds: int
    steps: int  # of each system in a round
    warmup: int  # rounds that do not count
    timeout: float  # time limit of a turn, in seconds

    @property
    def turns(self) -> int:
        """The number of calls of `on_progress`."""
        return 1 + (len(self.systems) + 1) * (1 + self.warmup + self.rounds)


def measure(plan: Plan, on_progress: Report) -> BenchReport:
    """Start every system once, train in turns, and return the report. A system that fails is excluded afterwards.

    Raises:
        TeamFailed: The plain process or the floor fails, so a comparison is not possible.
    """
    bench = _Bench(plan, on_progress)
    try:
        bench.start()
        for number in range(plan.warmup + plan.rounds):
            bench.round(number)
        return bench.report()
    finally:
        bench.end()


@dataclass
class _Running:
    """One running system."""

    team: Team
    tensor_bytes: int
    losses: list[Sequence[float]]  # of each rank, by step
    seconds: list[float] = field(default_factory=list)


class _Bench:
    """The state of one benchmark."""

    def __init__(self, plan: Plan, on_progress: Report) -> None:
        self._plan = plan
        self._report = on_progress
        self._expected: list[list[float]] = []
        self._room = 0  # bytes that must be free before a system is started
        self._floor: Team | None = None
        self._floors: list[FloorSeconds] = []
        self._running: dict[str, _Running] = {}
        self._failed: dict[str, Failure] = {}

    def start(self) -> None:
        """Compute the losses of the plain process, and start every system."""
        plan = self._plan
        self._report("starting", "one plain process")
        plain = Team(Plain, plan.workload, world=1, timeout=plan.timeout)
        try:
            self._expected = plain.ask("losses", WATCHED_STEPS + (plan.warmup + plan.rounds) * plan.steps)[0]
            needed = plain.ask("memory")[0].process or 0
            self._room = plan.workload.world * (needed - plan.workload.parameter_count() * _BYTES_OF_A_COPY)
        finally:
            plain.end()
        self._report("starting", FLOOR)
        self._floor = Team(Floor, plan.workload, timeout=plan.timeout)
        for name in plan.systems:
            self._report("starting", name)
            self._or_failed(name, partial(self._start, name))

    def round(self, number: int) -> None:
        """Run a turn of each system and of the floor, in reverse order in every other round."""
        plan = self._plan
        stage = f"round {number - plan.warmup + 1} of {plan.rounds}" if number >= plan.warmup else "warming up"
        counts = number >= plan.warmup
        first = WATCHED_STEPS + number * plan.steps
        order = [FLOOR, *self._running]
        for name in order if number % 2 == 0 else reversed(order):
            self._report(stage, name)
            if name == FLOOR:
                self._floor_turn(first, counts)
            else:
                self._or_failed(name, partial(self._turn, name, first, counts, number == plan.warmup))

    def report(self) -> BenchReport:
        """Return the report of all rounds."""
        results: list[SystemResult] = []
        for name in list(self._running):
            self._or_failed(name, partial(self._collect, name, results))
        return BenchReport(
            workload=self._plan.workload,
            steps=self._plan.steps,
            floor=self._floors,
            systems=results,
            failed=self._failed,
        )

    def end(self) -> None:
        """Stop all processes."""
        for running in self._running.values():
            running.team.end()
        if self._floor is not None:
            self._floor.end()

    def _start(self, name: str) -> None:
        plan = self._plan
        self._check_room()
        team = Team(partial(Training, name=name), plan.workload, timeout=plan.timeout)
        try:
            prepared = team.ask("prepare")
        except BaseException:
            team.end()
            raise
        losses = list(zip(*(rank.losses for rank in prepared), strict=True))
        self._running[name] = _Running(team, max(rank.tensor_bytes for rank in prepared), list(losses))

    def _check_room(self) -> None:
        """Raise an error instead of starting a system if the kernel might run out of memory.

        The plain process keeps the parameters, their gradients and two moments, and second copies of parameters and
        gradients for compute and accumulation. No rank of a system needs more than that minus one of the copies.
        """
        free = available_bytes()
        if self._plan.workload.device_type == "cpu" and free is not None and free < self._room:
            raise TeamFailed(
                f"{in_bytes(self._room)} must be free to start it beside {len(self._running)} other systems, "
                f"and {in_bytes(free)} are. Name fewer by --systems."
            )

    def _floor_turn(self, first: int, counts: bool) -> None:
        assert self._floor is not None
        seconds = FloorSeconds.of(self._floor.ask("run", first, self._plan.steps))
        if counts:
            self._floors.append(seconds)

    def _turn(self, name: str, first: int, counts: bool, counts_first: bool) -> None:
        running, steps = self._running[name], self._plan.steps
        if counts_first:
            running.team.ask("forget_peak")
        turns = running.team.ask("run", first, steps)
        running.losses += zip(*(turn.losses for turn in turns), strict=True)
        if counts:
            running.seconds.append(Span.seconds(turn.span for turn in turns) / steps)

    def _collect(self, name: str, results: list[SystemResult]) -> None:
        running = self._running[name]
        memory: list[PeakBytes] = running.team.ask("memory")
        results.append(
            SystemResult(
                name=name,
                seconds=running.seconds,
                loss_difference=largest_difference(running.losses, self._expected),
                tensor_bytes=running.tensor_bytes,
                process_bytes=_largest(rank.process for rank in memory),
                allocated_bytes=_largest(rank.allocated for rank in memory),
                reserved_bytes=_largest(rank.reserved for rank in memory),
            )
        )

    def _or_failed(self, name: str, run: Callable[[], None]) -> None:
        """Call `run`. If it fails, exclude the system."""
        try:
            run()
        except TeamFailed as failed:
            self._failed[name] = Failure(reason=str(failed), details=failed.details)
            if name in self._running:
                self._running.pop(name).team.end()


def largest_difference(losses: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Return the maximum difference of two sets of losses by step and rank; infinite if one is NaN."""
    differences = [
        abs(loss - other)
        for step, others in zip(losses, expected, strict=True)
        for loss, other in zip(step, others, strict=True)
    ]
    return max(differences) if all(math.isfinite(difference) for difference in differences) else math.inf


def _largest(counts: Iterable[int | None]) -> int | None:
    """Return the maximum over all ranks; None if it is unknown on a rank."""
    known = list(counts)
    return None if None in known else max(count for count in known if count is not None)
