"""A parameter group's gather: from every rank's shards to the unsharded buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fullshard.comm.transport import Gathers, Pending
from fullshard.comm.two_level import TwoLevelGathers
from fullshard.device.memory import Pool
from fullshard.device.travel import travel
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_buffers import ShardStorage, UnshardedBuffer
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.sharded_param import ShardedParam
from fullshard.tape.recorder import Origin

__all__ = ["Gather", "LocalGather", "TwoLevelGather", "gather_for"]


class Gather:
    """Gathers over all ranks of the shard axis.

    Args:
        params: the group's.
        storage: where their shards rest.
        wire: what they go over.
        scratch: memory for shards that are cast to travel.
    """

    def __init__(
        self, params: Sequence[ShardedParam], storage: ShardStorage, transport: Gathers, scratch: Pool
    ) -> None:
        self._params = params
        self._storage = storage
        self._transport = transport
        self._scratch = scratch
        self._sent: Tensor | None = None  # shards in the compute dtype and on the compute device, while they travel
        self._gathered_version = -1
        self._sent_version = -1  # of the shards when the last gather began

    @property
    def version(self) -> int:
        """A number that grows whenever anybody writes to one of the shards in place."""
        return sum([param.sharded._version for param in self._params])

    def read_ahead(self) -> None:
        """Begin to have in memory what a gather sends, if it is elsewhere: one is to start soon."""
        if not self.is_current:
            self._storage.read_ahead()

    def forget_ahead(self) -> None:
        """Give back what was read ahead for a gather that did not start."""
        self._storage.note_sent()

    @property
    def disk_failures(self) -> DiskFailures | None:
        """What the disk could not do that shards rest on; None if they rest on none."""
        return self._storage.failures

    @property
    def has_shards_alone(self) -> bool:
        """See `ShardStorage.is_alone`."""
        return self._storage.is_alone

    @property
    def overwrites(self) -> bool:
        """True if a gather writes to the unsharded buffer."""
        return True

    @property
    def is_current(self) -> bool:
        """True if the unsharded buffer was kept, and still has every rank's present values."""
        return self._gathered_version >= 0 and self._gathered_version == self.version

    def invalidate(self) -> None:
        """Gather anew when unsharded parameters are needed next: their memory was given back."""
        self._gathered_version = -1

    def note_changed_shards(self) -> None:
        """Gather anew when unsharded parameters are needed next: a rank's shards are others, whatever versions say."""
        self.invalidate()
        self._sent_version = -1

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, in_common: bool) -> Pending:
        """Begin to fill the unsharded buffer. The groups of a unit gather side by side.

        Args:
            unsharded: the group's.
            origin: on whose behalf.
            in_common: the buffer is one that all ranks of the shard axis fill and read.
        """
        return self._transport.all_gather(unsharded.receive, self._to_send(), origin=origin, in_common=in_common)

    def finish(self, unsharded: UnshardedBuffer) -> None:
        """Put what came in the pack where it belongs. Call when the gather has ended."""
        if self._sent is not None:
            self._scratch.give(self._sent)
            self._sent = None
        self._storage.note_sent()
        unsharded.unpack()
        self._gathered_version = self._sent_version  # not the present one: shards may have been written to meanwhile

    def note_current(self) -> None:
        """Note that unsharded parameters have every rank's present values."""
        self._gathered_version = self.version

    def _to_send(self) -> list[Tensor]:
        version = self.version
        parts, self._sent = self._storage.to_send(self._scratch, changed=self._sent_version != version)
        self._sent_version = version
        return parts

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of this rank's secondary shards, where groups of neighbouring ranks keep parameters together."""
        return 0

    def release_secondary(self) -> None:
        """Give the secondary shards' memory back."""


class TwoLevelGather(Gather):
    """Gathers across groups of neighbouring ranks and then within each; within only, as long as nothing has changed."""

    def __init__(
        self, params: Sequence[ShardedParam], storage: ShardStorage, transport: TwoLevelGathers, scratch: Pool
    ) -> None:
        super().__init__(params, storage, transport, scratch)
        self._two_level = transport
        self._secondary_version = -1

    def note_changed_shards(self) -> None:
        """See `Gather.note_changed_shards`. Secondary shards are no longer true either."""
        super().note_changed_shards()
        self._secondary_version = -1

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, in_common: bool) -> Pending:
        if self.secondary_nbytes and self._secondary_version == self.version:
            return self._two_level.gather_within(unsharded.receive, origin=origin)
        self._secondary_version = self.version
        return super().start(unsharded, origin, in_common=False)

    @property
    def secondary_nbytes(self) -> int:
        return self._two_level.secondary_nbytes

    def release_secondary(self) -> None:
        self._two_level.release()


class LocalGather(Gather):
    """No gather, where every rank steps whole parameters: at most a cast."""

    def start(self, unsharded: UnshardedBuffer, origin: Origin, *, in_common: bool) -> Pending:
        """See `Gather.start`. Nothing is sent."""
        self._sent_version = self.version
        if not self._storage.plan.lives_in_unsharded:
            unsharded.flat.copy_(self._storage.memory, non_blocking=True)
            if self._storage.plan.memory.offloaded:
                travel.note("cpu", "parameters", arrived=unsharded.flat.nbytes)
        return Pending()

    @property
    def overwrites(self) -> bool:
        return not self._storage.plan.lives_in_unsharded

    def finish(self, unsharded: UnshardedBuffer) -> None:
        self._gathered_version = self._sent_version


def gather_for(params: Sequence[ShardedParam], storage: ShardStorage, transports: GroupTransports) -> Gather:
    """The gather of a group, as its placements have it."""
    if not storage.plan.shards_optimizer:
        return LocalGather(params, storage, transports.gathers, transports.scratch)
    if isinstance(transports.gathers, TwoLevelGathers):
        return TwoLevelGather(params, storage, transports.gathers, transports.scratch)
    return Gather(params, storage, transports.gathers, transports.scratch)
