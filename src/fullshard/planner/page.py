"""The HTML page of a plan: programs that fit, and the streams and memory of a step as in the report of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from fullshard.plan.memory import State, memory_curve
from fullshard.plan.timeline import Placed, lay_out
from fullshard.planner.found import FoundProgram, Plan
from fullshard.planner.report import ChangedMachine, columns, head, paste, row, stated
from fullshard.report import shown
from fullshard.report.frame import framed, stamped
from fullshard.report.run import Span, StepMemory
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Tape

_PARTS = {
    Phase.FORWARD: "forward",
    Phase.PRE_BACKWARD: "backward",
    Phase.BACKWARD: "backward",
    Phase.POST_BACKWARD: "backward",
    Phase.STEP: "optimizer",
    Phase.IDLE: "other",
}
_OF_STREAM = {"gather": "gather", "reduce": "reduce", "replicate": "reduce", "offload": "other"}
_GAP = 2e-3  # of a step: shorter gaps between work of the same unit and phase are merged


def page(plan: Plan, changes: Sequence[ChangedMachine] = ()) -> str:
    """Return the page of a plan with a program that fits: one self-contained HTML file.

    It shows the step of the longest simulated model, which has only a few blocks if it has lists of identical blocks.
    """
    best = plan.best
    assert best is not None
    tape, step = best.sketch.entries(best.figures.candidate.rows)
    laid = lay_out(step, plan.question.cluster.costs(best.sketch.dtype))
    memory = _memory(tape, laid.placed, len(tape.entries) - len(step))
    drawn = {
        "timeline": shown.timeline([(0, "", list(_spans(laid.placed, laid.end)))]),
        "memory": shown.plain(shown.memory_curve(memory)),
    }
    known = {
        "name": f"Plan: {plan.question.subject.name}",
        "head": head(plan.question),
        "columns": columns(plan),
        "rows": [row(plan, found) for found in plan.fitting],
        "said": [*stated(plan), *map(str, changes)],
        "paste": paste(plan),
        "step_s": laid.end,
        "shown": _shown(best),
    }
    return framed("plan.html", {**known, **drawn, **stamped()}, drawn)


def _shown(best: FoundProgram) -> str:
    if not best.sketch.whole:
        return "The whole model."
    longest = max(best.sketch.tapes, key=lambda tape: len(tape.one))
    parts = [
        f"{fqn or 'the model'}: {longest.lengths[fqn]} of {length} blocks" for fqn, length in best.sketch.whole.items()
    ]
    return f"The model is shortened to a few blocks ({'; '.join(parts)}). All other blocks are like them."


def _spans(placed: Sequence[Placed], end: float) -> Iterator[Span]:
    """Yield the work of the streams by phase. Work of the same unit and phase without a gap is one span."""
    last: dict[str, Span] = {}
    for item in placed:
        stream, origin = item.entry.stream, item.entry.origin
        part = _OF_STREAM.get(stream, _PARTS[origin.phase])
        span = Span(stream=stream, name=part, unit=origin.unit, start_s=item.start, end_s=item.end)
        before = last.get(stream)
        if before is not None:
            if (before.name, before.unit) == (part, origin.unit) and item.start - before.end_s < _GAP * end:
                span = replace(span, start_s=before.start_s)
            else:
                yield before
        last[stream] = span
    yield from last.values()


def _memory(tape: Tape, placed: Sequence[Placed], begun: int) -> StepMemory:
    """Return the bytes by state from the index `begun` of the trace."""
    curve = [(place, held) for place, held in memory_curve(tape) if place >= begun]
    total = [sum(held.values()) for _, held in curve]
    return StepMemory(
        rank=0,
        at_s=np.array(_moments(tape, placed, [place for place, _ in curve], begun)),
        labels=tuple(_label(tape, place) for place, _ in curve),
        by_state={state.value: _bytes_of(state, curve) for state in State},
        peak=int(np.argmax(total)) if total else 0,
        largest=(),
        predicted=None,
        held=0,
        limit=None,
    )


def _bytes_of(state: State, curve: Sequence[tuple[int, Mapping[State, int]]]) -> np.typing.NDArray[np.int64]:
    return np.array([held.get(state, 0) for _, held in curve], dtype=np.int64)


def _label(tape: Tape, place: int) -> str:
    origin = tape.entries[place].origin
    return f"{origin.unit or 'the root'}, {origin.phase.value}"


def _moments(tape: Tape, placed: Sequence[Placed], places: Sequence[int], begun: int) -> list[float]:
    """Return the start time of the first work after each index in `places`, as a non-decreasing sequence."""
    starts = {id(item.entry): item.start for item in placed}
    after = 0.0
    coming: dict[int, float] = {}
    for place in range(len(tape.entries) - 1, begun - 1, -1):
        after = starts.get(id(tape.entries[place]), after)
        coming[place] = after
    return list(accumulate((coming[place] for place in places), max))
