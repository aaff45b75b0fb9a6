"""Placements of parameters, gradients and optimizer state. Strategies are plain values, and the engine reads only their
placements.

The algorithms are those of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) and of hybrid sharding (Zhao et al., 2023,
arXiv:2304.11277).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_flags, check_type


class Placement(Enum):
    """The distribution of a state over the ranks of the shard axis."""

    WHOLE = "whole"  # every rank has all of it
    GROUPED = "grouped"  # every group of adjacent ranks has all of it; each rank in it has a shard
    SHARDED = "sharded"  # every rank has a shard

    @property
    def spread(self) -> int:
        """0 for whole, 1 for grouped, 2 for sharded. A higher number means less memory per rank."""
        return list(Placement).index(self)


@dataclass(frozen=True, kw_only=True)
class Placements:
    """The placement of each state on the shard axis. Along a replicate axis, if there is one, every state is
    replicated.

    Args:
        parameters: The parameters between steps.
        parameters_in_step: The parameters from a unit's forward to its backward.
        gradients: The gradients while several microbatches accumulate.
        optimizer: The optimizer state, and so the parameters that the optimizer sees.
        replicated: Whether a replicate axis is required (a 2-D mesh).
        group: The number of adjacent ranks in a group, if a state is grouped. If None, the ranks of a host.

    Raises:
        ConfigError: Parameters are sharded more within a step than between steps, parameters or gradients are sharded
            but the optimizer state is whole, or the optimizer state is grouped.
    """

    parameters: Placement
    parameters_in_step: Placement
    gradients: Placement
    optimizer: Placement
    replicated: bool = False
    group: int | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "parameters_in_step", "gradients", "optimizer"):
            check_type(name, getattr(self, name), Placement, "a fullshard.Placement")
        check_flags(replicated=self.replicated)
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ConfigError(f"group={self.group!r}: expected a number of ranks, 1 or more, or None.")
        whole = Placement.WHOLE
        if self.parameters_in_step.spread > self.parameters.spread:
            raise ConfigError(
                f"parameters_in_step is {self.parameters_in_step.value} but parameters is {self.parameters.value}: "
                "parameters that are kept between steps are not freed within a step. Also set parameters to "
                f"{self.parameters_in_step.value}."
            )
        if self.optimizer is whole and not self.parameters is self.gradients is whole:
            raise ConfigError(
                "optimizer is whole but parameters or gradients are not: a rank can only update parameters "
                "whose values and gradients it has. Also set optimizer to sharded."
            )
        if self.optimizer is Placement.GROUPED:
            raise ConfigError(
                "optimizer is grouped: all groups would store and update the same parameters. Use strategy='hsdp' with "
                "a mesh whose first axis is the groups, or set optimizer to sharded."
            )

    @property
    def is_grouped(self) -> bool:
        """True if any state is grouped, so that the shard axis is used in two levels."""
        return Placement.GROUPED in (self.parameters, self.parameters_in_step, self.gradients)

    def without_groups(self, instead: Placement) -> Placements:
        """Return these placements with `instead` for every state that is grouped.

        Args:
            instead: The placement that replaces `Placement.GROUPED`.
        """

        def resolved(placement: Placement) -> Placement:
            return instead if placement is Placement.GROUPED else placement

        return replace(
            self,
            parameters=resolved(self.parameters),
            parameters_in_step=resolved(self.parameters_in_step),
            gradients=resolved(self.gradients),
        )


_W, _S = Placement.WHOLE, Placement.SHARDED
_ZERO3 = Placements(parameters=_S, parameters_in_step=_S, gradients=_S, optimizer=_S)
_ZERO2 = Placements(parameters=_S, parameters_in_step=_W, gradients=_S, optimizer=_S)


class ShardingStrategy(Enum):
    """The named strategies. Each has a short name (its value) and the name that torch gives it.

    | short | torch's name | parameters between steps | forward to backward | gradients | optimizer state |
    |---|---|---|---|---|---|
    | `ddp` | `NO_SHARD` | whole | whole | whole | whole |
    | `zero1` | (`SHARD_OPTIMIZER`) | whole | whole | whole while accumulating | sharded |
    | `zero2` | `SHARD_GRAD_OP` | sharded | whole | sharded | sharded |
    | `zero3` | `FULL_SHARD` | sharded | sharded | sharded | sharded |
    | `hsdp` | `HYBRID_SHARD` | `zero3` on the shard axis, replicated on the other | | | |
    | `hsdp_zero2` | `_HYBRID_SHARD_ZERO2` | `zero2` on the shard axis, replicated on the other | | | |
    """

    NO_SHARD = "ddp"
    SHARD_OPTIMIZER = "zero1"
    SHARD_GRAD_OP = "zero2"
    FULL_SHARD = "zero3"
    HYBRID_SHARD = "hsdp"
    _HYBRID_SHARD_ZERO2 = "hsdp_zero2"

    @property
    def placements(self) -> Placements:
        """The placements of this strategy."""
        return _PLACEMENTS[self.value]


_PLACEMENTS = {
    "ddp": Placements(parameters=_W, parameters_in_step=_W, gradients=_W, optimizer=_W),
    "zero1": Placements(parameters=_W, parameters_in_step=_W, gradients=_W, optimizer=_S),
    "zero2": _ZERO2,
    "zero3": _ZERO3,
    "hsdp": Placements(parameters=_S, parameters_in_step=_S, gradients=_S, optimizer=_S, replicated=True),
    "hsdp_zero2": Placements(parameters=_S, parameters_in_step=_W, gradients=_S, optimizer=_S, replicated=True),
}


def resolve_placements(strategy: str | ShardingStrategy | Placements, argument: str = "strategy") -> Placements:
    """Return the placements for a short name, a `ShardingStrategy` or placements.

    Raises:
        ConfigError: The strategy is unknown.
    """
    if isinstance(strategy, Placements):
        return strategy
    if isinstance(strategy, ShardingStrategy):
        return strategy.placements
    if isinstance(strategy, str) and strategy in _PLACEMENTS:
        return _PLACEMENTS[strategy]
    raise ConfigError(
        f"{argument}={strategy!r} is not a strategy. Choose one of {', '.join(_PLACEMENTS)}, "
        "a fullshard.ShardingStrategy, or Placements."
    )
