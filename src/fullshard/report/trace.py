"""Spans as a trace in the Chrome format for ui.perfetto.dev, with a process per rank and a thread per stream."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.device.lanes import LANES
from fullshard.report.run import Run
from fullshard.report.shown import in_order

__all__ = ["write_trace"]


def write_trace(run: Run, path: Path) -> None:
    """Write the spans of all ranks to `path`, compressed with gzip. Times start at the start of the step."""
    beside = path.with_name(path.name + ".new")
    told = {"displayTimeUnit": "ms", "otherData": {"run": run.name, "step": run.shown_step}}
    with gzip.open(beside, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(json.dumps(told)[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(run)))
        file.write("\n]}\n")
    beside.replace(path)


def _events(run: Run) -> Iterator[dict[str, Any]]:
    hosts = {rank.rank: rank.host for rank in run.ranks}
    for rank, spans in run.spans.items():
        lanes = in_order({span.lane for span in spans}, LANES)
        thread = {lane: number for number, lane in enumerate(lanes)}
        yield _named("process_name", rank, 0, name=f"rank {rank} on {hosts.get(rank, 'unknown')}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
        for lane in lanes:
            yield _named("thread_name", rank, thread[lane], name=lane)
            yield _named("thread_sort_index", rank, thread[lane], sort_index=thread[lane])
        for span in spans:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": thread[span.lane],
                "ts": round(span.start_s * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "name": f"{span.name} {span.unit}" if span.unit else span.name,
                "cat": span.name,
                "args": {"unit": span.unit or "the root"},
            }


def _named(what: str, rank: int, thread: int, **said: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": said}
