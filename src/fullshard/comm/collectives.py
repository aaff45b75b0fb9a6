"""Collectives over one process group, and its channels. Subclasses choose the transport.

    Collectives
    ├── PairwiseCollectives              sends and receives between all pairs, in place: gloo
    │   └── SharedMemoryCollectives      through shared memory, if all ranks are on one host
    │       └── PretendedCollectives     the same with simulated peers: dry runs of CPU ranks
    └── NativeCollectives                the backend's own, coalesced: NCCL, and the fake backend

`Collectives` counts and records every call, and compares fingerprints between ranks if the backend supports this. NCCL
does not: there `liveness/watchdog.py` detects ranks that make different calls. If a rank is lost, the error names it.
All communication of this package over a process group uses this class.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import address, all_gather_rows
from fullshard.comm.fingerprint import fingerprint, mismatch
from fullshard.comm.transport import PartSums, Pending, TermName, Transport
from fullshard.device.current import has_accelerator, mark_here, stamp_here
from fullshard.errors import FullshardError, RankLostError, RankMismatchError, named_ranks
from fullshard.liveness.rank_progress import GroupProgress, here
from fullshard.liveness.watchdog import PeerGoneError, lost
from fullshard.policy.switches import switches
from fullshard.tape.context import Kept
from fullshard.tape.recorder import Event, Origin, Phase, active

T = TypeVar("T")

_FIRST_TAG = 1 << 24  # far from the tags of users' own messages, which are small
_FIRST_TAG_IN_CALLS = 1 << 30  # far from the tags that are reserved before calls


@dataclass(slots=True, eq=False)
class Call:
    """A collective that is being started."""

    name: str
    origin: Origin
    tensors: int
    nbytes: int  # equal on all ranks
    sent_nbytes: int  # by this rank to all other ranks
    messages: int  # sent by this rank
    how: str = ""  # the variant, if it may differ between ranks

    @property
    def compared_origin(self) -> Origin:
        """The origin, with a note of the variant, for comparison between ranks."""
        if not self.how:
            return self.origin
        return self.origin._replace(note=", ".join(filter(None, (self.how, self.origin.note))))


class Collectives(GroupProgress, ABC):
    """All communication over one process group. Subclasses move the data; this class counts, records and compares."""

    is_queued = False  # see `Transport`
    compares = True  # whether calls through channels compare fingerprints
    is_of_accelerator = False  # True if it keeps tensors of one accelerator, and is recreated for other accelerators

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        super().__init__(f"{group.group_name} of {ranks}, {type(self).__name__}", ranks)
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._next_tag = _FIRST_TAG
        self._next_tag_in_calls = _FIRST_TAG_IN_CALLS
        self._channels: dict[str, Channel] = {}
        self._uncompared: deque[Callable[[], list[bytes]]] = deque()  # fingerprints, in the order of the collectives
        self._linked: weakref.WeakSet[Collectives] = weakref.WeakSet()
        here.register(self)

    def link(self, others: Iterable[Collectives]) -> None:
        """Link groups that serve the same units: their waits also end if ranks of this group make different calls."""
        self._linked.update(other for other in others if other is not self)

    def channel(self, tensors: int, *, variants: int = 1) -> Channel:
        """Create a channel for calls with up to `tensors` tensors.

        Args:
            tensors: The maximum number of tensors of a call.
            variants: The number of sets of message sizes with separate tags, see `Channel.variant`.
        """
        return Channel(self, 2 * tensors, variants)

    def channel_for(self, purpose: str, tensors: int, *, variants: int = 1) -> Channel:
        """Return the channel of `purpose`, one per process group. The first call creates it."""
        if purpose not in self._channels:
            self._channels[purpose] = self.channel(tensors, variants=variants)
        return self._channels[purpose]

    def reserve_tags(self, count: int) -> int:
        """Reserve `count` unique tags of this group, and return the first one. Ranks must do so in the same order."""
        tag, self._next_tag = self._next_tag, self._next_tag + count
        return tag

    def reserve_tags_in_call(self, count: int) -> int:
        """Reserve tags in a call. Their range is separate, because the call may fail on some ranks before this."""
        tag, self._next_tag_in_calls = self._next_tag_in_calls, self._next_tag_in_calls + count
        return tag

    def rank_shared_storages(self, sizes: Sequence[int], plan: str | None) -> list[torch.UntypedStorage] | None:
        """Return storages of `sizes` bytes that all ranks share. This is a collective if ranks can share memory.

        Args:
            sizes: The bytes of each storage.
            plan: A description of the use of the storages.

        Returns:
            An empty list if ranks cannot share memory, or if `plan` differs between ranks. None if `plan` is None on
            any rank.
        """
        return []

    def renew(self) -> None:
        """Make the group usable again after ranks have made different calls.

        Every rank of the group must call it. Pending collectives must not be waited for afterwards.

        Raises:
            RankLostError: A rank is lost, so the group cannot be used again.
        """
        if isinstance(self.broken, RankLostError):
            raise self.broken
        self.broken = None
        self._uncompared.clear()
        self.unsent.clear()
        self.started = 0

    def close(self) -> None:
        """Close resources that were opened for the process group, which no longer exists."""

    # -- synchronous collectives of small messages --------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], source: int, *, origin: Origin) -> None:
        """Broadcast the values of rank `source` (of this group) in every tensor, and wait for them."""
        nbytes = _nbytes(tensors)

        def send() -> None:
            for tensor in tensors:
                sent = tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor  # gloo lacks int16
                dist.broadcast(sent, group=self.group, group_src=source)

        sent_nbytes = nbytes if self.rank == source else 0
        self._run(Call("broadcast", origin, len(tensors), nbytes, sent_nbytes, len(tensors)), send)

    def gather_rows(self, own: Tensor, *, origin: Origin) -> Tensor:
        """Gather every rank's `own`, 1-D and of one size, as the rows of a matrix in rank order."""
        rows = own.new_empty(self.world, own.numel())
        nbytes = own.nbytes * (self.world - 1)
        call = Call("all_gather", origin, 1, rows.nbytes, nbytes, self.world - 1)
        self._run(call, lambda: all_gather_rows(rows, own.contiguous(), self.group))
        return rows

    def combine(self, tensor: Tensor, how: dist.ReduceOp.RedOpType, *, origin: Origin) -> None:
        """Reduce `tensor` in place over ranks, for example to the sum or maximum, with the backend's all-reduce."""
        nbytes = tensor.nbytes * 2 * (self.world - 1) // self.world
        call = Call("all_reduce", origin, 1, tensor.nbytes, nbytes, 2 * (self.world - 1))
        self._run(call, lambda: dist.all_reduce(tensor, op=how, group=self.group))

    def gather_objects(self, own: Any, *, origin: Origin, name: str = "all_gather_object") -> list[Any]:
        """Gather every rank's `own`, pickled for transport, in rank order."""
        every: list[Any] = [None] * self.world
        call = Call(name, origin, 0, 0, 0, self.world - 1)
        self._run(call, lambda: dist.all_gather_object(every, own, group=self.group))
        return every

    def broadcast_object(self, own: Any, source: int, *, origin: Origin) -> Any:
        """Broadcast the `own` of rank `source` (of this group), pickled for transport."""
        box = [own]
        call = Call("broadcast_object", origin, 0, 0, 0, self.world - 1 if self.rank == source else 0)
        self._run(call, lambda: dist.broadcast_object_list(box, group=self.group, group_src=source))
        return box[0]

    def barrier(self, name: str, *, origin: Origin) -> None:
        """Wait until all ranks have reached the operation `name`, which communicates without this class.

        Return immediately if the backend cannot compare fingerprints.

        Raises:
            RankMismatchError: A rank has reached another operation.
        """
        self._run(Call(name, origin, 0, 0, 0, 0), lambda: None, records=False)

    def _run(self, call: Call, send: Callable[[], T], *, records: bool = True) -> T:
        if self.broken is not None:
            raise self.broken
        self.started += 1
        event = self._event(call) if records else None
        try:
            agree = self._compare(call, alone=True)
            with here.waiting(call.name, call.origin, self if agree is not None else None, self.started):
                if agree is not None:
                    agree()
                sent = send()
        except PeerGoneError as gone:
            raise self._lost(gone, call) from gone
        if event is not None:
            if event.began is not None:
                event.ended = stamp_here()
            event.finish()
        return sent

    # -- for channels -------------------------------------------------------------------------------------------------

    def start(
        self, call: Call, start: Callable[..., Callable[[], None] | None], *args: Any, arrives: bool = False
    ) -> Pending:
        """Start a collective with `start(*args)`. `Pending.wait` compares `call` between ranks and names a lost peer.

        Args:
            call: The description of the collective.
            start: A function that starts it, and returns a function that waits for it, or None.
            args: The arguments of `start`. The last one is the first tag.
            arrives: Whether `Pending.has_arrived` should test for the data, if the backend supports this.
        """
        if self.broken is not None:
            raise self.broken
        self.started = number = self.started + 1
        try:
            event = None if active.recorder is None else self._record(call)
            agree = self._compare(call) if self.compares else None
            finish = start(*args)
            if event is not None:
                _note_launched(event)
        except PeerGoneError as gone:
            raise self._lost(gone, call) from gone
        if self.is_queued:
            if has_accelerator() and (mark := mark_here()) is not None:
                here.queue(call.name, call.origin, mark)
            return _QUEUED if finish is None and event is None else Pending(finish, event, _always)

        def agree_and_finish() -> None:
            here.enter(call.name, call.origin, self if agree is not None else None, number)
            try:
                if agree is not None:
                    agree()
                if finish is not None:
                    finish()
            except RankMismatchError:
                _never_finished.get_or_make(id(finish), lambda: finish)
                raise
            except PeerGoneError as gone:
                _never_finished.get_or_make(id(finish), lambda: finish)
                raise self._lost(gone, call) from gone
            finally:
                here.leave()

        arrival = self.arrival(args[-1]) if arrives else None
        return Pending(agree_and_finish, event, arrival or (lambda: False))

    def _compare(self, call: Call, *, alone: bool = False) -> Callable[[], None] | None:
        """Send the fingerprint of `call`. The returned function waits for those of the other ranks and compares."""
        if self.world == 1 or not switches.compares_ranks:
            return None
        local = fingerprint(call.name, call.compared_origin, call.tensors, call.nbytes)
        received = self._exchange_fingerprints(local, alone=alone)
        if received is None:
            return None
        self._uncompared.append(received)
        return partial(self._agree, received)

    def _agree(self, received: Callable[[], list[bytes]]) -> None:
        """Compare fingerprints up to `received`, oldest first, so that all ranks find the same difference."""
        while self.broken is None and received in self._uncompared:
            self.broken = mismatch(self._uncompared.popleft()(), self.ranks)
            if self.broken is not None:
                self._break_linked(self.broken)
        if self.broken is not None:
            raise self.broken

    def _break_linked(self, error: FullshardError) -> None:
        """Mark the linked groups as broken by `error`, and notify their ranks with a fingerprint."""
        name = f"to raise RankMismatchError, since {named_ranks(self.ranks)} differ"
        for other in self._linked:
            if other.broken is None and other.world > 1:
                other.broken = error
                with suppress(PeerGoneError):
                    other.leave(fingerprint(name, Origin("", Phase.IDLE), 0, 0))

    def leave(self, last: bytes) -> None:
        """Send `last` in place of the next fingerprint, without waiting."""
        received = self._exchange_fingerprints(last, alone=True)
        if received is not None:
            self._keep_unread(received)

    def _keep_unread(self, received: Callable[[], list[bytes]]) -> None:
        """Keep the memory of messages that this rank does not wait for."""
        _never_finished.get_or_make(id(received), lambda: received)

    def _lost(self, gone: PeerGoneError, call: Call) -> FullshardError:
        if self.broken is None:  # otherwise the rank has ended because it raised the same error
            with here.waiting(call.name, call.origin):
                self.broken = lost(self.ranks[gone.peer], here.now()[0])
        return self.broken

    def _exchange_fingerprints(self, local: bytes, *, alone: bool) -> Callable[[], list[bytes]] | None:
        """Send this rank's fingerprint to all. The returned function waits for all of them, in rank order.

        Return None if the backend does not support this. Then only the watchdog and timeouts detect a mismatch.

        Args:
            local: The fingerprint of this rank.
            alone: Whether it needs a separate message, because no message of a channel follows.
        """
        return None

    def arrival(self, tag: int) -> Callable[[], bool] | None:
        """Return a non-blocking test of whether all data of the last collective has arrived; None if not supported."""
        return None

    def _record(self, call: Call) -> Event | None:
        return self._event(call)

    def _event(self, call: Call) -> Event | None:
        recorder = active.recorder
        if recorder is None:
            return None
        stream = "gather" if call.name == "all_gather" else "reduce"
        event = Event(
            call.name, call.origin, stream, sent_bytes=call.sent_nbytes, messages=call.messages, ranks=self.ranks
        )
        if self.is_queued and recorder.reads_streams:
            event.began = stamp_here()
        return recorder.add(event)

    def gather_into_shared(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int
    ) -> Callable[[], None] | None:
        """Like `all_gather`, for full tensors in shared memory."""
        return self.all_gather(wholes, parts, tag)

    @abstractmethod
    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None] | None:
        """Start `Gathers.all_gather`, and return a function that waits for it; None if the host need not wait.

        The methods below do the same for their collectives.
        """

    @abstractmethod
    def reduce_scatter(self, of: PartSums, tag: int) -> Callable[[], None] | None: ...

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None] | None: ...

    @abstractmethod
    def all_to_all(self, receive: Sequence[Tensor], send: Sequence[Tensor], tag: int) -> Callable[[], None] | None: ...


