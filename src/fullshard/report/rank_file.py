"""The file that each rank writes during a run: lines of JSON. Readers ignore a truncated last line.

| kind | content |
|---|---|
| `start` | the rank, its host and device, the facts of the run; repeated if a run is resumed |
| `model` | the units, and how parameters are sharded: once their names are known, by the first rank |
| `step` | a step: its parts, busy and starved seconds, bytes held, work |
| `told` | numbers that the loop logs for a step, such as the loss; the mean if a line covers several steps |
| `counters` | hardware counters after a step, about once per second, in the order of `COUNTERS` |
| `units` | totals of each unit's collectives since the third step. Each line replaces the previous one |
| `spans` | the work of the streams in one step: for steps whose number is a power of two |
| `memory` | the step whose memory was observed, by the first rank |
| `operations` | the slowest operations of that step, with their times |
| `what_ifs` | the simulated gains of other settings |
| `out_of_memory` | the largest consumers of memory when it was exhausted, or nearly |
| `end` | the recording was closed |

The number of `step`, `told` and `counters` lines grows with the run. To keep the file small, after a few thousand of
them a line contains the mean of two steps, then of four, and so on, and counters are read less often.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from fullshard.errors import ConfigError, shown
from fullshard.regular_files import open_regular
from fullshard.report.line_schema import is_valid_line

_log = logging.getLogger(__name__)

FOLDER = "report"
_FLUSH_S = 2.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # so that a FIFO without a reader raises an OSError
_LISTED = 10  # maximum number of damaged lines that a warning lists


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of the file of `rank` of the run in `folder`."""
    return folder / FOLDER / f"rank{rank:05}.jsonl"


def rank_files(folder: Path) -> list[Path]:
    """Return the existing files of all ranks, in rank order."""
    return sorted((folder / FOLDER).glob("rank*.jsonl"))


class RankFile:
    """The file of a rank, to which lines are appended. If writing fails, one warning is logged and the run continues.

    Args:
        path: The path of the file; its folder is created.
        goes_on: Whether to append to an existing file instead of replacing it.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._flushed = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, _FLAGS | (os.O_APPEND if goes_on else os.O_TRUNC), 0o666)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def add(self, kind: str, **values: Any) -> None:
        """Append a line. Flush all lines if the last flush was more than `_FLUSH_S` ago."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, **values}, separators=(",", ":"), default=_plain) + "\n")
            if time.monotonic() - self._flushed > _FLUSH_S:
                self.flush()
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Make the lines visible to readers."""
        self._flushed = time.monotonic()
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Stop writing."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s: recording of this run has ended (%s).", self._path, error.strerror)
        with suppress(OSError):  # it was logged
            if self._file is not None:
                self._file.close()
        self._file = None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def lines_in(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a rank's file, except for a truncated last line.

    Only the last line of kind `units` is included. Lines of kind `spans` are long, so they are not parsed. Instead,
    they have the keys `n` and `line`, which is the argument of `parsed`. Damaged lines are skipped and logged, and
    their numbers are added to `damaged`.
    """
    units, units_number = b"", 0
    damaged = [] if damaged is None else damaged
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Remove it, or choose another run.") from error
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # the run may still be writing the last line
        if line.startswith(b'{"kind":"units"'):
            units, units_number = line, number
        elif (spans := _SPANS.match(line)) is not None:
            yield {"kind": "spans", "n": int(spans[1]), "line": line}
        elif (found := parsed(line)) is not None:
            yield found | {"line": line} if found["kind"] == "spans" else found
        else:
            damaged.append(number)
    if units:
        if (found := parsed(units)) is not None:
            yield found
        else:
            damaged.append(units_number)
    if damaged:
        few = ", ".join(map(str, sorted(damaged)[:_LISTED])) + ", ..." * (len(damaged) > _LISTED)
        _log.warning("%s: skipped damaged line %s (%d in total).", shown(str(path)), few, len(damaged))


_SPANS = re.compile(rb'\{"kind":"spans","n":(\d{1,18}),')


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the disk was full, or a host failed
        return None
    return found if is_valid_line(found) else None


def is_closed(path: Path) -> bool:
    """Return True if the rank of that file has closed its recording."""
    if not path.is_file():
        return False
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - 64))
        return b'{"kind":"end"' in file.read()


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return `values` without non-finite numbers, which JSON cannot represent."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
