"""The display of a benchmark in progress: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks.bench.rounds import Report

__all__ = ["shown"]


@contextmanager
def shown(console: Console, turns: int) -> Iterator[Report]:
    """Show stages within this context. Call its value with each stage, `turns` times in total."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("", total=turns)
        numbers = iter(range(turns))

        def on_progress(stage: str, what: str) -> None:
            progress.update(task, completed=next(numbers, turns), description=f"{stage}: {what}")

        yield on_progress


class _Lines:
    """Print a line when the stage changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""

    def __call__(self, stage: str, what: str) -> None:
        if stage != self._stage:
            self._console.print(stage, markup=False, highlight=False)
        self._stage = stage
