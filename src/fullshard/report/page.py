"""The page of a run: one HTML file that needs nothing else, with the same as JSON and as a trace beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from fullshard.report.causes import verdict
from fullshard.report.run import Finding, Run
from fullshard.report.shown import shown
from fullshard.report.trace import write_trace
from fullshard.versions import versions

__all__ = ["DATA", "PAGE", "TRACE", "write"]

PAGE, DATA, TRACE = "report.html", "report.json", "trace.json.gz"

_CHARTED_UNITS = 14
_LISTED_UNITS, _LISTED_RANKS = 15, 12


def write(run: Run, findings: Sequence[Finding], folder: Path, *, against: Run | None = None) -> Path:
    """Write the page of `run` into `folder`, and return its path.

    Beside it lie `report.json`, with all that the page shows, and `trace.json.gz`, with every recorded span, for
    ui.perfetto.dev or chrome://tracing. Each file replaces an older one at once, so one who reads never meets half.

    Args:
        run: what is known of the run.
        findings: its causes, the worst first; the first becomes the verdict.
        folder: made if it is missing.
        against: another run, to be shown beside this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = shown(run, findings, against)
    known["verdict"] = verdict(run, tuple(findings))
    known["written"] = datetime.now().astimezone().isoformat(timespec="seconds")
    known["fullshard"] = versions()["fullshard"]
    known["trace"] = TRACE if any(run.spans.values()) else None
    if known["trace"]:
        write_trace(run, folder / TRACE)
    _replace(folder / DATA, json.dumps(known, allow_nan=False, indent=1) + "\n")
    path = folder / PAGE
    _replace(path, _page(known))
    return path


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _page(known: Mapping[str, Any]) -> str:
    told = Environment(
        autoescape=True,
        loader=FunctionLoader(_asset),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    told.filters.update(coded=_coded, time=_time, size=_size, percent=_percent, rate=_rate, number=_number, many=_many)
    return told.get_template("page.html").render(
        known,
        data=htmlsafe_json_dumps(_drawn(known), dumps=_compact),
        style=_asset("page.css"),
        theme=_asset("theme.js"),
        script=_asset("page.js"),
        charts=_asset("echarts.min.js"),
        listed_units=_LISTED_UNITS,
        listed_ranks=_LISTED_RANKS,
    )


def _asset(name: str) -> str:
    return files("fullshard.report").joinpath("assets", name).read_text(encoding="utf-8")


def _coded(text: str) -> Markup:
    """The text, with what is between backticks as code."""
    pieces = escape(text).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(it) if at % 2 else it for at, it in enumerate(pieces))


def _compact(value: Any, **_: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _drawn(known: Mapping[str, Any]) -> dict[str, Any]:
    """What the charts need: all but what is written out in tables already, and lists of values for lists of names."""
    drawn = {name: known[name] for name in _CHARTED}
    if known["units"] is not None:
        drawn["units"] = {"rows": known["units"]["rows"][:_CHARTED_UNITS]}
    if known["shards"] is not None:
        parameters = [list(it.values()) for it in known["shards"]["parameters"]]
        drawn["shards"] = {**known["shards"], "parameters": parameters}
    return drawn


_NONE = "\u2013"  # what was not measured, in a table
_CHARTED = (
    "step",
    "over_steps",
    "timeline",
    "units",
    "memory",
    "held",
    "ranks",
    "shards",
    "training",
    "against",
    "name",
)


def _time(seconds: float | None) -> str:
    """Seconds for people: three digits and a unit, such as 41.2 ms."""
    if seconds is None:
        return _NONE
    size = abs(seconds)
    if size == 0:
        return "0"
    if size >= 120:
        return f"{seconds / 60:,.1f} min"
    if size >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def _size(nbytes: float | None) -> str:
    """Bytes for people: three digits and a decimal unit, such as 21.3 MB."""
    if nbytes is None:
        return _NONE
    if abs(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    power = next(power for power in (1, 2, 3, 4) if abs(nbytes) < 999.5 * 1000**power or power == 4)
    return f"{nbytes / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _percent(share: float | None) -> str:
    if share is None:
        return _NONE
    return "< 1\u00a0%" if 0 < share < 0.005 else f"{share * 100:.0f}\u00a0%"


def _rate(gb_s: float | None) -> str:
    return _NONE if gb_s is None else f"{_size(gb_s * 1e9)}/s"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
