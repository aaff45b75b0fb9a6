"""Resuming a run with any number of ranks and unchanged results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from fullshard.checkpoint.loading import latest
from fullshard.errors import ConfigError
from fullshard.train.parallelism import adapt_batch, adapt_to_ranks, sequences_of
from fullshard.train.run_folder import CHECKPOINTS, METRICS, lines_of
from fullshard.train.schedule import peak_lr
from fullshard.train.settings import OptimizationSettings, TrainSettings

AUTO = "auto"
# Settings that determine the results of a run, in addition to the sequences per step.
_FIXED = (
    *("text", "seq", "size", "layers", "heads", "width", "mlp-ratio"),
    *("steps", "lr", "min-lr", "warmup", "weight-decay", "clip", "seed"),
    *("dtype", "reduce-dtype", "gather-wire", "reduce-wire"),
)


def resumed_settings(settings: TrainSettings, world: int) -> TrainSettings:
    """Return the settings of a run with --resume auto, adapted to `world` ranks. Return others unchanged.

    If the run in --out exists, a step has the same sequences as before. Otherwise the batch is adapted to any number of
    ranks, since fewer ranks than intended may be available.

    Raises:
        ConfigError: --out is missing, or the existing run has other settings.
    """
    if settings.checkpoints.resume != AUTO:
        return settings
    out = settings.run.out
    if out is None:
        raise ConfigError("--resume auto needs --out, the folder of the run to resume or start.")
    header = next(lines_of(out), None)
    if header is None:
        return replace(settings, optimization=adapt_batch(settings.optimization, world))
    old: Any = header.get("settings")
    before, names = header.get("world"), ("batch", "accumulate", "sequences")
    has_settings = isinstance(old, dict) and "dtype" in old and all(_is_count(old.get(name, 1)) for name in names)
    if not has_settings or not _is_count(before):
        raise ConfigError(
            f"--resume auto: line 1 of {out / METRICS} has no valid settings and number of ranks. Choose another --out."
        )
    new = {**settings.as_options(), "lr": peak_lr(settings)}
    new.setdefault("dtype", old["dtype"])
    for name in _FIXED:
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"--resume auto: the run in {out} had --{name} {old.get(name, '(left out)')}, and now it is "
                f"{new.get(name, '(left out)')}. Start with the same options, or start a separate run with --resume "
                f"{out}/checkpoints and another --out."
            )
    previous = OptimizationSettings(**{name: old[name] for name in names if name in old})
    current = settings.optimization
    sequences = current.sequences or (current.batch and current.batch * current.accumulate)
    if sequences not in (None, sequences_of(previous, before)):
        raise ConfigError(
            f"--resume auto: a step of the run in {out} has {sequences_of(previous, before)} sequences, not "
            f"{sequences}. Leave --batch, --accumulate and --sequences as they were."
        )
    adapted = adapt_to_ranks(previous, before=before, world=world)
    optimization = replace(current, **{name: getattr(adapted, name) for name in names})
    return replace(settings, optimization=optimization)


def options_after_restart(argv: Sequence[str], out: Path) -> list[str]:
    """Return `argv`, with `--resume auto` if the run in `out` has a checkpoint: a restarted rank continues from it.

    Without a checkpoint, a run that began with `--resume PATH` cannot be continued, and `argv` leads to an error.
    """
    return [*argv, "--resume", AUTO] if latest(out / CHECKPOINTS) is not None else list(argv)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1
