"""What offloading to a disk will cost: seconds of every step, terabytes written, and the life of the disk.

With AdamW in fp32 two numbers of four bytes each are kept for a parameter, and every step reads and writes all of them:

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

__all__ = ["TB_WRITTEN_PER_TB", "Foresight", "Traffic", "check_room", "floored", "foresee"]

TB_WRITTEN_PER_TB = 600
"""What makers of consumer SSDs warrant: terabytes written in the disk's life for each terabyte that it holds. Those for
data centres have 1800 (one whole write a day for five years) and more, large cheap ones 200."""

DAY_S = 86_400
ADAMW_BYTES = 8  # of a parameter: two moments in fp32


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What all ranks of a host have on one disk, and move in a step."""

    room_bytes: int  # at rest
    read_bytes: int  # in a step
    written_bytes: int  # in a step

    @classmethod
    def of_optimizer(cls, parameters: float, *, bytes_each: float = ADAMW_BYTES, fraction: float = 1.0) -> Traffic:
        """That of an optimizer's state: all of it is read and written in every step.

        Args:
            parameters: how many the ranks of this host step.
            bytes_each: of state for each of them.
            fraction: of the state that rests on the disk.
        """
        nbytes = round(parameters * bytes_each * fraction)
        return cls(room_bytes=nbytes, read_bytes=nbytes, written_bytes=nbytes)

    @classmethod
    def of_parameters(cls, nbytes: int, *, gathers: int = 2, reductions: int = 1, clips: bool = False) -> Traffic:
        """That of shards and their gradients, beside the optimizer's state.

        Shards are read for each gather. Gradients are written as they are reduced; further reductions read them first.
        The optimizer reads both, and writes shards.

        Args:
            nbytes: of the shards of the ranks of this host.
            gathers: of each unit in a step: 2 in a microbatch under zero3, 1 under zero2.
            reductions: in a step: those of the microbatches whose gradients are synced.
            clips: whether gradients are clipped, which reads them twice and writes them once.
        """
        return cls.of_shards(nbytes, gathers=gathers) + cls.of_gradients(nbytes, reductions=reductions, clips=clips)

    @classmethod
    def of_shards(cls, nbytes: int, *, gathers: int = 2, is_stepped: bool = True) -> Traffic:
        """That of shards alone: the first half of `of_parameters`. Those that are not stepped are not written."""
        return cls(room_bytes=nbytes, read_bytes=nbytes * (gathers + is_stepped), written_bytes=nbytes * is_stepped)

    @classmethod
    def of_gradients(cls, nbytes: int, *, reductions: int = 1, clips: bool = False) -> Traffic:
        """That of their gradients alone: the second half."""
        return cls(
            room_bytes=nbytes,
            read_bytes=nbytes * (reductions + 2 * clips),
            written_bytes=nbytes * (reductions + clips),
        )

    @classmethod
    def of_activations(cls, nbytes: int, *, microbatches: int = 1) -> Traffic:
        """That of kept activations, `nbytes` in a microbatch: written in forward, read in backward."""
        moved = nbytes * microbatches
        return cls(room_bytes=nbytes, read_bytes=moved, written_bytes=moved)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            room_bytes=self.room_bytes + other.room_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """What a run will ask of a disk."""

    speed: DiskSpeed
    traffic: Traffic
    step_s: float  # without the disk
    endurance_bytes: float  # written in the disk's life
    is_endurance_known: bool = False  # from its data sheet

    @property
    def disk_s(self) -> float:
        """Seconds that the disk needs in a step. Beside computation they cost less than that."""
        return self.speed.seconds(self.traffic.read_bytes, self.traffic.written_bytes)

    @property
    def most_step_s(self) -> float:
        """Seconds of a step, if nothing of the disk's time is hidden."""
        return self.step_s + self.disk_s

    @property
    def least_step_s(self) -> float:
        """Seconds of a step, if all of the shorter one is hidden behind the longer one."""
        return max(self.step_s, self.disk_s)

    @property
    def written_a_day(self) -> float:
        """Bytes, if all is hidden that can be."""
        return self.traffic.written_bytes * DAY_S / self.least_step_s if self.least_step_s else 0.0

    def written_in(self, steps: int) -> int:
        """Bytes that so many steps write."""
        return self.traffic.written_bytes * steps

    @property
    def steps_of_life(self) -> float:
        """How many steps write what the disk is likely to bear."""
        return self.endurance_bytes / self.traffic.written_bytes if self.traffic.written_bytes else float("inf")

    def lines(self, steps: int) -> list[str]:
        """What is to be known before the first of so many steps; of seconds and days where the step's are known."""
        speed, traffic = self.speed, self.traffic
        step = f", for a step of {self.least_step_s:.3g} to {self.most_step_s:.3g} s" if self.step_s else ""
        a_day = f"{_tb(self.written_a_day)} a day, " if self.step_s else ""
        return [
            f"{speed.folder} ({speed.file_system or 'unknown file system'}, "
            f"{'direct' if speed.is_direct else 'through the cache'}): reads {_gb(speed.read_bytes_per_s)}/s, writes "
            f"{_gb(speed.write_bytes_per_s)}/s, both at once {_gb(speed.both_bytes_per_s)}/s in all, by "
            f"{speed.depth} requests of {speed.request_bytes >> 10} KiB",
            f"takes {_gb(traffic.room_bytes)} of {_gb(speed.free_bytes)} that are free",
            f"a step reads {_gb(traffic.read_bytes)} and writes {_gb(traffic.written_bytes)}: {self.disk_s:.3g} s of "
            f"the disk{step}",
            f"writes {a_day}{_tb(self.written_in(steps))} in {steps} steps{self._life(steps)}",
        ]

    def _life(self, steps: int) -> str:
        """How much of the disk's life so many steps take; nothing of memory, which does not wear."""
        if self.speed.file_system in IN_MEMORY:
            return ""
        disk = f"a disk of {_tb(self.speed.disk_bytes)} is likely to bear"
        bears = "its data sheet warrants" if self.is_endurance_known else disk
        life = self.written_in(steps) / self.endurance_bytes
        return f": {life:.1%} of the {_tb(self.endurance_bytes)} that {bears}"


