"""Hardware counters: rates and states read from the kernel and the GPU, and the advice for slow ranks."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.faulty_runs import FAULTS, HOT, healthy_run, with_counters, with_parts, with_seconds

from fullshard.report import counters as counters_module
from fullshard.report.causes import find_causes
from fullshard.report.counters import HardwareCounters, gpu_counters
from fullshard.report.line_schema import is_valid_line
from fullshard.report.run import COUNTERS

CPU = torch.device("cpu")


class FakeKernel:
    """Counters in /proc of a process with one child."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 0.0
        monkeypatch.setattr(counters_module.os, "getpid", lambda: 10)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def count(self, times: int) -> None:
        """Set every counter to `times` its unit: seconds of CPU, pages, kilobytes, faults."""
        ticks = times * counters_module._TICKS_PER_S
        self.write("stat", f"cpu  {4 * ticks} {ticks} {ticks} 77 88 {ticks} {ticks} 0 0 0\ncpu0 1 1\n")
        self.write("vmstat", f"nr 7\npgpgin {times}\npgpgout {2 * times}\npswpin {3 * times}\npswpout {4 * times}\n")
        self.write("net/dev", f"Inter-|\n face |\n lo: 9 9 9 9 9 9 9 9 9\n eth0:{times} 0 0 0 0 0 0 0 {5 * times} 0\n")
        self.write("net/snmp", f"Ip: A\nIp: 1\nTcp: X RetransSegs Y\nTcp: 7 {8 * times} 7\n")
        self.write("sys/class/net/lo/speed", "invalid\n")
        self.write("sys/class/net/eth0/speed", "25000\n")
        self.write("sys/class/net/eth0/device/vendor", "0x15b3\n")
        self.write("sys/class/net/veth0/speed", "800000\n")  # a made-up value for a virtual device
        self.write("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
        self.write("pressure/memory", f"some avg10=0.00 total={times * 100_000}\nfull avg10=0.00 total=0\n")
        self.write("10/task/10/children", "11 ")
        for pid, seconds in ((10, 2 * ticks), (11, ticks)):
            faults = f"{6 * times} 0 {7 * times} 0"
            self.write(f"{pid}/stat", f"{pid} (a (b) c) S 1 1 1 0 -1 0 {faults} {seconds} {ticks} 0 0")

    def counters(self, **more: object) -> HardwareCounters:
        return HardwareCounters(CPU, proc=self.folder, sys=self.folder / "sys", clock=lambda: self.now, **more)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return FakeKernel(tmp_path, monkeypatch)


def test_counter_rates_are_differences_per_second(kernel):
    kernel.count(10)
    counters = kernel.counters()
    kernel.count(14)
    kernel.now = 2.0
    found = dict(zip(COUNTERS, counters.sample(), strict=True))
    page = counters_module._PAGE
    expected = {
        "CPU of the host": 16.0,
        "CPU of this rank": 10.0,
        "disk reads": 2048.0,
        "disk writes": 4096.0,
        "swapped in": 6.0 * page,
        "swapped out": 8.0 * page,
        "network received": 2.0,
        "network sent": 10.0,
        "network errors": 16.0,
        "network link": 50e9,
        "minor page faults": 12.0,
        "major page faults": 14.0,
        "stalled for memory": 0.2,
    }
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(expected)
    assert is_valid_line({"kind": "counters", "n": 3, "v": list(found.values())})


def test_missing_counters_are_none(kernel):
    kernel.count(1)
    for name in ("pressure/memory", "net/dev", "net/snmp", "vmstat", "10/task/10/children"):
        (kernel.folder / name).unlink()
    shutil.rmtree(kernel.folder / "sys")
    counters = kernel.counters()
    kernel.now = 1.0
    found = dict(zip(COUNTERS, counters.sample(), strict=True))
    assert {name for name, value in found.items() if value is not None} == {"CPU of the host", "CPU of this rank"}


def test_counter_samples_start_every_second_and_thin_out(kernel, monkeypatch):
    monkeypatch.setattr(counters_module, "_MOST", 8)
    counters, taken = kernel.counters(), []
    for step in range(100_000):
        kernel.now = step / 10
        if counters.sample() is not None:
            taken.append(kernel.now)
    assert taken[:3] == [1.0, 2.0, 3.0]
    assert len(taken) < 8 * np.log2(10_000)


class FakeNvml:
    """The functions of NVML's package that are used."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    reasons = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=83, memory=20)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle):
        return 702_500

    def nvmlDeviceGetTemperature(self, handle, kind):
        raise RuntimeError("not supported")

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=5 * 10**9)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons


@pytest.mark.parametrize(("reasons", "slowed", "limited"), [(0x1, 0, 0), (0x4, 0, 1), (0x40, 1, 0), (0x8C, 1, 1)])
def test_gpu_counters_convert_nvml_values_to_base_units(kernel, reasons, slowed, limited):
    nvml = FakeNvml()
    nvml.reasons = reasons
    counters = kernel.counters(gpu=gpu_counters(nvml, "GPU-1"))
    kernel.now = 1.0
    found = dict(zip(COUNTERS, counters.sample(), strict=True))
    assert {name: value for name, value in found.items() if value is not None} == {
        "GPU utilization": 0.83,
        "GPU clock": 1.41e9,
        "GPU clock, at most": 1.98e9,
        "GPU power": 702.5,
        "GPU memory": 5e9,
        "GPU slowed by heat or supply": slowed,
        "GPU at its power limit": limited,
    }


def cells(run, rank):
    return (np.arange(len(run.ranks)) == rank)[:, None] & np.ones(len(run.steps), dtype=bool)


@pytest.mark.parametrize(
    ("changes", "stated", "change"),
    [
        (HOT, "1.20 instead of 1.90 GHz, at 91 °C and 640 W", "fans"),
        ({"GPU_clock": 1.5e9, "GPU_at_its_power_limit": 1.0}, "1.50 instead of 1.90 GHz", "power limit"),
        ({"GPU_clock": 1.5e9}, "1.50 instead of 1.90 GHz", "nvidia-smi -rac"),
        ({"swapped_out": 3e7}, "node0 swaps 30 MB/s", "Free memory there"),
        ({}, "computes longer", "Check clock, temperature and power"),
    ],
)
def test_advice_names_the_counter_that_explains_a_slow_rank(changes, stated, change):
    run = healthy_run()
    run = with_counters(with_parts(run, [2], backward=0.5), cells(run, 2), **changes)
    (finding,) = find_causes(run)
    assert finding.cause == "throttled rank"
    assert stated in finding.stated and change in finding.change


def test_advice_names_the_cores_that_other_processes_use():
    run = healthy_run(ranks=2, per_host=1)
    starved = run.starved_s + cells(run, 1) * 0.4 * run.step_s
    run = with_parts(run, [1], backward=0.5)
    run = with_counters(run, cells(run, 0), CPU_of_the_host=1.1)
    (finding,) = find_causes(run.__class__(**{**vars(run), "starved_s": starved}))
    assert "Other processes use 7.2 cores of node1" in finding.stated
    assert finding.change == "End other programs on node1, or pin ranks to cores."


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"network_link": 1.25e8}, "The link of node1 reaches 125 MB/s, other links 3.12 GB/s"),
        ({"network_errors": 900.0}, "node1 repeats 900 packets per second, other hosts 3"),
        ({}, "communication of"),
    ],
)
@pytest.mark.parametrize("slow", ["all", "some"])
def test_slow_communication_advice_names_the_host_with_a_bad_link(changes, stated, slow):
    run = healthy_run(ranks=8, per_host=2, steps=24)
    if slow == "all":
        run = next(fault.plant(run, 0.5) for fault in FAULTS if fault.planted == "a network too slow for the model")
    else:
        run = with_seconds(run, gather=(run.steps % 4 == 0) * np.full(run.step_s.shape, 1.0))
    host = np.array([rank.host == "node1" for rank in run.ranks])[:, None] & (run.steps > 0)
    (finding,) = find_causes(with_counters(run, host, **changes))
    assert finding.cause == ("slow link" if slow == "all" else "network stalls")
    assert stated in finding.stated or (slow == "some" and not changes)
    assert ("cable, port and driver there" in finding.change) == bool(changes)


def test_unusual_counters_of_a_healthy_run_are_not_a_cause():
    run = healthy_run()
    assert find_causes(with_counters(run, cells(run, 0), GPU_clock=1.2e9, swapped_in=1e8)) == ()
