"""The `fullshard report` command: the report of a run, which may be in progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fullshard.command_line import Command, MaybePath
from fullshard.errors import ConfigError, shown
from fullshard.report.causes import find_causes, step_lines, tier_lines, verdict
from fullshard.report.export import export
from fullshard.report.page import write
from fullshard.report.rank_file import rank_files
from fullshard.report.reading import DROPPED, read_run
from fullshard.report.run import PARTS, Run
from fullshard.report.watching import follow, serving

WRITTEN = 0
_LOOK_S = 2.0

_DESCRIPTION = (
    "Write a report of RUN into its folder: what slows it down or fills its memory, the timeline of a step, the "
    "waits of each unit, memory, ranks and shards. report.json has the same data, trace.json.gz the streams for "
    "ui.perfetto.dev."
)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Output options."""

    against: MaybePath = None
    """The folder of a second run to compare with."""
    export: MaybePath = None
    """A folder for CSV files with the numbers by step and rank, and of units and causes."""
    watch: bool = False
    """Serve the page on this machine only and follow the run, until Ctrl-C."""
    terminal: bool = False
    """With --watch: follow the run in the terminal instead of serving the page."""


@dataclass(frozen=True, kw_only=True)
class ReportCommandSettings:
    """All options."""

    report: ReportSettings = field(default_factory=ReportSettings)


COMMAND = Command(ReportCommandSettings, "fullshard report", _DESCRIPTION, ("RUN",))


def run(argv: Sequence[str]) -> int:
    """Write the report with the options `argv` and return the exit code."""
    words, remaining = COMMAND.take_words(argv)
    settings = COMMAND.parse(remaining).report
    folder = Path(words[0])
    if settings.terminal and not settings.watch:
        raise ConfigError("--terminal: there is nothing to follow without --watch. Pass both, or neither.")
    console = Console(emoji=False)
    if settings.terminal:
        with suppress(KeyboardInterrupt), Live(_view(folder, settings), console=console) as live:
            follow(lambda: _state(folder), lambda: live.update(_view(folder, settings)), _remaining)
        return WRITTEN
    path, summary, _ = _write(folder, settings.against, settings.export)
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {shown(str(path))}", markup=False, highlight=False, soft_wrap=True)
    if settings.watch:
        with suppress(KeyboardInterrupt), serving(folder) as address:
            console.print(f"serving the page at {address} until Ctrl-C", markup=False, highlight=False, soft_wrap=True)
            follow(lambda: _state(folder), lambda: _write(folder, settings.against, settings.export), _remaining)
    return WRITTEN


def _write(folder: Path, against: Path | None, exported: Path | None) -> tuple[Path, str, Run]:
    """Write the report of the run in `folder`, and CSV files into `exported` if it is given.

    Return the path of the report, the verdict with the offloaded bytes, and the run.
    """
    found = read_run(folder)
    other = None if against is None else read_run(against)
    findings = find_causes(found)
    remedy = "Copy the run to a folder that you can write to, and pass that folder."
    with _writing(f"{folder}: the report cannot be written there", remedy):
        path = write(found, findings, folder, against=other)
    if exported is not None:
        with _writing(f"--export {exported}: no files can be written there", "Pass a folder that you can write to."):
            export(found, findings, exported)
    dropped = [f"{DROPPED}: {found.facts[DROPPED]}"] if DROPPED in found.facts else []
    lines = [verdict(found, findings), *step_lines(found), *tier_lines(found), *dropped]
    if other is not None:
        lines += [f"compared with {other.name}: {verdict(other, find_causes(other))}", *step_lines(other)]
    return path, "\n".join(shown(line, lines=True) for line in lines), found


def _view(folder: Path, settings: ReportSettings) -> Group:
    """Write the report, and return its verdict and the parts of steps for the terminal."""
    _, summary, run = _write(folder, settings.against, settings.export)
    table = Table("ms", "last step", "median", box=None, header_style="bold")
    steps = 1e3 * run.parts_s[:, ~np.isnan(run.parts_s).any((0, 2))].mean(0)
    if len(steps):
        for part, last, median in zip(PARTS, steps[-1], np.median(steps, 0), strict=True):
            if last or median:
                table.add_row(part, f"{last:.1f}", f"{median:.1f}")
        table.add_row("step", f"{steps[-1].sum():.1f}", f"{np.median(steps.sum(-1)):.1f}")
    count = f"{len(run.steps)} steps of {len(run.ranks)} ranks"
    return Group(Text(f"{count}; Ctrl-C ends the view, not the run", style="dim"), Text(summary), table)


@contextmanager
def _writing(problem: str, remedy: str) -> Iterator[None]:
    """Context manager that converts errors of the operating system into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem} ({error.strerror}). {remedy}") from error


def _state(folder: Path) -> list[tuple[int, int]]:
    """Return a value that changes when ranks have written more lines."""
    return [(item.st_size, item.st_mtime_ns) for item in (path.stat() for path in rank_files(folder))]


def _remaining() -> bool:
    try:
        time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return False
    return True
