"""The seam to the wire: grouped all-gather, reduce-scatter, all-reduce and all-to-all over one process group.

A call moves several tensors as one. All tensors are 1-D and contiguous, and are read and written where they lie.
Sums are taken in rank order 0..N-1 and divided once, so that a sum has the same bits whichever collective carried it.

    Collectives
    ├── PairwiseCollectives              grouped isend/irecv straight into place: gloo
    │   └── SharedMemoryCollectives      through memory that all ranks see, where they are on one host
    └── NativeCollectives                the backend's own, coalesced: NCCL, and the fake backend
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import all_gather_each, all_reduce_each, group_timeout_s, reduce_scatter_each
from fullshard.comm.fingerprint import claim, compares_ranks, mismatch
from fullshard.comm.neighbours import (
    Block,
    CannotShareError,
    Key,
    Neighbours,
    connect,
    nbytes_end_to_end,
)
from fullshard.device.memory import Pool
from fullshard.errors import RankLostError, RankMismatchError
from fullshard.layout.shard_spec import owned
from fullshard.liveness.watchdog import PeerGoneError, lost
from fullshard.liveness.whereabouts import here
from fullshard.tape.recorder import Event, Origin, Phase, active_recorder

__all__ = [
    "Collectives",
    "NativeCollectives",
    "PairwiseCollectives",
    "Pending",
    "SharedMemoryCollectives",
    "collectives_for",
]

_log = logging.getLogger(__name__)

_FIRST_TAG = 1 << 24  # far from the small numbers that users give their own messages
_CLAIM_TAGS = 1 << 16  # more than there are collectives under way at once

_Works = list[tuple[int, dist.Work]]  # messages under way, by the peer


class Pending:
    """A started collective. Its tensors may be used after `wait()`, which may be called again.

    Args:
        finish: returns when the result is in place.
        event: for the record.
        has_come: tells whether `wait()` is sure not to wait for other ranks. Not every collective knows.
    """

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        event: Event | None = None,
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        self._finish = finish
        self._event = event
        self.has_come = has_come

    def wait(self) -> None:
        """Return when the result is in place.

        Raises:
            RankMismatchError: another rank does something else. The group cannot be used any more.
            RankLostError: another rank's process is gone. Nor can it then.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if self._event is not None:
            self._event.finish()
            self._event = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective that is being started."""

    name: str
    origin: Origin
    tensors: int
    nbytes: int  # as all ranks count them
    sent_nbytes: int  # by this rank, to all others together
    messages: int  # of this rank
    how: str = ""  # where ranks could differ in it

    @property
    def claimed_origin(self) -> Origin:
        """The origin, with a note of how it is done, for others to compare."""
        notes = filter(None, (self.how, self.origin.note))
        return replace(self.origin, note=", ".join(notes)) if self.how else self.origin


class Collectives(ABC):
    """Grouped collectives over one process group. Subclasses move the data; this class counts and records."""

    is_queued = False  # whether calls are carried out in order, with no need for the host to wait in between

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._next_tag = _FIRST_TAG
        self._tags_of: dict[str, int] = {}
        self._claimed: deque[Callable[[], list[bytes]]] = deque()  # not compared yet, in the order of the collectives
        self.broken: RankMismatchError | RankLostError | None = None  # why the group cannot be used any more

    def reserve_tags(self, count: int) -> int:
        """The first of `count` tags that no other call on this group uses. Ranks must reserve in the same order."""
        tag, self._next_tag = self._next_tag, self._next_tag + count
        return tag

    def tags_of(self, purpose: str, count: int) -> int:
        """The first of the `count` tags that belong to `purpose`: reserved when they are first asked for."""
        if purpose not in self._tags_of:
            self._tags_of[purpose] = self.reserve_tags(count)
        return self._tags_of[purpose]

    def common_storages(self, sizes: Sequence[int], plan: str) -> list[torch.UntypedStorage]:
        """Storages that all ranks write and read, of `sizes` in bytes; none if ranks cannot share memory.

        A collective, unless they cannot. Nor are there any if `plan`, what they are for, is not the same on all ranks.
        """
        return []

    def all_gather(
        self, wholes: Sequence[Tensor], parts: Sequence[Tensor], *, tag: int, origin: Origin, in_common: bool = False
    ) -> Pending:
        """Every rank's part of each tensor, end to end in rank order, in the corresponding whole.

        Args:
            wholes: each of `world * part.numel()` elements. A part may lie in its own place in the whole.
            parts: this rank's.
            tag: the first of `len(parts)` reserved tags.
            origin: for the record.
            in_common: the wholes lie in `common_storages`, at the same place on every rank, and this rank does not need
                any more what lies there now.
        """
        others, nbytes = self.world - 1, _nbytes(wholes)
        how, start = ("in common", self._gather_in_common) if in_common else ("", self._all_gather)
        return self._start(
            _Call("all_gather", origin, len(wholes), nbytes, _nbytes(parts) * others, len(parts) * others, how),
            lambda: start(wholes, parts, tag),
        )

    def reduce_scatter(
        self,
        sums: Sequence[Tensor],
        wholes: Sequence[Tensor],
        part_numels: Sequence[int],
        divisor: float,
        *,
        tag: int,
        origin: Origin,
    ) -> Pending:
        """The sum over ranks of this rank's part of each whole, divided by `divisor`, in the corresponding sum.

        Rank r's part of a whole is `whole[r * n : (r + 1) * n]` for its `n` of `part_numels`: the last parts may be
        short or empty. The wholes must stay unchanged until `wait()` returns.
        """
        nbytes, messages = _nbytes(wholes), len(sums) * (self.world - 1)
        pending = self._start(
            _Call("reduce_scatter", origin, len(wholes), nbytes, nbytes - _nbytes(sums), messages),
            lambda: self._reduce_scatter(sums, wholes, part_numels, divisor, tag),
        )
        pending.has_come = self._arrival(tag) or pending.has_come
        return pending

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, *, tag: int, origin: Origin) -> Pending:
        """The sum over ranks of each tensor, divided by `divisor`, in its place. Uses two tags a tensor."""
        nbytes, others = _nbytes(tensors), self.world - 1
        sent_nbytes = nbytes * 2 * others // self.world
        return self._start(
            _Call("all_reduce", origin, len(tensors), nbytes, sent_nbytes, 2 * len(tensors) * others),
            lambda: self._all_reduce(tensors, divisor, tag),
        )

    def all_to_all(
        self, rooms: Sequence[Tensor], parts: Sequence[Tensor], *, common_nbytes: int, tag: int, origin: Origin
    ) -> Pending:
        """What every rank has for this one, in the corresponding room.

        Args:
            rooms: one a rank, each as large as what that rank has for this one; that may be nothing.
            parts: what this rank has for each. Its own may lie in its own room; several may be the same tensor.
            common_nbytes: bytes of what is exchanged as all ranks count them, who otherwise have nothing to compare.
            tag: one reserved tag.
            origin: for the record.
        """
        sent = [part for rank, part in enumerate(parts) if rank != self.rank and part.numel()]
        _keep_own([rooms[self.rank]], [parts[self.rank]])
        return self._start(
            _Call("all_to_all", origin, len(parts), common_nbytes, _nbytes(sent), len(sent)),
            lambda: self._all_to_all(rooms, parts, tag),
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int, *, origin: Origin) -> None:
        """Rank `source`'s (of this group) values in every tensor, before this returns."""
        nbytes = _nbytes(tensors) if self.rank == source else 0
        event = self._record(_Call("broadcast", origin, len(tensors), nbytes, nbytes, len(tensors)))
        with here.waiting("broadcast", origin):
            for tensor in tensors:
                sent = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # gloo knows no 8-bit floats
                dist.broadcast(sent, group=self.group, group_src=source)
        if event is not None:
            event.finish()

    def _start(self, call: _Call, start: Callable[[], Callable[[], None]]) -> Pending:
        """What `start()` has begun. It is waited for once all ranks agree on `call`; a peer that is gone is named."""
        if self.broken is not None:
            raise self.broken
        try:
            event = self._record(call)
            agree = self._compare(call)
            finish = start()
        except PeerGoneError as gone:
            raise self._lost(gone, call) from gone
        if self.is_queued:
            here.queue(call.name, call.origin)
            return Pending(finish, event, has_come=lambda: True)

        def agree_and_finish() -> None:
            here.enter(call.name, call.origin)
            try:
                if agree is not None:
                    agree()
                finish()
            except RankMismatchError:
                _never_finished.append(finish)
                raise
            except PeerGoneError as gone:
                _never_finished.append(finish)
                raise self._lost(gone, call) from gone
            finally:
                here.leave()

        return Pending(agree_and_finish, event)

    def _compare(self, call: _Call) -> Callable[[], None] | None:
        """Tell the other ranks what is being started. What is returned waits for what they tell."""
        if self.world == 1 or not compares_ranks():
            return None
        received = self._exchange_claims(claim(call.name, call.claimed_origin, call.tensors, call.nbytes))
        if received is None:
            return None
        self._claimed.append(received)
        return partial(self._agree, received)

    def _agree(self, received: Callable[[], list[bytes]]) -> None:
        """Compare claims up to `received`, oldest first: all ranks find the same difference, whatever they wait for."""
        while self.broken is None and received in self._claimed:
            self.broken = mismatch(self._claimed.popleft()(), self._ranks)
        if self.broken is not None:
            raise self.broken

    def _lost(self, gone: PeerGoneError, call: _Call) -> RankLostError:
        with here.waiting(call.name, call.origin):
            self.broken = lost(self._ranks[gone.peer], here.now()[0])
        return self.broken

    def _exchange_claims(self, mine: bytes) -> Callable[[], list[bytes]] | None:
        """Send this rank's claim to all. What is returned waits for those of all ranks, and gives them in rank order.

        None where the backend has no way to do so: a mismatch is then for a time-out to find.
        """
        return None

    def _arrival(self, tag: int) -> Callable[[], bool] | None:
        """What tells, without waiting, whether all has come that the collective started last waits for; if anything."""
        return None

    def _record(self, call: _Call) -> Event | None:
        recorder = active_recorder()
        if recorder is None:
            return None
        lane = "gather" if call.name == "all_gather" else "reduce"
        event = Event(
            call.name, call.origin, lane, sent_bytes=call.sent_nbytes, messages=call.messages, ranks=self._ranks
        )
        return recorder.add(event)

    def _gather_in_common(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        return self._all_gather(wholes, parts, tag)

    @abstractmethod
    def _all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]: ...

    @abstractmethod
    def _reduce_scatter(
        self, sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], divisor: float, tag: int
    ) -> Callable[[], None]: ...

    @abstractmethod
    def _all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]: ...

    @abstractmethod
    def _all_to_all(self, rooms: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]: ...


