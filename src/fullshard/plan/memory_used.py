"""The memory of a process or device, and its peak."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard.device.host_memory import bytes_by_name, host_room

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc(5), clear_refs


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Peak bytes of one rank. None if this machine does not report them."""

    process: int | None  # above the memory at the start
    allocated: int | None  # of a GPU, by torch's allocator
    reserved: int | None


class PeakMemory:
    """The peak memory of this process, above its memory when this object is created.

    It counts the pages of the process and its share of the pages that it shares with other ranks. It does not count
    pages of files, such as libraries, which are loaded on first use and shared by all processes. The kernel tracks the
    peak of all pages, so it does not depend on sampling.
    """

    def __init__(self, device: torch.device) -> None:

        self._device = device
        self._start = process_bytes()

    def reset(self) -> None:
        """Reset the peak."""
        try:
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        except OSError:  # not Linux, or no permission: the peak is unknown
            self._start = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> PeakBytes:
        """Return the peak since the last `reset`."""
        peak = process_bytes(at_peak=True)
        on_gpu = self._device.type == "cuda"
        return PeakBytes(
            process=None if peak is None or self._start is None else max(0, peak - self._start),
            allocated=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            reserved=torch.cuda.max_memory_reserved(self._device) if on_gpu else None,
        )


def process_bytes(*, at_peak: bool = False) -> int | None:
    """Return the bytes of this process's pages and its share of shared ones; None if they are unknown."""
    try:
        status = bytes_by_name(_PROCESS / "status")
        shared = bytes_by_name(_PROCESS / "smaps_rollup")["Pss_Shmem"]
        whole = status["VmHWM" if at_peak else "VmRSS"]
        return whole - status["RssFile"] - status["RssShmem"] + shared
    except (OSError, KeyError):
        return None


def memory_for_a_rank(device: torch.device, local_world: int) -> int:
    """Return the bytes that one rank can use: its accelerator's memory, or its share of the machine or container."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    room = host_room()
    return (1 << 62 if room is None else room) // local_world