def foresee(
    speed: DiskSpeed,
    traffic: Traffic,
    *,
    step_s: float = 0.0,
    endurance_bytes: float | None = None,
    ask: Callable[[int], str] | None = None,
) -> Foresight:
    """What `traffic` will cost on a disk of `speed`.

    Args:
        speed: of the disk, as measured.
        traffic: what is to be on it.
        step_s: seconds of a step without it; 0 if that is not known.
        endurance_bytes: what may be written to the disk in its life, from its data sheet. If None, TB_WRITTEN_PER_TB
            for what the file system holds.
        ask: see `check_room`.

    Raises:
        ConfigError: a number is negative.
        DiskError: there is no room for it. The fraction for which there is room is named.
    """
    endurance = speed.disk_bytes * TB_WRITTEN_PER_TB if endurance_bytes is None else endurance_bytes
    if step_s < 0 or endurance <= 0 or min(traffic.room_bytes, traffic.read_bytes, traffic.written_bytes) < 0:
        raise ConfigError(
            f"{traffic}, a step of {step_s:g} s, {endurance:g} bytes of endurance: none of them may be negative, and "
            "a disk bears some writing. Leave out what is not known."
        )
    check_room(speed.folder, traffic, speed.free_bytes, ask=ask)
    return Foresight(
        speed=speed,
        traffic=traffic,
        step_s=step_s,
        endurance_bytes=endurance,
        is_endurance_known=endurance_bytes is not None,
    )


def check_room(folder: Path, traffic: Traffic, free_bytes: int, *, ask: Callable[[int], str] | None = None) -> None:
    """Refuse `traffic` that has not so much room.

    Args:
        folder: where.
        traffic: what is to be there.
        free_bytes: there, what of `traffic` is there already included.
        ask: says what to ask for that fits into so many bytes; of `traffic`, a part, if None.

    Raises:
        DiskError: there is no room for it. The fraction for which there is room is named.
    """
    if traffic.room_bytes <= free_bytes:
        return
    fits = f"Offload {floored(free_bytes / traffic.room_bytes)} of it" if ask is None else ask(free_bytes)
    raise DiskError(
        f"{folder}: {traffic.room_bytes} bytes are to rest there, and {free_bytes} are free. {fits}, make room, or "
        "name a folder on a larger disk."
    )


def floored(fraction: float) -> str:
    """A fraction in words, no larger than it is: two digits that count."""
    if fraction <= 0:
        return "nothing"
    step = 10.0 ** (floor(log10(fraction)) - 1)
    return f"{floor(fraction / step) * step:.2g}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _tb(nbytes: float) -> str:
    terabytes = nbytes / 1e12
    return f"{terabytes:.0f} TB" if terabytes >= 100 else f"{terabytes:.3g} TB"
