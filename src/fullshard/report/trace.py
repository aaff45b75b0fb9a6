"""Spans as a trace in the Chrome format for ui.perfetto.dev, with a process per rank and a thread per stream."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.device.streams import STREAMS
from fullshard.regular_files import replacing
from fullshard.report.run import Run
from fullshard.report.shown import in_order


def write_trace(run: Run, path: Path) -> None:
    """Write the spans of all ranks to `path`, compressed with gzip. Times are relative to the start of the step."""
    header = {"displayTimeUnit": "ms", "otherData": {"run": run.name, "step": run.shown_step}}
    with replacing(path) as unfinished, gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=3) as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(run)))
        file.write("\n]}\n")


def _events(run: Run) -> Iterator[dict[str, Any]]:
    hosts = {rank.rank: rank.host for rank in run.ranks}
    for rank, spans in run.spans.items():
        streams = in_order({span.stream for span in spans}, STREAMS)
        thread = {stream: number for number, stream in enumerate(streams)}
        yield _named("process_name", rank, 0, name=f"rank {rank} on {hosts.get(rank, 'unknown')}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
        for stream in streams:
            yield _named("thread_name", rank, thread[stream], name=stream)
            yield _named("thread_sort_index", rank, thread[stream], sort_index=thread[stream])
        for span in spans:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": thread[span.stream],
                "ts": round(span.start_s * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "name": f"{span.name} {span.unit}" if span.unit else span.name,
                "cat": span.name,
                "args": {"unit": span.unit or "the root"},
            }


def _named(what: str, rank: int, thread: int, **stated: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": stated}
