"""Messages between each pair of ranks, without intermediate buffers: gloo between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import break_connections, connected_again
from fullshard.comm.collectives import Collectives, copy_own, divide
from fullshard.comm.transport import PartSums
from fullshard.device.memory import Pool
from fullshard.errors import RankMismatchError, named_ranks
from fullshard.layout.shard_spec import owned
from fullshard.liveness.rank_progress import here
from fullshard.liveness.watchdog import PeerGoneError
from fullshard.tape.recorder import Origin, Phase

_FINGERPRINT_TAGS = 1 << 16  # more than the number of pending collectives

_WHOLE, _CUT = b".", b"x"  # messages of ranks whose connections are intact, or broken by `end_wait`

_Works = list[tuple[int, dist.Work]]  # pending messages, by peer


class PairwiseCollectives(Collectives):
    """Every rank sends each other rank its data, without intermediate buffers.

    gloo's own all-gather and reduce-scatter use additional buffers, and its reduce-scatter sums everything on every
    rank. Each message has a unique tag, since messages of several units are pending at the same time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._scratch = Pool(torch.device("cpu"))
        self._fingerprint_tag = self.reserve_tags(_FINGERPRINT_TAGS)
        self._fingerprints = 0
        self._last_tag = self.reserve_tags(1)
        self._connections: Any = group  # torch does not annotate send and recv of renewed connections
        self._renewals = 0
        self._waits_for_messages = False
        self._is_cut = False

    def renew(self) -> None:
        """See `Collectives.renew`. Create new connections. Unreceived messages stay on the old ones.

        Messages that both sides have started are delivered first, so that they do not write to memory later.
        """
        super().renew()
        with here.waiting("renewal of a process group", Origin("", Phase.IDLE)):
            self._renewals += 1
            connections = connected_again(self.group, f"fullshard renewal {self._renewals}")
            before, self._connections = self._connections, connections
            if _CUT in self._exchange(_CUT if self._is_cut else _WHOLE, self._last_tag)():
                self.broken = self._cut_error()
                raise self.broken
            self._connections = before
            self._exchange(_WHOLE, self._last_tag)()
        self._connections, self._fingerprints = connections, 0

    def end_wait(self) -> None:
        """See `GroupProgress.end_wait`. gloo cannot cancel a wait, so the connections are broken."""
        if self._waits_for_messages:
            self._is_cut = True
            break_connections(self._connections, self._peers(), self._last_tag)

    def _cut_error(self) -> RankMismatchError:
        return RankMismatchError(
            f"the connections between {named_ranks(self.ranks)} were closed to end a deadlock. This process group "
            "cannot be used again: end the processes and restart from the last checkpoint."
        )

    def _wait_all(self, works: _Works) -> None:
        self._waits_for_messages = True
        try:
            for peer, work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    if self.broken is not None:
                        raise self.broken from error
                    _raise_if_gone(peer, error)
                    raise
        finally:
            self._waits_for_messages = False

    def _peers(self) -> list[int]:
        """Return the other ranks, starting with the next one, so that ranks do not all send to the same rank first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _exchange_fingerprints(self, local: bytes, *, alone: bool) -> Callable[[], list[bytes]]:
        tag = self._fingerprint_tag + self._fingerprints % _FINGERPRINT_TAGS
        self._fingerprints += 1
        return self._exchange(local, tag)

    def _exchange(self, local: bytes, tag: int) -> Callable[[], list[bytes]]:
        """Start to all-gather `local`, of equal size on all ranks. The returned function waits for the messages."""
        published = torch.frombuffer(bytearray(local), dtype=torch.uint8)
        received_bytes = list(torch.empty(self.world, len(local), dtype=torch.uint8, device="cpu"))
        received_bytes[self.rank] = published
        works: _Works = [work for peer in self._peers() for work in self._receive(received_bytes[peer], peer, tag)]
        works += [work for peer in self._peers() for work in self._send(published, peer, tag)]

        def received() -> list[bytes]:
            self._wait_all(works)
            return [one.numpy().tobytes() for one in received_bytes]

        return received

    def _send(self, tensor: Tensor, rank: int, tag: int) -> _Works:
        try:
            work = self._connections.send([_real(tensor)], rank, tag) if tensor.numel() else None
        except RuntimeError as error:
            _raise_if_gone(rank, error)
            raise
        return [] if work is None else [(rank, work)]

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> _Works:
        try:
            work = self._connections.recv([_real(tensor)], rank, tag) if tensor.numel() else None
        except RuntimeError as error:
            _raise_if_gone(rank, error)
            raise
        return [] if work is None else [(rank, work)]

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        works: _Works = []
        places = [whole.view(self.world, -1) for whole in wholes]
        for peer in self._peers():
            for i, place in enumerate(places):
                works += self._receive(place[peer], peer, tag + i)
        for peer in self._peers():
            for i, part in enumerate(parts):
                works += self._send(part, peer, tag + i)
        copy_own([place[self.rank] for place in places], parts)
        return lambda: self._wait_all(works)

    def reduce_scatter(self, of: PartSums, tag: int) -> Callable[[], None]:
        works: _Works = []
        peers = self._peers()
        received: list[dict[int, Tensor]] = [
            {peer: self._scratch.take(out.numel(), out.dtype) for peer in peers} for out in of.sums
        ]
        for peer in peers:
            for i, by_peer in enumerate(received):
                works += self._receive(by_peer[peer], peer, tag + i)
        for peer in peers:
            for i, (whole, n) in enumerate(zip(of.wholes, of.part_numels, strict=True)):
                works += self._send(whole[peer * n : (peer + 1) * n], peer, tag + i)

        def finish() -> None:
            self._wait_all(works)
            for out, whole, n, by_peer in zip(of.sums, of.wholes, of.part_numels, received, strict=True):
                local = whole[self.rank * n : (self.rank + 1) * n]
                sum_in_rank_order(out, [by_peer.get(rank, local) for rank in range(self.world)], of.divisor)
                for scratch in by_peer.values():
                    self._scratch.give(scratch)

        return finish

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        part_numels = [len(owned(tensor.numel(), self.world, 0)) for tensor in tensors]
        local = [part_of(tensor, n, self.rank) for tensor, n in zip(tensors, part_numels, strict=True)]
        number = self.started
        if any(part.numel() for part in local):
            self.unsent[number] = False
        sums = [self._scratch.take(part.numel(), part.dtype) for part in local]
        reduced = self.reduce_scatter(PartSums(sums, tensors, part_numels, divisor), tag)

        def finish() -> None:
            reduced()
            works: _Works = []
            second = tag + len(tensors)
            for peer in self._peers():
                for i, (tensor, n) in enumerate(zip(tensors, part_numels, strict=True)):
                    works += self._receive(part_of(tensor, n, peer), peer, second + i)
                    works += self._send(sums[i], peer, second + i)
            self.unsent.pop(number, None)
            for part, total in zip(local, sums, strict=True):
                part.copy_(total)
            self._wait_all(works)
            for total in sums:
                self._scratch.give(total)

        return finish

    def all_to_all(self, receive: Sequence[Tensor], send: Sequence[Tensor], tag: int) -> Callable[[], None]:
        works = [work for peer in self._peers() for work in self._receive(receive[peer], peer, tag)]
        works += [work for peer in self._peers() for work in self._send(send[peer], peer, tag)]
        return lambda: self._wait_all(works)


def _real(tensor: Tensor) -> Tensor:
    """Return a real view of `tensor` if it is complex, which gloo does not support."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _raise_if_gone(peer: int, error: RuntimeError) -> None:
    """Raise `PeerGoneError` for the `error` of a message to or from `peer`, unless it is a timeout."""
    if "Timed out" not in str(error):
        raise PeerGoneError(peer) from error


def part_of(whole: Tensor, part_numel: int, rank: int) -> Tensor:
    """Return the part of `whole` that belongs to `rank`. The last parts may be shorter or empty."""
    return whole[rank * part_numel : (rank + 1) * part_numel]


def sum_in_rank_order(out: Tensor, terms: Sequence[Tensor], divisor: float) -> None:
    """Compute `out` = (terms[0] + terms[1] + ...) / divisor, in this order of operations."""
    if len(terms) == 1:
        out.copy_(terms[0])
    else:
        torch.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out.add_(term)
    divide([out], divisor)
