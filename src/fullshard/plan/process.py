"""The memory of a rank's process on CPUs: tensors, the overhead of the C library's allocator, and fixed costs.

torch allocates CPU tensors with `malloc`, together with many small objects that are not in a trace: for each tensor,
and for each node of the autograd graph. They are small, but occupy gaps where larger memory was freed, which are then
too short for the next allocation. A heap that is fragmented in this way was measured to be a third larger than its
tensors. So small objects are also passed to a model of the allocator (`malloc.py`), as observed in a trace of the
`malloc` calls of torch 2.13. Their exact sizes make little difference.

Not modeled: the heaps of other threads, and pages that a program never touches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.plan.malloc import Malloc
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Entry, Free, Operation, Tape

_BEFORE_DATA, _AFTER_DATA = (96,), (176, 24)  # bytes before and after a tensor's data
# Bytes of a node of the autograd graph, which lives from an operation's forward to its backward.
_NODE = (496, 312, *(24,) * 8, 40, 64)
_BACKWARD = (Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD)

FIRST_STEPS_NBYTES = 2_500_000
"""The memory of a process for its first steps, without tensors: measured, see `benchmarks/predicted_memory.py`."""

PRODUCTS_NBYTES = {"bfloat16": (7_000_000, 21_000_000), "float16": (7_000_000, 21_000_000)}
"""The memory of oneDNN for matrix products of a dtype in a CPU process: pages, and address space, which a limit counts
as well. Measured with models of three sizes; the results differ by 2 MB."""

MARGIN, MARGIN_NBYTES = 0.04, 3_000_000
"""The margin of a limit above the prediction: a fraction of it, and the memory that MKL keeps for packed operands."""


@dataclass(frozen=True)
class ProcessMemory:
    """Peak bytes of tensors, of the pages that the process has for them, and of address space.

    Shared memory counts as a share per rank for tensors and pages, and in full for address space. `dtype` is that of
    most matrix products.
    """

    tensors: int
    held: int
    addresses: int
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """The memory that the process takes in addition to its memory before the trace."""
        return self.held + fixed_nbytes(self.dtype)

    @property
    def address_nbytes(self) -> int:
        """The address space that it takes. `RLIMIT_AS` counts it, whether the process writes to it or not."""
        _, addresses = PRODUCTS_NBYTES.get(self.dtype, (0, 0))
        return self.addresses + FIRST_STEPS_NBYTES + addresses

    def fits(self, limit: int) -> bool:
        """Return True if a process with this additional limit is predicted to succeed. There is a margin for errors."""
        return self.fits_from <= limit

    @property
    def fits_from(self) -> int:
        """The smallest limit with `fits(limit)`."""
        return round((self.address_nbytes + MARGIN_NBYTES) * (1 + MARGIN))


def fixed_nbytes(dtype: str) -> int:
    """Return the bytes that a process needs for steps of any model, with matrix products in `dtype`."""
    pages, _ = PRODUCTS_NBYTES.get(dtype, (0, 0))
    return FIRST_STEPS_NBYTES + pages


class ProcessHeap:
    """The simulated `malloc` of the process of a trace's rank, entry by entry."""

    def __init__(self, threshold: int | None = None) -> None:
        self.malloc = Malloc(threshold)
        self._chunks: dict[int, list[int]] = {}  # by storage
        self._graph: list[list[int]] = []  # chunks of each node

    def note(self, entry: Entry) -> int:
        """Return the bytes of pages touched for the first time for `entry`. Shared memory is not on the heap."""
        before = self.malloc.touched
        match entry:
            case Allocation() if entry.ranks > 1:
                return entry.nbytes
            case Allocation():
                self._drop(self._chunks.pop(entry.storage, []))
                chunks = self._small(_BEFORE_DATA)
                chunks.append(self.malloc.allocate_aligned(entry.nbytes))
                self._chunks[entry.storage] = chunks + self._small(_AFTER_DATA)
            case Free():
                self._drop(self._chunks.pop(entry.storage, []))
            case Operation() if entry.origin.phase is Phase.FORWARD:
                self._graph.append(self._small(_NODE))
            case Operation() if entry.origin.phase in _BACKWARD and self._graph:
                self._drop(self._graph.pop())
            case Operation() if entry.origin.phase is Phase.STEP:
                while self._graph:
                    self._drop(self._graph.pop())
        return self.malloc.touched - before

    def _small(self, sizes: Iterable[int]) -> list[int]:
        return [self.malloc.allocate(nbytes) for nbytes in sizes]

    def _drop(self, chunks: list[int]) -> None:
        for chunk in reversed(chunks):
            self.malloc.free(chunk)


def threshold_set() -> int | None:
    """Return the `malloc` threshold that this process's environment sets, in bytes; None if it sets none."""
    value = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(value) if value.isdigit() else None


def process_memory(tape: Tape, *, threshold: int | None = None) -> ProcessMemory:
    """Return the peak memory of a rank's process, for a trace of whole steps of CPU ranks (`streams="cpu"`)."""
    heap = ProcessHeap(threshold)
    tensors = in_common = mapped_in_common = 0.0
    most_tensors = most_held = most_addresses = 0.0
    for entry in tape.entries:
        heap.note(entry)
        if isinstance(entry, Allocation | Free):
            sign = 1 if isinstance(entry, Allocation) else -1
            tensors += sign * entry.own_nbytes
            if entry.ranks > 1:
                in_common += sign * entry.own_nbytes
                mapped_in_common += sign * entry.nbytes
        most_tensors = max(most_tensors, tensors)
        most_held = max(most_held, heap.malloc.nbytes + in_common)
        most_addresses = max(most_addresses, heap.malloc.address_nbytes + mapped_in_common)
    return ProcessMemory(
        tensors=round(most_tensors),
        held=round(most_held),
        addresses=round(most_addresses),
        dtype=compute_dtype(tape.entries),
    )


def compute_dtype(entries: Iterable[Entry]) -> str:
    """Return the dtype with the most FLOPs."""
    flops = Counter[str]()
    for entry in entries:
        if isinstance(entry, Operation) and entry.flops:
            flops[entry.dtype] += entry.flops
    return max(flops, key=lambda dtype: flops[dtype], default="float32")
