"""A model of CUDA's caching allocator: the memory that it holds for the tensors of a trace, block by block.

torch requests *segments* from the device and cuts *blocks* from them. The rules are those of torch:

    rounding     sizes are rounded up to 512 bytes
    pools        up to 1 MiB from segments of 2 MiB; below 10 MiB from segments of 20 MiB; larger blocks have
                 separate segments, rounded up to 2 MiB. Each stream has separate pools
    choice       the smallest free block that is large enough; among equal ones, the one with the lowest address
    splitting    a remainder stays free: 512 bytes or more in small pools and expandable segments, else above 1 MiB
    merging      a freed block is merged with adjacent free blocks of its segment; segments stay
    expandable   `expandable_segments:True`: one segment per pool, which grows in steps of 2 or 20 MiB at its end
    retries      if the device has no space for a segment, all completely free segments are returned to it before a
                 second request. If that fails too, the request fails; the model continues and counts the failure

    Not modeled: the memory of cuBLAS, NCCL and CUDA itself, `max_split_size_mb` and garbage collection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from fullshard.layout.offsets import align
from fullshard.tape.tape import HOST, Allocation, Entry, Free, Tape

_MIB = 1 << 20
_STEP = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_LARGE_FROM, _LARGE_SEGMENT = 10 * _MIB, 20 * _MIB
_GROWTH = 2 * _MIB


@dataclass(frozen=True)
class AllocatorUse:
    """Peak bytes of tensors, of the blocks that contain them, and of segments."""

    tensors: int
    allocated: int
    reserved: int


@dataclass(eq=False)
class _Block:
    start: int
    nbytes: int
    pool: _Pool
    before: _Block | None = None  # adjacent blocks of the segment
    after: _Block | None = None
    is_free: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of free blocks in a pool."""
        return self.nbytes, self.start


@dataclass(eq=False)
class _Pool:
    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # sorted
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)  # the free ones
    last: _Block | None = None  # the last block of an expandable segment

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, block.order)
        self.blocks[block.order] = block

    def take(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, block.order)]
        del self.blocks[block.order]

    def best(self, nbytes: int) -> _Block | None:
        """Return the smallest free block of at least `nbytes`."""
        found = bisect_left(self.free, (nbytes, -1))
        return self.blocks[self.free[found]] if found < len(self.free) else None


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        expandable: Whether segments are expandable.
        room: The bytes that the device has for segments that are not expandable. None means no limit.
    """

    def __init__(self, *, expandable: bool = False, room: float | None = None) -> None:
        self._expandable = expandable
        self._room = float("inf") if room is None else room
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._end = 0  # the next address: segments do not overlap
        self.allocated = 0  # bytes of blocks in use
        self.reserved = 0  # bytes of segments
        self.requested = self.given_back = self.retries = self.failures = 0
        """The number of segments requested and returned, of requests without enough device memory, and of requests that
        failed even after all free segments were returned."""

    def allocate(self, nbytes: int, stream: str) -> _Block:
        """Return a block of at least `nbytes` from the pools of `stream`."""
        size = align(max(nbytes, 1), _STEP)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.best(size) or self._grow(pool, size)
        pool.take(block)
        left = block.nbytes - size
        if left >= _STEP if is_small or self._expandable else left > _SMALL:
            remaining = _Block(block.start + size, left, pool, block, block.after)
            if block.after is not None:
                block.after.before = remaining
            if pool.last is block:
                pool.last = remaining
            block.nbytes, block.after = size, remaining
            pool.add(remaining)
        self.allocated += block.nbytes
        return block

    def free(self, block: _Block) -> None:
        """Free a block and merge it with adjacent free blocks."""
        pool = block.pool
        self.allocated -= block.nbytes
        if block.before is not None and block.before.is_free:
            first, second = block.before, block
            pool.take(first)
            block = _join(pool, first, second)
        if block.after is not None and block.after.is_free:
            pool.take(block.after)
            block = _join(pool, block, block.after)
        pool.add(block)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        if not self._expandable:
            nbytes = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT if size < _LARGE_FROM else align(size, _GROWTH)
            return self._segment(pool, nbytes)
        last, step = pool.last, _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        if last is None:
            pool.last = self._segment(pool, align(size, step))
            return pool.last
        at_end = last.nbytes if last.is_free else 0
        grown = align(size - at_end, step)
        self.reserved += grown
        if last.is_free:
            pool.take(last)
            last.nbytes += grown
            pool.add(last)
            return last
        pool.last = last.after = _Block(last.start + last.nbytes, grown, pool, last)
        pool.add(pool.last)
        return pool.last

    def _make_room(self, nbytes: int) -> None:
        """Return all completely free segments to the device, because it has no space for `nbytes` more."""
        self.retries += 1
        for pool in self._pools.values():
            for block in [block for block in pool.blocks.values() if block.before is None and block.after is None]:
                pool.take(block)
                self.reserved -= block.nbytes
                self.given_back += 1
        self.failures += self.reserved + nbytes > self._room

    def _segment(self, pool: _Pool, nbytes: int) -> _Block:
        if not self._expandable and self.reserved + nbytes > self._room:
            self._make_room(nbytes)
        self.requested += 1
        block = _Block(self._end, nbytes, pool)
        self._end += 1 << 50 if self._expandable else nbytes
        self.reserved += nbytes
        pool.add(block)
        return block


class TapeAllocator(CachingAllocator):
    """The allocator of a trace. It receives entries in order. Arguments are those of `CachingAllocator`."""

    def __init__(self, *, expandable: bool = False, room: float | None = None) -> None:
        super().__init__(expandable=expandable, room=room)
        self._held: dict[int, _Block] = {}
        self.tensors = 0  # bytes of tensors, without rounding

    def note(self, entry: Entry) -> None:
        """Perform the allocation or free that `entry` records. Host memory is ignored."""
        if isinstance(entry, Allocation) and entry.stream != HOST:
            self._held[entry.storage] = self.allocate(entry.nbytes, entry.stream)
            self.tensors += entry.nbytes
        elif isinstance(entry, Free) and entry.storage in self._held:
            self.free(self._held.pop(entry.storage))
            self.tensors -= entry.nbytes


def _join(pool: _Pool, first: _Block, second: _Block) -> _Block:
    """Merge two adjacent blocks."""
    first.nbytes += second.nbytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    if pool.last is second:
        pool.last = first
    return first


def allocator_use(tape: Tape, *, since: int = 0, expandable: bool = False) -> AllocatorUse:
    """Return the peak bytes of tensors, blocks and segments of the trace's accelerator.

    Args:
        tape: A trace of whole steps with streams. Host memory is ignored.
        since: The index in the trace to start from. The memory that is live there counts as freshly allocated, as after
            `torch.cuda.empty_cache()`.
        expandable: See `CachingAllocator`.
    """
    allocator = TapeAllocator(expandable=expandable)
    most_tensors = most_allocated = 0
    for entry in (*_alive(tape.entries[:since]), *tape.entries[since:]):
        allocator.note(entry)
        most_tensors, most_allocated = max(most_tensors, allocator.tensors), max(most_allocated, allocator.allocated)
    return AllocatorUse(most_tensors, most_allocated, allocator.reserved)


def _alive(entries: Sequence[Entry]) -> list[Allocation]:
    """Return the allocations that are live after `entries`."""
    alive: dict[int, Allocation] = {}
    for entry in entries:
        if isinstance(entry, Allocation):
            alive[entry.storage] = entry
        elif isinstance(entry, Free):
            alive.pop(entry.storage, None)
    return list(alive.values())
