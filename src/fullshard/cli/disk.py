"""The `fullshard disk` command: the predicted cost of offloading to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fullshard.command_line import Command, MaybeFloat
from fullshard.disk.folder import creating, free_bytes
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
    """Parameters that the ranks of this host update."""
    bytes_each: float = ADAMW_BYTES
    """Bytes of optimizer state per parameter: 8 for AdamW in fp32."""
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
    settings = COMMAND.parse(remaining).disk
    _check(settings)
    folder = Path(words[0]).expanduser()
    others = Traffic.of_activations(round(settings.activations), microbatches=settings.microbatches)
    if settings.shards:
        nbytes, microbatches = round(settings.parameters * _FP32_BYTES * settings.shards), settings.microbatches
        others += Traffic.of_parameters(nbytes, gathers=2 * microbatches, reductions=microbatches)
    states = Traffic.of_optimizer(settings.parameters, bytes_each=settings.bytes_each, fraction=settings.fraction)
    traffic = others + states

    def ask(room: int) -> str:
        fits = (room - others.room_bytes) / (settings.parameters * settings.bytes_each or 1)
        less = "smaller --shards" if settings.shards else "fewer --activations"
        return f"Ask for --fraction {floored(fits)}" if fits > 0 else f"Ask for {less}"

    if not folder.exists():
        raise ConfigError(f"{folder}: the folder does not exist. Create it first, or choose another folder.")
    with creating(folder):
        check_room(folder, traffic, free_bytes(folder), ask=ask)
    load = predict_load(
        measure(folder, seconds=settings.seconds),  # warns about unsuitable folders
        traffic,
        step_s=settings.step_seconds,
        endurance_bytes=None if settings.endurance is None else settings.endurance * 1e12,
        ask=ask,
    )
    console = Console(emoji=False)
    for line in load.lines(settings.steps):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return MEASURED


def _check(settings: DiskSettings) -> None:
    for name in ("fraction", "shards"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ConfigError(f"--{name} {getattr(settings, name):g}: must be from 0 to 1.")
    for name in ("parameters", "bytes_each", "activations", "step_seconds"):
        if not 0 <= getattr(settings, name) <= 1e18:  # products of larger numbers may not be finite
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(settings, name):g}: must be from 0 to 1e18.")
    if min(settings.steps, settings.microbatches) < 1:
        raise ConfigError(f"--steps {settings.steps}, --microbatches {settings.microbatches}: must be 1 or more.")
    if settings.endurance is not None and settings.endurance <= 0:
        raise ConfigError(f"--endurance {settings.endurance:g}: must be greater than 0. Leave it out if it is unknown.")
