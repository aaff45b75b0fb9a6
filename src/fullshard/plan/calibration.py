"""`here`: a description of this machine, measured in under a minute."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import ConfigError
from fullshard.plan.cpu_speeds import cpu_speeds
from fullshard.plan.gpu_speeds import OF_TRAINING, gpu_speeds, large_rate
from fullshard.plan.hardware import HERE, hardware, known_hardware
from fullshard.plan.link_speeds import link_speeds
from fullshard.regular_files import writing

Report = Callable[[str], None]  # called with the name of the next measurement

DTYPE = "bfloat16"  # the dtype whose share of the peak rate is fitted
NETWORK_BYTES_PER_S, NETWORK_STEP_S = 1.25e9, 50e-6
LARGE_BYTES = 2**28  # of a tensor that exceeds all caches


def calibrate(
    device: torch.device | str | None = None,
    *,
    like: str | None = None,
    seconds: float = 30.0,
    on_progress: Report = lambda _: None,
) -> dict[str, Any]:
    """Return a description of this machine, in the format of the TOML files, see `fullshard.plan.hardware.described`.

    Args:
        device: The device to describe. If None, the current accelerator if there is one, otherwise the CPU.
        like: The known hardware that provides what cannot be measured here, such as peak rates and links to other
            hosts. If None, it is chosen by the name of the GPU.
        seconds: The approximate duration on a CPU. With less time, sizes are measured less often. Ignored on a GPU.
        on_progress: Called with the name of the next measurement.

    Raises:
        ConfigError: No known hardware matches the GPU, `like` is given for a CPU, or there is too little time.
    """
    if seconds <= 0:
        raise ConfigError(f"calibrate(seconds={seconds:g}): must be greater than 0. Pass 30, for example.")
    current = torch.accelerator.current_accelerator()
    chosen = torch.device(device) if device is not None else current or torch.device("cpu")
    if chosen.type == "cpu" and like is not None:
        raise ConfigError(f"calibrate(like={like!r}): a CPU is measured completely. Leave `like` out.")
    if like is not None:
        hardware(like)  # raises before anything is measured if it is unknown
    if chosen.type == "cpu":
        return _cpu(seconds, on_progress)
    if not torch.cuda.is_available() or chosen.type != "cuda":
        raise ConfigError(f"calibrate({str(chosen)!r}): expected a CPU or a device of torch.cuda.")
    return _gpu(torch.device("cuda", chosen.index or 0), like, on_progress)


def write_description(stated: dict[str, Any], path: Path) -> None:
    """Write a description as TOML and create missing folders."""
    import tomli_w  # late: only needed for writing

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(stated))


def _gpu(device: torch.device, like: str | None, on_progress: Report) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(device)
    like = like or _like(about.name, about.total_memory)
    base = hardware(like)
    found = gpu_speeds(device, on_progress)
    count = torch.cuda.device_count()
    if count > 1:
        on_progress(f"collectives of {count} GPUs")
        found["collectives"] = link_speeds(count)
    large = [item for item in found["memory"] if item["nbytes"] >= LARGE_BYTES]
    memory_rate = statistics.harmonic_mean(max(item[name] for item in large) for name in OF_TRAINING)
    return {
        "like": like,
        "name": HERE,
        "kind": "gpu",
        "title": f"{about.name}, measured",
        "memory_bytes": about.total_memory,
        "ranks_per_host": count,
        **({"link": _link(found["collectives"], count, base.base_s)} if count > 1 else {}),
        "host_link_bytes_per_s": min(found["to_device_bytes_per_s"], found["to_host_bytes_per_s"]),
        "host_memory_bytes": _memory_bytes(),
        "fitted": {
            "matmul_share": large_rate(found["products"][DTYPE]) / base.flops_per_s[DTYPE],
            "memory_share": memory_rate / base.memory_bytes_per_s,
            "host_s": found["host_s"],
        },
        "measured": found,
        "sources": [
            f"measured by fullshard calibrate with torch {torch.__version__}, Python {platform.python_version()}",
            f"peaks and unmeasured links: those of {like}",
        ],
    }


def _cpu(seconds: float, on_progress: Report) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_progress(f"{cores} cores at once")
    found = cpu_speeds(cores, seconds)
    rates = {name: _rates(table, found["dims"]) for name, table in found["products"].items()}
    usual = found["dims"][-2]
    memory_bytes = _memory_bytes()
    link_s = found.get("gather_large_s", 0.0) - found.get("gather_small_s", 0.0)
    link_bytes_per_s = found["link_bytes"] / link_s if link_s > 0 else found["copy_bytes_per_s"] / 2
    latency_s = found.get("gather_small_s", 0.0)
    return {
        "name": HERE,
        "kind": "cpu",
        "title": f"{cores} cores of {_processor()}, measured",
        "memory_bytes": memory_bytes,
        "flops_per_s": {name: max(rates[name].values()) for name in rates},
        "memory_bytes_per_s": found["copy_bytes_per_s"],
        "ranks_per_host": cores,
        "base_s": latency_s,
        "link": {"bytes_per_s": link_bytes_per_s, "step_s": latency_s},
        "network": {"bytes_per_s": NETWORK_BYTES_PER_S, "step_s": NETWORK_STEP_S},
        "host_link_bytes_per_s": found["copy_bytes_per_s"] / 2,
        "host_memory_bytes": memory_bytes,
        "fitted": {
            "matmul_share": rates["float32"][usual, usual, usual] / max(rates["float32"].values()),
            "memory_share": found["add_bytes_per_s"] / found["copy_bytes_per_s"],
            "host_s": found["operation_s"],
        },
        "measured": found,
        "sources": [
            f"measured by fullshard calibrate with torch {torch.__version__}, Python {platform.python_version()}, on "
            "all cores at the same time: the busy time of each",
            "flops_per_s: the fastest measured matrix product; memory_bytes_per_s: a copy",
            "network: not measured, 10 Gbit/s assumed",
        ],
    }


def _rates(table: list[list[list[float]]], dims: list[int]) -> dict[tuple[int, int, int], float]:
    """Return the FLOP/s of matrix products by (rows, inner dimension, columns), computed from their seconds."""
    return {
        (m, k, n): 2 * m * k * n / table[i][j][o]
        for i, m in enumerate(dims)
        for j, k in enumerate(dims)
        for o, n in enumerate(dims)
    }


def _processor() -> str:
    """Return the name of the processor if the system reports it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _link(sizes: list[dict[str, float]], ranks: int, base_s: float) -> dict[str, float]:
    """Return the bus bandwidth of the largest all-gather and the time per ring step of the smallest, minus its base."""
    small, large = sizes[0], sizes[-1]
    step_s = max(0.0, small["gather_s"] - base_s) / (ranks - 1)
    sent = large["nbytes"] * (ranks - 1) / ranks
    return {"bytes_per_s": sent / max(large["gather_s"] - small["gather_s"], 1e-9), "step_s": step_s}


def _like(gpu: str, memory_bytes: int) -> str:
    """Return the known hardware that matches a GPU with this name and memory."""
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    known = {name: hardware(name) for name in known_hardware()}
    named = {name: item for name, item in known.items() if item.kind == "gpu" and name.split("-")[0] in words}
    if not named:
        raise ConfigError(
            f"{gpu}: none of {', '.join(known)} has this name, and links to other GPUs cannot be measured with one "
            f"GPU. Choose the most similar one: --like {next(iter(known))}"
        )
    return min(named, key=lambda name: abs(named[name].memory_bytes - memory_bytes))


def _memory_bytes() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
