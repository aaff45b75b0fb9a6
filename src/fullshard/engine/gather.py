"""The gather of a parameter group: from every rank's shards to the unsharded buffer."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from fullshard.comm.collectives import Channel
from fullshard.comm.native import NativeCollectives
from fullshard.comm.transport import Gathers, Pending
from fullshard.comm.two_level import TwoLevelGathers
from fullshard.device.memory import Pool
from fullshard.device.transfers import transfers
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_buffers import ShardStorage, UnshardedBuffer
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.sharded_param import ShardedParam
from fullshard.tape.recorder import Origin

_VERSION = attrgetter("sharded._version")


class Gather:
    """Gathers over all ranks of the shard axis."""

    is_two_level = False  # True if it uses secondary shards

    def __init__(
        self, params: Sequence[ShardedParam], storage: ShardStorage, transport: Gathers, scratch: Pool
    ) -> None:
        self._params = params
        self._storage = storage
        self._transport = transport
        self._scratch = scratch
        self._sent: Tensor | None = None  # shards in the compute dtype and on the compute device, while they are sent
        self._sent_versions: tuple[int, ...] | None = None  # of the shards when the last gather began
        self.gathered_versions: tuple[int, ...] | None = None
        """Versions of the shards that the unsharded parameters were gathered from; None if these are not valid."""
        self.overwrites = True
        """True if a gather writes to the unsharded buffer."""

    @property
    def versions(self) -> tuple[int, ...]:
        """For each shard, a number that increases with each in-place write to it."""
        return tuple(map(_VERSION, self._params))

    def read_ahead(self) -> None:
        """Start to read the shards if they are not in memory. Call it shortly before a gather."""
        if not self.is_current:
            self._storage.read_ahead()

    def forget_ahead(self) -> None:
        """Free the data that was read ahead for a gather that did not start."""
        self._storage.note_sent()

    @property
    def disk_failures(self) -> DiskFailures | None:
        """The failures of the disk that stores the shards; None if the shards are not on a disk."""
        return self._storage.failures

    @property
    def has_shards_alone(self) -> bool:
        """See `ShardStorage.is_alone`."""
        return self._storage.is_alone

    @property
    def is_current(self) -> bool:
        """True if the unsharded buffer was kept and still holds the current values of every rank."""
        return self.gathered_versions == tuple(map(_VERSION, self._params))

    def invalidate(self) -> None:
        """Mark the unsharded parameters as invalid, because their memory was freed."""
        self.gathered_versions = None

    def note_changed_shards(self) -> None:
        """Force an all-gather at the next use. Shards of some rank have changed, possibly without a new version."""
        self.invalidate()
        self._sent_versions = None

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, into_shared: bool) -> Pending:
        """Start to fill the unsharded buffer. The groups of a unit gather concurrently."""
        shards = self.shards_to_send()
        return self._transport.all_gather(unsharded.receive, shards, origin=origin, into_shared=into_shared)

    def shards_to_send(self) -> list[Tensor]:
        """Return the current shards, for a gather that starts now."""
        versions = tuple(map(_VERSION, self._params))
        parts, self._sent = self._storage.to_send(self._scratch, changed=self._sent_versions != versions)
        self._sent_versions = versions
        return parts

    @property
    def joint_channel(self) -> Channel | None:
        """A channel that sends the messages of several groups together; None if this gather needs a separate call."""
        transport = self._transport
        if type(self) is not Gather or not isinstance(transport, Channel):
            return None
        return transport if isinstance(transport.collectives, NativeCollectives) else None

    def finish(self, unsharded: UnshardedBuffer) -> None:
        """Copy the received pack into the parameters. Call it when the gather has ended."""
        if self._sent is not None:
            self._scratch.give(self._sent)
            self._sent = None
        if self._storage.plan.is_on_disk:
            self._storage.note_sent()
        unsharded.unpack()
        self.gathered_versions = self._sent_versions  # not `versions`: shards may have changed since the start

    def note_current(self) -> None:
        """Record that the unsharded parameters hold the current values of every rank."""
        self.gathered_versions = self.versions

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of this rank's secondary shards, if groups of consecutive ranks keep parameters unsharded together."""
        return 0

    def release_secondary(self) -> None:
        """Free the secondary shards."""


class TwoLevelGather(Gather):
    """Gathers across groups of consecutive ranks, then within each. The first is skipped if its result is valid."""

    is_two_level = True

    def __init__(
        self, params: Sequence[ShardedParam], storage: ShardStorage, transport: TwoLevelGathers, scratch: Pool
    ) -> None:
        super().__init__(params, storage, transport, scratch)
        self._two_level = transport
        self._secondary_versions: tuple[int, ...] | None = None

    def note_changed_shards(self) -> None:
        """See `Gather.note_changed_shards`. Secondary shards also become invalid."""
        super().note_changed_shards()
        self._secondary_versions = None

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, into_shared: bool) -> Pending:
        if self.secondary_nbytes and self._secondary_versions == self.versions:
            return self._two_level.gather_within(unsharded.receive, origin=origin)
        self._secondary_versions, versions = None, self.versions  # they are still the earlier ones if this start fails
        pending = super().start(unsharded, origin, into_shared=False)
        self._secondary_versions = versions
        return pending

    @property
    def secondary_nbytes(self) -> int:
        return self._two_level.secondary_nbytes

    def release_secondary(self) -> None:
        self._two_level.release()


class LocalGather(Gather):
    """A gather without communication, for replicated parameters. It copies them if their dtype or device differs."""

    def __init__(
        self, params: Sequence[ShardedParam], storage: ShardStorage, transport: Gathers, scratch: Pool
    ) -> None:
        super().__init__(params, storage, transport, scratch)
        self.overwrites = not storage.plan.lives_in_unsharded

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, into_shared: bool) -> Pending:
        """See `Gather.start`. Nothing is sent."""
        self._sent_versions = self.versions
        if not self._storage.plan.lives_in_unsharded:
            unsharded.flat.copy_(self._storage.memory, non_blocking=True)
            if self._storage.plan.memory.offloaded:
                transfers.note("cpu", "parameters", arrived=unsharded.flat.nbytes)
        return Pending()

    def finish(self, unsharded: UnshardedBuffer) -> None:
        self.gathered_versions = self._sent_versions


def gather_for(params: Sequence[ShardedParam], storage: ShardStorage, transports: GroupTransports) -> Gather:
    """Return the gather for the placements of a group."""
    if not storage.plan.shards_optimizer:
        return LocalGather(params, storage, transports.gathers, transports.scratch)
    if isinstance(transports.gathers, TwoLevelGathers):
        return TwoLevelGather(params, storage, transports.gathers, transports.scratch)
    return Gather(params, storage, transports.gathers, transports.scratch)
