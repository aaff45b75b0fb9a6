"""A prediction made in a separate process while a run starts, and its comparison with measurements of the run."""

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

from fullshard.disk.prediction import Traffic
from fullshard.errors import ConfigError
from fullshard.plan.prediction import Prediction
from fullshard.tape.tape import Collective

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

_PATIENCE_S = 300.0
NOTABLE = 0.10  # a relative difference above which a cause is reported
_LEAST_S, _LEAST_BYTES = 5e-5, 5e4  # smaller values are displayed as 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted needs of one rank of a run, in bytes and in seconds per step."""

    hardware: str  # the machine that the times are for. If it is empty, no machine is described and all seconds are 0
    peak_bytes: int  # the peak bytes of tensors
    peak_at: str  # the unit and the phase of the peak
    by_state: Mapping[str, int]  # the peak bytes of each state. The peaks occur at different times
    needed_bytes: int  # the peak including the overhead of the allocator, or of the process
    limit_bytes: int  # the available bytes
    step_s: float  # a whole step, from the second one
    gather_s: float  # time during which all-gathers run
    reduce_s: float  # time during which reductions run
    exposed_s: float  # time during which compute waits for other ranks or for copies
    would_fit: tuple[str, ...] = ()  # changes with which the run would fit, if it does not
    turns: tuple[tuple[str, int], ...] = ()  # see `Prediction.turns`
    flops_share: float = 0.0  # the model's own FLOPs in `step_s` as a share of the peak rate (MFU)
    on_disk_bytes: int = 0  # the bytes on disk, including activations
    disk_read_bytes: int = 0  # the bytes read from disk per step, from the second one
    disk_written_bytes: int = 0  # the bytes written to disk per step, from the second one

    @property
    def fits(self) -> bool:
        """True if the available memory is sufficient."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def disk_traffic(self) -> Traffic:
        """The bytes on disk, and the bytes read and written per step."""
        return Traffic(
            room_bytes=self.on_disk_bytes, read_bytes=self.disk_read_bytes, written_bytes=self.disk_written_bytes
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except `turns`, for a line of metrics."""
        return {name: value for name, value in asdict(self).items() if name != "turns"}


def forecast_of(prediction: Prediction, *, limit_bytes: int, times: bool = True) -> Forecast:
    """Return the forecast for a prediction."""
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


# -- a separate process ----------------------------------------------------------------------------------------------


def check_importable(arguments: Iterable[Any]) -> None:
    """Raise `ConfigError` if another process could not import one of `arguments`."""
    of_script = [argument for argument in arguments if getattr(argument, "__module__", "") == "__main__"]
    if of_script:
        raise ConfigError(
            f"{of_script[0].__qualname__} is defined in the running script, which another process cannot import. Move "
            "it to a module and import it from there."
        )


