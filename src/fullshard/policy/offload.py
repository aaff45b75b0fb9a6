"""Memory of the shards, their gradients and the optimizer's state: the device's, the CPU's, or a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.policy.sizes import parse_size

__all__ = ["CPUOffload", "CPUOffloadPolicy", "Offload", "OffloadPolicy"]


@dataclass(frozen=True)
class OffloadPolicy:
    """Everything stays on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients live in CPU memory, and the optimizer steps there.

    A unit's shards are copied to the device before its gather, and its reduced gradients back. On a machine that
    computes on the CPU this is valid and changes nothing.

    Args:
        pin_memory: whether the CPU memory is page-locked, so that copies run beside compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True, kw_only=True)
class Offload(OffloadPolicy):
    """Part of the optimizer's state and of the parameters rests in a file between uses, and part of what forward keeps
    for backward is away meanwhile: as much as is said, of whole units.

    In a step it is read, stepped and written a portion at a time, in three buffers of one portion each: 64 MiB, or the
    state of one parameter where that is more. Values are those of a run without offload, bit for bit. The file has no
    name, is of this run alone, and ends with the process; a run goes on from its checkpoints.

    Args:
        optimizer: how much of each optimizer's state rests where: `{"disk": fraction}`, by bytes. Units are taken from
            the last one that the optimizer has on, until they have at least that much.
        parameters: how much of the shards rests where: `{"disk": fraction}`. They are read for each gather. Their
            gradients are written there as they are reduced, and their optimizer's states rest there, too, on top of
            what `optimizer` says. Not for strategies that keep parameters whole. Units are chosen as they are made.
        activations: how much of what forward keeps for backward is away between the two, and where: in the host's
            memory (`"cpu"`: nothing changes where that is what computes) or on a disk. `{"cpu": 0.5, "disk": 0.25}` is
            half of the units and a quarter, the earliest on the disk. With checkpoints it is their inputs that travel.
        folder: where the file is made: on a disk of this machine. Every rank has one of its own.
        budget: instead of fractions, the memory that a rank's tensors may take on the device that computes: bytes, or
            words such as "20GB". Until the first step of an optimizer, all is away that can be; from then on the least
            that fits, chosen by `state/budget.py`, the same on all ranks.

    Raises:
        ConfigError: a fraction is not within 0 and 1, a tier is unknown, `folder` is missing, or both a budget and
            fractions are given.

    Example:
        ```python
        fully_shard(model, offload_policy=Offload(optimizer={"disk": 0.5}, folder="/nvme/run"))
        ```
    """

    optimizer: Mapping[str, float] = field(default_factory=dict, hash=False)
    parameters: Mapping[str, float] = field(default_factory=dict, hash=False)
    activations: Mapping[str, float] = field(default_factory=dict, hash=False)
    folder: str | PathLike[str] | None = None
    budget: int | str | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_size(self.budget, "Offload(budget)", "memory")
            if any(self.optimizer.values()) or any(self.activations.values()):
                raise ConfigError(
                    f"Offload(budget={self.budget!r}, optimizer={dict(self.optimizer)}, activations="
                    f"{dict(self.activations)}): a budget chooses the fractions. Leave either out."
                )
        _check_fractions("optimizer", self.optimizer, ("disk",))
        _check_fractions("parameters", self.parameters, ("disk",))
        _check_fractions("activations", self.activations, ("cpu", "disk"))
        named = {name: dict(getattr(self, name)) for name in ("optimizer", "parameters", "activations")}
        if any(fractions.get("disk") for fractions in named.values()) and self.folder is None:
            given = ", ".join(f"{name}={fractions}" for name, fractions in named.items() if fractions)
            raise ConfigError(
                f"Offload({given}) has no folder for what is to rest on a disk. Name one on a disk of this machine: "
                'folder="/nvme/run".'
            )

    @property
    def disk_fraction(self) -> float:
        """How much of the optimizer's state rests on the disk."""
        return self.optimizer.get("disk", 0.0) if self.budget is None else float(self.folder is not None)

    @property
    def activations_away(self) -> Mapping[str, float]:
        """How much of what forward keeps is away until backward, by where it is."""
        return self.activations if self.budget is None else {self.activations_tier: 1.0}

    @property
    def activations_tier(self) -> str:
        """Where a budget has activations: on a disk if there is one."""
        return "cpu" if self.folder is None else "disk"

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, as long as fractions have not been chosen for it."""
        return None if self.budget is None else parse_size(self.budget, "Offload(budget)", "memory")

    @property
    def disk_folder(self) -> Path:
        """The folder for it."""
        assert self.folder is not None, "no fraction is on the disk"
        return Path(self.folder)


def _check_fractions(name: str, fractions: Mapping[str, float], tiers: tuple[str, ...]) -> None:
    given = f"Offload({name}={dict(fractions)})"
    unknown = [tier for tier in fractions if tier not in tiers]
    if unknown:
        remedy = f"Name one of {', '.join(map(repr, tiers))}"
        if unknown[0] == "cpu":
            remedy += "; or give CPUOffloadPolicy() to as many units as are to have theirs on the CPU"
        raise ConfigError(f"{given}: {unknown[0]!r} is no tier of {name}. {remedy}.")
    if any(not 0 <= fraction <= 1 for fraction in fractions.values()) or sum(fractions.values()) > 1:
        raise ConfigError(f"{given}: fractions are of the whole, each from 0 to 1, and no more than 1 together.")


@dataclass(frozen=True)
class CPUOffload:
    """The same choice for `FullyShardedDataParallel`, spelled as in torch."""

    offload_params: bool = False

    @property
    def policy(self) -> OffloadPolicy:
        """The policy that this stands for."""
        return CPUOffloadPolicy() if self.offload_params else OffloadPolicy()
