"""The `fullshard calibrate` command: measurement of this machine for predictions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fullshard.amounts import in_bytes
from fullshard.command_line import Command, MaybePath, MaybeStr
from fullshard.errors import ConfigError
from fullshard.plan.calibration import calibrate, write_description
from fullshard.plan.hardware import Hardware, described, hardware, here_path
from fullshard.regular_files import writing

MEASURED = 0
WIDTH = 110  # of a table without a terminal

_DESCRIPTION = (
    "Measure this machine in under a minute and write a description of it for predictions (--hardware here): the "
    "speed of matrix products by size, memory bandwidth, the host time of launching an operation, and the links "
    "between ranks."
)


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """The hardware and the output file."""

    out: MaybePath = None
    """The file. Default: here.toml in the user's configuration folder, which --hardware here reads."""
    like: MaybeStr = None
    """Known hardware for values that cannot be measured, such as links to other hosts. Default: by the GPU's name."""
    device: MaybeStr = None
    """cpu or cuda. Default: the GPU, if there is one."""
    seconds: float = 30.0
    """Approximate duration of the measurement. With less time, each size is measured fewer times."""


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """All options."""

    machine: CalibrationSettings = field(default_factory=CalibrationSettings)


COMMAND = Command(CalibrateSettings, "fullshard calibrate", _DESCRIPTION)


def run(argv: Sequence[str]) -> int:
    """Measure with the options `argv` and return the exit code."""
    settings = COMMAND.parse(argv).machine
    out = here_path() if settings.out is None else settings.out
    if settings.device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {settings.device}: unknown device. Expected cpu or cuda.")
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out}: descriptions are TOML files. Use {out.parent / (out.stem or 'here')}.toml.")
    with writing(out, option="--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    found = calibrate(
        None if settings.device is None else torch.device(settings.device),
        like=settings.like,
        seconds=settings.seconds,
        on_progress=_report,
    )
    write_description(found, out)
    console.print(_table(described(found), None if "like" not in found else hardware(found["like"])))
    console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)
    return MEASURED


def _report(what: str) -> None:
    sys.stderr.write(f"measuring: {what}\n")


def _table(here: Hardware, known: Hardware | None) -> Table:
    """Return a table of the measurement next to the peaks of similar known hardware."""
    table = Table(title=here.title, title_justify="left")
    for name in ("", "measured", "known", "share"):
        table.add_column(name, justify="left" if not name else "right")
    for name, measured, peak, show in _lines(here, known):
        share = f"{measured / peak:.0%}" if peak else ""
        table.add_row(name, show(measured), show(peak) if peak else "", share)
    return table


def _lines(here: Hardware, known: Hardware | None) -> list[tuple[str, float, float | None, Any]]:
    """Return the name, the measurement, the known peak or None, and the formatter of each row."""
    found = here.measured
    lines: list[tuple[str, float, float | None, Any]] = []
    for dtype in found["products"]:
        peak = known.flops_per_s.get(dtype) if known else None
        rates: Any = found["products"][dtype]  # of a GPU, by size
        best = here.flops_per_s[dtype] if here.kind == "cpu" else max(rate["flops_per_s"] for rate in rates)
        lines.append((f"matrix products, {dtype}, the best", best, peak, _rate))
    memory = known.memory_bytes_per_s if known else None
    reached = here.fitted.memory_share * (memory or here.memory_bytes_per_s)
    lines.append(("memory, read and written", reached, memory, _per_second))
    lines.append(("host time of an operation", here.fitted.host_s, known.fitted.host_s if known else None, _micro))
    if known:
        lines.append(("between two kernels", found["launch_s"], None, _micro))
        lines.append(("to and from the host", here.host_link_bytes_per_s, known.host_link_bytes_per_s, _per_second))
    else:
        lines.append(("a new page of memory", found["page_s"] * 4096, None, _micro))
        lines.append(("a gather between ranks", here.link.bytes_per_s, None, _per_second))
        lines.append(("before its first byte", here.base_s, None, _micro))
    return lines


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


def _per_second(bytes_per_s: float) -> str:
    return f"{in_bytes(bytes_per_s)}/s"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
