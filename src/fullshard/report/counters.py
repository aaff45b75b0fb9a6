"""Hardware counters of a rank: its GPU, and the CPU, disks, network and memory of its host, about once per second.

NVML's Python package (`pip install 'fullshard[nvml]'`) reads the counters of GPUs. The others are read from /proc.
Counters that a machine does not have are None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fullshard.report.run import COUNTERS

_EVERY_S = 1.0
_MOST = 4096  # the number of samples after which the time between samples doubles
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HEAT_OR_SUPPLY = 0x08 | 0x20 | 0x40 | 0x80  # NVML: hardware slowdown, software and hardware thermal, power brake
_POWER_LIMIT = 0x04

Numbers = dict[str, float]


class HardwareCounters:
    """The hardware counters of this rank.

    Args:
        device: The device of the rank.
        proc: The folder with the counters of the kernel.
        sys: The folder with the kernel's devices.
        gpu: Returns the counters of the GPU. If None, NVML reads those of `device`.
        clock: Returns seconds.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        gpu: Callable[[], Numbers] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._sys, self._clock = proc, sys, clock
        self._gpu = gpu or _counters_of(device)
        self._every_s, self._samples = _EVERY_S, 0
        self._of_processes: dict[str, float] = {}
        self._at = clock()
        self._totals = self._read_totals()

    def sample(self) -> list[float | None] | None:
        """Return the counters in the order of `COUNTERS`; None if it is too early for another sample.

        Rates are averages since the last sample. The time between samples, one second at first, doubles after every few
        thousand samples, so that their number is limited.
        """
        now = self._clock()
        if now < self._at + self._every_s:
            return None
        before, self._totals = self._totals, self._read_totals()
        elapsed, self._at = now - self._at, now
        found = {
            name: max(0.0, total - before[name]) / elapsed for name, total in self._totals.items() if name in before
        }
        found |= self._gpu() | self._link()
        self._samples += 1
        if self._samples % _MOST == 0:
            self._every_s *= 2
        return [float(f"{found[name]:.5g}") if name in found else None for name in COUNTERS]

    def _read_totals(self) -> Numbers:
        found: Numbers = {}
        for read in (self._cpu_totals, self._memory_totals, self._network_totals, self._resent_totals):
            with suppress(OSError, ValueError, IndexError, KeyError):  # not Linux, or a kernel without this file
                found |= read()
        return found

    def _cpu_totals(self) -> Numbers:
        user, nice, system, _, _, *interrupts = map(int, self._text("stat").split("\n", 1)[0].split()[1:9])
        self._add_processes()
        busy = (user + nice + system + sum(interrupts)) / _TICKS_PER_S
        return {"CPU of the host": busy, "CPU of this rank": sum(self._of_processes.values())}

    def _add_processes(self) -> None:
        """Update the CPU seconds of this process and of its children, such as the workers of a loader."""
        pid = os.getpid()
        with suppress(OSError):  # a kernel without lists of children
            children = self._text(f"{pid}/task/{pid}/children").split()
            for each in (str(pid), *children):
                with suppress(OSError):  # the process has ended
                    fields = self._text(f"{each}/stat").rpartition(")")[2].split()
                    self._of_processes[each] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def _memory_totals(self) -> Numbers:
        pages = dict(line.split() for line in self._text("vmstat").splitlines())
        fields = self._text(f"{os.getpid()}/stat").rpartition(")")[2].split()
        found = {
            "disk reads": 1024.0 * int(pages["pgpgin"]),
            "disk writes": 1024.0 * int(pages["pgpgout"]),
            "swapped in": float(_PAGE) * int(pages["pswpin"]),
            "swapped out": float(_PAGE) * int(pages["pswpout"]),
            "minor page faults": float(fields[7]),
            "major page faults": float(fields[9]),
        }
        with suppress(OSError):  # a kernel without pressure stall information
            some = self._text("pressure/memory").split("\n", 1)[0]
            found["stalled for memory"] = int(some.rpartition("total=")[2]) / 1e6
        return found

    def _network_totals(self) -> Numbers:
        lines = (line.partition(":") for line in self._text("net/dev").splitlines()[2:])
        devices = [[*map(float, numbers.split())] for name, _, numbers in lines if name.strip() != "lo"]
        return {
            "network received": sum(device[0] for device in devices),
            "network sent": sum(device[8] for device in devices),
        }

    def _resent_totals(self) -> Numbers:
        names, values = (line.split() for line in self._text("net/snmp").splitlines() if line.startswith("Tcp:"))
        return {"network errors": float(values[names.index("RetransSegs")])}

    def _link(self) -> Numbers:
        """Return the speed of the fastest network card or InfiniBand port. Virtual interfaces have no device."""
        found = [0.0]
        cards = (device.with_name("speed") for device in self._sys.glob("class/net/*/device"))
        ports = self._sys.glob("class/infiniband/*/ports/*/rate")
        for paths, unit in ((cards, 1e6), (ports, 1e9)):
            for path in paths:
                with suppress(OSError, ValueError):  # an interface that is down, or has no speed
                    found.append(unit / 8 * float(path.read_text().split()[0]))
        return {"network link": max(found)} if max(found) > 0 else {}

    def _text(self, name: str) -> str:
        return (self._proc / name).read_text(encoding="utf-8", errors="replace")


def _counters_of(device: torch.device) -> Callable[[], Numbers]:
    """Return a function that reads the counters of `device`. Its result is empty without NVML or an NVIDIA GPU."""
    if device.type == "cuda":
        with suppress(Exception):  # NVML is not installed, has no driver, or the GPU is of another vendor
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            return gpu_counters(import_module("pynvml"), uuid if uuid.startswith("MIG-") else f"GPU-{uuid}")
    return dict


def gpu_counters(nvml: Any, uuid: str) -> Callable[[], Numbers]:
    """Return a function that reads the counters of a GPU."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    one_of: Mapping[str, Callable[[], float]] = {
        "GPU utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "GPU clock": lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "GPU clock, at most": lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "GPU power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "GPU temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "GPU memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "GPU slowed by heat or supply": lambda: bool(_reasons(nvml, handle) & _HEAT_OR_SUPPLY),
        "GPU at its power limit": lambda: bool(_reasons(nvml, handle) & _POWER_LIMIT),
    }

    def read() -> Numbers:
        found: Numbers = {}
        for name, value in one_of.items():
            with suppress(Exception):  # a counter that this GPU does not have, or a GPU that has failed
                found[name] = float(value())
        return found

    return read


def _reasons(nvml: Any, handle: Any) -> int:
    return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
