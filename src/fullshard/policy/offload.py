"""Memory of the shards, their gradients and the optimizer's state: the device's, the CPU's, or a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Real
from os import PathLike
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags
from fullshard.policy.sizes import parse_size

__all__ = ["CPUOffload", "CPUOffloadPolicy", "Home", "Offload", "OffloadPolicy", "check_policy", "policies_by_name"]


class Home(Enum):
    """Where the shards of a unit are, with their gradients and the optimizer's state."""

    DEVICE = "on the device"
    STEPPED_ON_CPU = "on the CPU, with a copy of the shards on the device"
    CPU = "on the CPU"
    DISK = "on a disk"


@dataclass(frozen=True)
class OffloadPolicy:
    """Everything stays on the device that computes."""

    @property
    def in_full(self) -> Offload:
        """The same, said as `Offload` says it."""
        return Offload()


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients live in CPU memory, and the optimizer steps there: of the units that have this policy.

    It is `Offload(parameters={"cpu": 1})` for each. On a machine that computes on the CPU it is valid and changes
    nothing.

    Args:
        pin_memory: whether the CPU memory is page-locked, so that copies run beside compute.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_flags(pin_memory=self.pin_memory)

    @property
    def in_full(self) -> Offload:
        """See `OffloadPolicy.in_full`."""
        return Offload(optimizer={"cpu": 1.0}, parameters={"cpu": 1.0}, pin_memory=self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class Offload(OffloadPolicy):
    """Part of what training needs is away from the device that computes, on the CPU or on a disk: as much as is said,
    of whole units. Values are those of a run without offload, bit for bit.

    On the CPU, shards are stepped where they are, and copied to the device for their gathers. On a machine that
    computes on the CPU, `"cpu"` changes nothing. On a disk, states rest in a file between steps. In a step they are
    read, stepped and written a portion at a time, in three buffers of one portion each: 64 MiB, or the state of one
    parameter where that is more. The file has no name, is of this run alone, and ends with the process; a run goes on
    from its checkpoints.

    Args:
        optimizer: how much of the optimizer's state rests where: `{"cpu": 0.5, "disk": 0.25}`, by bytes. Units are
            taken from the last one on, until they have at least that much: first those for the CPU, whose gradients
            are there too, and which the optimizer steps there, while the device keeps a copy of their shards; then
            those for the disk, for each optimizer by itself.
        parameters: how much of the shards rests where: `{"cpu": 0.25, "disk": 0.5}`. On the CPU from the last unit on,
            too, and without a copy on the device: shards travel for each gather, and the optimizer's state is on the
            CPU as well, as part of what `optimizer` asks for. On the disk as units are made, and not under strategies
            that keep parameters whole: shards are read for each gather, gradients written as they are reduced, and the
            optimizer's state rests there as well, on top of what `optimizer` says.
        activations: how much of what forward keeps for backward is away between the two, and where: in the host's
            memory (`"cpu"`: nothing changes where that is what computes) or on a disk. `{"cpu": 0.5, "disk": 0.25}` is
            half of the units and a quarter, the earliest on the disk. With checkpoints it is their inputs that travel.
        folder: where the file is made: on a disk of this machine. Every rank has one of its own.
        pin_memory: whether CPU memory for shards is page-locked, so that copies run beside compute.
        budget: instead of fractions, the memory that a rank's tensors may take on the device that computes: bytes, or
            words such as "20GB". Until the first step of an optimizer, all is away that can be; from then on the least
            that fits, chosen by `state/budget.py`, the same on all ranks: of units, the optimizer's state, on the CPU
            beside an accelerator as far as the host's memory has room, and in `folder` beyond that, or where the CPU
            computes; then what forward keeps; then, where the CPU computes, shards and gradients in `folder`.

    Raises:
        ConfigError: a fraction is no number from 0 to 1, a tier is unknown, `folder` is missing, or both a budget and
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
    pin_memory: bool = True
    budget: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters", "activations"):  # what says the same is the same
            _check_form(name, getattr(self, name))
            object.__setattr__(self, name, {tier: share for tier, share in getattr(self, name).items() if share})
        if self.budget is not None:
            parse_size(self.budget, "Offload(budget)", "memory")
            if self.optimizer or self.parameters or self.activations:
                raise ConfigError(
                    f"Offload(budget={self.budget!r}, optimizer={dict(self.optimizer)}, parameters="
                    f"{dict(self.parameters)}, activations={dict(self.activations)}): a budget chooses the fractions. "
                    "Leave either out."
                )
        _check_fractions("optimizer", self.optimizer, ("cpu", "disk"))
        _check_fractions("parameters", self.parameters, ("cpu", "disk"))
        _check_fractions("activations", self.activations, ("cpu", "disk"))
        if self.cpu_fraction + max(self.disk_fraction, self.parameters.get("disk", 0.0)) > 1:
            raise ConfigError(
                f"Offload(optimizer={dict(self.optimizer)}, parameters={dict(self.parameters)}): the optimizer's state "
                f"is on the CPU wherever parameters are, so {self.cpu_fraction:g} of it is, and no more than "
                f"{1 - self.cpu_fraction:g} can be on a disk."
            )
        named = {name: dict(getattr(self, name)) for name in ("optimizer", "parameters", "activations")}
        if any(fractions.get("disk") for fractions in named.values()) and self.folder is None:
            given = ", ".join(f"{name}={fractions}" for name, fractions in named.items() if fractions)
            raise ConfigError(
                f"Offload({given}) has no folder for what is to rest on a disk. Name one on a disk of this machine: "
                'folder="/nvme/run".'
            )

    @property
    def in_full(self) -> Offload:
        """See `OffloadPolicy.in_full`."""
        return self

    def home_of_all(self, *, beside: bool) -> Home:
        """The home that all units have; the device, as long as it is not known which of them have another.

        Args:
            beside: see `states_on_cpu`.
        """
        if self.parameters.get("cpu", 0.0) == 1:
            return Home.CPU
        return Home.STEPPED_ON_CPU if self.states_on_cpu(beside=beside) == 1 else Home.DEVICE

    def states_on_cpu(self, *, beside: bool) -> float:
        """How much of the optimizer's state is on the CPU: of a budget all that can be, until fractions are chosen.

        Args:
            beside: whether that CPU is beside the device that computes. If not, a budget gains nothing by it.
        """
        return self.cpu_fraction if self.budget is None else float(beside)

    @property
    def cpu_fraction(self) -> float:
        """How much of the optimizer's state is on the CPU: wherever parameters are, at least."""
        return max(self.optimizer.get("cpu", 0.0), self.parameters.get("cpu", 0.0))

    @property
    def disk_fraction(self) -> float:
        """How much of the optimizer's state rests on the disk."""
        return self.optimizer.get("disk", 0.0) if self.budget is None else float(self.folder is not None)

    @property
    def starts_on_disk(self) -> bool:
        """True if shards are on the disk until fractions are chosen, where they can be and the CPU computes."""
        return self.budget is not None and self.folder is not None

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
        """The folder for it; `~` is the user's own."""
        assert self.folder is not None, "no fraction is on the disk"
        return Path(self.folder).expanduser()


def _check_form(name: str, fractions: object) -> None:
    if not isinstance(fractions, Mapping) or not all(isinstance(share, Real) for share in fractions.values()):
        raise ConfigError(
            f"Offload({name}={fractions!r}): how much of it is where is needed, in numbers from 0 to 1. Write "
            f'{name}={{"cpu": 0.5}}, or "disk", or both.'
        )


def _check_fractions(name: str, fractions: Mapping[str, float], tiers: tuple[str, ...]) -> None:
    given = f"Offload({name}={dict(fractions)})"
    unknown = [tier for tier in fractions if tier not in tiers]
    if unknown:
        raise ConfigError(f"{given}: {unknown[0]!r} is no tier of {name}. Name one of {', '.join(map(repr, tiers))}.")
    if any(not 0 <= fraction <= 1 for fraction in fractions.values()) or sum(fractions.values()) > 1:
        raise ConfigError(f"{given}: fractions are of the whole, each from 0 to 1, and no more than 1 together.")


def policies_by_name(patterns: Mapping[str, OffloadPolicy], names: Sequence[str]) -> list[OffloadPolicy]:
    """For each of `names`, FQNs of units, the policy of the first pattern that matches it; if none does, no offload.

    Patterns are those of a shell (`layers.*`); one that ends in `.*` matches the name before that, too. The root's name
    is empty.

    Raises:
        ConfigError: a pattern matches none of the names, or stands for no policy.
    """
    for pattern, policy in patterns.items():
        check_policy(policy, f"offload_policy[{pattern!r}]")
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            known = ", ".join(repr(name) for name in names)
            raise ConfigError(
                f"offload_policy: no unit's name matches {pattern!r}. The units are {known}, where '' is the module "
                "itself. Name one of them, or a pattern such as 'layers.*'."
            )
    first = (next((pattern for pattern in patterns if _matches(pattern, name)), None) for name in names)
    return [OffloadPolicy() if pattern is None else patterns[pattern] for pattern in first]


def check_policy(policy: object, name: str = "offload_policy") -> None:
    """Raise `ConfigError` if `policy`, the argument of that name, is none."""
    if not isinstance(policy, OffloadPolicy):
        raise ConfigError(
            f"{name}={policy!r} is no policy. Pass Offload(...) or CPUOffloadPolicy() of fullshard, or leave it out."
        )


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or pattern == f"{name}.*"


@dataclass(frozen=True)
class CPUOffload:
    """The same choice for `FullyShardedDataParallel`, spelled as in torch."""

    offload_params: bool = False

    def __post_init__(self) -> None:
        check_flags(offload_params=self.offload_params)

    @property
    def policy(self) -> OffloadPolicy:
        """The policy that this stands for."""
        return CPUOffloadPolicy() if self.offload_params else OffloadPolicy()
