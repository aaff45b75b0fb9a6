"""The page of a run: one self-contained HTML file, and files with the same content as JSON and as a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.regular_files import replacing
from fullshard.report.causes import verdict
from fullshard.report.frame import framed, stamped
from fullshard.report.run import Finding, Run
from fullshard.report.shown import shown
from fullshard.report.trace import write_trace

PAGE, DATA, TRACE = "report.html", "report.json", "trace.json.gz"

_CHARTED_UNITS = 14
_LISTED = {"listed_units": 15, "listed_ranks": 12, "listed_operations": 15}  # rows of tables before "show all"


def write(run: Run, findings: Sequence[Finding], folder: Path, *, against: Run | None = None) -> Path:
    """Write the page of `run` into `folder`, and return its path.

    This also writes `report.json`, with the content of the page, and `trace.json.gz`, with all recorded spans for
    ui.perfetto.dev or chrome://tracing. Each file replaces an older one atomically, so readers never see a partial
    file.

    Args:
        run: The run.
        findings: The causes of lost time and memory, the most expensive first.
        folder: The folder of the run.
        against: Another run to compare with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = shown(run, findings, against)
    known["verdict"] = verdict(run, tuple(findings))
    known.update(stamped())
    known["trace"] = TRACE if any(run.spans.values()) else None
    if known["trace"]:
        write_trace(run, folder / TRACE)
    files = {
        folder / DATA: json.dumps(known, allow_nan=False, indent=1) + "\n",
        folder / PAGE: framed("page.html", {**known, **_LISTED}, _drawn(known)),
    }
    for file, text in files.items():
        with replacing(file) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    return folder / PAGE


def _drawn(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the charts, without values that are in the tables, and with lists instead of dicts."""
    drawn = {name: known[name] for name in _CHARTED}
    if known["units"] is not None:
        drawn["units"] = {"rows": known["units"]["rows"][:_CHARTED_UNITS]}
    if known["shards"] is not None:
        parameters = [list(item.values()) for item in known["shards"]["parameters"]]
        drawn["shards"] = {**known["shards"], "parameters": parameters}
    return drawn


_CHARTED = (
    *("step", "over_steps", "timeline", "units", "memory", "held", "tiers"),
    *("ranks", "hardware", "shards", "training", "against", "name"),
)
