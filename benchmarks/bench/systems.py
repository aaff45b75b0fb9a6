"""The systems by name, with their descriptions, requirements and constructors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.bench import peers
from benchmarks.bench.sharded import REPLICAS, fully_sharded
from benchmarks.bench.trainer import Build
from fullshard.errors import ConfigError, near_matches

__all__ = ["ALL", "FULLSHARD", "SYSTEMS", "System", "chosen_systems"]

ALL = "all"
FULLSHARD = "fullshard-"


@dataclass(frozen=True)
class System:
    """One way to train a model on several ranks."""

    settings: str  # in words
    build: Build
    needs: str = "torch"  # the required module, imported before memory is counted
    replicates: bool = False  # whether every rank keeps the full optimizer state
    hybrid: bool = False  # whether ranks are divided into replicas
    variant: bool = False  # measured only if named

    @property
    def is_installed(self) -> bool:
        """True if the required module is installed."""
        found = find_spec(self.needs.partition(".")[0])
        return found is not None and found.origin is not None  # a folder of that name has none


_FSDP = "torch.distributed.fsdp"

SYSTEMS = {
    "fullshard-zero3": System("strategy zero3", fully_sharded("zero3")),
    "fullshard-zero2": System("strategy zero2", fully_sharded("zero2")),
    "fullshard-zero1": System("strategy zero1", fully_sharded("zero1")),
    "fullshard-ddp": System("strategy ddp", fully_sharded("ddp"), replicates=True),
    "fullshard-hsdp": System(f"strategy hsdp, {REPLICAS} replicas", fully_sharded("hsdp"), hybrid=True, variant=True),
    "fullshard-hsdp-zero2": System(
        f"strategy hsdp_zero2, {REPLICAS} replicas", fully_sharded("hsdp_zero2"), hybrid=True, variant=True
    ),
    "torch-ddp": System("DistributedDataParallel", peers.ddp(), replicates=True),
    "torch-ddp-views": System(
        "DistributedDataParallel, gradient_as_bucket_view", peers.ddp(bucket_views=True), replicates=True, variant=True
    ),
    "torch-zero1": System(
        "DistributedDataParallel, gradient_as_bucket_view; ZeroRedundancyOptimizer",
        peers.zero1,
        needs="torch.distributed.optim",
    ),
    "torch-fsdp1": System("FullyShardedDataParallel, FULL_SHARD, use_orig_params", peers.fsdp1, needs=_FSDP),
    "torch-fsdp2": System("fully_shard", peers.fsdp2(), needs=_FSDP),
    "torch-fsdp2-whole": System(
        "fully_shard, reshard_after_forward=False", peers.fsdp2(reshard_after_forward=False), needs=_FSDP
    ),
    "torch-fsdp2-prefetch": System(
        "fully_shard, next block prefetched both ways", peers.fsdp2(prefetch=True), needs=_FSDP, variant=True
    ),
    "deepspeed-zero1": System("ZeRO stage 1", peers.deepspeed(1), needs="deepspeed"),
    "deepspeed-zero2": System("ZeRO stage 2", peers.deepspeed(2), needs="deepspeed"),
    "deepspeed-zero3": System("ZeRO stage 3", peers.deepspeed(3), needs="deepspeed"),
}


def chosen_systems(listed: str, world: int) -> list[str]:
    """Return the names in `listed`, separated by commas; `all` is all installed systems without variants.

    Raises:
        ConfigError: A system is unknown, not installed, not possible with this number of ranks, or named twice.
    """
    names = [word.strip() for word in listed.split(",") if word.strip()]
    if ALL in names:
        usual = [name for name, system in SYSTEMS.items() if system.is_installed and not system.variant]
        names = [*usual, *(name for name in names if name != ALL and name not in usual)]
    _check_names(listed, names)
    for name in names:
        _check_fits(name, world)
    return names


def _check_names(listed: str, names: Sequence[str]) -> None:
    if not names:
        raise ConfigError(f"--systems {listed!r}: names none. Take {ALL}, or some of {', '.join(SYSTEMS)}.")
    for name in names:
        if name not in SYSTEMS:
            near = near_matches(name, SYSTEMS)
            raise ConfigError(f"--systems: no system {name}.{near} Take {ALL}, or some of {', '.join(SYSTEMS)}.")
        if names.count(name) > 1:
            raise ConfigError(f"--systems: {name} is named twice. Name it once.")


def _check_fits(name: str, world: int) -> None:
    system = SYSTEMS[name]
    if not system.is_installed:
        package = system.needs.partition(".")[0]
        raise ConfigError(
            f"--systems: {name} needs {package}, which is not installed. Install it, or leave {name} out."
        )
    if system.hybrid and world % REPLICAS:
        raise ConfigError(
            f"--systems: {name} needs {REPLICAS} equal replicas, but there are {world} ranks. Take an even --ranks."
        )
