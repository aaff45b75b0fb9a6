"""The output of `fullshard checkpoint`: tables or JSON on stdout, a progress bar on stderr after the first second."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fullshard.checkpoint.manifest import Progress as Report
from fullshard.errors import shown

_WIDTH = 200  # columns, for output without a terminal
_BAR_AFTER_S = 1.0


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_line(text: str) -> None:
    """Print text, which may come from an untrusted file."""
    _console().print(Text(shown(text, lines=True)), soft_wrap=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under headings. Columns of `right` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    _console().print(table)


def _console() -> Console:
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


class SlowBar:
    """Context manager that shows a progress bar of bytes on a terminal after the first second."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, emoji=False)
        self._began = monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def reporting(self, doing: str) -> Report:
        """Return a function to call with the bytes done and the total. `doing` is shown next to the bar."""
        self._stop()

        def on_progress(done: int, total: int) -> None:
            if self._bar is None and self._console.is_terminal and monotonic() - self._began > _BAR_AFTER_S:
                columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), DownloadColumn())
                self._bar = Progress(*columns, console=self._console, transient=True, expand=True)
                self._bar.add_task(doing, total=total)
                self._bar.start()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done, total=total)

        return on_progress

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
