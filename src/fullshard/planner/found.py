"""What of a program is found: the fastest of its candidates that fits. And a plan: all that was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullshard.planner.candidates import Cluster
from fullshard.planner.question import Question
from fullshard.planner.sketch import Figures, Sketch

__all__ = ["ALIKE", "Found", "Plan", "answer", "host_fits", "largest_rows"]

ALIKE = 1.005
"""Times that differ by less are taken to be the same."""
_PLENTY = 0.5
"""Of the usable memory: what needs no more need not be exchanged for what needs less."""


@dataclass(frozen=True)
class Found:
    """A program, the fastest of its candidates that fit, or else the one that needs least."""

    sketch: Sketch
    figures: Figures
    fits: bool
    largest: int  # rows of a microbatch that fit at most, whatever the global batch


@dataclass
class Plan:
    """What the search has found: programs in order of time, those that fit first.

    `left_out` says how many were not simulated, by reason.
    """

    question: Question
    found: list[Found] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def fitting(self) -> list[Found]:
        """Those that fit, the fastest first."""
        return sorted((item for item in self.found if item.fits), key=lambda item: item.figures.seconds_a_row)

    @property
    def best(self) -> Found | None:
        """The fastest that fits; or, if memory is short, of those that predictions cannot tell from it the one that
        needs the least.
        """
        fitting = self.fitting
        if not fitting or fitting[0].figures.needed_bytes <= _PLENTY * self.question.cluster.usable_bytes:
            return next(iter(fitting), None)
        alike = (item for item in fitting if item.figures.seconds_a_row <= ALIKE * fitting[0].figures.seconds_a_row)
        return min(alike, key=lambda item: item.figures.needed_bytes)

    @property
    def runner_up(self) -> Found | None:
        """The fastest that is not the best one's strategy and checkpointing."""
        best = self.best
        if best is None:
            return None
        chosen = best.sketch.program
        others = (
            item
            for item in self.fitting
            if (item.sketch.program.strategy, item.sketch.program.checkpointing)
            != (chosen.strategy, chosen.checkpointing)
        )
        return next(others, None)

    def leave_out(self, reason: str) -> None:
        """Count a program that is not simulated."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def answer(question: Question, made: Sketch) -> Found | None:
    """The best candidate of a program; None if it cannot be told, or fits without the disk that it is to have."""
    usable = question.cluster.usable_bytes
    if made.program.disk:
        return _answer_on_disk(question, made)
    shapes = [shape for shape in question.shapes_of(made.program) if made.can_tell(shape[0])]
    if not shapes:
        return None
    small = [made.figures(rows, count) for rows, count in shapes if made.needed_bytes(rows) <= usable]
    fitting = [item for item in small if made.program.cpu == 1 or host_fits(question.cluster, item)]  # a part of it may
    if fitting:
        chosen = min(fitting, key=lambda item: item.seconds_a_row)
    else:
        chosen = made.figures(*min(shapes, key=lambda shape: made.needed_bytes(shape[0])))
    return Found(made, chosen, bool(fitting), largest_rows(made, usable))


def _answer_on_disk(question: Question, made: Sketch) -> Found | None:
    """Of candidates with the least on the disk with which they fit, the fastest; with all on it, if none does."""
    usable = question.cluster.usable_bytes
    shapes = [shape for shape in question.shapes_of(made.program) if made.can_tell(shape[0])]
    shares = {shape: made.least_on_disk(shape[0], usable) for shape in shapes}
    if not shapes or any(share == 0 for share in shares.values()):
        return None
    parts = {shape: made.with_on_disk(share) for shape, share in shares.items() if share is not None}
    fitting = [
        (part, figures)
        for (rows, count), part in parts.items()
        if host_fits(question.cluster, figures := part.figures(rows, count))
        and part.disk_bytes * question.cluster.per_host <= question.cluster.disk.free_bytes
    ]
    if fitting:
        part, figures = min(fitting, key=lambda item: item[1].seconds_a_row)
    else:
        part, figures = made, made.figures(*min(shapes))
    return Found(part, figures, bool(fitting), largest_rows(part, usable))


def host_fits(cluster: Cluster, figures: Figures, share: float = 1.0) -> bool:
    """True if all ranks of a host have room in its memory for what is offloaded, or for `share` of that."""
    if cluster.hardware.kind == "cpu":
        return True
    return share * figures.host_bytes * cluster.per_host <= 0.9 * cluster.hardware.host_memory_bytes


def largest_rows(made: Sketch, usable: float) -> int:
    """The most rows of a microbatch that fit; 0 if not even one does."""
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
