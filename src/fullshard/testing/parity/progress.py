"""The display of a comparison in progress: a bar on a terminal, a line for each row elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.report import ParityRow

__all__ = ["shown"]


def shown(rows: Iterable[ParityRow], cases: Sequence[Case], console: Console) -> Iterator[ParityRow]:
    """Yield `rows` as they arrive, one for each of `cases`, in order."""
    return _with_bar(rows, cases, console) if console.is_terminal else _with_lines(rows, console)


def _with_bar(rows: Iterable[ParityRow], cases: Sequence[Case], console: Console) -> Iterator[ParityRow]:
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task(str(cases[0]), total=len(cases))
        for done, row in enumerate(rows, start=1):
            progress.update(task, completed=done, description=str(cases[min(done, len(cases) - 1)]))
            yield row


def _with_lines(rows: Iterable[ParityRow], console: Console) -> Iterator[ParityRow]:
    for row in rows:
        console.print(str(row), markup=False, highlight=False, soft_wrap=True)
        yield row
