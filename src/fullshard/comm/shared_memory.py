"""Collectives through memory that all ranks of a group share: gloo on one host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import group_timeout_s
from fullshard.comm.collectives import Call, copy_own
from fullshard.comm.pairwise import PairwiseCollectives, part_of, sum_in_rank_order
from fullshard.comm.peers import (
    CannotShareError,
    HostPeers,
    Key,
    SharedBlock,
    address_of_none,
    connect,
    nbytes_end_to_end,
)
from fullshard.comm.transport import PartSums
from fullshard.layout.shard_spec import owned
from fullshard.liveness.rank_progress import here
from fullshard.tape.recorder import Event, Origin, Phase

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_PLAN = bytes(32)
"""Sent instead of the digest of a plan by a rank without a plan."""


class _once(Generic[T]):  # noqa: N801  # a decorator
    """`functools.cached_property` without its lock, which Python 3.11 holds for all instances while the method runs.

    The method is a collective. With the lock, two ranks could deadlock if two threads of each use two groups.
    """

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method = method

    def __get__(self, instance: object, owner: type | None = None) -> T:
        value = vars(instance)[self._method.__name__] = self._method(instance)
        return value


class SharedMemoryCollectives(PairwiseCollectives):
    """Every rank writes data to shared memory, and its peers read it there. Fingerprints are sent along.

    If not all ranks are on one host, messages are pairwise instead. This is decided in the first collective, because
    all ranks of the group call it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._connect_tag = self.reserve_tags(2)
        self._plan_tag = self.reserve_tags(1)
        self._fingerprint = b""  # sent with the collective that is being started
        self._started = 0  # number of collectives, which identifies messages and is equal on all ranks

    @_once
    def peers(self) -> HostPeers | None:
        """The other ranks, if all are on this host. The first access is a collective."""
        if self.world == 1:
            return None
        with here.waiting("meeting of the ranks on a host", Origin("", Phase.IDLE), self, self.started):
            try:
                return self._connect()
            except CannotShareError as obstacle:
                _log.info("ranks %s communicate over gloo without shared memory: %s", self.ranks, obstacle)
                return None

    def _connect(self) -> HostPeers:
        """Connect to the other ranks: a collective."""
        tags = iter(range(self._connect_tag, self._connect_tag + 2))

        def exchange(local: bytes) -> list[bytes]:
            return self._exchange(local, next(tags))()

        return connect(self.rank, exchange, group_timeout_s(self.group))

    def renew(self) -> None:
        """See `Collectives.renew`. Data of unfinished collectives in shared memory is discarded."""
        super().renew()
        self.close()
        vars(self).pop("peers", None)
        self._fingerprint, self._started = b"", 0

    def end_wait(self) -> None:
        super().end_wait()
        peers = vars(self).get("peers")
        if peers is not None and self.broken is not None:
            peers.end_wait(self.broken)

    def leave(self, last: bytes) -> None:
        if "peers" not in vars(self):  # the others may wait to connect to this rank
            self._keep_unread(self._exchange(address_of_none("ranks make different calls"), self._connect_tag))
            vars(self)["peers"] = None
        super().leave(last)

    def close(self) -> None:
        """Close the connections to the peers, if there are any."""
        peers = vars(self).get("peers")
        if peers is not None:
            peers.close()

    def rank_shared_storages(self, sizes: Sequence[int], plan: str | None) -> list[torch.UntypedStorage] | None:
        peers = self.peers
        if peers is None:
            return []
        digest = _NO_PLAN if plan is None else sha256(f"{plan}{list(sizes)}".encode()).digest()
        # The fingerprint does not contain sizes, which may differ between ranks.
        call = Call("agreement on shared memory after a backward", Origin("", Phase.IDLE), 0, 0, 0, 0)
        return self._run(call, partial(self._rank_shared_storages, peers, sizes, digest), records=False)

    def _rank_shared_storages(
        self, peers: HostPeers, sizes: Sequence[int], digest: bytes
    ) -> list[torch.UntypedStorage] | None:
        plans = [digest, *self._exchange(digest, self._plan_tag)()]
        if _NO_PLAN in plans:
            return None
        if not sizes or any(other != digest for other in plans):
            return []
        peers.drop_free()  # later gathers do not need blocks
        collective, _ = self._next_key(0)
        return [memory.storage for memory in peers.rank_shared(sizes, collective)]

    def gather_into_shared(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        peers = self.peers
        assert peers is not None
        collective, _ = self._next_key(tag)
        free, written = (collective, tag), (collective, tag + 1)
        local = [whole.view(self.world, -1)[self.rank] for whole in wholes]
        number = self.started
        self.unsent[number] = True

        def write() -> None:
            with torch.no_grad():
                _copy_each(local, parts)
            peers.signal(written)
            self.unsent.pop(number, None)

        peers.signal(free, self._take_fingerprint())
        peers.when_signalled(written, _nothing)
        peers.when_signalled(free, write)  # once no rank needs the current contents

        def finish() -> None:
            peers.await_signals(free)
            peers.await_signals(written)

        return finish

    def _exchange_fingerprints(self, local: bytes, *, alone: bool) -> Callable[[], list[bytes]]:
        peers = self.peers
        if peers is None:
            return super()._exchange_fingerprints(local, alone=alone)
        if alone:
            key = self._next_key(self._fingerprint_tag)
            peers.signal(key, local)
            peers.when_signalled(key, _nothing)
        else:
            self._fingerprint = local

        def received() -> list[bytes]:
            fingerprints = {**peers.next_fingerprints(), self.rank: local}
            return [fingerprints[rank] for rank in range(self.world)]

        return received

    def _record(self, call: Call) -> Event | None:
        if self.peers is not None:
            messages = (2 if call.name == "all_reduce" or call.how else 1) * (self.world - 1)
            call = replace(call, messages=messages)
        return super()._record(call)

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        peers = self.peers
        if peers is None:
            return super().all_gather(wholes, parts, tag)
        key = self._next_key(tag)
        self._publish(peers, key, dict.fromkeys(self._peers(), parts))
        places = [whole.view(self.world, -1) for whole in wholes]
        copy_own([place[self.rank] for place in places], parts)

        def finish() -> None:
            self._read(peers, key, {rank: [place[rank] for place in places] for rank in range(self.world)})

        return finish

    def reduce_scatter(self, of: PartSums, tag: int) -> Callable[[], None]:
        peers = self.peers
        if peers is None:
            return super().reduce_scatter(of, tag)
        key = self._next_key(tag)
        parts = self._parts_by_rank(of.wholes, of.part_numels)
        block = self._publish(peers, key, parts, patiently=True)

        def finish() -> None:
            self._sum(peers, key, of.sums, parts[self.rank], of.divisor)
            # All ranks have published, so peers can read the block without further data from this rank.
            block.is_due = block.about == key

        return finish

    def arrival(self, tag: int) -> Callable[[], bool] | None:
        peers = self.peers
        return None if peers is None else partial(peers.have_all_published, (self._started, tag))

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        peers = self.peers
        if peers is None:
            return super().all_reduce(tensors, divisor, tag)
        first = self._next_key(tag)
        second = (first[0], tag + len(tensors))
        parts = self._parts_by_rank(tensors, [len(owned(tensor.numel(), self.world, 0)) for tensor in tensors])
        local = parts[self.rank]
        number = self.started
        self.unsent[number] = False
        self._publish(peers, first, parts)

        def finish() -> None:
            block = peers.take(nbytes_end_to_end(local))
            sums = block.memory.tensors_like(local)
            self._sum(peers, first, sums, local, divisor)
            peers.publish(second, block)
            self.unsent.pop(number, None)
            _copy_each(local, sums)
            self._read(peers, second, parts)

        return finish

    def all_to_all(self, receive: Sequence[Tensor], send: Sequence[Tensor], tag: int) -> Callable[[], None]:
        peers = self.peers
        if peers is None:
            return super().all_to_all(receive, send, tag)
        key = self._next_key(tag)
        self._publish(peers, key, {rank: [part] for rank, part in enumerate(send)})
        return lambda: self._read(peers, key, {rank: [buffer] for rank, buffer in enumerate(receive)})

    def _next_key(self, tag: int) -> Key:
        self._started += 1
        return self._started, tag

    def _parts_by_rank(self, wholes: Sequence[Tensor], part_numels: Sequence[int]) -> dict[int, list[Tensor]]:
        """Return every rank's part of each whole."""
        pairs = list(zip(wholes, part_numels, strict=True))
        return {rank: [part_of(whole, n, rank) for whole, n in pairs] for rank in range(self.world)}

    def _publish(
        self, peers: HostPeers, key: Key, parts: Mapping[int, Sequence[Tensor]], *, patiently: bool = False
    ) -> SharedBlock:
        """Publish the `parts` for every other rank in shared memory. Equal tensors are written once."""
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
        block = peers.take(end, patiently=patiently)
        for start, tensors in shown.values():
            _copy_each(block.memory.tensors_like(tensors, start), tensors)
        peers.publish(key, block, starts, self._take_fingerprint())
        return block

    def _take_fingerprint(self) -> bytes:
        fingerprint, self._fingerprint = self._fingerprint, b""
        return fingerprint

    def _read(self, peers: HostPeers, key: Key, receive: Mapping[int, Sequence[Tensor]]) -> None:
        """Wait for the peers' data of `key`, and copy it to their buffers in `receive`."""
        published = peers.published(key)
        for one in published:
            _copy_each(receive[one.rank], one.tensors_like(receive[one.rank]))
        peers.have_read(published)

    def _sum(self, peers: HostPeers, key: Key, sums: Sequence[Tensor], local: Sequence[Tensor], divisor: float) -> None:
        """Wait for the peers' data of `key`, and sum it with `local`."""
        published = peers.published(key)
        terms = {**{one.rank: one.tensors_like(local) for one in published}, self.rank: local}
        for i, out in enumerate(sums):
            sum_in_rank_order(out, [terms[rank][i] for rank in range(self.world)], divisor)
        peers.have_read(published)


def _nothing() -> None:
    """Do nothing."""


def _copy_each(places: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for place, tensor in zip(places, sent, strict=True):
        place.copy_(tensor)