class PairwiseCollectives(Collectives):
    """Every rank sends to every other what that one needs, straight from where it lies into its place.

    gloo's own all-gather and reduce-scatter go through buffers of their own, and its reduce-scatter sums everything
    everywhere. Each message has a tag of its own, since messages of several units are under way at once.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._scratch = Pool(torch.device("cpu"))
        self._claim_tag = self.reserve_tags(_CLAIM_TAGS)
        self._claims = 0

    def _peers(self) -> list[int]:
        """The other ranks, nearest above first, so that not all ranks send to the same one at once."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _exchange_claims(self, mine: bytes) -> Callable[[], list[bytes]]:
        tag = self._claim_tag + self._claims % _CLAIM_TAGS
        self._claims += 1
        return self._exchange(mine, tag)

    def _exchange(self, mine: bytes, tag: int) -> Callable[[], list[bytes]]:
        """Send `mine`, of the same size on all ranks, to all. What is returned waits for those of all ranks."""
        told = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rooms = list(torch.empty(self.world, len(mine), dtype=torch.uint8))
        rooms[self.rank] = told
        works: _Works = [work for peer in self._peers() for work in self._receive(rooms[peer], peer, tag)]
        works += [work for peer in self._peers() for work in self._send(told, peer, tag)]

        def received() -> list[bytes]:
            _wait_all(works)
            return [room.numpy().tobytes() for room in rooms]

        return received

    def _send(self, tensor: Tensor, rank: int, tag: int) -> _Works:
        try:
            work = dist.isend(tensor, group=self.group, group_dst=rank, tag=tag) if tensor.numel() else None
        except RuntimeError as error:
            _raise_if_gone(rank, error)
            raise
        return [] if work is None else [(rank, work)]

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> _Works:
        try:
            work = dist.irecv(tensor, group=self.group, group_src=rank, tag=tag) if tensor.numel() else None
        except RuntimeError as error:
            _raise_if_gone(rank, error)
            raise
        return [] if work is None else [(rank, work)]

    def _all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        works: _Works = []
        places = [whole.view(self.world, -1) for whole in wholes]
        for peer in self._peers():
            for i, place in enumerate(places):
                works += self._receive(place[peer], peer, tag + i)
        for peer in self._peers():
            for i, part in enumerate(parts):
                works += self._send(part, peer, tag + i)
        _keep_own([place[self.rank] for place in places], parts)
        return lambda: _wait_all(works)

    def _reduce_scatter(
        self, sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], divisor: float, tag: int
    ) -> Callable[[], None]:
        works: _Works = []
        peers = self._peers()
        received: list[dict[int, Tensor]] = [
            {peer: self._scratch.take(out.numel(), out.dtype) for peer in peers} for out in sums
        ]
        for peer in peers:
            for i, room in enumerate(received):
                works += self._receive(room[peer], peer, tag + i)
        for peer in peers:
            for i, (whole, n) in enumerate(zip(wholes, part_numels, strict=True)):
                works += self._send(whole[peer * n : (peer + 1) * n], peer, tag + i)

        def finish() -> None:
            _wait_all(works)
            for out, whole, n, room in zip(sums, wholes, part_numels, received, strict=True):
                mine = whole[self.rank * n : (self.rank + 1) * n]
                _sum_in_rank_order(out, [room.get(rank, mine) for rank in range(self.world)], divisor)
                for scratch in room.values():
                    self._scratch.give(scratch)

        return finish

    def _all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        part_numels = [len(owned(tensor.numel(), self.world, 0)) for tensor in tensors]
        mine = [_part(tensor, n, self.rank) for tensor, n in zip(tensors, part_numels, strict=True)]
        sums = [self._scratch.take(part.numel(), part.dtype) for part in mine]
        reduced = self._reduce_scatter(sums, tensors, part_numels, divisor, tag)

        def finish() -> None:
            reduced()
            works: _Works = []
            second = tag + len(tensors)
            for peer in self._peers():
                for i, (tensor, n) in enumerate(zip(tensors, part_numels, strict=True)):
                    works += self._receive(_part(tensor, n, peer), peer, second + i)
                    works += self._send(sums[i], peer, second + i)
            for part, total in zip(mine, sums, strict=True):
                part.copy_(total)
            _wait_all(works)
            for total in sums:
                self._scratch.give(total)

        return finish

    def _all_to_all(self, rooms: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        works = [work for peer in self._peers() for work in self._receive(rooms[peer], peer, tag)]
        works += [work for peer in self._peers() for work in self._send(parts[peer], peer, tag)]
        return lambda: _wait_all(works)


class SharedMemoryCollectives(PairwiseCollectives):
    """Every rank puts what others need where they see it, and they take it from there; claims go along.

    If not all ranks are on one host, it is pairwise after all. This turns out in the first collective, since only there
    all ranks of the group are sure to meet.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._meeting_tag = self.reserve_tags(2)
        self._plan_tag = self.reserve_tags(1)
        self._claim = b""  # goes with the collective that is being started
        self._started = 0  # collectives, which all ranks count alike: nothing is taken for what came before or after

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """The other ranks, if all are on this host. Asked first, it is a collective."""
        if self.world == 1:
            return None
        tags = iter(range(self._meeting_tag, self._meeting_tag + 2))

        def exchange(mine: bytes) -> list[bytes]:
            return self._exchange(mine, next(tags))()

        with here.waiting("meeting of the ranks on a host", Origin("", Phase.IDLE)):
            try:
                return connect(self.rank, exchange, group_timeout_s(self.group))
            except CannotShareError as obstacle:
                _log.info("ranks %s exchange messages by gloo and share no memory: %s", self._ranks, obstacle)
                return None

    def common_storages(self, sizes: Sequence[int], plan: str) -> list[torch.UntypedStorage]:
        neighbours = self.neighbours
        if neighbours is None:
            return []
        call = _Call("agreement on memory in common", Origin("", Phase.IDLE), len(sizes), sum(sizes), 0, 0)
        digest = sha256(f"{plan}{list(sizes)}".encode()).digest()
        with here.waiting(call.name, call.origin):
            try:
                plans = self._exchange(digest, self._plan_tag)()
                if not sizes or any(other != digest for other in plans):
                    return []
                neighbours.drop_free()  # what was gathered went through them, and will not any more
                collective, _ = self._next_key(0)
                return [memory.storage for memory in neighbours.common(sizes, collective)]
            except PeerGoneError as gone:
                raise self._lost(gone, call) from gone

    def _gather_in_common(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        neighbours = self.neighbours
        assert neighbours is not None, "memory in common is for neighbours"
        collective, _ = self._next_key(tag)
        free, written = (collective, tag), (collective, tag + 1)
        mine = [whole.view(self.world, -1)[self.rank] for whole in wholes]

        def write() -> None:
            with torch.no_grad():
                _copy_each(mine, parts)
            neighbours.sign(written)

        neighbours.sign(free, self._take_claim())
        neighbours.when_signed(written, _nothing)
        neighbours.when_signed(free, write)  # when nobody needs any more what lies there

        def finish() -> None:
            neighbours.await_signs(free)
            neighbours.await_signs(written)

        return finish

    def _exchange_claims(self, mine: bytes) -> Callable[[], list[bytes]]:
        neighbours = self.neighbours
        if neighbours is None:
            return super()._exchange_claims(mine)
        self._claim = mine

        def received() -> list[bytes]:
            claims = {**neighbours.next_claims(), self.rank: mine}
            return [claims[rank] for rank in range(self.world)]

        return received

    def _record(self, call: _Call) -> Event | None:
        if self.neighbours is not None and call.name != "broadcast":
            messages = (2 if call.name == "all_reduce" or call.how else 1) * (self.world - 1)
            call = replace(call, messages=messages)
        return super()._record(call)

    def _all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        neighbours = self.neighbours
        if neighbours is None:
            return super()._all_gather(wholes, parts, tag)
        key = self._next_key(tag)
        self._show(neighbours, key, dict.fromkeys(self._peers(), parts))
        places = [whole.view(self.world, -1) for whole in wholes]
        _keep_own([place[self.rank] for place in places], parts)

        def finish() -> None:
            self._take(neighbours, key, {rank: [place[rank] for place in places] for rank in range(self.world)})

        return finish

    def _reduce_scatter(
        self, sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], divisor: float, tag: int
    ) -> Callable[[], None]:
        neighbours = self.neighbours
        if neighbours is None:
            return super()._reduce_scatter(sums, wholes, part_numels, divisor, tag)
        key = self._next_key(tag)
        parts = self._parts_by_rank(wholes, part_numels)
        block = self._show(neighbours, key, parts, patiently=True)

        def finish() -> None:
            self._sum(neighbours, key, sums, parts[self.rank], divisor)
            # All have told, and whoever has not read it needs nothing more of this rank.
            block.is_due = block.about == key

        return finish

    def _arrival(self, tag: int) -> Callable[[], bool] | None:
        neighbours = self.neighbours
        return None if neighbours is None else partial(neighbours.have_told, (self._started, tag))

    def _all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        neighbours = self.neighbours
        if neighbours is None:
            return super()._all_reduce(tensors, divisor, tag)
        first = self._next_key(tag)
        second = (first[0], tag + len(tensors))
        parts = self._parts_by_rank(tensors, [len(owned(tensor.numel(), self.world, 0)) for tensor in tensors])
        mine = parts[self.rank]
        self._show(neighbours, first, parts)

        def finish() -> None:
            block = neighbours.take(nbytes_end_to_end(mine))
            sums = block.memory.tensors_like(mine)
            self._sum(neighbours, first, sums, mine, divisor)
            neighbours.tell(second, block)
            _copy_each(mine, sums)
            self._take(neighbours, second, parts)

        return finish

    def _all_to_all(self, rooms: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        neighbours = self.neighbours
        if neighbours is None:
            return super()._all_to_all(rooms, parts, tag)
        key = self._next_key(tag)
        self._show(neighbours, key, {rank: [part] for rank, part in enumerate(parts)})
        return lambda: self._take(neighbours, key, {rank: [room] for rank, room in enumerate(rooms)})

    def _next_key(self, tag: int) -> Key:
        self._started += 1
        return self._started, tag

    def _parts_by_rank(self, wholes: Sequence[Tensor], part_numels: Sequence[int]) -> dict[int, list[Tensor]]:
        """Every rank's part of each whole."""
        pairs = list(zip(wholes, part_numels, strict=True))
        return {rank: [_part(whole, n, rank) for whole, n in pairs] for rank in range(self.world)}

    def _show(
        self, neighbours: Neighbours, key: Key, parts: Mapping[int, Sequence[Tensor]], *, patiently: bool = False
    ) -> Block:
        """Put every other rank's `parts` where it can take them from, and tell. The same for several lie there once."""
        starts: dict[int, int] = {}
        shown: dict[tuple[int, ...], tuple[int, Sequence[Tensor]]] = {}
        end = 0
        for peer in self._peers():
            tensors = parts[peer]
            which = tuple(map(id, tensors))
            if which not in shown:
                shown[which] = (end, tensors)
                end += nbytes_end_to_end(tensors)
            starts[peer], _ = shown[which]
        block = neighbours.take(end, patiently=patiently)
        for start, tensors in shown.values():
            _copy_each(block.memory.tensors_like(tensors, start), tensors)
        neighbours.tell(key, block, starts, self._take_claim())
        return block

    def _take_claim(self) -> bytes:
        claim, self._claim = self._claim, b""
        return claim

    def _take(self, neighbours: Neighbours, key: Key, rooms: Mapping[int, Sequence[Tensor]]) -> None:
        """Wait for what the others show of `key`, and copy it to their `rooms`."""
        told = neighbours.told(key)
        for one in told:
            _copy_each(rooms[one.rank], one.tensors_like(rooms[one.rank]))
        neighbours.have_read(told)

    def _sum(
        self, neighbours: Neighbours, key: Key, sums: Sequence[Tensor], mine: Sequence[Tensor], divisor: float
    ) -> None:
        """Wait for what the others show of `key`, and add it to what is `mine`."""
        told = neighbours.told(key)
        terms = {**{one.rank: one.tensors_like(mine) for one in told}, self.rank: mine}
        for i, out in enumerate(sums):
            _sum_in_rank_order(out, [terms[rank][i] for rank in range(self.world)], divisor)
        neighbours.have_read(told)


class NativeCollectives(Collectives):
    """The backend's own collectives, one launch for all tensors of a call, queued on the current stream."""

    is_queued = True

    def _all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        all_gather_each([*wholes], [*parts], self.group)
        return _nothing

    def _reduce_scatter(
        self, sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], divisor: float, tag: int
    ) -> Callable[[], None]:
        # Rows missing in the last part are the one reason to copy a gradient: the backend wants equal parts.
        equal = [_padded(whole, n * self.world) for whole, n in zip(wholes, part_numels, strict=True)]
        room = [s if s.numel() == n else s.new_empty(n) for s, n in zip(sums, part_numels, strict=True)]
        reduce_scatter_each(room, equal, self.group)
        for out, total in zip(room, sums, strict=True):
            if out is not total:
                total.copy_(out[: total.numel()])
        _divide(sums, divisor)
        return _nothing

    def _all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        all_reduce_each([*tensors], self.group)
        _divide(tensors, divisor)
        return _nothing

    def _all_to_all(self, rooms: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        nothing = [parts[self.rank].new_empty(0)]  # its own is in place
        before, after = slice(self.rank), slice(self.rank + 1, None)
        received, sent = ([*tensors[before], *nothing, *tensors[after]] for tensors in (rooms, parts))
        dist.all_to_all(received, sent, group=self.group)
        return _nothing


# Of collectives that other ranks did not join: gloo may still write to their tensors, so these must stay.
_never_finished: list[Callable[[], None]] = []

_of_group: dict[tuple[dist.ProcessGroup, str], Collectives] = {}


def collectives_for(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """The collectives of `group` for tensors on `device`: always the same object, so that its tags stay apart."""
    key = (group, device.type)
    if key not in _of_group:
        pairwise = device.type == "cpu" and "gloo" in dist.get_backend_config(group)
        _of_group[key] = (SharedMemoryCollectives if pairwise else NativeCollectives)(group)
    return _of_group[key]


def _nothing() -> None:
    """What is left to do when the backend has done it all."""


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _wait_all(works: _Works) -> None:
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            _raise_if_gone(peer, error)
            raise


def _raise_if_gone(peer: int, error: RuntimeError) -> None:
    """Say that `error`, of a message to or from `peer`, means that `peer` is gone, unless it was a time-out."""
    if "Timed out" not in str(error):
        raise PeerGoneError(peer) from error


def _keep_own(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy this rank's own parts to their places, unless that is where they lie."""
    for place, part in zip(places, parts, strict=True):
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)


def _copy_each(places: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for place, tensor in zip(places, sent, strict=True):
        place.copy_(tensor)


def _part(whole: Tensor, part_numel: int, rank: int) -> Tensor:
    return whole[rank * part_numel : (rank + 1) * part_numel]


def _padded(whole: Tensor, numel: int) -> Tensor:
    return whole if whole.numel() == numel else torch.nn.functional.pad(whole, (0, numel - whole.numel()))


def _sum_in_rank_order(out: Tensor, terms: Sequence[Tensor], divisor: float) -> None:
    """`out` = (terms[0] + terms[1] + ...) / divisor, in as few passes as that order of operations allows."""
    if len(terms) == 1:
        out.copy_(terms[0])
    else:
        torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
    _divide([out], divisor)


def _divide(tensors: Sequence[Tensor], divisor: float) -> None:
    if divisor != 1:
        torch._foreach_div_(list(tensors), divisor)
