"""The `fullshard parity` command."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fullshard.command_line import Command, check_writable, dumps_with_options
from fullshard.regular_files import writing
from fullshard.testing.parity.cases import NOT_SHARDED, Case
from fullshard.testing.parity.check import rows_of
from fullshard.testing.parity.report import WIDTH, ParityReport, ParityRow
from fullshard.testing.parity.settings import ParitySettings
from fullshard.testing.ranks import RanksFailed

EQUAL, DIFFERENT, NOT_COMPARED, INTERRUPTED = 0, 1, 2, 130

_DESCRIPTION = (
    "Train your model in one plain process and sharded over ranks, under every strategy and on the same data, and "
    "report differences. On a CPU, results should be identical to the bit. The exit code is 0 if nothing differs, 1 if "
    "something differs, and 2 if the results could not be compared."
)
COMMAND = Command(ParitySettings, "fullshard parity", _DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """Compare with the options `argv` and return the exit code."""
    settings = COMMAND.parse(argv)
    recipe, cases, tolerance = settings.recipe(), settings.cases(), settings.tolerance()
    if settings.verdict.json is not None:
        check_writable("json", settings.verdict.json)
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        rows = shown(rows_of(recipe, cases, tolerance, settings.verdict.timeout), cases, console)
        report = ParityReport(tuple(rows), tolerance)
    except RanksFailed as failed:
        sys.stderr.write(f"fullshard: plain training fails, so sharded training cannot be compared with it. {failed}\n")
        return NOT_COMPARED
    except KeyboardInterrupt:
        return INTERRUPTED
    console.print(report.table())
    console.print(report.stated, markup=False, highlight=False, soft_wrap=True)
    if settings.verdict.json is not None:
        with writing(settings.verdict.json, option="--json"):
            settings.verdict.json.write_text(dumps_with_options(settings, report.as_dict()))
    return EQUAL if report.is_equal else DIFFERENT


def shown(rows: Iterable[ParityRow], cases: Sequence[Case], console: Console) -> Iterator[ParityRow]:
    """Yield the `rows` of `cases` as they arrive. Show a progress bar on a terminal, else lines."""
    if not console.is_terminal:
        for row in rows:
            console.print(str(row), markup=False, highlight=False, soft_wrap=True)
            yield row
        return
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task(str(cases[0]), total=len(cases))
        done = 0
        for row in rows:
            done += row.strategy != NOT_SHARDED
            progress.update(task, completed=done, description=str(cases[min(done, len(cases) - 1)]))
            yield row
