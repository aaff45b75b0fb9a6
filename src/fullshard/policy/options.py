"""The options of one unit: a frozen dataclass that is passed from the user's call to the unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fullshard.errors import ConfigError
from fullshard.policy.offload import OffloadPolicy, check_policy
from fullshard.policy.precision import MixedPrecisionPolicy, check_encodings
from fullshard.policy.strategy import Placement, Placements, ShardingStrategy, resolve_placements


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of one unit.

    Raises:
        ConfigError: An encoding is set but parameters are never gathered, `shard_alignment` is less than 1, or
            `offload` is not a policy.
    """

    placements: Placements
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)  # the offload policy of the shards
    # Whether to free unsharded parameters between forward and backward. If None, the placements decide.
    reshard_after_forward: bool | None = None
    prefetches_forward: bool = True  # whether forward starts the all-gather of the next unit early
    # When backward starts the next all-gather: "pre", before this unit's backward; "post", after it; "", never.
    backward_prefetch: str = "pre"
    prefetch_depth: int = 1  # how many units to prefetch
    casts_inputs_at_root: bool = False  # whether a root casts its inputs to the param dtype even if other units do not
    # Whether the next forward after a step broadcasts the buffers of the first rank.
    broadcasts_buffers: bool = False
    shard_alignment: int = 1  # the block size in elements that shards of large parameters are a multiple of

    def __post_init__(self) -> None:
        check_encodings(self.precision, self.placements)
        check_policy(self.offload)
        if self.parameters_on_disk:
            self._check_parameters_on_disk()
        if type(self.shard_alignment) is not int or self.shard_alignment < 1:
            raise ConfigError(
                f"shard_alignment={self.shard_alignment!r}: expected a number of elements, 1 or more. Pass the block "
                "size of the optimizer states, such as 256."
            )

    def _check_parameters_on_disk(self) -> None:
        given = f"Offload(parameters={{'disk': {self.parameters_on_disk}}})"
        if self.placements.parameters is Placement.WHOLE:
            raise ConfigError(
                f"{given}: this strategy keeps full parameters in memory between steps, so it has no shards to "
                "offload to disk. Choose one that shards parameters, such as 'zero3' or 'hsdp'."
            )
        if self.precision.reduce_wire is not None:
            raise ConfigError(
                f"{given} with reduce_wire={self.precision.reduce_wire!r}: gradients on a disk have a different "
                "layout, which would change the blocks of the encoding and so the results. Leave reduce_wire out."
            )

    @classmethod
    def of(
        cls,
        strategy: str | ShardingStrategy | Placements,
        *,
        reshard_after_forward: bool | int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        broadcast_buffers: bool = False,
        shard_alignment: int = 1,
    ) -> ShardOptions:
        """Return the options for the arguments of `fully_shard`.

        Raises:
            ConfigError: The strategy is unknown, or the arguments contradict each other.
        """
        placements = resolve_placements(strategy)
        if not isinstance(reshard_after_forward, bool | None):
            placements = _resharded_to(reshard_after_forward, placements)
            reshard_after_forward = reshard_after_forward > 1
        return cls(
            placements=placements,
            precision=mp_policy or MixedPrecisionPolicy(),
            offload=offload_policy or OffloadPolicy(),
            reshard_after_forward=reshard_after_forward,
            broadcasts_buffers=broadcast_buffers,
            shard_alignment=shard_alignment,
        )

    @property
    def parameters_on_disk(self) -> float:
        """The fraction of the shards on disk for units with this policy."""
        return self.offload.in_full.parameters.get("disk", 0.0)

    @property
    def starts_on_disk(self) -> bool:
        """True if shards start on disk when computing on the CPU, until fractions are chosen for a budget."""
        can_be_there = self.placements.parameters is not Placement.WHOLE and self.precision.reduce_wire is None
        return can_be_there and self.offload.in_full.starts_on_disk

    @property
    def activations(self) -> Mapping[str, float]:
        """The fraction of activations that are offloaded between forward and backward, by tier."""
        return self.offload.in_full.offloaded_activations

    @property
    def keeps_unsharded(self) -> bool:
        """True if every rank keeps unsharded parameters between steps."""
        return self.placements.parameters is Placement.WHOLE


def _resharded_to(group: int, placements: Placements) -> Placements:
    """Return `placements` with parameters that groups of ranks keep from forward to backward."""
    if not isinstance(group, int) or group < 1:
        raise ConfigError(
            f"reshard_after_forward={group!r}: expected True, False, None or a number of ranks, 1 or more."
        )
    if placements.parameters is not Placement.SHARDED:
        raise ConfigError(
            f"reshard_after_forward={group}: parameters are {placements.parameters.value} between steps under this "
            "strategy, so they cannot be resharded. Use strategy='zero3' or 'hsdp'."
        )
    return replace(placements, parameters_in_step=Placement.GROUPED, group=group)
