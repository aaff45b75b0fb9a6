"""`make bench`: measure in turns, and show the tables. The exit code is 0 if every system could train."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.bench.picture import check_picture, draw
from benchmarks.bench.progress import shown
from benchmarks.bench.report import WIDTH
from benchmarks.bench.rounds import measure
from benchmarks.bench.settings import BenchSettings, OutputSettings
from benchmarks.bench.team import TeamFailed
from fullshard.command_line import check_writable, dumps_with_options, parse
from fullshard.regular_files import writing

__all__ = ["run"]

MEASURED, FAILED, INTERRUPTED = 0, 1, 130

_DESCRIPTION = (
    "Measure training steps of this library and of every peer that is installed, in turn, on the same model and the "
    "same data: time, memory, and how far the losses are from those of one plain process, and what this machine "
    "allows at best. The exit code is 0 if every system could train, 1 if one could not."
)


def run(argv: Sequence[str]) -> int:
    """Measure with the options `argv` and return the exit code.

    Raises:
        ConfigError: An option is invalid. Nothing has been started then.
    """
    settings = parse(BenchSettings, argv, prog="python -m benchmarks.bench", description=_DESCRIPTION)
    plan, output = settings.plan(), settings.output
    _check_output(output)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    try:
        with shown(console, plan.turns) as on_progress:
            report = measure(plan, on_progress)
    except TeamFailed as failed:
        sys.stderr.write(f"fullshard: there is nothing to compare with: {failed}\n{failed.details}")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    for table in report.tables():
        console.print(table)
    console.print(report.stated, markup=False, highlight=False, soft_wrap=True)
    if output.json is not None:
        with writing(output.json, option="--json"):
            output.json.write_text(dumps_with_options(settings, report.as_dict()))
    if output.picture is not None and report.systems:
        with writing(output.picture, option="--picture"):
            draw(report, output.picture)
    return FAILED if report.failed else MEASURED


def _check_output(output: OutputSettings) -> None:
    """Raise an error before the measurement if an output is not writable."""
    if output.picture is not None:
        check_picture(output.picture)
    for name, path in (("json", output.json), ("picture", output.picture)):
        if path is not None:
            check_writable(name, path)
