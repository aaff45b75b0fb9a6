"""A model of the C library's `malloc`, chunk by chunk: the memory that a process has, and the pages that it touches.

The rules are those of `malloc/malloc.c` in glibc 2.36, for one arena, with default settings:

    threshold    larger chunks have separate mappings, which are unmapped when freed; 128 KiB at first. Freeing a
                 mapping of up to 32 MiB raises the threshold to its size: smaller chunks are on the heap afterwards
    heap         the smallest free chunk that is large enough, or else the end of the heap, which grows
    freeing      a chunk is merged with adjacent free chunks. Memory at the end of the heap returns to the system only
                 if more than twice the threshold is free there
    small ones   seven freed chunks of each size up to 1 KiB are kept for the next allocation of that size, and more
                 of those up to 128 bytes until a large allocation. Meanwhile, they are not merged. If one is taken
                 from other free chunks of its size, these are kept, too
    alignment    torch requests 64 bytes, which are cut from a chunk that is 96 bytes larger. The remainder is small
                 and soon reused; then the same request does not fit where the previous one was
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from fullshard.layout.offsets import align

_PAGE = 4096
_OWN, _LEAST = 16, 32  # bytes of the header of a chunk; the smallest chunk
_THRESHOLD, _MOST = 128 << 10, 32 << 20
_PAD = 128 << 10  # free bytes that the end of the heap keeps
_SMALL, _KEPT = 1040, 7  # up to seven chunks of each size up to 1040 bytes are kept for that size
_FAST = 128  # and any number of chunks up to this size
_LARGE = 1024  # an allocation of this size merges them again
_MUCH = 64 << 10  # freeing this much triggers a check of the end of the heap


class Malloc:
    """glibc's allocator, for one thread. Chunks are identified by their addresses; those of mappings are negative.

    Args:
        threshold: The value of `MALLOC_MMAP_THRESHOLD_` in bytes. None if it is not set, so that the threshold rises.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self.heap = 0  # the size of the heap in bytes
        self.mapped = 0  # bytes of mappings
        self.touched = 0
        """Bytes of pages touched for the first time so far. Pages that are returned and obtained again count again."""
        self._rises = threshold is None
        self._threshold = _THRESHOLD if threshold is None else threshold
        self._trims_from = _THRESHOLD
        self._top = 0  # start of the free end of the heap
        self._untouched = 0  # start of its untouched end
        self._sizes: dict[int, int] = {}  # chunks in use
        self._free: list[tuple[int, int]] = []  # sizes and addresses, sorted
        self._starts: dict[int, int] = {}  # of free chunks: size by address
        self._ends: dict[int, int] = {}  # and address by end
        self._kept: defaultdict[int, list[int]] = defaultdict(list)  # by size
        self._fast: defaultdict[int, list[int]] = defaultdict(list)
        self._mappings = 0

    @property
    def nbytes(self) -> int:
        """The bytes of pages that the process has obtained from the system."""
        return self._untouched + self.mapped

    @property
    def address_nbytes(self) -> int:
        """The bytes of its address space, touched or not."""
        return self.heap + self.mapped

    def allocate(self, nbytes: int) -> int:
        """Allocate a chunk for `nbytes` and return its address."""
        size = _chunk(nbytes)
        if size <= _SMALL and self._kept[size]:
            return self._use(self._kept[size].pop(), size)
        found = self._cut(size)
        return self._map(size) if found is None else self._use(*found)

    def allocate_aligned(self, nbytes: int, alignment: int = 64) -> int:
        """Allocate a chunk with `nbytes` at an aligned address and return its address."""
        size = _chunk(nbytes)
        found = self._cut(size + alignment + _LEAST)
        if found is None:
            return self._map(size + alignment + _LEAST)
        address, room = found
        ahead = -(address + _OWN) % alignment
        ahead += alignment if 0 < ahead < _LEAST else 0
        if ahead:
            self._give_back(address, ahead)
        left = room - ahead - size
        if left <= _LEAST:
            return self._use(address + ahead, size + left)
        self._give_back(address + ahead + size, left)
        return self._use(address + ahead, size)

    def free(self, address: int) -> None:
        """Free a chunk."""
        size = self._sizes.pop(address)
        if address >= 0:
            self._give_back(address, size)
            return
        self.mapped -= size
        if self._rises and self._threshold < size <= _MOST:
            self._threshold, self._trims_from = size, 2 * size

    def _use(self, address: int, size: int) -> int:
        self._sizes[address] = size
        if address + size > self._untouched:
            self.touched += address + size - self._untouched
            self._untouched = address + size
        return address

    def _map(self, size: int) -> int:
        size = align(size + _OWN // 2, _PAGE)
        self._mappings += 1
        self._sizes[-self._mappings] = size
        self.mapped += size
        self.touched += size
        return -self._mappings

    def _cut(self, size: int) -> tuple[int, int] | None:
        """Return address and size of a chunk, free or new at the end of the heap; None if it has to be mapped."""
        if size <= _FAST and self._fast[size]:
            address = self._fast[size].pop()
            while self._fast[size] and len(self._kept[size]) < _KEPT:
                self._kept[size].append(self._fast[size].pop())
            return address, size
        if size >= _LARGE:
            self._join_fast()
        place = bisect_left(self._free, (size, -1))
        if place < len(self._free):
            room, address = self._free[place]
            self._take(address)
            if room == size <= _SMALL:
                self._keep_others_of(size)
            if room - size < _LEAST:
                return address, room
            self._put(address + size, room - size)
            return address, size
        if self.heap - self._top < size + _LEAST:
            if self._join_fast():
                return self._cut(size)
            if size >= self._threshold:
                return None
            self.heap = align(self._top + size + _PAD + _LEAST, _PAGE)
        self._top += size
        return self._top - size, size

    def _keep_others_of(self, size: int) -> None:
        """Keep free chunks of exactly this size for later allocations after one was taken."""
        while len(self._kept[size]) < _KEPT:
            place = bisect_left(self._free, (size, -1))
            if place == len(self._free) or self._free[place][0] != size:
                return
            address = self._free[place][1]
            self._take(address)
            self._kept[size].append(address)

    def _give_back(self, address: int, size: int) -> None:
        """Keep a chunk for its size or merge it with free neighbors, and trim the heap if its free end is too large."""
        if size <= _SMALL and len(self._kept[size]) < _KEPT:
            self._kept[size].append(address)
        elif size <= _FAST:
            self._fast[size].append(address)
        elif self._join(address, size) >= _MUCH:
            self._join_fast()
            if self.heap - self._top >= self._trims_from:
                self.heap -= max(0, (self.heap - self._top - _LEAST - 1 - _PAD) // _PAGE * _PAGE)
                self._untouched = min(self._untouched, self.heap)

    def _join_fast(self) -> bool:
        """Merge all chunks in the fast lists, and return whether there were any."""
        chunks = [(address, size) for size, addresses in self._fast.items() for address in addresses]
        self._fast.clear()
        for address, size in chunks:
            self._join(address, size)
        return bool(chunks)

    def _join(self, address: int, size: int) -> int:
        """Merge a chunk with its free neighbors, and return the size of the free chunk."""
        if (before := self._ends.get(address)) is not None:
            size += self._take(before)
            address = before
        if address + size == self._top:
            self._top = address
            return self.heap - address
        if address + size in self._starts:
            size += self._take(address + size)
        self._put(address, size)
        return size

    def _put(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._starts[address], self._ends[address + size] = size, address

    def _take(self, address: int) -> int:
        size = self._starts.pop(address)
        del self._ends[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size


def _chunk(nbytes: int) -> int:
    """Return the size of a chunk for this many bytes."""
    return max(_LEAST, align(nbytes + _OWN // 2, _OWN))
