"""A page about a plan that needs nothing else: its lanes over time and its memory, drawn as SVG within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment

from fullshard.plan.memory import State, memory_curve
from fullshard.plan.timeline import Placed, lay_out
from fullshard.planner.report import WhatIf, columns, head, paste, row, said
from fullshard.planner.search import Found, Plan
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import HOST

__all__ = ["page"]

_WIDTH, _LANE, _HEIGHT = 1100.0, 26.0, 260.0
_MOST_POINTS = 700
_COLOURS = {
    Phase.FORWARD: "#4c86c6",
    Phase.PRE_BACKWARD: "#b9783f",
    Phase.BACKWARD: "#d39a3c",
    Phase.POST_BACKWARD: "#b0563f",
    Phase.STEP: "#5fa06a",
    Phase.IDLE: "#9a9a9a",
}
_STATE_COLOURS = ("#4c6ea6", "#5fa06a", "#b0563f", "#7fb2dd", "#d3b23c", "#d9804a", "#9c7bb8", "#a0a0a0")


@dataclass(frozen=True)
class _Bar:
    lane: str
    x: float
    width: float
    y: float
    colour: str
    title: str


def page(plan: Plan, changes: Sequence[WhatIf] = ()) -> str:
    """The page of a plan in which something fits.

    It shows the step of the longest model that was run: one of few blocks, where there are lists of like ones.
    """
    best = plan.best
    assert best is not None
    rows = best.figures.candidate.rows
    tape, step = best.sketch.entries(rows)
    laid = lay_out(step, plan.question.cluster.costs(best.sketch.dtype))
    lanes = list(dict.fromkeys(["compute", *(it.entry.lane for it in laid.placed)]))
    bars = list(_bars(laid.placed, lanes, laid.end))
    begun = len(tape.entries) - len(step)
    curve = [(place, held) for place, held in memory_curve(tape) if place >= begun]
    told = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
    return told.render(
        title=f"Plan: {plan.question.subject.name}",
        head=head(plan.question),
        rows=list(_rows(plan)),
        said=[*said(plan), *map(str, changes)],
        paste=paste(plan),
        lanes=[(name, 14 + number * _LANE) for number, name in enumerate(lanes)],
        bars=bars,
        height=len(lanes) * _LANE + 24,
        step_ms=f"{laid.end * 1e3:,.2f}",
        shown=_shown(best),
        areas=list(_areas(curve)),
        states=[(state.value, _STATE_COLOURS[place]) for place, state in enumerate(State)],
        most=f"{max((sum(held.values()) for _, held in curve), default=0) / 1e9:,.2f}",
        curve_height=_HEIGHT,
        width=_WIDTH,
        phases=[(phase.value, colour) for phase, colour in _COLOURS.items()],
    )


def _shown(best: Found) -> str:
    if not best.sketch.whole:
        return "The whole model."
    longest = max(best.sketch.tapes, key=lambda it: len(it.one))
    parts = [
        f"{fqn or 'the model'}: {longest.lengths[fqn]} of {length} blocks" for fqn, length in best.sketch.whole.items()
    ]
    return f"Shown is the model shortened to a few blocks ({'; '.join(parts)}): all others are like them."


def _bars(placed: Sequence[Placed], lanes: Sequence[str], end: float) -> Iterator[_Bar]:
    """A bar for each thing on a lane; what follows without a gap, of the same unit and phase, is one."""
    joined: dict[str, list[Any]] = {lane: [] for lane in lanes}
    for it in placed:
        before = joined[it.entry.lane]
        same = before and (before[-1][2].unit, before[-1][2].phase) == (it.entry.origin.unit, it.entry.origin.phase)
        if same and it.start - before[-1][1] < 2e-3 * end and it.entry.lane in ("compute", HOST):
            before[-1][1] = it.end
        else:
            before.append([it.start, it.end, it.entry.origin, it.entry.name])
    for number, lane in enumerate(lanes):
        for start, stop, origin, name in joined[lane]:
            width = (stop - start) / end * _WIDTH
            if width < 0.15:
                continue
            title = f"{origin.unit or 'the root'}, {origin.phase.value}: {(stop - start) * 1e3:.3f} ms"
            title += "" if lane == "compute" else f", {name}"
            yield _Bar(lane, start / end * _WIDTH, width, number * _LANE, _COLOURS[origin.phase], title)


def _areas(curve: Sequence[tuple[int, Mapping[State, int]]]) -> Iterator[tuple[str, str, str]]:
    """The states as areas on top of one another: points, colour and name of each."""
    if not curve:
        return
    every = max(1, len(curve) // _MOST_POINTS)
    most = max(sum(held.values()) for _, held in curve)
    chosen = [max(curve[at : at + every], key=lambda it: sum(it[1].values()))[1] for at in range(0, len(curve), every)]
    below = [0.0] * len(chosen)
    for place, state in enumerate(State):
        above = [low + held.get(state, 0) for low, held in zip(below, chosen, strict=True)]
        xs = [at * _WIDTH / max(1, len(chosen) - 1) for at in range(len(chosen))]
        upper = [f"{x:.1f},{_HEIGHT * (1 - y / most):.1f}" for x, y in zip(xs, above, strict=True)]
        lower = [f"{x:.1f},{_HEIGHT * (1 - y / most):.1f}" for x, y in zip(xs, below, strict=True)]
        yield " ".join([*upper, *reversed(lower)]), _STATE_COLOURS[place], state.value
        below = above


def _rows(plan: Plan) -> Iterator[list[str]]:
    yield columns(plan)
    yield from (row(plan, found) for found in plan.fitting)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --text: #1c1c1c; --back: #fff; --line: #ccc; --soft: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --back: #16181b; --line: #444; --soft: #202327; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1140px;
  margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; }
td, th { padding: .2em .8em; border-bottom: 1px solid var(--line); text-align: right; }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; }
pre { background: var(--soft); padding: 1em; overflow-x: auto; } svg { width: 100%; height: auto; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
.key i { display: inline-block; width: .9em;
  height: .9em; margin-right: .3em; } .key span { white-space: nowrap;
  margin-right: 1em; }
</style>
<h1>{{ title }}</h1>
{% for line in head %}<p>{{ line }}</p>
{% endfor %}
<table>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>
{% endfor %}</tr>
{% endfor %}
</table>
{% for line in said %}<p>{{ line }}</p>
{% endfor %}
<h2>Lanes of a step</h2>
<p>{{ shown }} {{ step_ms }} ms from left to right.</p>
<p class="key">{% for name, colour in phases %}<span><i style="background:{{ colour }}"></i>{{ name }}</span>
{% endfor %}</p>
<svg viewBox="-70 0 {{ width + 72 }} {{ height }}" role="img" aria-label="what each lane does over time">
{% for name, y in lanes %}<text x="-68" y="{{ y }}">{{ name }}</text>
{% endfor %}
{% for bar in bars %}<rect x="{{ '%.2f' % bar.x }}" y="{{ bar.y }}" width="{{ '%.2f' % bar.width }}" height="20"
 fill="{{ bar.colour }}"><title>{{ bar.title }}</title></rect>
{% endfor %}
</svg>
<h2>Memory of a step</h2>
<p>{{ most }} GB of tensors at the peak of what is shown; in the order in which the host asks for it.</p>
<p class="key">{% for name, colour in states %}<span><i style="background:{{ colour }}"></i>{{ name }}</span>
{% endfor %}</p>
<svg viewBox="0 0 {{ width }} {{ curve_height }}" role="img" aria-label="bytes by state over a step">
{% for points, colour, name in areas %}
<polygon points="{{ points }}" fill="{{ colour }}"><title>{{ name }}</title></polygon>
{% endfor %}
</svg>
<h2>Lines to paste</h2>
{% for where, text in paste.items() %}<h3>{{ where }}</h3>
<pre>{{ text }}</pre>
{% endfor %}
</html>
"""
