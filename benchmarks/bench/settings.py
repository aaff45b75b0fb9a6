"""The settings of `make bench`, and the values that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from benchmarks.bench.model import SIZES, Shape
from benchmarks.bench.rounds import Plan
from benchmarks.bench.systems import ALL, SYSTEMS, chosen_systems
from benchmarks.bench.workload import DTYPES, OPTIMIZERS, Workload
from fullshard.amounts import in_bytes
from fullshard.command_line import MaybeInt, MaybePath, MaybeStr
from fullshard.device.host_memory import available_bytes
from fullshard.errors import ConfigError
from fullshard.train.ranks import cores_of_machine

__all__ = ["BenchSettings"]


_DEVICES = ("cpu", "cuda")
_RANKS_ON_CPU = 2
_BYTES_OF_A_PARAMETER = 16  # itself, its gradient and two moments, in float32


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model and its batch. A size sets all dimensions; explicitly given ones take precedence."""

    size: str = "34m"
    """One of the named sizes: tiny, 34m, wide86m, 124m."""
    vocab: MaybeInt = None
    """Vocabulary size."""
    width: MaybeInt = None
    """Size of the hidden state per token."""
    layers: MaybeInt = None
    """Transformer blocks. Each is one unit of sharding."""
    heads: MaybeInt = None
    """Attention heads in a block. They divide the width."""
    mlp_ratio: MaybeInt = None
    """Width of a block's MLP as a multiple of the width."""
    batch: MaybeInt = None
    """Sequences per rank and step."""
    seq: MaybeInt = None
    """Tokens in a sequence."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Precision, optimizer and seed, the same for every system."""

    dtype: str = "fp32"
    """Dtype of compute: fp32 or bf16. Stored parameters, gradient sums and the optimizer stay in float32."""
    optimizer: str = "adamw"
    """The optimizer of all systems: adamw (fused), adamw-default (not fused), sgd (with momentum)."""
    seed: int = 0
    """Seed of the initial weights and the data."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Systems, devices and rounds."""

    systems: str = ALL
    """Names of systems, separated by commas; all: all installed systems, without variants. An unknown name raises an
    error with the list of names."""
    ranks: MaybeInt = None
    """Processes of each system. All systems run at the same time. Default: one per GPU, or two without GPUs."""
    device: MaybeStr = None
    """cpu or cuda. Default: cuda if there is a GPU."""
    rounds: int = 10
    """Measured turns of each system."""
    steps: int = 1
    """Steps of each system in a turn."""
    warmup: int = 2
    """Warm-up turns of each system."""
    timeout: float = 600.0
    """Time limit in seconds for a turn, and for the start of a system."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Files to write."""

    json: MaybePath = None
    """A JSON file for all measurements."""
    picture: MaybePath = None
    """A file for bars of time and memory, with the floor as a line: .png, .svg or .pdf. Needs matplotlib."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """All settings of one benchmark."""

    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def plan(self) -> Plan:
        """Return the plan of the measurement.

        Raises:
            ConfigError: An option is invalid.
        """
        measure = self.measure
        for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0)):
            _check_least(name, getattr(measure, name), least)
        if measure.timeout <= 0:
            raise ConfigError(f"--timeout {measure.timeout:g}: must be a positive number of seconds.")
        workload = self.workload()
        systems = chosen_systems(measure.systems, workload.world)
        if workload.device_type == "cpu":
            _check_memory(workload, systems)
        return Plan(
            workload=workload,
            systems=systems,
            rounds=measure.rounds,
            steps=measure.steps,
            warmup=measure.warmup,
            timeout=measure.timeout,
        )

    def workload(self) -> Workload:
        """Return the training job.

        Raises:
            ConfigError: An option is invalid.
        """
        device_type = _device_type(self.measure.device)
        ranks = self.measure.ranks
        usual = torch.cuda.device_count() if device_type == "cuda" else _RANKS_ON_CPU
        world = usual if ranks is None else ranks
        _check_least("ranks", world, 1)
        if device_type == "cuda" and world > torch.cuda.device_count():
            raise ConfigError(
                f"--ranks {world}: there are {torch.cuda.device_count()} GPUs, and each rank needs one of its own. "
                "Take as many ranks, or --device cpu."
            )
        return Workload(
            shape=self.shape(),
            dtype=_one_of("dtype", self.training.dtype, DTYPES),
            optimizer=_one_of("optimizer", self.training.optimizer, OPTIMIZERS),
            world=world,
            threads=max(1, cores_of_machine() // world),
            device_type=device_type,
            seed=self.training.seed,
        )

    def shape(self) -> Shape:
        """Return the named size, with explicitly given dimensions in place of its own.

        Raises:
            ConfigError: The size is unknown, or the dimensions are inconsistent.
        """
        given = {dim.name: getattr(self.model, dim.name) for dim in fields(Shape)}
        for name, value in given.items():
            if value is not None:
                _check_least(name, value, 1)
        size = SIZES[_one_of("size", self.model.size, SIZES)]
        shape = replace(size, **{name: value for name, value in given.items() if value is not None})
        if shape.width % shape.heads:
            raise ConfigError(
                f"--width {shape.width}: {shape.heads} heads cannot share it in even parts. "
                f"Take --width {shape.heads * -(-shape.width // shape.heads)}, or another --heads."
            )
        return shape


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}.")


def _one_of(option: str, name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise ConfigError(f"--{option} {name}: unknown. Choose one of {', '.join(known)}.")
    return name


def _device_type(named: str | None) -> str:
    if named is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if _one_of("device", named, _DEVICES) == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here. Take --device cpu.")
    return named


def _check_memory(workload: Workload, systems: Sequence[str]) -> None:
    """Raise an error for a workload that cannot fit, since the kernel would kill an arbitrary process."""
    available = available_bytes()
    whole = workload.parameter_count() * _BYTES_OF_A_PARAMETER
    needed = sum(whole * (workload.world if SYSTEMS[name].replicates else 1) for name in systems)
    if available is not None and needed > available:
        raise ConfigError(
            f"--systems: {len(systems)} systems on {workload.world} ranks keep at least {in_bytes(needed)} together, "
            f"and {in_bytes(available)} are free. Name fewer systems, or a smaller model."
        )
