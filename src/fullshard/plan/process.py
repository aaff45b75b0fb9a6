"""The memory of a rank's process on CPUs: tensors, what the C library's allocator holds beyond them, and fixed costs.

torch takes the memory of a CPU's tensors from `malloc`, and with it much that is small and on no tape: of each tensor,
and of each node of autograd's graph. There is little of it, but it lies where larger memory has been freed, which is
too short then for what comes next: a heap that is cut up so was measured to be a third larger than its tensors. So what
is small is played to a model of the allocator, too (`malloc.py`), by what was seen of torch 2.13 in a trace of its
calls to `malloc`. What sizes it has in detail makes little difference.

Not modelled: other threads' heaps, and pages that a program never touches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.plan.malloc import Malloc
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Entry, Free, Operation, Tape

__all__ = [
    "FIRST_STEPS_NBYTES",
    "MARGIN",
    "MARGIN_NBYTES",
    "PRODUCTS_NBYTES",
    "ProcessHeap",
    "ProcessMemory",
    "compute_dtype",
    "fixed_nbytes",
    "process_memory",
    "threshold_set",
]

_BEFORE_DATA, _AFTER_DATA = (96,), (176, 24)  # bytes of a tensor beside its data
# Of a node of autograd's graph, from an operation's forward to its backward.
_NODE = (496, 312, *(24,) * 8, 40, 64)
_BACKWARD = (Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD)

FIRST_STEPS_NBYTES = 2_500_000
"""What a process takes for its first steps beside tensors: measured, see `benchmarks/predicted_memory.py`."""

PRODUCTS_NBYTES = {"bfloat16": (7_000_000, 21_000_000), "float16": (7_000_000, 21_000_000)}
"""What products of matrices of a dtype take in a process on a CPU, by oneDNN: of pages, and of addresses, which a limit
counts too. Measured with models of three sizes, which differ by 2 MB."""

MARGIN, MARGIN_NBYTES = 0.04, 3_000_000
"""What a limit must leave beyond what is predicted: a part of it, and what MKL keeps for packed operands."""


@dataclass(frozen=True)
class ProcessMemory:
    """The most bytes at once: of tensors, of pages that the process has for them, and of addresses.

    Of memory in common a rank's part counts of tensors and pages, and all of it of addresses. `dtype` is that of most
    products of matrices.
    """

    tensors: int
    held: int
    addresses: int
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """All that the process takes beyond what it took before the tape."""
        return self.held + fixed_nbytes(self.dtype)

    @property
    def address_nbytes(self) -> int:
        """The addresses that it takes: what `RLIMIT_AS` counts, whether it ever writes there or not."""
        _, addresses = PRODUCTS_NBYTES.get(self.dtype, (0, 0))
        return self.addresses + FIRST_STEPS_NBYTES + addresses

    def fits(self, limit: int) -> bool:
        """True if a process that may take so many more bytes will get through, with a margin for what is not known."""
        return self.fits_from <= limit

    @property
    def fits_from(self) -> int:
        """The least limit with which it is said to."""
        return round((self.address_nbytes + MARGIN_NBYTES) * (1 + MARGIN))


def fixed_nbytes(dtype: str) -> int:
    """The bytes that a process takes for its steps whatever the model's size, where most products are of `dtype`."""
    pages, _ = PRODUCTS_NBYTES.get(dtype, (0, 0))
    return FIRST_STEPS_NBYTES + pages


class ProcessHeap:
    """What `malloc` does in the process of a tape's rank, entry by entry.

    Args:
        threshold: see `Malloc`.
    """

    def __init__(self, threshold: int | None = None) -> None:
        self.malloc = Malloc(threshold)
        self._chunks: dict[int, list[int]] = {}  # by storage
        self._graph: list[list[int]] = []  # chunks of each node

    def note(self, entry: Entry) -> int:
        """Bytes of pages that are touched first for `entry`. Memory in common is not of the heap."""
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
    """The threshold of `malloc` that this process's environment sets, in bytes; None if it sets none."""
    value = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(value) if value.isdigit() else None


def process_memory(tape: Tape, *, threshold: int | None = None) -> ProcessMemory:
    """What the process of the tape's rank needs at most, for a tape of CPU ranks (`lanes="cpu"`) of whole steps.

    Args:
        tape: from the making of the model on.
        threshold: see `Malloc`.
    """
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
    """The dtype in which most FLOPs are done."""
    flops = Counter[str]()
    for entry in entries:
        if isinstance(entry, Operation) and entry.flops:
            flops[entry.dtype] += entry.flops
    return max(flops, key=lambda dtype: flops[dtype], default="float32")
