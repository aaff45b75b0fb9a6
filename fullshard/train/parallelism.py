"""How the ranks of a run divide the sequences of a microbatch, and into replicas of the sharded model."""

from __future__ import annotations

from fullshard.errors import ConfigError
from fullshard.strategy import resolve_placements
from fullshard.train.settings import OptimizationSettings, ParallelSettings

DEFAULT_ROWS = 16


def replicas_of(settings: ParallelSettings, world: int, machines: int = 1) -> int | None:
    """How many copies of the sharded model there are; None for a strategy without a replicate axis.

    Left to itself, a hybrid strategy keeps one copy on each machine, and two on a single machine.

    Raises:
        ConfigError: replicas for a strategy that has none, or as many as cannot divide the ranks.
    """
    if not resolve_placements(settings.strategy).replicated:
        if settings.replicas is not None:
            raise ConfigError(
                f"--replicas {settings.replicas}: strategy {settings.strategy} has no replicas. Use --strategy hsdp, "
                "or leave --replicas out."
            )
        return None
    replicas = settings.replicas or max(2, machines)
    if replicas < 1 or world % replicas:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"--replicas {replicas}: {world} ranks cannot form {replicas} equal replicas. "
            f"Take one of {', '.join(map(str, fitting))}."
        )
    return replicas


def rows_of(settings: OptimizationSettings, world: int) -> int:
    """Sequences in one microbatch over all ranks: as asked, else the least that `world` ranks share and that is enough.

    Raises:
        ConfigError: the ranks cannot share them evenly.
    """
    if settings.batch is None:
        return -(-DEFAULT_ROWS // world) * world
    if settings.batch < 1 or settings.batch % world:
        below, above = settings.batch // world * world, max(1, -(-settings.batch // world)) * world
        near = f"{below} or {above}" if below > 0 and below != above else f"{above}"
        raise ConfigError(
            f"--batch {settings.batch}: {world} ranks cannot share {settings.batch} sequences evenly. Take {near}."
        )
    return settings.batch
