"""The results of the search: the fastest candidate of each program that fits, and the plan of all programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fullshard.planner.candidates import Cluster
from fullshard.planner.question import Question
from fullshard.planner.sketch import Sketch, SketchFigures

IDENTICAL = 1.005  # times with a smaller ratio count as equal
_PLENTY = 0.5
"""A share of the usable memory. Programs below it are not replaced by ones that need less."""


@dataclass(frozen=True)
class FoundProgram:
    """A program with its fastest candidate that fits, or else the candidate that needs least memory."""

    sketch: Sketch
    figures: SketchFigures
    fits: bool
    largest: int  # maximum rows per microbatch that fit, for any global batch

    @property
    def has_margin(self) -> bool:
        """True if the program also fits if the prediction is too low by `Cluster.memory_error`."""
        return self.fits and self.figures.needed_bytes <= self.sketch.cluster.safe_bytes


@dataclass
class Plan:
    """The result of the search: programs by time, those that fit first.

    `left_out` counts the programs that were not simulated, by reason.
    """

    question: Question
    found: list[FoundProgram] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def fitting(self) -> list[FoundProgram]:
        """The programs that fit, the fastest first."""
        return sorted((item for item in self.found if item.fits), key=lambda item: item.figures.seconds_a_row)

    @property
    def with_margin(self) -> list[FoundProgram]:
        """The programs that fit with a margin for the error of the prediction, the fastest first."""
        return [item for item in self.fitting if item.has_margin]

    @property
    def best(self) -> FoundProgram | None:
        """The fastest program that fits with a margin for the error of the prediction, or else without.

        If memory is short, it is the one that needs the least among those whose predicted times are practically equal.
        """
        fitting = self.with_margin or self.fitting
        if not fitting or fitting[0].figures.needed_bytes <= _PLENTY * self.question.cluster.usable_bytes:
            return next(iter(fitting), None)
        identical = (
            item for item in fitting if item.figures.seconds_a_row <= IDENTICAL * fitting[0].figures.seconds_a_row
        )
        return min(identical, key=lambda item: item.figures.needed_bytes)

    @property
    def runner_up(self) -> FoundProgram | None:
        """The fastest program with a different strategy or checkpointing than the best one."""
        best = self.best
        if best is None:
            return None
        chosen = best.sketch.program
        others = (
            item
            for item in self.with_margin or self.fitting
            if (item.sketch.program.strategy, item.sketch.program.checkpointing)
            != (chosen.strategy, chosen.checkpointing)
        )
        return next(others, None)

    def leave_out(self, reason: str) -> None:
        """Count a program that is not simulated."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def answer(question: Question, made: Sketch) -> FoundProgram | None:
    """Return the best candidate of a program; None if it is unpredictable, or does not need its disk."""
    if made.program.disk:
        return _answer_on_disk(question, made)
    shapes = [shape for shape in question.shapes_of(made.program) if made.can_report(shape[0])]
    if not shapes:
        return None
    usable = question.cluster.usable_bytes
    small = [made.figures(rows, count) for rows, count in shapes if made.needed_bytes(rows) <= usable]
    chosen = fastest(
        question.cluster,
        (item for item in small if made.program.cpu == 1 or host_fits(question.cluster, item)),  # a fraction may fit
    )
    least = chosen or made.figures(*min(shapes, key=lambda shape: made.needed_bytes(shape[0])))
    return FoundProgram(made, least, chosen is not None, largest_rows(made))


def fastest(cluster: Cluster, fitting: Iterable[SketchFigures]) -> SketchFigures | None:
    """Return the fastest of the candidates that fit, if possible with a margin for the error of the prediction."""
    return min(fitting, key=lambda item: (item.needed_bytes > cluster.safe_bytes, item.seconds_a_row), default=None)


def _answer_on_disk(question: Question, made: Sketch) -> FoundProgram | None:
    """Return the fastest candidate with the smallest fraction on disk that fits; else one with everything on disk.

    States that are not on the CPU can be on disk.
    """
    shapes = [shape for shape in question.shapes_of(made.program) if made.can_report(shape[0])]
    every, limit_for = made.with_on_disk(1 - made.program.cpu), question.cluster.limit_for
    shares = {shape: made.least_on_disk(shape[0], limit_for(every.needed_bytes(shape[0]))) for shape in shapes}
    if not shapes or any(share == 0 for share in shares.values()):
        return None
    parts = {shape: made.with_on_disk(share) for shape, share in shares.items() if share is not None}
    fitting = [
        (part, figures)
        for (rows, count), part in parts.items()
        if host_fits(question.cluster, figures := part.figures(rows, count))
        and part.disk_bytes * question.cluster.per_host <= question.cluster.disk.free_bytes
    ]
    chosen = fastest(question.cluster, (figures for _, figures in fitting))
    part = next((part for part, figures in fitting if figures is chosen), made)
    return FoundProgram(part, chosen or made.figures(*min(shapes)), chosen is not None, largest_rows(part))


def host_fits(cluster: Cluster, figures: SketchFigures, share: float = 1.0) -> bool:
    """Return True if the offloaded states of all ranks of a host, or `share` of them, fit into its memory."""
    if cluster.hardware.kind == "cpu":
        return True
    return share * figures.host_bytes * cluster.per_host <= 0.9 * cluster.hardware.host_memory_bytes


def largest_rows(made: Sketch) -> int:
    """Return the maximum rows per microbatch that fit; 0 if not even one does.

    There is a margin for the error of the prediction, unless one row does not fit with it.
    """
    usable = made.cluster.limit_for(made.needed_bytes(1))
    if made.needed_bytes(1) > usable:
        return 0
    if made.most_rows is not None:
        return max(rows for rows in range(1, made.most_rows + 1) if made.needed_bytes(rows) <= usable)
    below, above = 1, 2
    while made.needed_bytes(above) <= usable and above < 1 << 16:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if made.needed_bytes(middle) <= usable else (below, middle)
    return below
