"""Checks of a run before any process group starts.

Each check raises `ConfigError` with one line: the option, the cause and the remedy. All ranks get the same result,
because they check the same settings and files.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from fullshard.command_line import check_path
from fullshard.errors import ConfigError, near_matches
from fullshard.policy.arguments import parse_size
from fullshard.policy.precision import GATHER_ENCODINGS, REDUCE_ENCODINGS
from fullshard.policy.strategy import ShardingStrategy
from fullshard.report.destinations import check_destination
from fullshard.train.model import shape_of
from fullshard.train.parallelism import replicas_of, sequences_of
from fullshard.train.resuming import AUTO
from fullshard.train.run_folder import check_out
from fullshard.train.settings import (
    CheckpointSettings,
    MemorySettings,
    OptimizationSettings,
    ParallelSettings,
    RunSettings,
    TextSettings,
    TrainSettings,
)
from fullshard.train.text import TextSource, find_text

DTYPES = ("float32", "bfloat16")
STRATEGIES = tuple(strategy.value for strategy in ShardingStrategy)


def check(settings: TrainSettings, world: int, machines: int = 1) -> TextSource:
    """Check all settings for `world` ranks on `machines` machines, and return the text for training."""
    _check_parallelism(settings.parallelism, world, machines)
    _check_optimization(settings.optimization, world)
    _check_memory(settings.memory, settings.parallelism)
    if settings.optimization.capture:
        _check_capture(settings.memory)
        if settings.run.log_to is not None:
            raise ConfigError("--log-to with --capture: a captured run has no report. Leave one of them out.")
    _check_run(settings.run)
    shape_of(settings.model)
    source = find_text(settings.text.text)
    _check_text(settings.text, source)
    _check_checkpoints(settings.checkpoints)
    if settings.run.out is not None:
        check_out(settings.run.out, resumes=settings.checkpoints.resume == AUTO)
    return source


def check_ranks(requested: int | None, world: int) -> None:
    """Raise an error if `--ranks` differs from the number of ranks started by torchrun."""
    if requested is not None and requested != world:
        raise ConfigError(f"--ranks {requested}: torchrun started {world} ranks. Leave --ranks out under torchrun.")


def _check_parallelism(settings: ParallelSettings, world: int, machines: int) -> None:
    _check_choice("strategy", settings.strategy, STRATEGIES)
    if settings.on is not None:
        _check_choice("on", settings.on, ("ray",))
    elif settings.ray_address is not None:
        raise ConfigError(
            f"--ray-address {settings.ray_address}: only used with --on ray. Add --on ray, or leave it out."
        )
    if world < 1:
        raise ConfigError(f"--ranks {world}: a run needs at least 1 rank.")
    replicas_of(settings, world, machines)


def _check_optimization(settings: OptimizationSettings, world: int) -> None:
    for name in ("accumulate", "steps"):
        _check_at_least(name, getattr(settings, name), 1)
    for name in ("warmup", "weight_decay", "clip", "min_lr"):
        _check_at_least(name, getattr(settings, name), 0)
    if settings.lr is not None and settings.lr <= 0:
        raise ConfigError(f"--lr {settings.lr}: must be greater than 0.")
    if settings.min_lr > 1:
        raise ConfigError(f"--min-lr {settings.min_lr}: must be a fraction of the peak learning rate, at most 1.")
    sequences_of(settings, world)


def _check_memory(settings: MemorySettings, parallelism: ParallelSettings) -> None:
    if settings.dtype is not None:
        _check_choice("dtype", settings.dtype, DTYPES)
    _check_choice("reduce-dtype", settings.reduce_dtype, DTYPES)
    if settings.gather_wire is not None:
        _check_choice("gather-wire", settings.gather_wire, GATHER_ENCODINGS)
        if parallelism.strategy == "ddp":
            raise ConfigError(
                f"--gather-wire {settings.gather_wire}: --strategy ddp does not gather parameters. Leave it out, or "
                "choose a different strategy."
            )
    if settings.reduce_wire is not None:
        _check_choice("reduce-wire", settings.reduce_wire, REDUCE_ENCODINGS)
        if settings.reduce_dtype != "float32":
            raise ConfigError(
                f"--reduce-wire {settings.reduce_wire}: encoded gradients are summed in float32, but --reduce-dtype "
                f"is {settings.reduce_dtype}. Leave one of them out."
            )
    _check_offload(settings)


def _check_capture(settings: MemorySettings) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("--capture: CUDA graphs need a GPU, but torch does not find one. Leave it out.")
    names = [item.name for item in fields(MemorySettings) if item.name.startswith("offload_")]
    used = [name.replace("_", "-") for name in names if getattr(settings, name)]
    if used:
        raise ConfigError(f"--capture: a CUDA graph cannot offload. Leave out --capture or --{used[0]}.")


def _check_offload(settings: MemorySettings) -> None:
    states = ("optimizer", "parameters", "activations")
    on_disk = {f"offload-{state}": float(getattr(settings, f"offload_{state}")) for state in states}
    on_cpu = {f"offload-{state}-cpu": float(getattr(settings, f"offload_{state}_cpu")) for state in states}
    every = on_disk | on_cpu
    for name, fraction in every.items():
        if not 0 <= fraction <= 1:
            raise ConfigError(f"--{name} {fraction:g}: must be a fraction from 0 to 1.")
        if name in on_disk and fraction and settings.offload_folder is None:
            raise ConfigError(f"--{name} {fraction:g} needs --offload-folder, a folder on a local disk.")
    most = max(settings.offload_optimizer_cpu, settings.offload_parameters_cpu)
    name = max(("offload-optimizer", "offload-parameters"), key=lambda item: on_disk[item])
    if most + on_disk[name] > 1:
        raise ConfigError(
            f"--{name} {on_disk[name]:g} and --offload-optimizer-cpu or --offload-parameters-cpu, which put {most:g} "
            "of the optimizer state on the CPU, exceed 1 together."
        )
    if settings.offload_activations + settings.offload_activations_cpu > 1:
        raise ConfigError(
            f"--offload-activations {settings.offload_activations:g} and --offload-activations-cpu "
            f"{settings.offload_activations_cpu:g}: their sum must be at most 1."
        )
    if settings.offload_folder is not None and settings.offload_budget is None and not any(on_disk.values()):
        options = ", ".join(f"--{name}" for name in on_disk)
        raise ConfigError(
            f"--offload-folder {settings.offload_folder}: not used. Set {options} or --offload-budget, or leave it out."
        )
    if settings.offload_budget is not None:
        parse_size(settings.offload_budget, "--offload-budget", "memory")
        if any(every.values()):
            given = " ".join(f"--{name} {fraction:g}" for name, fraction in every.items() if fraction)
            raise ConfigError(
                f"--offload-budget {settings.offload_budget} with {given}: a budget chooses the fractions. Leave one "
                "of them out."
            )


def _check_checkpoints(settings: CheckpointSettings) -> None:
    _check_at_least("checkpoint_every", settings.checkpoint_every, 0)
    _check_at_least("keep", settings.keep, 1)
    _check_at_least("safety_copy_every", settings.safety_copy_every, 0)
    if settings.safety_copy_every and settings.resume != AUTO:
        raise ConfigError(
            f"--safety-copy-every {settings.safety_copy_every}: a restarted run only reads its safety copy with "
            "--resume auto. Add that, or leave --safety-copy-every out."
        )
    if settings.resume is None or settings.resume == AUTO:
        return
    check_path(settings.resume, "--resume")
    if not Path(settings.resume).is_dir():
        raise ConfigError(
            f"--resume {settings.resume}: the folder does not exist. Pass a checkpoint, a folder of checkpoints, or "
            "auto."
        )


def _check_run(settings: RunSettings) -> None:
    if settings.log_to is not None:
        if not settings.report:
            raise ConfigError("--log-to with --no-report: it logs the values of the report. Leave one of them out.")
        check_destination(settings.log_to)
    for name in ("log_every", "validate_every", "sample_every", "sample_bytes", "seed"):
        _check_at_least(name, getattr(settings, name), 0)
    _check_at_least("validate_bytes", settings.validate_bytes, 1)
    if settings.temperature <= 0:
        raise ConfigError(
            f"--temperature {settings.temperature}: must be greater than 0; 0.01 chooses the most likely byte."
        )
    if settings.prompt == "":
        raise ConfigError(
            "--prompt is empty: a sample needs at least one byte to continue. Leave --prompt out for a line break."
        )


def _check_text(settings: TextSettings, source: TextSource) -> None:
    _check_at_least("seq", settings.seq, 1)
    needed = settings.seq + 2
    for part, size in (("training", source.training_bytes), ("validation", source.validation_bytes)):
        if size < needed:
            raise ConfigError(
                f"--text {source.root}: too short. Its {part} part has {size} bytes, and sequences of {settings.seq} "
                f"need at least {needed}. Use a longer text, or a smaller --seq."
            )


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        listed = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
        raise ConfigError(f"--{name} {value}: unknown.{near_matches(value, known)} Choose one of {listed}.")


def _check_at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {least}.")
