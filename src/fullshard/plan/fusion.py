"""A model of compiled blocks: `torch.compile` fuses operations with few FLOPs per byte into few kernels.

A sequence of such operations, between two operations with a FLOP formula, counts as one kernel. It reads values that
earlier kernels wrote, and writes those that are still used after it. Values that are freed within the sequence are not
written to memory. A reduction to a single number, such as the largest value of a tensor for a scale of float8, ends a
kernel: the next one reads the tensor again.

Times are approximate. The compiler splits a sequence where shapes or the dimensions of reductions differ, and it saves
fewer values for backward than an eager block. So the predicted memory is that of eager blocks, which need more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fullshard.plan.operations import is_unknown
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Access, Allocation, Entry, Free, Operation

FUSED = "inductor.fused"
"""The name of a fused kernel in a trace."""

_NUMBER_NBYTES = 8
_COMPILED = (Phase.FORWARD, Phase.BACKWARD)


def fused(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries of a trace as if each unit below the root had been compiled."""
    run = _Run()
    for entry in entries:
        if not run.takes(entry):
            yield from run.end()
            run = _Run()
        if run.takes(entry):
            run.add(entry)
        else:
            yield entry
    yield from run.end()


class _Run:
    """A sequence of operations of one unit that is compiled to one kernel, with its allocations and frees."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._operations: list[Operation] = []
        self._has_reduced = False  # to a single number

    def takes(self, entry: Entry) -> bool:
        """Return True if `entry` can be added to the sequence."""
        if isinstance(entry, Allocation | Free):
            return bool(self._operations)
        if not isinstance(entry, Operation) or entry.flops or entry.crosses or is_unknown(entry.name):
            return False
        if entry.origin.phase not in _COMPILED or not entry.origin.unit:
            return False
        if self._has_reduced and not _is_of_numbers(entry):
            return False
        first = self._operations[0] if self._operations else entry
        return entry.stream == first.stream and entry.origin == first.origin

    def add(self, entry: Entry) -> None:
        """Add an entry that `takes` accepts."""
        self._entries.append(entry)
        if isinstance(entry, Operation):
            self._operations.append(entry)
            is_number = sum(access.nbytes for access in entry.writes) <= _NUMBER_NBYTES
            self._has_reduced |= is_number and not _is_of_numbers(entry)

    def end(self) -> Iterator[Entry]:
        """Yield the allocations of the sequence, its kernel, and its frees."""
        if len(self._operations) < 2:
            yield from self._entries
            return
        written = set[int]()  # storages that earlier operations of the sequence wrote
        freed = {entry.storage for entry in self._entries if isinstance(entry, Free)}
        reads, writes = dict[tuple[int, int], Access](), dict[tuple[int, int], Access]()
        for operation in self._operations:
            for access in operation.reads:
                if access.storage not in written:
                    _keep_longer(reads, access)
            for access in operation.writes:
                written.add(access.storage)
                if access.storage not in freed:
                    _keep_longer(writes, access)
        first = self._operations[0]
        yield from (entry for entry in self._entries if isinstance(entry, Allocation))
        yield first._replace(name=FUSED, reads=tuple(reads.values()), writes=tuple(writes.values()), copies=False)
        yield from (entry for entry in self._entries if isinstance(entry, Free))


def _is_of_numbers(operation: Operation) -> bool:
    """Return True if an operation only reads and writes single numbers."""
    return all(access.nbytes <= _NUMBER_NBYTES for access in (*operation.reads, *operation.writes))


def _keep_longer(known: dict[tuple[int, int], Access], access: Access) -> None:
    """Record an access by its start. If it is known already, keep the larger number of bytes."""
    key = access.storage, access.start
    if key not in known or known[key].nbytes < access.nbytes:
        known[key] = access
