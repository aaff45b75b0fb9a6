"""The memory of a rank's process on CPUs: tensors, the overhead of the C library's heap, and fixed costs.

torch allocates CPU tensors with `malloc`, together with many small objects that are not in a trace. These objects
occupy gaps where larger memory was freed, which are then too short for the next tensor. So a heap is larger than its
tensors by a measured factor (`docs/log.md`, "Heap fragmentation"). Tensors of `MALLOC_MMAP_THRESHOLD_` bytes or more
have separate mappings, which are returned to the system when they are freed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.plan.costs import rate_name
from fullshard.tape.tape import Allocation, Entry, Free, Operation, Tape

_LARGEST_THRESHOLD = 32 << 20
"""The largest threshold of glibc. If the environment sets none, it rises to the size of the largest freed mapping."""

HEAP_FACTOR = 1.24
"""Bytes of the heap per byte of its tensors at the peak: the mean of the 12 configurations of
`benchmarks/predicted_memory.py --part process`, which need 1.12 to 1.34."""

FIRST_STEPS_NBYTES = 2_500_000
"""The memory of a process for its first steps, without tensors: measured, see `benchmarks/predicted_memory.py`."""

PRODUCTS_NBYTES = {"bfloat16": (7_000_000, 21_000_000), "float16": (7_000_000, 21_000_000)}
"""The memory of oneDNN for matrix products of a dtype in a CPU process: pages, and address space, which a limit counts
as well. Measured with models of three sizes; the results differ by 2 MB."""

MARGIN, MARGIN_NBYTES = 0.04, 3_000_000
"""The margin of a limit above the prediction: a fraction of it, and the memory that MKL keeps for packed operands."""


@dataclass(frozen=True)
class ProcessMemory:
    """Peak bytes of a rank's tensors, of the pages that the process has for them, and of address space.

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
    def fits_from(self) -> int:
        """The smallest additional `RLIMIT_AS` that is predicted to be sufficient. It includes a margin for errors.

        It is reliable with a fixed `MALLOC_MMAP_THRESHOLD_` only. Without one, a heap can be much more fragmented.
        """
        _, addresses = PRODUCTS_NBYTES.get(self.dtype, (0, 0))
        return round((self.addresses + FIRST_STEPS_NBYTES + addresses + MARGIN_NBYTES) * (1 + MARGIN))

    def fits(self, limit: int) -> bool:
        """Return True if a process with this additional limit is predicted to succeed."""
        return self.fits_from <= limit


def fixed_nbytes(dtype: str) -> int:
    """Return the bytes that a process needs for steps of any model, with matrix products in `dtype`."""
    pages, _ = PRODUCTS_NBYTES.get(dtype, (0, 0))
    return FIRST_STEPS_NBYTES + pages


class ProcessPages:
    """The pages of a rank's process, updated by each entry: a heap that never shrinks, and mappings of large tensors.

    Args:
        threshold: The value of `MALLOC_MMAP_THRESHOLD_` in bytes. None if it is not set.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self.heap_nbytes = 0  # the most bytes of tensors on the heap so far
        self._threshold = min(threshold or _LARGEST_THRESHOLD, _LARGEST_THRESHOLD)
        self._on_heap = dict[int, int]()  # bytes by storage
        self._on_heap_nbytes = 0

    def has_mapping(self, entry: Allocation | Free) -> bool:
        """Return True if a storage is not on the heap. Memory shared by ranks is never on the heap."""
        return entry.ranks > 1 or entry.nbytes >= self._threshold

    def note(self, entry: Entry) -> int:
        """Process an entry and return the bytes of pages that its allocation touches for the first time."""
        if isinstance(entry, Free):
            self._on_heap_nbytes -= self._on_heap.pop(entry.storage, 0)
        elif isinstance(entry, Allocation):
            if self.has_mapping(entry):
                return entry.nbytes
            self._on_heap[entry.storage] = entry.nbytes
            self._on_heap_nbytes += entry.nbytes
            growth = max(0, self._on_heap_nbytes - self.heap_nbytes)
            self.heap_nbytes += growth
            return growth
        return 0


def threshold_set() -> int | None:
    """Return the `malloc` threshold that this process's environment sets, in bytes; None if it sets none."""
    value = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(value) if value.isdigit() else None


def process_memory(tape: Tape, *, threshold: int | None = None) -> ProcessMemory:
    """Return the peak memory of a rank's process, for a trace of whole steps of CPU ranks (`streams="cpu"`).

    Args:
        tape: The trace.
        threshold: The value of `MALLOC_MMAP_THRESHOLD_` in bytes. None if it is not set.
    """
    pages = ProcessPages(threshold)
    tensors = mapped = mapped_addresses = 0.0
    most_tensors = most_held = most_addresses = 0.0
    for entry in tape.entries:
        pages.note(entry)
        if not isinstance(entry, Allocation | Free):
            continue
        sign = 1 if isinstance(entry, Allocation) else -1
        tensors += sign * entry.own_nbytes
        if pages.has_mapping(entry):
            mapped += sign * entry.own_nbytes
            mapped_addresses += sign * entry.nbytes
        most_tensors = max(most_tensors, tensors)
        most_held = max(most_held, HEAP_FACTOR * pages.heap_nbytes + mapped)
        most_addresses = max(most_addresses, HEAP_FACTOR * pages.heap_nbytes + mapped_addresses)
    return ProcessMemory(
        tensors=round(most_tensors),
        held=round(most_held),
        addresses=round(most_addresses),
        dtype=compute_dtype(tape.entries),
    )


def compute_dtype(entries: Iterable[Entry]) -> str:
    """Return the dtype with the most FLOPs; "float8" stands for all 8-bit formats."""
    flops = Counter[str]()
    for entry in entries:
        if isinstance(entry, Operation) and entry.flops:
            flops[rate_name(entry.dtype)] += entry.flops
    return max(flops, key=lambda dtype: flops[dtype], default="float32")
