"""The picture of a benchmark: bars of time and memory, with the floor as a line."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench.floor import FLOOR
from benchmarks.bench.report import BenchReport
from benchmarks.bench.spread import Spread
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_picture", "draw"]

_FORMATS = (".png", ".svg", ".pdf")
_OWN, _PEER, _LINE = "#2a6f97", "#a9b4bd", "#c1121f"


def check_picture(path: Path) -> None:
    """Raise an error before the measurement if a picture cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed, or the name has no known format.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--picture {path}: must end in one of {', '.join(_FORMATS)}.")
    try:
        found = find_spec("matplotlib") is not None
    except ValueError:  # it was partially imported
        found = False
    if not found:
        raise ConfigError(f"--picture {path}: needs matplotlib. Install it by pip install 'fullshard[bench]'.")


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture of `report`, which has at least one system."""
    from matplotlib.figure import Figure  # late: it is slow to import, and rarely needed

    figure = Figure(figsize=(11, 1.2 + 0.45 * len(report.systems)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    _draw_time(report, time)
    _draw_memory(report, memory)
    workload = report.workload
    figure.suptitle(
        f"{workload.parameter_count() / 1e6:.3g}M parameters, {workload.world} ranks on {workload.device_type}, "
        f"{workload.dtype}, batch {workload.shape.batch} x {workload.shape.seq} a rank: lower is better"
    )
    figure.legend(loc="outside lower left")
    figure.savefig(path, dpi=150)


def _draw_time(report: BenchReport, axes: Axes) -> None:
    spreads = [Spread.of(system.seconds) for system in report.systems]
    axes.barh(
        [system.name for system in report.systems],
        [1e3 * spread.median for spread in spreads],
        xerr=[
            [1e3 * (spread.median - spread.low) for spread in spreads],
            [1e3 * (spread.high - spread.median) for spread in spreads],
        ],
        color=_colors(report),
        ecolor="#333333",
    )
    floor = 1e3 * Spread.of([seconds.total for seconds in report.floor]).median
    axes.axvline(floor, color=_LINE, linestyle="--", label=f"{FLOOR}: {floor:.3g} ms")
    axes.invert_yaxis()
    axes.set_xlabel("ms a step: median and middle half of the rounds")


def _draw_memory(report: BenchReport, axes: Axes) -> None:
    on_gpu = report.workload.device_type == "cuda"
    peaks = [(system.allocated_bytes if on_gpu else system.process_bytes) or 0 for system in report.systems]
    axes.barh([system.name for system in report.systems], [peak / 1e6 for peak in peaks], color=_colors(report))
    axes.set_xlabel(f"MB at most, {'allocated on the GPU' if on_gpu else 'process above its start'}")


def _colors(report: BenchReport) -> list[str]:
    return [_OWN if system.is_own else _PEER for system in report.systems]
