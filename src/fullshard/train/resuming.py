"""Resuming a run with any number of ranks and unchanged numbers."""

from __future__ import annotations

from dataclasses import replace

from fullshard.errors import ConfigError
from fullshard.train.parallelism import sequences_of, shared_again, shared_by_any
from fullshard.train.run_folder import lines_of
from fullshard.train.schedule import peak_lr
from fullshard.train.settings import OptimizationSettings, TrainSettings

AUTO = "auto"
# Settings that determine a run's numbers, in addition to those of the step size.
_FIXED = (
    *("text", "seq", "size", "layers", "heads", "width", "mlp-ratio"),
    *("steps", "lr", "min-lr", "warmup", "weight-decay", "clip", "seed"),
    *("dtype", "reduce-dtype", "gather-wire", "reduce-wire"),
)


def going_on(settings: TrainSettings, world: int) -> TrainSettings:
    """Return the settings for `world` ranks.

    If the run in --out resumes, a step has the same sequences as before. If it starts, any number of ranks can share a
    step, since fewer ranks than intended may be available.

    Raises:
        ConfigError: --resume auto without --out, or the existing run has different numbers.
    """
    if settings.checkpoints.resume != AUTO:
        return settings
    out = settings.run.out
    if out is None:
        raise ConfigError("--resume auto needs --out, the folder of the run to resume or start.")
    header = next(lines_of(out), None)
    if header is None:
        return replace(settings, optimization=shared_by_any(settings.optimization, world))
    was, now = header["settings"], {**settings.as_options(), "lr": peak_lr(settings)}
    now.setdefault("dtype", was["dtype"])
    changed = [name for name in _FIXED if was.get(name) != now.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"--resume auto: the run in {out} had --{name} {was.get(name, '(left out)')}, and now it is "
            f"{now.get(name, '(left out)')}. Start with the same options, or start a separate run with --resume "
            f"{out}/checkpoints and another --out."
        )
    before = header["world"]
    taken = OptimizationSettings(**{name: was[name] for name in ("batch", "accumulate", "sequences") if name in was})
    requested = settings.optimization
    wanted = requested.sequences or (requested.batch and requested.batch * requested.accumulate)
    if wanted not in (None, sequences_of(taken, before)):
        raise ConfigError(
            f"--resume auto: a step of the run in {out} learns from {sequences_of(taken, before)} sequences, not from "
            f"{wanted}. Leave --batch, --accumulate and --sequences as they were."
        )
    shared = shared_again(taken, before=before, world=world)
    return replace(
        settings,
        optimization=replace(requested, batch=shared.batch, accumulate=shared.accumulate, sequences=shared.sequences),
    )