class Channel(Transport):
    """Messages for one purpose over a process group, with tags that no other channel uses.

    Some ranks may create more channels than others, for a model that they do not use. So tags are reserved later: by
    `reserve_tags` once the ranks have compared their models, or in the first call.

    Args:
        collectives: The collectives of the process group.
        tags: The number of tags per variant: two per tensor, because an all-reduce sends two messages.
        variants: The number of sets of message sizes with separate tags.
    """

    def __init__(self, collectives: Collectives, tags: int, variants: int = 1) -> None:
        self.collectives = collectives
        self.world = collectives.world
        self.rank = collectives.rank
        self.is_queued = collectives.is_queued
        self._tags = tags
        self._variants = variants

    @cached_property
    def _first_tag(self) -> int:
        return self.collectives.reserve_tags_in_call(self._tags * self._variants)

    def reserve_tags(self) -> None:
        """Reserve the tags, unless they are reserved already. Ranks must do so in the same order."""
        if "_first_tag" not in vars(self):
            self._first_tag = self.collectives.reserve_tags(self._tags * self._variants)

    def variant(self, text: str) -> Channel:
        """Return the channel for the variant `text` of messages; an empty text is the normal variant.

        Ranks with gradients of different parameters send messages of different sizes. gloo terminates a process that
        receives more bytes than expected. So variants have different tags, except for collisions of their checksums.
        """
        if not text or self._variants == 1:
            return self
        number = 1 + crc32(text.encode()) % (self._variants - 1)
        channel = Channel(self.collectives, self._tags)
        channel._first_tag = self._first_tag + number * self._tags
        return channel

    def _tag(self, origin: Origin) -> int:
        return self.variant(origin.note)._first_tag if origin.note else self._first_tag

    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, into_shared: bool = False
    ) -> Pending:
        collectives, others = self.collectives, self.world - 1
        how, begin = (
            ("into shared memory", collectives.gather_into_shared) if into_shared else ("", collectives.all_gather)
        )
        call = Call(
            "all_gather",
            origin,
            len(receive),
            sum(map(_NBYTES, receive)),
            sum(map(_NBYTES, send)) * others,
            len(send) * others,
            how,
        )
        tag = self._tag(origin) if origin.note else self._first_tag
        return collectives.start(call, begin, receive, send, tag)

    def reduce_scatter(self, of: PartSums, *, origin: Origin) -> Pending:
        collectives, tag = self.collectives, self._tag(origin) if origin.note else self._first_tag
        nbytes, messages = sum(map(_NBYTES, of.wholes)), len(of.sums) * (self.world - 1)
        call = Call("reduce_scatter", origin, len(of.wholes), nbytes, nbytes - sum(map(_NBYTES, of.sums)), messages)
        return collectives.start(call, collectives.reduce_scatter, of, tag, arrives=True)

    def all_reduce(
        self, tensors: Sequence[Tensor], divisor: float, *, origin: Origin, names: Sequence[TermName] = ()
    ) -> Pending:
        collectives, tag = self.collectives, self._tag(origin)
        nbytes, others = _nbytes(tensors), self.world - 1
        sent_nbytes = nbytes * 2 * others // self.world
        return collectives.start(
            Call("all_reduce", origin, len(tensors), nbytes, sent_nbytes, 2 * len(tensors) * others),
            collectives.all_reduce,
            tensors,
            divisor,
            tag,
        )

    def all_to_all(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, common_nbytes: int, origin: Origin
    ) -> Pending:
        collectives, rank, tag = self.collectives, self.rank, self._tag(origin)
        sent = [part for other, part in enumerate(send) if other != rank and part.numel()]
        copy_own([receive[rank]], [send[rank]])
        return collectives.start(
            Call("all_to_all", origin, len(send), common_nbytes, _nbytes(sent), len(sent)),
            collectives.all_to_all,
            receive,
            send,
            tag,
        )


def _always() -> bool:
    return True


_QUEUED = Pending(has_arrived=_always)


def _note_launched(event: Event) -> None:
    """Record the time at which the program continues after starting a collective."""
    event.launched = time.perf_counter()
    if event.began is not None:
        event.ended = stamp_here()


# Collectives that other ranks did not join. Gloo may write to their tensors while the process group exists.
_never_finished: Kept[int, object] = Kept("collectives that never finished")


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(_NBYTES, tensors))


_NBYTES = attrgetter("nbytes")


def copy_own(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy this rank's parts to their positions, unless they are there already."""
    for place, part in zip(places, parts, strict=True):
        if address(place) != address(part):
            place.copy_(part)


def divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide sums in place."""
    if divisor != 1 and tensors:
        torch._foreach_div_(list(tensors), divisor)
