"""The result of a benchmark, as values, as tables and as JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import RenderableType
from rich.table import Table

from benchmarks.bench.floor import FLOOR, FloorSeconds
from benchmarks.bench.spread import Spread, ratios
from benchmarks.bench.systems import FULLSHARD, SYSTEMS
from benchmarks.bench.workload import Workload
from fullshard.amounts import in_bytes
from fullshard.versions import versions

__all__ = ["WIDTH", "BenchReport", "SystemResult"]

WIDTH = 120  # of the tables, without a terminal


@dataclass(frozen=True, kw_only=True)
class SystemResult:
    """One system: seconds per step in each round, and the peak memory of any rank."""

    name: str
    seconds: Sequence[float]
    loss_difference: float  # the largest from the plain process
    tensor_bytes: int
    process_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None

    @property
    def is_own(self) -> bool:
        """True for this library."""
        return self.name.startswith(FULLSHARD)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a system has no result."""

    reason: str
    details: str


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All measurements of one run."""

    workload: Workload
    steps: int  # in a round
    floor: Sequence[FloorSeconds]  # by round
    systems: Sequence[SystemResult]
    failed: Mapping[str, Failure]

    def over(self, name: str, other: str) -> Spread:
        """Return the ratio of the step times of `name` and `other`, which may be the floor."""
        return Spread.of(ratios(self._seconds(name), self._seconds(other)))

    @property
    def not_installed(self) -> list[str]:
        """The systems that cannot be measured on this machine."""
        return [name for name, system in SYSTEMS.items() if not system.is_installed]

    def tables(self) -> list[RenderableType]:
        """Return the tables for rich: every system, and the ratios of this library to each peer."""
        fully_sharded = [system for system in self.systems if system.is_own]
        peers = [system for system in self.systems if not system.is_own]
        return [self._systems_table(), *([self._ratios_table(fully_sharded, peers)] if fully_sharded and peers else [])]

    @property
    def stated(self) -> str:
        """The text below the tables."""
        parts = [asdict(floor) for floor in self.floor]
        medians = {name: Spread.of([part[name] for part in parts]).median for name in parts[0]}
        lines = ["floor = " + " + ".join(f"{name} {_ms(seconds)}" for name, seconds in medians.items()) + " ms"]
        if self.not_installed:
            lines.append(f"Not installed here: {', '.join(self.not_installed)}.")
        lines += [f"{name} failed: {failure.reason}" for name, failure in self.failed.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "versions": versions(),
            "machine": machine(self.workload),
            "workload": {
                **asdict(self.workload),
                "parameters": self.workload.parameter_count(),
                "tokens_per_step": self.workload.tokens_per_step,
            },
            "rounds": len(self.floor),
            "steps_per_round": self.steps,
            "floor": {
                "step_s": asdict(Spread.of(self._seconds(FLOOR))),
                "seconds": self._seconds(FLOOR),
                "parts": [asdict(floor) for floor in self.floor],
            },
            "systems": {system.name: self._as_dict(system) for system in self.systems},
            "failed": {name: asdict(failure) for name, failure in self.failed.items()},
            "not_installed": self.not_installed,
        }

    def _as_dict(self, system: SystemResult) -> dict[str, Any]:
        others = [FLOOR, *(other.name for other in self.systems if other is not system)]
        difference = system.loss_difference
        step = Spread.of(system.seconds)
        return {
            "settings": SYSTEMS[system.name].settings,
            "step_s": asdict(step),
            "seconds": list(system.seconds),
            "tokens_per_s": self.workload.tokens_per_step / step.median,
            "over": {other: asdict(self.over(system.name, other)) for other in others},
            "process_bytes": system.process_bytes,
            "tensor_bytes": system.tensor_bytes,
            "allocated_bytes": system.allocated_bytes,
            "reserved_bytes": system.reserved_bytes,
            "loss_difference": difference if math.isfinite(difference) else "inf",
        }

    def _seconds(self, name: str) -> list[float]:
        if name == FLOOR:
            return [floor.total for floor in self.floor]
        return next(list(system.seconds) for system in self.systems if system.name == name)

    def _systems_table(self) -> Table:
        workload, rounds = self.workload, len(self.floor)
        table = Table(
            title=f"{workload.parameter_count() / 1e6:.3g}M parameters, {workload.world} ranks on "
            f"{workload.device_type}, {workload.dtype}, {workload.optimizer}, "
            f"batch {workload.shape.batch} x {workload.shape.seq} a rank; {rounds} rounds of {self.steps} steps",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("system", no_wrap=True)
        memory: dict[str, list[int | None]] = {
            "process peak": [system.process_bytes for system in self.systems],
            "tensors peak": [system.tensor_bytes for system in self.systems],
            "allocated": [system.allocated_bytes for system in self.systems],
            "reserved": [system.reserved_bytes for system in self.systems],
        }
        known = {heading: counts for heading, counts in memory.items() if any(count is not None for count in counts)}
        for heading in ("step ms", "middle half", "tokens/s", "over floor", *known, "loss differs"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_row(FLOOR, *self._speed(FLOOR), *("" for _ in known), "")
        for index, system in enumerate(self.systems):
            counts = [_bytes(of_systems[index]) for of_systems in known.values()]
            table.add_row(system.name, *self._speed(system.name), *counts, _number(system.loss_difference))
        return table

    def _speed(self, name: str) -> list[str]:
        step = Spread.of(self._seconds(name))
        tokens = self.workload.tokens_per_step / step.median
        over = "" if name == FLOOR else f"{self.over(name, FLOOR).median:.2f}"
        return [_ms(step.median), f"{_ms(step.low)} - {_ms(step.high)}", f"{tokens:.0f}", over]

    def _ratios_table(self, fully_sharded: Sequence[SystemResult], peers: Sequence[SystemResult]) -> Table:
        table = Table(
            title="Step time over that of each peer in the same round: median (middle half)", box=box.SIMPLE_HEAD
        )
        table.add_column("system", no_wrap=True)
        for peer in peers:
            table.add_column(peer.name, justify="right", no_wrap=True)
        for system in fully_sharded:
            spreads = [self.over(system.name, peer.name) for peer in peers]
            table.add_row(
                system.name, *(f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})" for spread in spreads)
            )
        return table


def machine(workload: Workload) -> dict[str, Any]:
    """Return the machine and the versions of the measurement."""
    gpu = torch.cuda.get_device_name() if workload.device_type == "cuda" else None
    return {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _bytes(count: int | None) -> str:
    return "" if count is None else in_bytes(count)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
