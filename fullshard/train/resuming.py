"""A run that goes on: on as many ranks as there are now, with the numbers that it would have had."""

from __future__ import annotations

from dataclasses import replace

from fullshard.errors import ConfigError
from fullshard.train.run_folder import lines_of
from fullshard.train.schedule import peak_lr
from fullshard.train.settings import OptimizationSettings, TrainSettings

__all__ = ["AUTO", "going_on", "shared_anew"]

AUTO = "auto"
# What decides the numbers of a run, beside what a step is made of.
_FIXED = (
    *("text", "seq", "size", "layers", "heads", "width", "mlp-ratio"),
    *("steps", "lr", "min-lr", "warmup", "weight-decay", "clip", "dtype", "reduce-dtype", "seed"),
)


def going_on(settings: TrainSettings, world: int) -> TrainSettings:
    """The settings for `world` ranks; if the run in --out goes on, a step learns from as many sequences as before.

    Raises:
        ConfigError: --resume auto without --out, or the run that is there had other numbers, or its steps cannot be
            shared by the ranks.
    """
    if settings.checkpoints.resume != AUTO:
        return settings
    out = settings.run.out
    if out is None:
        raise ConfigError("--resume auto needs --out: the folder of the run that is to go on, or to start.")
    header = next(lines_of(out), None)
    if header is None:
        return settings
    was, now = header["settings"], {**settings.as_options(), "lr": peak_lr(settings)}
    now.setdefault("dtype", was["dtype"])
    changed = [name for name in _FIXED if was.get(name) != now.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"--resume auto: the run in {out} had --{name} {was.get(name, '(left out)')}, and now it is "
            f"{now.get(name, '(left out)')}. Start with the options that it had; or begin a run of its own by --resume "
            f"{out}/checkpoints and another --out."
        )
    sequences = was["batch"] * was["accumulate"]
    asked = settings.optimization
    if asked.batch is not None and asked.batch * asked.accumulate != sequences:
        raise ConfigError(
            f"--resume auto: a step of the run in {out} learns from {sequences} sequences, not from "
            f"{asked.batch * asked.accumulate}. Leave --batch and --accumulate as they were."
        )
    shared = shared_anew(was["batch"], was["accumulate"], before=header["world"], world=world)
    return replace(settings, optimization=replace(asked, batch=shared.batch, accumulate=shared.accumulate))


def shared_anew(batch: int, accumulate: int, *, before: int, world: int) -> OptimizationSettings:
    """The batch and the microbatches by which `world` ranks take a step as `before` ranks did.

    From as many sequences, with no more in one microbatch of a rank, in as few microbatches as that allows.

    Raises:
        ConfigError: the ranks cannot share the sequences of a step evenly.
    """
    if world == before:
        return OptimizationSettings(batch=batch, accumulate=accumulate)
    sequences, most = batch * accumulate, batch // before
    if sequences % world:
        fitting = [str(n) for n in range(1, sequences + 1) if sequences % n == 0]
        raise ConfigError(
            f"--resume auto: {world} ranks cannot share the {sequences} sequences of a step evenly. Start "
            f"{', '.join(fitting)} ranks."
        )
    of_rank = sequences // world
    rows = max(rows for rows in range(1, most + 1) if of_rank % rows == 0)
    return OptimizationSettings(batch=rows * world, accumulate=of_rank // rows)
