"""The collectives along axes, and the transports of a parameter group, which are bound to channels on creation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm.collectives import Channel, Collectives
from fullshard.comm.mesh import Axes, subgroup
from fullshard.comm.routes import collectives_for
from fullshard.comm.transport import Gathers, Sums, Transport
from fullshard.comm.two_level import TwoLevelGathers, TwoLevelSums
from fullshard.device.memory import Pool, scratch_of
from fullshard.engine.group_plan import GroupPlan

_VARIANTS = 1024  # distinct sets of missing gradients that have separate messages
_FEW_VARIANTS = 64  # the same, if a call has one message for each group of ranks


@dataclass(frozen=True)
class AxesCollectives:
    """The collectives along axes, and the scratch memory that they may use."""

    shard: Collectives
    replicate: Collectives | None
    across: Collectives | None  # with `within`: the shard axis in two levels
    within: Collectives | None
    scratch: Pool

    @classmethod
    def along(cls, axes: Axes, device: torch.device) -> AxesCollectives:
        """Return the collectives along `axes` for tensors on `device`."""
        replicas, across, within = axes.replicate_group, None, None
        if axes.group_size is not None:
            within, across = (collectives_for(subgroup(ranks), device) for ranks in axes.group_ranks)
        along = cls(
            collectives_for(axes.shard_group, device),
            None if replicas is None else collectives_for(replicas, device),
            across,
            within,
            scratch_of(device),
        )
        for item in along.each:
            item.link(along.each)
        return along

    @property
    def each(self) -> list[Collectives]:
        """The collectives of all axes that exist."""
        return [item for item in (self.shard, self.replicate, self.across, self.within) if item is not None]

    @property
    def is_broken(self) -> bool:
        """True if communication is impossible, because ranks made different calls or a rank was lost."""
        for item in (self.shard, self.replicate, self.across, self.within):
            if item is not None and item.broken is not None:
                return True
        return False


@dataclass(frozen=True)
class GroupTransports:
    """The transports of one parameter group."""

    gathers: Gathers
    sums: Sums  # over the shard axis in one level
    replicas: Sums | None  # over the replicate axis
    two_level_sums: TwoLevelSums | None  # replaces `sums` if gradients are grouped
    scratch: Pool
    channels: Sequence[Channel]

    @classmethod
    def bind(cls, plan: GroupPlan, collectives: AxesCollectives) -> GroupTransports:
        """Create the channels of a group."""
        channels: list[Channel] = []

        def channel(over: Collectives, tensors: int, variants: int = 1) -> Channel:
            channels.append(over.channel(tensors, variants=variants))
            return channels[-1]

        messages = len(plan.layout.in_place) + 1
        gather_wire = plan.contract.gather_wire if plan.shards_optimizer else None
        reduce_wire, scratch = plan.contract.reduce_wire, collectives.scratch
        gathers: Gathers
        if plan.gathers_in_two_levels:
            assert collectives.across is not None and collectives.within is not None
            across = _gathers_encoded_as(gather_wire, channel(collectives.across, messages), scratch)
            within = channel(collectives.within, messages * collectives.across.world)
            gathers = TwoLevelGathers(across, within, scratch)
        else:
            gathers = _gathers_encoded_as(gather_wire, channel(collectives.shard, plan.gather_messages), scratch)
        two_level_sums = None
        if plan.sums_in_two_levels:
            assert collectives.across is not None and collectives.within is not None
            two_level_sums = TwoLevelSums(
                _sums_encoded_as(reduce_wire, channel(collectives.across, messages, _FEW_VARIANTS), scratch),
                channel(collectives.within, messages * collectives.across.world, _FEW_VARIANTS),
                scratch,
            )
        return cls(
            gathers,
            _sums_encoded_as(reduce_wire, channel(collectives.shard, messages, _VARIANTS), scratch),
            None
            if collectives.replicate is None
            else _sums_encoded_as(reduce_wire, channel(collectives.replicate, messages, _VARIANTS), scratch),
            two_level_sums,
            scratch,
            channels,
        )

    def reserve_tags(self) -> None:
        """Reserve the tags of all messages. Ranks must do so in the same order."""
        for channel in self.channels:
            channel.reserve_tags()

    @property
    def error_feedback_nbytes(self) -> int:
        """Bytes that error feedback of encoded gradients keeps."""
        return sum(sums.error_nbytes for sums in self._each_sums)

    def forget_errors(self) -> None:
        """Reset error feedback, so that the next gradients do not include earlier quantization errors."""
        for sums in self._each_sums:
            sums.forget_errors()

    @property
    def _each_sums(self) -> list[Sums]:
        across = None if self.two_level_sums is None else self.two_level_sums.across
        return [sums for sums in (self.sums, self.replicas, across) if sums is not None]


def _gathers_encoded_as(name: str | None, transport: Gathers, scratch: Pool) -> Gathers:
    """Return gathers over `transport` with the codec `name`; `transport` itself if `name` is None or for one rank."""
    if name is None or transport.world == 1:
        return transport
    from fullshard.comm.codec import codec_named  # imported here, because few programs need it
    from fullshard.comm.encoded import EncodedGathers

    return EncodedGathers(transport, codec_named(name), scratch)


def _sums_encoded_as(name: str | None, transport: Transport, scratch: Pool) -> Sums:
    """Return sums over `transport` with the codec `name`; `transport` itself if `name` is None or for one rank."""
    if name is None or transport.world == 1:
        return transport
    from fullshard.comm.codec import codec_named  # imported here, because few programs need it
    from fullshard.comm.encoded import EncodedSums

    return EncodedSums(transport, codec_named(name), scratch)
