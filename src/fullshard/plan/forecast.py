"""A prediction in numbers, made in a process of its own while a run starts, and held against what the run then does."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fullshard.disk.foresight import Traffic
from fullshard.errors import ConfigError
from fullshard.plan.prediction import Prediction
from fullshard.tape.tape import Collective

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Comparison",
    "Forecast",
    "Forecasting",
    "Measured",
    "Row",
    "compare",
    "comparison_table",
    "forecast_of",
]

T = TypeVar("T")

_PATIENCE_S = 300.0
NOTABLE = 0.10  # a difference beyond which a cause is named
_LEAST_S, _LEAST_BYTES = 5e-5, 5e4  # what is shown as 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a rank of a run is expected to need. Bytes and seconds, of one rank and one step.

    Args:
        hardware: the machine that times are of; empty, if none is described, and all seconds are 0 then.
        peak_bytes: of tensors, at the moment that needs most.
        peak_at: the unit and the phase of that moment.
        by_state: the most bytes of each state, which come at different moments.
        needed_bytes: with what the allocator, or the process, holds beyond.
        limit_bytes: what there is for it.
        step_s: a whole step, from the second on.
        gather_s: in which gathers are under way.
        reduce_s: in which reductions are.
        exposed_s: in which compute waits for other ranks.
        would_fit: changes by which it would fit, if it does not.
        turns: see `Prediction.turns`.
        flops_share: the share of the peak rate that the model's own FLOPs come to in `step_s` (MFU).
        on_disk_bytes: that rest on a disk, activations included.
        disk_read_bytes: from there, in a step from the second on.
        disk_written_bytes: to there.
    """

    hardware: str
    peak_bytes: int
    peak_at: str
    by_state: Mapping[str, int]
    needed_bytes: int
    limit_bytes: int
    step_s: float
    gather_s: float
    reduce_s: float
    exposed_s: float
    would_fit: tuple[str, ...] = ()
    turns: tuple[tuple[str, int], ...] = ()
    flops_share: float = 0.0
    on_disk_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0

    @property
    def fits(self) -> bool:
        """True if what is needed is there."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def disk_traffic(self) -> Traffic:
        """What it has on a disk and moves there."""
        return Traffic(
            room_bytes=self.on_disk_bytes, read_bytes=self.disk_read_bytes, written_bytes=self.disk_written_bytes
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it but the turns, for a line of metrics."""
        return {name: value for name, value in asdict(self).items() if name != "turns"}


def forecast_of(prediction: Prediction, *, limit_bytes: int, times: bool = True) -> Forecast:
    """The forecast that a prediction comes to.

    Args:
        prediction: of one rank.
        limit_bytes: the memory that one rank has.
        times: whether the machine is described, so that seconds mean something.
    """
    collectives = [item for item in prediction.step.placed if isinstance(item.entry, Collective)]
    gathers = sum(collective.end - collective.start for collective in collectives if "gather" in collective.entry.name)
    every = sum(collective.end - collective.start for collective in collectives)
    origin = prediction.peak.origin
    return Forecast(
        hardware=prediction.hardware.name if times else "",
        peak_bytes=prediction.peak.nbytes,
        peak_at=f"{origin.phase.value} of {origin.unit or 'the root'}",
        by_state={state.value: nbytes for state, nbytes in prediction.most_by_state.items() if nbytes},
        needed_bytes=prediction.needed_bytes,
        limit_bytes=limit_bytes,
        step_s=prediction.step_s * times,
        gather_s=gathers * times,
        reduce_s=(every - gathers) * times,
        exposed_s=prediction.exposed_s * times,
        turns=prediction.turns,
        flops_share=prediction.flops_utilisation * times,
    )


# -- a process beside the run -----------------------------------------------------------------------------------------


def check_importable(arguments: Iterable[Any]) -> None:
    """Refuse functions that another process would not find.

    Raises:
        ConfigError: one is of the script that runs.
    """
    of_script = [argument for argument in arguments if getattr(argument, "__module__", "") == "__main__"]
    if of_script:
        raise ConfigError(
            f"{of_script[0].__qualname__} is of the script that runs, which another process cannot import. Put it "
            "into a module, and import it from there."
        )


