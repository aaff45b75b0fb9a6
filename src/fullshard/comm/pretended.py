"""Simulated CPU peers, with the memory usage of gloo's ranks, for dry runs of a single rank.

The transports are the engine's own. Only the peers are simulated: ranks that do what this rank does, as late as
possible. They reach a collective only when this rank has to wait for them, so no sum is complete before this rank waits
for it. This rank learns that a block has been read when it reaches the next operation of the peers. Of all possible
orders of the ranks, this one needs nearly the most memory.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.peers import (
    CannotShareError,
    HostPeers,
    Key,
    MappedMemory,
    Published,
    SharedBlock,
    nbytes_end_to_end,
)
from fullshard.comm.shared_memory import SharedMemoryCollectives
from fullshard.layout.offsets import align
from fullshard.policy.switches import switches


class PretendedCollectives(SharedMemoryCollectives):
    """Simulated shared memory if all ranks of a group are on one host of `LOCAL_WORLD_SIZE` ranks; else pairwise."""

    is_of_accelerator = True

    def _connect(self) -> HostPeers:
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        if not switches.shares_memory_between_ranks:
            raise CannotShareError("it is switched off")
        hosts = {rank // per_host for rank in dist.get_process_group_ranks(self.group)}
        if len(hosts) > 1:
            raise CannotShareError(f"they are on {len(hosts)} hosts")
        return _PretendedPeers(self.rank, self.world)

    def _exchange(self, local: bytes, tag: int) -> Callable[[], list[bytes]]:
        met = vars(self).get("peers")
        if met is not None:
            met.hear()
        return lambda: [local] * self.world


class _OfPeer(MappedMemory):
    """A block of a peer, as large as this rank's, or larger if its part of the sums is larger."""

    def tensors_like(self, tensors: Sequence[Tensor], byte_offset: int = 0) -> list[Tensor]:
        needed = byte_offset + nbytes_end_to_end(tensors)
        if needed > self.nbytes:
            super().__init__(_bytes(needed), self._ranks)
        return super().tensors_like(tensors, byte_offset)


def _bytes(nbytes: int) -> Tensor:
    with torch.inference_mode(False):  # writable both in inference mode and outside of it
        return torch.empty(align(nbytes, mmap.PAGESIZE), dtype=torch.uint8, device="cpu")


class _PretendedPeers(HostPeers):
    """Ranks of this host that do what this rank does."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, {}, 0.0)
        self._world = world
        self._peers = [peer for peer in range(world) if peer != rank]
        self._of_peers: dict[int, dict[int, MappedMemory]] = {}  # by the number of this rank's block, and by peer
        self._unheard: list[SharedBlock] = []  # read by the peers, which this rank has not noticed yet
        self._dropped: list[dict[int, MappedMemory]] = []  # memory that the peers free in the next `hear`
        self._published: dict[Key, SharedBlock] = {}
        self._fingerprints: deque[bytes] = deque()

    def _shared_block(self, number: int, nbytes: int) -> SharedBlock:
        return SharedBlock(number, MappedMemory(_bytes(nbytes), self._world))

    def take(self, nbytes: int, *, patiently: bool = False) -> SharedBlock:
        """Take a block. The peers make the same progress, so they also take and write a block of this size now."""
        block = super().take(nbytes, patiently=patiently)
        block.readers = len(self._peers)
        if block.number not in self._of_peers:
            nbytes, world = block.memory.nbytes, self._world
            self._of_peers[block.number] = {peer: _OfPeer(_bytes(nbytes), world) for peer in self._peers}
        return block

    def _drop(self, block: SharedBlock) -> None:
        super()._drop(block)
        if block.number in self._of_peers:
            self._dropped.append(self._of_peers.pop(block.number))

    def _receive_all(self) -> None:
        """Do nothing: simulated peers send no messages."""

    def _receive(self, timeout_s: float) -> bool:
        return self.hear()

    def hear(self) -> bool:
        """Process the peers' actions up to the progress of this rank. Return True if there were any."""
        self._dropped.clear()
        for block in self._unheard:
            block.readers = 0
        heard, self._unheard = self._unheard, []
        return bool(heard)

    def publish(
        self, key: Key, block: SharedBlock, byte_offsets: Mapping[int, int] | None = None, fingerprint: bytes = b""
    ) -> None:
        block.about = key
        self._published[key] = block
        self._note(fingerprint)

    def published(self, key: Key) -> list[Published]:
        self.hear()
        block = self._published.pop(key)
        return [Published(peer, block.number, memory, 0) for peer, memory in self._of_peers[block.number].items()]

    def have_all_published(self, key: Key) -> bool:
        return False

    def have_read(self, published: Iterable[Published]) -> None:
        self._unheard += [self._blocks[number] for number in {one.block for one in published}]

    def signal(self, key: Key, fingerprint: bytes = b"") -> None:
        self._note(fingerprint)

    def when_signalled(self, key: Key, act: Callable[[], None]) -> None:
        self._acts[key] = act

    def await_signals(self, key: Key) -> None:
        self.hear()
        if key in self._acts:
            self._acts.pop(key)()

    def _rank_shared(self, sizes: Sequence[int], collective: int) -> list[MappedMemory]:
        return [self._new_block(nbytes).memory for nbytes in sizes]

    def _note(self, fingerprint: bytes) -> None:
        if fingerprint:
            self._fingerprints.append(fingerprint)

    def next_fingerprints(self) -> dict[int, bytes]:
        self.hear()
        local = self._fingerprints.popleft()
        return dict.fromkeys(self._peers, local)
