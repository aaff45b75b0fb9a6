"""Offload policies: whether shards, gradients and optimizer states are on the device, on the CPU or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Real
from os import PathLike
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags, parse_size


class StatePlacement(Enum):
    """The placement of the shards of a unit, their gradients and the optimizer state."""

    DEVICE = "on the device"
    STEPPED_ON_CPU = "on the CPU, with a copy of the shards on the device"
    CPU = "on the CPU"
    DISK = "on a disk"


@dataclass(frozen=True)
class OffloadPolicy:
    """The default policy: everything stays on the device that computes."""

    @property
    def in_full(self) -> Offload:
        """The equivalent `Offload`."""
        return Offload()


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards and gradients of the units with this policy in CPU memory, and run their optimizer step there.

    It is equivalent to `Offload(parameters={"cpu": 1})` for each unit. When computing on the CPU, it is valid and
    changes nothing.

    Args:
        pin_memory: Whether CPU memory is page-locked, so that copies overlap with compute.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_flags(pin_memory=self.pin_memory)

    @property
    def in_full(self) -> Offload:
        """The equivalent `Offload`."""
        return Offload(optimizer={"cpu": 1.0}, parameters={"cpu": 1.0}, pin_memory=self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class Offload(OffloadPolicy):
    """Offload a fraction of the training state to the CPU or to disk, in whole units.

    Values are bitwise equal to those of a run without offload.

    On the CPU, the optimizer updates shards in place, and shards are copied to the device for all-gathers. When
    computing on the CPU, `"cpu"` changes nothing. On disk, states are stored in a file between steps. A step reads,
    updates and writes them in chunks, with three buffers of one chunk each: 64 MiB, or the state of one parameter if
    that is larger. The file has no name. It belongs to this run only and disappears with the process; a run resumes
    from its checkpoints.

    Args:
        optimizer: The fraction of the optimizer state per tier, by bytes: `{"cpu": 0.5, "disk": 0.25}`. Units are
            offloaded from the last one until the fraction is reached. Units for the CPU are chosen first: their
            gradients are on the CPU too, the optimizer step runs there, and the device keeps a copy of their shards.
            Units for the disk are chosen next, separately for each optimizer.
        parameters: The fraction of the shards per tier: `{"cpu": 0.25, "disk": 0.5}`. For the CPU, units are also taken
            from the last one, and the device keeps no copy: shards are copied for each all-gather. Their optimizer
            state is on the CPU as well and counts towards `optimizer`. For the disk, units are taken as they are
            created; strategies that keep unsharded parameters do not support it. Shards are read for each all-gather,
            gradients are written as they are reduced, and the optimizer state is on disk as well, in addition to
            `optimizer`.
        activations: The fraction of activations per tier that are offloaded between forward and backward: to host
            memory (`"cpu"`, which changes nothing when computing on the CPU) or to disk. `{"cpu": 0.5, "disk": 0.25}`
            means half of the units and a quarter of them, the earliest units on disk. With activation checkpointing,
            the inputs of the checkpoints are offloaded.
        folder: The folder for the file, on a disk of this machine. Every rank creates its own file.
        pin_memory: Whether CPU memory for shards is page-locked, so that copies overlap with compute.
        budget: The memory that a rank's tensors may take on the device that computes, in bytes or as a string such as
            "20GB". It replaces fractions. Until the first optimizer step, everything possible is offloaded. After that,
            the smallest offload that fits is used, chosen by `state/budget.py` and identical on all ranks, in whole
            units: first the optimizer state, on the CPU alongside an accelerator as far as host memory allows, and in
            `folder` beyond that or when computing on the CPU; then activations; then, when computing on the CPU, shards
            and gradients in `folder`.

    Raises:
        ConfigError: A fraction is not a number from 0 to 1, a tier is unknown, `folder` is missing, or both a budget
            and fractions are given.

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
        for name in ("optimizer", "parameters", "activations"):  # equivalent policies must compare equal
            _check_form(name, getattr(self, name))
            object.__setattr__(self, name, {tier: share for tier, share in getattr(self, name).items() if share})
        if self.budget is not None:
            parse_size(self.budget, "Offload(budget)", "memory")
            if self.optimizer or self.parameters or self.activations:
                raise ConfigError(
                    f"Offload(budget={self.budget!r}, optimizer={dict(self.optimizer)}, "
                    f"parameters={dict(self.parameters)}, activations={dict(self.activations)}): a budget chooses the "
                    "fractions. Leave one of them out."
                )
        _check_fractions("optimizer", self.optimizer, ("cpu", "disk"))
        _check_fractions("parameters", self.parameters, ("cpu", "disk"))
        _check_fractions("activations", self.activations, ("cpu", "disk"))
        if self.cpu_fraction + max(self.disk_fraction, self.parameters.get("disk", 0.0)) > 1:
            raise ConfigError(
                f"Offload(optimizer={dict(self.optimizer)}, parameters={dict(self.parameters)}): the "
                "optimizer state of parameters on the CPU is also on the CPU. This is "
                f"{self.cpu_fraction:g} of the state, so at most {1 - self.cpu_fraction:g} can be on a disk."
            )
        named = {name: dict(getattr(self, name)) for name in ("optimizer", "parameters", "activations")}
        if any(fractions.get("disk") for fractions in named.values()) and self.folder is None:
            given = ", ".join(f"{name}={fractions}" for name, fractions in named.items() if fractions)
            raise ConfigError(
                f"Offload({given}) offloads to disk without a folder. Pass a folder on a local disk: "
                'folder="/nvme/run".'
            )

    @property
    def in_full(self) -> Offload:
        """The equivalent `Offload`."""
        return self

    def placement_of_all(self, *, alongside: bool) -> StatePlacement:
        """Return the placement of all units; the device while it is not known which units are offloaded.

        Args:
            alongside: See `states_on_cpu`.
        """
        if self.parameters.get("cpu", 0.0) == 1:
            return StatePlacement.CPU
        return StatePlacement.STEPPED_ON_CPU if self.states_on_cpu(alongside=alongside) == 1 else StatePlacement.DEVICE

    def states_on_cpu(self, *, alongside: bool) -> float:
        """Return the fraction of the optimizer state on the CPU. With a budget, all of it until fractions are chosen.

        Args:
            alongside: Whether an accelerator computes. If not, a budget does not offload to the CPU.
        """
        return self.cpu_fraction if self.budget is None else float(alongside)

    @property
    def cpu_fraction(self) -> float:
        """The fraction of the optimizer state on the CPU, which is at least that of parameters."""
        return max(self.optimizer.get("cpu", 0.0), self.parameters.get("cpu", 0.0))

    @property
    def disk_fraction(self) -> float:
        """The fraction of the optimizer state on disk."""
        return self.optimizer.get("disk", 0.0) if self.budget is None else float(self.folder is not None)

    @property
    def starts_on_disk(self) -> bool:
        """True if shards that can be on disk are there until fractions are chosen, when computing on the CPU."""
        return self.budget is not None and self.folder is not None

    @property
    def offloaded_activations(self) -> Mapping[str, float]:
        """The fraction of activations that are offloaded until backward, by tier."""
        return self.activations if self.budget is None else {self.activations_tier: 1.0}

    @property
    def activations_tier(self) -> str:
        """The tier that a budget uses for activations: disk if there is a folder, otherwise the CPU."""
        return "cpu" if self.folder is None else "disk"

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None without a budget or once fractions are chosen for it."""
        return None if self.budget is None else parse_size(self.budget, "Offload(budget)", "memory")

    @property
    def disk_folder(self) -> Path:
        """The folder for the file, with `~` expanded."""
        assert self.folder is not None, "no fraction is on the disk"
        return Path(self.folder).expanduser()


def _check_form(name: str, fractions: object) -> None:
    if not isinstance(fractions, Mapping) or not all(isinstance(share, Real) for share in fractions.values()):
        raise ConfigError(
            f"Offload({name}={fractions!r}): expected the fraction on each tier, from 0 to 1. Pass "
            f'{name}={{"cpu": 0.5}}, or "disk", or both.'
        )


def _check_fractions(name: str, fractions: Mapping[str, float], tiers: tuple[str, ...]) -> None:
    given = f"Offload({name}={dict(fractions)})"
    unknown = [tier for tier in fractions if tier not in tiers]
    if unknown:
        raise ConfigError(
            f"{given}: {unknown[0]!r} is not a tier of {name}. Expected one of {', '.join(map(repr, tiers))}."
        )
    if any(not 0 <= fraction <= 1 for fraction in fractions.values()) or sum(fractions.values()) > 1:
        raise ConfigError(f"{given}: each fraction must be from 0 to 1, and their sum at most 1.")


def policies_by_name(patterns: Mapping[str, OffloadPolicy], names: Sequence[str]) -> list[OffloadPolicy]:
    """Return for each unit FQN in `names` the policy of the first pattern that matches it, or else no offload.

    Patterns use shell syntax (`layers.*`). A pattern that ends in `.*` also matches the name without this suffix. The
    root's name is empty.

    Raises:
        ConfigError: A pattern matches none of the names, or its value is not a policy.
    """
    for pattern, policy in patterns.items():
        check_policy(policy, f"offload_policy[{pattern!r}]")
    for pattern in patterns:
        if not any(_matches(pattern, name) for name in names):
            known = ", ".join(repr(name) for name in names)
            raise ConfigError(
                f"offload_policy: no unit name matches {pattern!r}. The units are {known}, where '' is the module "
                "itself. Pass one of them, or a pattern such as 'layers.*'."
            )
    first = (next((pattern for pattern in patterns if _matches(pattern, name)), None) for name in names)
    return [OffloadPolicy() if pattern is None else patterns[pattern] for pattern in first]


def check_policy(policy: object, name: str = "offload_policy") -> None:
    """Raise `ConfigError` if `policy`, passed as the argument `name`, is not an offload policy."""
    if not isinstance(policy, OffloadPolicy):
        raise ConfigError(
            f"{name}={policy!r} is not an offload policy. Pass fullshard.Offload(...) or "
            "fullshard.CPUOffloadPolicy(), or leave it out."
        )


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or pattern == f"{name}.*"


@dataclass(frozen=True)
class CPUOffload:
    """The offload of `FullyShardedDataParallel`: everything or nothing, with torch's names.

    Args:
        offload_params: Whether shards, gradients and the optimizer step are on the CPU.
    """

    offload_params: bool = False

    def __post_init__(self) -> None:
        check_flags(offload_params=self.offload_params)

    @property
    def policy(self) -> OffloadPolicy:
        """The equivalent policy."""
        return CPUOffloadPolicy() if self.offload_params else OffloadPolicy()