class Forecasting(Generic[T]):
    """A forecast under way in a process of its own, which gives way to whatever else wants to compute.

    Args:
        forecast: a function of a module, such as one that returns a `Forecast`.
        arguments: for it; they are pickled.
    """

    def __init__(self, forecast: Callable[..., T], *arguments: Any) -> None:
        check_importable(arguments)
        environ = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        self._process = subprocess.Popen(
            (sys.executable, "-m", "fullshard.plan.forecast"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(sys.path))  # by itself: it takes it to find what comes next
        self._process.stdin.write(pickle.dumps((forecast, arguments)))
        self._process.stdin.close()
        self._process.stdin = None

    def result(self) -> T:
        """What it returns; waits for it.

        Raises:
            ConfigError: there is none, with the last line that its process has said.
        """
        try:
            out, said = self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            self.close()
            raise ConfigError(
                f"nothing could be predicted within {_PATIENCE_S:g} s. The run goes on without; `fullshard plan` takes "
                "its time."
            ) from error
        if self._process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise ConfigError(f"nothing could be predicted: {_PREFIX.sub('', last[0])}")
        found: T = pickle.loads(out)
        return found

    def close(self) -> None:
        """End the process, if it is still there."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()


_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_PREFIX = re.compile(r"^(\[rank\d+\]: )*(fullshard\.errors\.\w+: )?")
"""What stands before a message of this package's in a traceback."""


def _answer() -> None:
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # what a user's module prints is no answer
    os.nice(10)
    sys.path[:] = pickle.load(sys.stdin.buffer)
    forecast, arguments = pickle.load(sys.stdin.buffer)
    out.write(pickle.dumps(forecast(*arguments)))
    out.flush()


# -- predicted beside measured ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a rank has needed. None where it was not measured.

    Args:
        step_s: seconds of a step, from the end of one optimizer's step to that of the next.
        needed_bytes: at most: of the allocator of an accelerator, or of the process.
        by_state: bytes by state, each at its own peak, under the names that a `Forecast` has for them.
        gather_s: seconds in which gathers were under way.
        reduce_s: seconds in which reductions were.
        input_s: seconds from an optimizer's step to the next forward.
        core_s: seconds in which this rank could have computed, and every core was taken.
    """

    step_s: float | None = None
    needed_bytes: int | None = None
    by_state: Mapping[str, int] | None = None
    gather_s: float | None = None
    reduce_s: float | None = None
    input_s: float | None = None
    core_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was measured, for a line of metrics."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Row:
    """One number, predicted and measured, in `unit`: "B" or "s"."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """By which part of the prediction the measurement is off."""
        return self.measured / self.predicted - 1 if self.predicted else 0.0

    @property
    def said_difference(self) -> str:
        """That in percent, or in times from ten times on; nothing where what was predicted is as good as nothing."""
        if self.predicted < (_LEAST_S if self.unit == "s" else _LEAST_BYTES):
            return ""
        return f"{self.difference:+.1%}" if self.difference < 9 else f"{self.difference + 1:,.0f} times"


@dataclass(frozen=True)
class Comparison:
    """The numbers beside each other, and in words what those mean that differ."""

    rows: tuple[Row, ...]
    causes: tuple[str, ...]


def compare(forecast: Forecast, measured: Measured) -> Comparison:
    """`forecast` beside `measured`; each difference in memory or in the step's time above 10 % with its cause."""
    rows = [
        Row(f"  {state}", "B", nbytes, measured.by_state[state])
        for state, nbytes in forecast.by_state.items()
        if measured.by_state is not None and measured.by_state.get(state)
    ]
    if measured.needed_bytes is not None:
        rows.insert(0, Row("memory", "B", forecast.needed_bytes, measured.needed_bytes))
    if forecast.step_s and measured.step_s is not None:
        rows.append(Row("step", "s", forecast.step_s, measured.step_s))
        for name, expected, found in (
            ("  gathers under way", forecast.gather_s, measured.gather_s),
            ("  reductions under way", forecast.reduce_s, measured.reduce_s),
        ):
            if expected and found is not None:
                rows.append(Row(name, "s", expected, found))
    return Comparison(tuple(rows), tuple(_causes(forecast, measured, rows)))


def _causes(forecast: Forecast, measured: Measured, rows: list[Row]) -> list[str]:
    by_name = {row.name.strip(): row for row in rows}
    causes = []
    memory, step = by_name.get("memory"), by_name.get("step")
    if memory is not None and abs(memory.difference) > NOTABLE:
        more = "more" if memory.difference > 0 else "less"
        said = "what other libraries and this script keep in the same process is not on the tape of a dry run"
        if measured.core_s is not None:  # on CPUs
            said += (
                ", and which pieces of freed memory the C library can use again is partly chance: with "
                "MALLOC_MMAP_THRESHOLD_=65536 in the environment there are fewer"
            )
        causes.append(f"{abs(memory.difference):.0%} {more} memory than predicted: {said}.")
    if step is None or abs(step.difference) <= NOTABLE:
        return causes
    late = step.measured - step.predicted
    if late < 0:
        return [
            *causes,
            f"A step is {-step.difference:.0%} shorter: {forecast.hardware} is described as slower than it is.",
        ]
    shares: dict[str, float] = {}
    if measured.input_s is not None:
        shares["input: time between an optimizer's step and the next forward"] = measured.input_s
    for name in ("gathers under way", "reductions under way"):
        if (row := by_name.get(name)) is not None:
            cause = "a slower link than described, or ranks that wait for others"
            took = f"{name} for {_said(row.measured, row.unit)} instead of {_said(row.predicted, row.unit)}"
            shares[f"{cause}: {took}"] = row.measured - row.predicted
    if measured.core_s is not None:
        shares["other processes: this one waited for a core"] = measured.core_s
    told = [f"{cause} ({seconds:.3f} s of {late:.3f} s)" for cause, seconds in shares.items() if seconds > 0.25 * late]
    said = "; ".join(told) or f"slower compute than {forecast.hardware} is described with: `fullshard calibrate` again"
    return [*causes, f"A step is {step.difference:.0%} longer. {said[0].upper()}{said[1:]}."]


def comparison_table(comparison: Comparison) -> Table:
    """The numbers as a table of rich's."""
    from rich.table import Table  # late: whoever only imports this library need not have it

    table = Table(title="predicted beside measured, one rank")
    table.add_column("")
    for heading in ("predicted", "measured", "differs by"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        table.add_row(row.name, _said(row.predicted, row.unit), _said(row.measured, row.unit), row.said_difference)
    return table


def _said(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:,.1f} ms"
    return f"{value / 1e6:,.1f} MB"


if __name__ == "__main__":
    _answer()
