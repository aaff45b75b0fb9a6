"""Division of the sequences of a microbatch over the ranks, and of the ranks into replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.errors import ConfigError
from fullshard.policy.strategy import resolve_placements
from fullshard.train.settings import OptimizationSettings, ParallelSettings

DEFAULT_ROWS = 16


def replicas_of(settings: ParallelSettings, world: int, machines: int = 1) -> int | None:
    """Return the number of replicas of the sharded model; None for a strategy without a replicate axis.

    By default a hybrid strategy has one replica per machine, so that a run can continue with the remaining machines. On
    a single machine it has two, or one if the number of ranks is odd.

    Raises:
        ConfigError: The strategy has no replicas, or their number does not divide the ranks.
    """
    if not resolve_placements(settings.strategy).replicated:
        if settings.replicas is not None:
            raise ConfigError(
                f"--replicas {settings.replicas}: strategy {settings.strategy} does not use replicas. Use --strategy "
                "hsdp, or leave --replicas out."
            )
        return None
    replicas = settings.replicas
    if replicas is None:
        replicas = machines if machines > 1 else 2 - world % 2
    if replicas < 1 or world % replicas:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"--replicas {replicas}: {world} ranks cannot form {replicas} equal replicas. Choose one of "
            f"{', '.join(map(str, fitting))}."
        )
    return replicas


def rows_of(settings: OptimizationSettings, world: int) -> int:
    """Return the sequences of one microbatch over all ranks. The default is the first multiple of `world` >= 16."""
    if settings.batch is None:
        return -(-DEFAULT_ROWS // world) * world
    if settings.batch < 1 or settings.batch % world:
        below, above = settings.batch // world * world, max(1, -(-settings.batch // world)) * world
        near = f"{below} or {above}" if below > 0 and below != above else f"{above}"
        raise ConfigError(
            f"--batch {settings.batch}: {world} ranks cannot share {settings.batch} sequences evenly. Use {near}."
        )
    return settings.batch


def sequences_of(settings: OptimizationSettings, world: int) -> int:
    """Return the training sequences per step, over all ranks and microbatches."""
    return _sequences_in(settings, rows_of(settings, world))


def _sequences_in(settings: OptimizationSettings, batch: int) -> int:
    most = batch * settings.accumulate
    if settings.sequences is None:
        return most
    if not most - batch < settings.sequences <= most:
        advice = f"Take --accumulate {-(-settings.sequences // batch)}" if settings.sequences > 0 else "Take more"
        raise ConfigError(
            f"--sequences {settings.sequences}: {settings.accumulate} microbatches of {batch} are for "
            f"{most - batch + 1} to {most} sequences. {advice}, or leave --sequences out."
        )
    return settings.sequences


@dataclass(frozen=True)
class BatchPart:
    """The sequences of one rank in one microbatch of a step."""

    first: int  # the index of the first sequence within the step
    rows: int  # their number, equal on every rank, because collectives require it
    counted: int  # the number without padding, which comes last


def part_of(settings: OptimizationSettings, *, microbatch: int, rank: int, world: int) -> BatchPart:
    """Return the sequences of rank `rank` in microbatch `microbatch`, counted from 0."""
    rows = rows_of(settings, world) // world
    first = (microbatch * world + rank) * rows
    return BatchPart(first, rows, counted=min(rows, max(0, sequences_of(settings, world) - first)))


def adapt_to_ranks(settings: OptimizationSettings, *, before: int, world: int) -> OptimizationSettings:
    """Return settings for `world` ranks that give the same steps as `settings` with `before` ranks.

    A step has the same number of sequences, and the microbatches of a rank are not larger.
    """
    if world == before:
        return settings
    return _divided(settings, world, sequences_of(settings, before), most=rows_of(settings, before) // before)


def adapt_batch(settings: OptimizationSettings, world: int) -> OptimizationSettings:
    """Return settings for `world` ranks that give the same steps, even if the ranks do not divide the batch."""
    batch = settings.batch
    if batch is None or batch < 1 or settings.accumulate < 1 or batch % world == 0:
        return settings
    return _divided(settings, world, _sequences_in(settings, batch), most=-(-batch // world))


def _divided(settings: OptimizationSettings, world: int, sequences: int, most: int) -> OptimizationSettings:
    """Return settings with microbatches of at most `most` sequences per rank.

    The number of microbatches is minimal, or up to twice that if this reduces the padding of the last one.
    """
    least = -(-sequences // (world * most))
    choices = [(-(-sequences // (world * count)), count) for count in range(least, 2 * least + 1)]
    rows, accumulate = min(choices, key=lambda choice: (choice[0] * choice[1], choice[1]))
    fills = world * rows * accumulate == sequences
    return replace(settings, batch=world * rows, accumulate=accumulate, sequences=None if fills else sequences)
