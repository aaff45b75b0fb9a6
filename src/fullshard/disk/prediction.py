"""Predicted costs of offloading to a disk: seconds per step, terabytes written, and the share of the disk's endurance.

AdamW in fp32 keeps two numbers of four bytes each per parameter, and every step reads and writes all of them:

    written in a run = parameters x 8 bytes x fraction on the disk x steps        7B x 8 x 1 x 10,000 = 560 TB
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path

from fullshard.disk.folder import IN_MEMORY
from fullshard.disk.speed import DiskSpeed
from fullshard.errors import ConfigError, DiskError

TB_WRITTEN_PER_TB = 600
"""The typical warranted endurance of consumer SSDs: terabytes written per terabyte of capacity. SSDs for data centers
have 1800 (one full write per day for five years) or more, large inexpensive ones 200."""

DAY_S = 86_400
ADAMW_BYTES = 8  # per parameter: two moments in fp32


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The data of all ranks of a host on one disk, and the bytes that a step reads and writes."""

    room_bytes: int  # on the disk at the same time
    read_bytes: int  # per step
    written_bytes: int  # per step

    @classmethod
    def of_optimizer(cls, parameters: float, *, bytes_each: float = ADAMW_BYTES, fraction: float = 1.0) -> Traffic:
        """Return the traffic of an optimizer state. Every step reads and writes all of it.

        Args:
            parameters: The number of parameters that the ranks of this host update.
            bytes_each: Bytes of state per parameter.
            fraction: The fraction of the state on disk.
        """
        nbytes = round(parameters * bytes_each * fraction)
        return cls(room_bytes=nbytes, read_bytes=nbytes, written_bytes=nbytes)

    @classmethod
    def of_parameters(cls, nbytes: int, *, gathers: int = 2, reductions: int = 1, clips: bool = False) -> Traffic:
        """Return the traffic of shards and their gradients, without the optimizer state.

        Each all-gather reads shards. Each reduction writes gradients; later reductions read them first. The optimizer
        reads both and writes shards.

        Args:
            nbytes: Bytes of the shards of all ranks of this host.
            gathers: All-gathers of each unit per step: 2 per microbatch under zero3, 1 under zero2.
            reductions: Reductions per step, one for each microbatch whose gradients are synchronized.
            clips: Whether gradients are clipped, which reads them twice and writes them once.
        """
        return cls.of_shards(nbytes, gathers=gathers) + cls.of_gradients(nbytes, reductions=reductions, clips=clips)

    @classmethod
    def of_shards(cls, nbytes: int, *, gathers: int = 2, is_stepped: bool = True) -> Traffic:
        """Return the traffic of shards without gradients. Frozen shards are not written."""
        return cls(room_bytes=nbytes, read_bytes=nbytes * (gathers + is_stepped), written_bytes=nbytes * is_stepped)

    @classmethod
    def of_gradients(cls, nbytes: int, *, reductions: int = 1, clips: bool = False) -> Traffic:
        """Return the traffic of gradients."""
        read_bytes, written_bytes = nbytes * (reductions + 2 * clips), nbytes * (reductions + clips)
        return cls(room_bytes=nbytes, read_bytes=read_bytes, written_bytes=written_bytes)

    @classmethod
    def of_activations(cls, nbytes: int, *, microbatches: int = 1) -> Traffic:
        """Return the traffic of activations. Forward writes `nbytes` per microbatch, and backward reads them."""
        moved = nbytes * microbatches
        return cls(room_bytes=nbytes, read_bytes=moved, written_bytes=moved)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            room_bytes=self.room_bytes + other.room_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class PredictedLoad:
    """The predicted load of a run on a disk."""

    speed: DiskSpeed
    traffic: Traffic
    step_s: float  # without the disk
    endurance_bytes: float  # bytes that can be written to the disk in its life
    is_endurance_known: bool = False  # from its data sheet

    @property
    def disk_s(self) -> float:
        """Seconds that the disk needs per step. They may overlap with computation."""
        return self.speed.seconds(self.traffic.read_bytes, self.traffic.written_bytes)

    @property
    def most_step_s(self) -> float:
        """Seconds per step if nothing overlaps with disk access."""
        return self.step_s + self.disk_s

    @property
    def least_step_s(self) -> float:
        """Seconds per step if disk access and computation overlap fully."""
        return max(self.step_s, self.disk_s)

    @property
    def written_a_day(self) -> float:
        """Bytes written per day if disk access and computation overlap fully."""
        return self.traffic.written_bytes * DAY_S / self.least_step_s if self.least_step_s else 0.0

    def written_in(self, steps: int) -> int:
        """Return the bytes that `steps` steps write."""
        return self.traffic.written_bytes * steps

    def lines(self, steps: int) -> list[str]:
        """Return a summary for a run of `steps` steps. It includes rates per day if the step time is known."""
        speed, traffic = self.speed, self.traffic
        step = f", for a step of {self.least_step_s:.3g} to {self.most_step_s:.3g} s" if self.step_s else ""
        per_day = f"{_tb(self.written_a_day)} a day, " if self.step_s else ""
        return [
            f"{speed.folder} ({speed.file_system or 'unknown file system'}, "
            f"{'direct' if speed.is_direct else 'through the cache'}): reads {_gb(speed.read_bytes_per_s)}/s, writes "
            f"{_gb(speed.write_bytes_per_s)}/s, both at once {_gb(speed.both_bytes_per_s)}/s in all, by "
            f"{speed.depth} requests of {speed.request_bytes >> 10} KiB",
            f"takes {_gb(traffic.room_bytes)} of {_gb(speed.free_bytes)} free space",
            f"a step reads {_gb(traffic.read_bytes)} and writes {_gb(traffic.written_bytes)}: {self.disk_s:.3g} s of "
            f"the disk{step}",
            f"writes {per_day}{_tb(self.written_in(steps))} in {steps} steps{self._endurance_used(steps)}",
        ]

    def _endurance_used(self, steps: int) -> str:
        """Return text about the share of the endurance that `steps` steps use; empty for file systems in memory."""
        if self.speed.file_system in IN_MEMORY:
            return ""
        disk = f"a disk of {_tb(self.speed.disk_bytes)} is likely to endure"
        source = "its data sheet warrants" if self.is_endurance_known else disk
        share = self.written_in(steps) / self.endurance_bytes
        return f": {share:.1%} of the {_tb(self.endurance_bytes)} that {source}"


