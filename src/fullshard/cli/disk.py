"""`fullshard disk`: the predicted cost of offload to a folder, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fullshard.command_line import Command, MaybeFloat
from fullshard.disk.folder import free_bytes, made
from fullshard.disk.prediction import ADAMW_BYTES, Traffic, check_room, floored, predict_load
from fullshard.disk.speed import measure
from fullshard.errors import ConfigError

MEASURED = 0
_FP32_BYTES = 4

_DESCRIPTION = (
    "Measure the disk of FOLDER in under ten seconds and predict the cost of offloading to it: seconds per step, "
    "terabytes written per day, and the share of the disk's endurance."
)


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """The data to offload."""

    parameters: float = 7e9
    """Parameters that the ranks of this host step."""
    bytes_each: float = ADAMW_BYTES
    """Bytes of optimizer state for each of them: 8 for AdamW in fp32."""
    fraction: float = 1.0
    """Fraction of the optimizer's state on the disk."""
    shards: float = 0.0
    """Fraction of the parameters, in fp32, on the disk with their gradients; their optimizer state is in --fraction."""
    activations: float = 0.0
    """Bytes of activations per microbatch, of all ranks of this host."""
    microbatches: int = 1
    """Microbatches per step. Each reads shards twice, as under zero3, and writes gradients."""
    step_seconds: float = 0.0
    """Seconds per step without offload, if known."""
    steps: int = 10_000
    """Steps of the run."""
    endurance: MaybeFloat = None
    """Endurance of the disk by its data sheet, in terabytes written. Default: 600 for each terabyte of the file
    system."""
    seconds: float = 8.0
    """Approximate duration of the measurement."""


@dataclass(frozen=True, kw_only=True)
class DiskCommandSettings:
    """All options."""

    disk: DiskSettings = field(default_factory=DiskSettings)


COMMAND = Command(DiskCommandSettings, "fullshard disk", _DESCRIPTION, ("FOLDER",))


def run(argv: Sequence[str]) -> int:
    """Measure the disk, print the cost of the options `argv`, and return the exit code."""
    words, remaining = COMMAND.take_words(argv)
    stated = COMMAND.parse(remaining).disk
    _check(stated)
    folder = Path(words[0]).expanduser()
    besides = Traffic.of_activations(round(stated.activations), microbatches=stated.microbatches)
    if stated.shards:
        besides += Traffic.of_parameters(
            round(stated.parameters * _FP32_BYTES * stated.shards),
            gathers=2 * stated.microbatches,
            reductions=stated.microbatches,
        )
    traffic = besides + Traffic.of_optimizer(stated.parameters, bytes_each=stated.bytes_each, fraction=stated.fraction)

    def ask(room: int) -> str:
        fits = (room - besides.room_bytes) / (stated.parameters * stated.bytes_each or 1)
        less = "smaller --shards" if stated.shards else "fewer --activations"
        return f"Ask for --fraction {floored(fits)}" if fits > 0 else f"Ask for {less}"

    if not folder.exists():
        raise ConfigError(f"{folder}: the folder does not exist. Create it first, or choose another folder.")
    with made(folder):
        check_room(folder, traffic, free_bytes(folder), ask=ask)
    found = predict_load(
        measure(folder, seconds=stated.seconds),  # which warns about unsuitable folders
        traffic,
        step_s=stated.step_seconds,
        endurance_bytes=None if stated.endurance is None else stated.endurance * 1e12,
        ask=ask,
    )
    console = Console(emoji=False)
    for line in found.lines(stated.steps):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return MEASURED


def _check(stated: DiskSettings) -> None:
    for name in ("fraction", "shards"):
        if not 0 <= getattr(stated, name) <= 1:
            raise ConfigError(f"--{name} {getattr(stated, name):g}: must be from 0 to 1.")
    for name in ("parameters", "bytes_each", "activations", "step_seconds"):
        if getattr(stated, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(stated, name):g}: must be 0 or more.")
    if min(stated.steps, stated.microbatches) < 1:
        raise ConfigError(f"--steps {stated.steps}, --microbatches {stated.microbatches}: must be 1 or more.")
    if stated.endurance is not None and stated.endurance <= 0:
        raise ConfigError(f"--endurance {stated.endurance:g}: must be greater than 0. Leave it out if it is unknown.")