class Forecasting(Generic[T]):
    """A forecast that is computed in a separate process with low priority."""

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
        self._process.stdin.write(pickle.dumps(sys.path))  # first, because it is needed to unpickle the rest
        self._process.stdin.write(pickle.dumps((forecast, arguments)))
        self._process.stdin.close()
        self._process.stdin = None

    def result(self) -> T:
        """Wait for the result and return it."""
        try:
            out, stated = self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            self.close()
            raise ConfigError(
                f"the prediction did not finish within {_PATIENCE_S:g} s. The run continues without it; `fullshard "
                "plan` has no time limit."
            ) from error
        if self._process.returncode:
            last = stated.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise ConfigError(f"nothing could be predicted: {_PREFIX.sub('', last[0])}")
        found: T = pickle.loads(out)
        return found

    def close(self) -> None:
        """Kill the process if it is still running."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()


_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_PREFIX = re.compile(r"^(\[rank\d+\]: )*(fullshard\.errors\.\w+: )?")
"""The prefix of a message of this package in a traceback."""


def _answer() -> None:
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # output of the user's module is not part of the result
    os.nice(10)
    sys.path[:] = pickle.load(sys.stdin.buffer)
    forecast, arguments = pickle.load(sys.stdin.buffer)
    out.write(pickle.dumps(forecast(*arguments)))
    out.flush()


# -- predicted versus measured ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured needs of a rank. None for values that were not measured."""

    step_s: float | None = None  # seconds per step, from the end of one optimizer step to the end of the next
    needed_bytes: int | None = None  # the peak of an accelerator's allocator, or of the process
    by_state: Mapping[str, int] | None = None  # peak bytes by state, with the names that a `Forecast` uses
    gather_s: float | None = None  # seconds during which all-gathers ran
    reduce_s: float | None = None  # seconds during which reductions ran
    input_s: float | None = None  # seconds from an optimizer step to the next forward
    core_s: float | None = None  # seconds during which this rank was ready to compute but every core was busy

    def as_dict(self) -> dict[str, Any]:
        """Return the measured values, for a line of metrics."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Row:
    """One predicted and measured number with its `unit`: "B" or "s"."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """The relative difference of the measurement from the prediction."""
        return self.measured / self.predicted - 1 if self.predicted else 0.0

    @property
    def difference_text(self) -> str:
        """The difference in percent, or as a factor if it is ten or more. Empty if the prediction is near zero."""
        if self.predicted < (_LEAST_S if self.unit == "s" else _LEAST_BYTES):
            return ""
        return f"{self.difference:+.1%}" if self.difference < 9 else f"{self.difference + 1:,.0f} times"


@dataclass(frozen=True)
class ForecastComparison:
    """Predicted and measured values, with an explanation of their differences."""

    rows: tuple[Row, ...]
    causes: tuple[str, ...]


def compare(forecast: Forecast, measured: Measured) -> ForecastComparison:
    """Compare `forecast` with `measured`. Differences above 10 % in memory or step time are explained by a cause."""
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
    return ForecastComparison(tuple(rows), tuple(_causes(forecast, measured, rows)))


def _causes(forecast: Forecast, measured: Measured, rows: list[Row]) -> list[str]:
    by_name = {row.name.strip(): row for row in rows}
    causes = []
    memory, step = by_name.get("memory"), by_name.get("step")
    if memory is not None and abs(memory.difference) > NOTABLE:
        more = "more" if memory.difference > 0 else "less"
        stated = "a dry run does not trace the memory of other libraries and of this script"
        if measured.core_s is not None:  # on CPUs
            stated += (
                ", and how much freed memory the C library reuses varies: MALLOC_MMAP_THRESHOLD_=65536 in the "
                "environment reduces this"
            )
        causes.append(f"{abs(memory.difference):.0%} {more} memory than predicted: {stated}.")
    if step is None or abs(step.difference) <= NOTABLE:
        return causes
    late = step.measured - step.predicted
    if late < 0:
        return [
            *causes,
            f"A step is {-step.difference:.0%} shorter: {forecast.hardware} is faster than its description.",
        ]
    shares: dict[str, float] = {}
    if measured.input_s is not None:
        shares["input: time between an optimizer's step and the next forward"] = measured.input_s
    for name in ("gathers under way", "reductions under way"):
        if (row := by_name.get(name)) is not None:
            cause = "a slower link than described, or ranks that wait for slower ranks"
            took = f"{name} for {_stated(row.measured, row.unit)} instead of {_stated(row.predicted, row.unit)}"
            shares[f"{cause}: {took}"] = row.measured - row.predicted
    if measured.core_s is not None:
        shares["other processes: this one waited for a core"] = measured.core_s
    reported = [
        f"{cause} ({seconds:.3f} s of {late:.3f} s)" for cause, seconds in shares.items() if seconds > 0.25 * late
    ]
    stated = "; ".join(reported) or (
        f"slower compute than in the description of {forecast.hardware}: run `fullshard calibrate` again"
    )
    return [*causes, f"A step is {step.difference:.0%} longer. {stated[0].upper()}{stated[1:]}."]


def comparison_table(comparison: ForecastComparison) -> Table:
    """Return the numbers as a `rich` table."""
    from rich.table import Table  # late: importing this library does not require rich

    table = Table(title="predicted and measured, one rank")
    table.add_column("")
    for heading in ("predicted", "measured", "differs by"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        table.add_row(row.name, _stated(row.predicted, row.unit), _stated(row.measured, row.unit), row.difference_text)
    return table


def _stated(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:,.1f} ms"
    return f"{value / 1e6:,.1f} MB"


if __name__ == "__main__":
    _answer()