def predict_load(
    speed: DiskSpeed,
    traffic: Traffic,
    *,
    step_s: float = 0.0,
    endurance_bytes: float | None = None,
    ask: Callable[[int], str] | None = None,
) -> PredictedLoad:
    """Return the predicted load of `traffic` on a disk.

    Args:
        speed: The measured speed of the disk.
        traffic: The data on the disk.
        step_s: Seconds per step without the disk; 0 if unknown.
        endurance_bytes: Bytes that may be written to the disk over its lifetime, from its data sheet. If None,
            TB_WRITTEN_PER_TB for the size of the file system.
        ask: See `check_room`.

    Raises:
        ConfigError: A number is negative.
        DiskError: The disk has too little free space. The message names the fraction that fits.
    """
    endurance = speed.disk_bytes * TB_WRITTEN_PER_TB if endurance_bytes is None else endurance_bytes
    if step_s < 0 or endurance <= 0 or min(traffic.room_bytes, traffic.read_bytes, traffic.written_bytes) < 0:
        raise ConfigError(
            f"{traffic}, a step of {step_s:g} s, {endurance:g} bytes of endurance: none of them may be negative, and "
            "endurance must be greater than 0. Leave out unknown values."
        )
    check_room(speed.folder, traffic, speed.free_bytes, ask=ask)
    return PredictedLoad(
        speed=speed,
        traffic=traffic,
        step_s=step_s,
        endurance_bytes=endurance,
        is_endurance_known=endurance_bytes is not None,
    )


def check_room(folder: Path, traffic: Traffic, free_bytes: int, *, ask: Callable[[int], str] | None = None) -> None:
    """Raise an error if `traffic` does not fit on the disk.

    Args:
        folder: The folder on the disk.
        traffic: The data on the disk.
        free_bytes: The free bytes there, including the bytes that `traffic` occupies already.
        ask: Returns the advice for a number of free bytes. If None, the message names a fraction of `traffic`.

    Raises:
        DiskError: The disk has too little free space. The message names the fraction that fits.
    """
    if traffic.room_bytes <= free_bytes:
        return
    fits = f"Offload {floored(free_bytes / traffic.room_bytes)} of it" if ask is None else ask(free_bytes)
    raise DiskError(
        f"{folder}: {traffic.room_bytes} bytes are needed there, but {free_bytes} are free. {fits}, free space, or "
        "choose a folder on a larger disk."
    )


def floored(fraction: float) -> str:
    """Format a fraction with two significant digits, rounded down."""
    if fraction <= 0:
        return "nothing"
    step = 10.0 ** (floor(log10(fraction)) - 1)
    return f"{floor(fraction / step) * step:.2g}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _tb(nbytes: float) -> str:
    terabytes = nbytes / 1e12
    return f"{terabytes:.0f} TB" if terabytes >= 100 else f"{terabytes:.3g} TB"
