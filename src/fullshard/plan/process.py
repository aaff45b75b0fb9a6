"""The memory of a rank's process on CPUs: tensors, what the C library's allocator holds beyond them, and fixed costs.

torch takes the memory of a CPU's tensors from `malloc`. glibc's gives some of it back to the system at once, and keeps
the rest: a model of it, chunk by chunk, by the rules of `malloc/malloc.c` in glibc 2.36:

    threshold    what is larger has a mapping of its own, which is gone when freed; 128 KiB at first. Freeing a mapping
                 of up to 32 MiB raises the threshold to its size: what is smaller is on the heap from then on
    heap         the smallest free chunk that is large enough; else the end of the heap, which grows
    freeing      a chunk joins its free neighbours. Of the end of the heap, memory goes back to the system only when
                 more than twice the threshold is free there
    alignment    torch asks for 64 bytes, which are cut from a chunk that is larger

This holds with a fixed threshold (`MALLOC_MMAP_THRESHOLD_=65536` in the environment). With one that rises, a process
was measured to hold 15 to 37 % more than the model says: the heap is cut up by much that is small, which is on no tape.
Not modelled: other threads' heaps, and pages that a program never touches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.layout.offsets import align
from fullshard.tape.tape import Allocation, Entry, Free, Operation, Tape

__all__ = [
    "FIRST_STEPS_NBYTES",
    "MARGIN",
    "PRODUCTS_NBYTES",
    "Malloc",
    "ProcessMemory",
    "compute_dtype",
    "process_memory",
]

_PAGE = 4096
_ALIGNMENT, _OWN, _LEAST = 64, 16, 32
_THRESHOLD, _MOST = 128 << 10, 32 << 20
_PAD = 128 << 10  # free bytes that the end of the heap keeps

FIRST_STEPS_NBYTES = 2_500_000
"""What a process takes for its first steps beside tensors: measured, see `benchmarks/predicted_memory.py`."""

PRODUCTS_NBYTES = {"bfloat16": (7_000_000, 21_000_000), "float16": (7_000_000, 21_000_000)}
"""What products of matrices of a dtype take in a process on a CPU, by oneDNN: of pages, and of addresses, which a limit
counts too. Measured with models of three sizes, which differ by 2 MB."""

MARGIN = 0.02
"""What a limit must leave beyond what is predicted, as a part of it."""


@dataclass(frozen=True)
class ProcessMemory:
    """The most bytes at once: of tensors, and of the process for them. Memory in common counts by this rank's part.

    `dtype` is that of most products of matrices.
    """

    tensors: int
    held: int
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """All that the process takes beyond what it took before the tape."""
        pages, _ = PRODUCTS_NBYTES.get(self.dtype, (0, 0))
        return self.held + FIRST_STEPS_NBYTES + pages

    @property
    def address_nbytes(self) -> int:
        """The addresses that it takes: what `RLIMIT_DATA` counts, whether it ever writes there or not."""
        pages, addresses = PRODUCTS_NBYTES.get(self.dtype, (0, 0))
        return self.nbytes - pages + addresses

    def fits(self, limit: int) -> bool:
        """True if a process that may take so many more bytes will get through, with a margin for what is not known."""
        return self.address_nbytes * (1 + MARGIN) <= limit


class Malloc:
    """glibc's allocator, for one thread. Chunks are named by their addresses; those of mappings are negative.

    Args:
        threshold: what `MALLOC_MMAP_THRESHOLD_` is set to, in bytes; None if it is not set, so that it rises.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self.heap = 0
        """Bytes from the beginning of the heap to its end."""
        self.mapped = 0
        """Bytes of mappings."""
        self._rises = threshold is None
        self._threshold = _THRESHOLD if threshold is None else threshold
        self._trims_from = _THRESHOLD if threshold is not None else 2 * _THRESHOLD
        self._top = 0  # where the free end of the heap begins
        self._sizes: dict[int, int] = {}  # chunks in use
        self._free: list[tuple[int, int]] = []  # sizes and addresses, sorted
        self._starts: dict[int, int] = {}  # of free chunks: size by address
        self._ends: dict[int, int] = {}  # and address by end
        self._mappings = 0

    @property
    def nbytes(self) -> int:
        """What the process has of the system."""
        return self.heap + self.mapped

    def allocate(self, nbytes: int) -> int:
        """The address of a new chunk: cut from one that is larger, so that what it holds is aligned."""
        size = align(nbytes + _OWN // 2, _OWN)
        wanted = size + _ALIGNMENT + _LEAST
        place = bisect_left(self._free, (wanted, -1))
        if place < len(self._free):
            found, address = self._free[place]
            self._take(address)
        elif wanted <= self.heap - self._top or wanted < self._threshold:
            if wanted > self.heap - self._top:
                self.heap = align(self._top + wanted + _PAD, _PAGE)
            found, address = wanted, self._top
            self._top += wanted
        else:
            self._mappings += 1
            size = align(wanted, _PAGE)
            self.mapped += size
            self._sizes[-self._mappings] = size
            return -self._mappings
        ahead = -(address + _OWN) % _ALIGNMENT
        ahead += _ALIGNMENT if 0 < ahead < _LEAST else 0
        if ahead:
            self._give(address, ahead)
        left = found - ahead - size
        size += left if left < _LEAST else 0
        self._sizes[address + ahead] = size
        if left >= _LEAST:
            self._give(address + ahead + size, left)
        return address + ahead

    def free(self, address: int) -> None:
        """Give a chunk back."""
        size = self._sizes.pop(address)
        if address < 0:
            self.mapped -= size
            if self._rises and self._threshold < size <= _MOST:
                self._threshold, self._trims_from = size, 2 * size
            return
        self._give(address, size)
        if self.heap - self._top >= self._trims_from:
            self.heap = align(self._top + _PAD, _PAGE)

    def _give(self, address: int, size: int) -> None:
        """Join a chunk that is free to its free neighbours."""
        if (before := self._ends.get(address)) is not None:
            size += self._take(before)
            address = before
        if address + size in self._starts:
            size += self._take(address + size)
        if address + size < self._top:
            self._put(address, size)
        else:
            self._top = address

    def _put(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._starts[address], self._ends[address + size] = size, address

    def _take(self, address: int) -> int:
        size = self._starts.pop(address)
        del self._ends[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size


def process_memory(tape: Tape, *, threshold: int | None = None) -> ProcessMemory:
    """What the process of the tape's rank needs at most, for a tape of CPU ranks (`lanes="cpu"`) of whole steps.

    Args:
        tape: from the making of the model on.
        threshold: see `Malloc`.
    """
    malloc = Malloc(threshold)
    chunks: dict[int, int] = {}
    tensors = shared = most_tensors = most_held = 0.0
    for entry in tape.entries:
        if isinstance(entry, Allocation):
            tensors += entry.own_nbytes
            if entry.ranks > 1:
                shared += entry.own_nbytes
            else:
                chunks[entry.storage] = malloc.allocate(entry.nbytes)
            most_tensors, most_held = max(most_tensors, tensors), max(most_held, malloc.nbytes + shared)
        elif isinstance(entry, Free):
            tensors -= entry.own_nbytes
            if entry.ranks > 1:
                shared -= entry.own_nbytes
            else:
                malloc.free(chunks.pop(entry.storage))
    return ProcessMemory(round(most_tensors), round(most_held), compute_dtype(tape.entries))


def compute_dtype(entries: Iterable[Entry]) -> str:
    """The dtype in which most FLOPs are done."""
    flops = Counter[str]()
    for entry in entries:
        if isinstance(entry, Operation) and entry.flops:
            flops[entry.dtype] += entry.flops
    return max(flops, key=lambda dtype: flops[dtype], default="float32")
