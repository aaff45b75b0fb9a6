"""The display of a run in progress and at its end: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text as Styled

from fullshard.amounts import in_bytes
from fullshard.plan.forecast import Forecast, ForecastComparison, comparison_table
from fullshard.train.bytes_table import RunLedgers, bytes_table
from fullshard.train.run_folder import METRICS, SAMPLES, WEIGHTS

LINE_EVERY_S = 5.0  # without a terminal, the minimum time between two lines of loss
Progress = Callable[[int, int], None]  # called with the amount done and the total
PATIENCE_S = 1.0  # the time after which the progress of an operation is shown


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The facts of a run at its start."""

    strategy: str
    ranks: int
    device: str
    parameters: int
    training_bytes: int
    validation_bytes: int
    steps: int
    out: Path


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The values of a step."""

    step: int  # steps done
    loss: float  # nats per byte
    bits_per_byte: float
    tokens_per_s: float  # a token is a byte
    left_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """The values of a run at its end."""

    bits_per_byte: float  # on validation text
    sample: bytes
    seconds: float
    ledgers: RunLedgers
    strategy: str
    out: Path


class Display:
    """A display of plain lines. It prints at most one line with the loss every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._memory = ""
        self._steps = 0
        self._shown_at = float("-inf")

    def start(self, heading: Heading) -> None:
        self._steps = heading.steps
        self.log(
            f"Training {heading.parameters / 1e6:.2f}M parameters on {heading.ranks} x {heading.device}, "
            f"strategy {heading.strategy}, {heading.steps} steps"
        )
        self.log(
            f"Text: {in_bytes(heading.training_bytes)} to train on, {in_bytes(heading.validation_bytes)} to validate "
            f"on. Output: {heading.out}"
        )

    def set_memory(self, ledgers: RunLedgers) -> None:
        """Store the memory of a rank, which later lines show."""
        own, ddp = in_bytes(ledgers.measured.total), in_bytes(ledgers.ddp.total)
        self._memory = f"  {own} per rank (ddp {ddp})"

    def show_forecast(self, forecast: Forecast) -> None:
        step = f", {forecast.step_s * 1e3:.3g} ms per step" if forecast.step_s else ""
        self.log(f"Predicted: {in_bytes(forecast.needed_bytes)} per rank{step}; peak in {forecast.peak_at}")

    def show_comparison(self, comparison: ForecastComparison) -> None:
        self.console.print(comparison_table(comparison))
        for cause in comparison.causes:
            self.log(cause)

    def advance(self, step: int) -> None:
        """Show the number of completed steps, if there is a bar."""

    def report(self, report: StepReport) -> None:
        now = time.monotonic()
        if report.step < self._steps and now - self._shown_at < LINE_EVERY_S:
            return
        self._shown_at = now
        self.log(f"step {report.step}/{self._steps}  {self.numbers_of(report)}")

    def show_validation(self, step: int, bits_per_byte: float) -> None:
        self.log(f"step {step}/{self._steps}  validation: {bits_per_byte:.3f} bits per byte")

    def show_sample(self, step: int, content: bytes) -> None:
        self.log(f"step {step}/{self._steps}  sample:")
        self.log(indented(printable(content)))

    def show_result(self, result: Result) -> None:
        self.log(f"\nSample of the trained model:\n{indented(printable(result.sample))}\n")
        self.console.print(bytes_table(result.ledgers, result.strategy))
        self.log(
            f"Validation: {result.bits_per_byte:.3f} bits per byte after {duration(result.seconds)}. "
            f"In {result.out}: {METRICS}, {SAMPLES}, {WEIGHTS}"
        )

    def show_problem(self, message: str) -> None:
        self.log(f"Problem: {message}")

    @contextmanager
    def watching(self, what: str) -> Iterator[Progress]:
        """Context manager for a long operation. It yields a function to call with the amount done and the total."""
        shown_at = time.monotonic() - LINE_EVERY_S + PATIENCE_S

        def advance(done: int, total: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= LINE_EVERY_S and total:
                shown_at = time.monotonic()
                self.show_watched(f"{what}: {100 * done // total} %")

        yield advance

    def show_watched(self, line: str) -> None:
        """Show the progress of a long operation."""
        self.log(line)

    def close(self) -> None:
        """Remove the bar, if there is one. This may be called twice."""

    def numbers_of(self, report: StepReport) -> str:
        """Return loss, speed, remaining time and memory in one line."""
        return (
            f"loss {report.loss:.3f}  {report.bits_per_byte:.3f} bits/byte  "
            f"{report.tokens_per_s / 1000:.1f}k tokens/s  {duration(report.left_s)} left{self._memory}"
        )

    def log(self, line: str) -> None:
        """Print text without markup, highlighting or wrapping."""
        self.console.print(Styled(line), soft_wrap=True)


class BarDisplay(Display):
    """A display with a bar at the foot of a terminal and numbers below it. Other lines scroll above."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = _BarWithNumbers(
            BarColumn(bar_width=None), TextColumn("{task.completed}/{task.total}"), console=console, transient=True
        )
        self._task = TaskID(0)

    def start(self, heading: Heading) -> None:
        super().start(heading)
        self._task = self._bar.add_task("", total=heading.steps)
        self._bar.start()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def report(self, report: StepReport) -> None:
        self._bar.numbers = self.numbers_of(report)

    def show_watched(self, line: str) -> None:
        self._bar.numbers = line

    def close(self) -> None:
        self._bar.stop()


class _BarWithNumbers(Bars):
    """A progress bar as wide as the terminal, with a line of text below it."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        table = self.make_tasks_table(self.tasks)
        table.expand = True
        yield table
        yield Styled(self.numbers, no_wrap=True, overflow="ellipsis")


def display_for(console: Console, *, shows: bool) -> Display:
    """Return the display for `console`; if not `shows`, one that prints nothing."""
    if not shows:
        return Display(Console(quiet=True, emoji=False))
    return BarDisplay(console) if console.is_terminal else Display(console)


def restore_terminal(console: Console) -> None:
    """Restore a terminal after an interrupted bar: show the cursor, and continue below the bar."""
    if console.is_terminal:
        console.show_cursor()
        console.print()


def printable(content: bytes) -> str:
    """Return the text of `content` with control characters replaced."""
    text = content.decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def indented(text: str) -> str:
    """Return the text with a vertical bar before each line, to distinguish it from the run's own lines."""
    return "\n".join(f"    | {line}" for line in text.splitlines())


def duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, such as 3:07, with hours if needed."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
