"""The trace: all work on the streams of a device, in the order of issue by the host.

A trace is a recorder with more detail. It contains every operation and collective with the bytes that it reads and
writes, every allocation and free, every recorded event, and every wait for an event. `dry/` records it. Races, memory,
times and reports are all derived from a trace, so there is no second description of the engine's work. A trace has many
thousands of entries. They are named tuples, which are fast to create and to send to another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from fullshard.tape.recorder import Origin, Recorder

HOST = "host"
"""The stream of the host, which has memory separate from an accelerator's."""


class Access(NamedTuple):
    """A byte range of a storage, from `start` to `stop`. Storages are numbered in order of appearance."""

    storage: int
    start: int
    stop: int
    touched: int | None = None  # the number of bytes accessed, if not all: a strided tensor has gaps

    @property
    def nbytes(self) -> int:
        """The number of bytes read or written."""
        return self.stop - self.start if self.touched is None else self.touched


class Operation(NamedTuple):
    """A torch operation on a stream: the memory it reads and writes, and its floating-point operations.

    Args:
        name: The name of the operation.
        stream: The name of the stream.
        origin: The unit and the phase of the step.
        reads: The ranges of memory that are read.
        writes: The ranges of memory that are written.
        flops: The number of floating-point operations by formula.
        copies: Whether it only moves values.
        dtype: The dtype of its result, or of its first operand if it has FLOPs, such as `"bfloat16"`.
        skipped_flops: The part of `flops` that a kernel can skip: blocks above the diagonal of causal attention.
        crosses: Whether it copies between host memory and accelerator memory.
    """

    name: str
    stream: str
    origin: Origin
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int = 0
    copies: bool = False
    dtype: str = ""
    skipped_flops: int = 0
    crosses: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(access.nbytes for access in (*self.reads, *self.writes))


class Collective(NamedTuple):
    """A collective on a stream: the ranks of its process group, and the bytes of each input tensor on this rank.

    Args:
        name: The name of the collective, such as `"all_gather"`.
        stream: The name of the stream.
        origin: The unit and the phase of the step.
        reads: The ranges of memory that are read.
        writes: The ranges of memory that are written.
        ranks: The ranks of the process group.
        sizes: The bytes of each input tensor on this rank.
    """

    name: str
    stream: str
    origin: Origin
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]


class Allocation(NamedTuple):
    """Memory allocated for a storage from the memory of a stream.

    Args:
        storage: The number of the storage.
        nbytes: Its size in bytes.
        stream: The name of the stream.
        origin: The unit and the phase of the step.
        purpose: Its use by the engine. Empty for allocations by user modules, autograd and optimizers.
        ranks: The number of ranks of a host that share it.
    """

    storage: int
    nbytes: int
    stream: str
    origin: Origin
    purpose: str = ""
    ranks: int = 1

    @property
    def own_nbytes(self) -> float:
        """This rank's share of the bytes: all of them, or an equal share of shared memory."""
        return self.nbytes / self.ranks


class Free(NamedTuple):
    """The return of a storage's memory to its stream.

    Args:
        storage: The number of the storage.
        nbytes: Its size in bytes.
        stream: The name of the stream.
        origin: The unit and the phase of the step.
        ranks: The number of ranks of a host that share it.
    """

    storage: int
    nbytes: int
    stream: str
    origin: Origin
    ranks: int = 1

    @property
    def own_nbytes(self) -> float:
        """See `Allocation.own_nbytes`."""
        return self.nbytes / self.ranks


class Recorded(NamedTuple):
    """A numbered event after all work queued on a stream so far.

    Args:
        mark: The number of the event.
        stream: The name of the stream.
        origin: The unit and the phase of the step.
    """

    mark: int
    stream: str
    origin: Origin


class DiskTransfer(NamedTuple):
    """A read from a file or a write to a file on a separate thread.

    The range of the file is a byte range of a storage that is never allocated.

    Args:
        name: `"write"`, `"read"`, or `"read ahead"` if the reader reads the range again in case it was written since.
        stream: The name of the thread.
        origin: The unit and the phase of the step.
        reads: The ranges of memory that are read.
        writes: The ranges of memory that are written.
    """

    name: str
    stream: str
    origin: Origin
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


class Waited(NamedTuple):
    """A wait of a stream for an event.

    Args:
        mark: The number of the event.
        stream: The name of the stream.
        site: The source line that requested the wait.
        origin: The unit and the phase of the step.
        queried: Whether the host did not wait, but queried the event, which was complete.
    """

    mark: int
    stream: str
    site: str
    origin: Origin
    queried: bool = False


Entry = Operation | Collective | Allocation | Free | Recorded | DiskTransfer | Waited

E = TypeVar("E", Operation, Collective, Allocation, Free, Recorded, DiskTransfer, Waited)


class Tape(Recorder):
    """A recorder that also keeps all entries, in the order of issue by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def note(self, entry: Entry) -> None:
        """Append `entry`.

        Args:
            entry: An operation, a collective, a transfer, an allocation or an event.
        """
        self.entries.append(entry)

    def of(self, kind: type[E]) -> Iterator[E]:
        """Return the entries of one kind, in order.

        Args:
            kind: The class of the entries, such as `Collective`.
        """
        return (entry for entry in self.entries if isinstance(entry, kind))

    def peak_bytes(self, *, since: int = 0, of_host: bool = False) -> int:
        """Return the peak bytes of live tensors in device memory, or in host memory alongside it.

        Memory that ranks share is divided equally between them, so the sum over ranks is the memory of the host.

        Args:
            since: The index in the trace to start from.
            of_host: Whether to count host memory.
        """
        held = peak = 0.0
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Allocation | Free) and (entry.stream == HOST) == of_host:
                held += entry.own_nbytes if isinstance(entry, Allocation) else -entry.own_nbytes
            peak = max(peak, held) if place >= since else held
        return round(peak)
