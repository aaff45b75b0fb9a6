"""The tape: all that happens on the lanes of a device, in the order in which the host asks for it.

A tape is a recorder that is told more: every operation and collective with the bytes that it reads and writes, every
allocation and free, every mark that a lane sets and every wait for one. Who watches for that is `dry/`; races, memory,
times and reports are read off a tape, and nothing else describes what the engine does. A tape has many thousands of
entries: they are tuples with names, which are quick to make and to send to another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from fullshard.tape.recorder import Origin, Recorder

__all__ = ["HOST", "Access", "Allocation", "Collective", "Entry", "Free", "Operation", "Recorded", "Tape", "Waited"]


HOST = "host"
"""The lane of the host, which has memory of its own beside an accelerator."""


class Access(NamedTuple):
    """Some bytes of a storage, from `start` up to `stop`. Storages are numbered as they first appear."""

    storage: int
    start: int
    stop: int
    touched: int | None = None  # how many of them, if not all: a strided tensor leaves some out

    @property
    def nbytes(self) -> int:
        """How many bytes are read or written."""
        return self.stop - self.start if self.touched is None else self.touched


class Operation(NamedTuple):
    """An operation of torch's on a lane: what it reads and writes, and the floating-point operations it takes.

    `copies` tells whether it moves values and computes none. `dtype` is that of what it gives, such as "bfloat16".
    `flops` are those of the formula, and `skipped_flops` those of them that a
    kernel need not do: attention under a causal mask leaves out the blocks above the diagonal. `crosses` tells whether
    it copies between the memory of the host and that of an accelerator.
    """

    name: str
    lane: str
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
    """A collective on a lane: its process group's ranks, and the bytes of each tensor that this rank gives."""

    name: str
    lane: str
    origin: Origin
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]


class Allocation(NamedTuple):
    """Memory that a storage got, from the memory that is kept for a lane. `purpose` is what the engine says it is for;
    empty for what the user's modules, autograd and optimizers allocate. So many `ranks` of a host have it in common.
    """

    storage: int
    nbytes: int
    lane: str
    origin: Origin
    purpose: str = ""
    ranks: int = 1

    @property
    def own_nbytes(self) -> float:
        """This rank's part of the bytes: all of them, or those of one of the ranks that have them in common."""
        return self.nbytes / self.ranks


class Free(NamedTuple):
    """Memory that a storage gave back to the lane that it was from. `ranks` as of its allocation."""

    storage: int
    nbytes: int
    lane: str
    origin: Origin
    ranks: int = 1

    @property
    def own_nbytes(self) -> float:
        """See `Allocation.own_nbytes`."""
        return self.nbytes / self.ranks


class Recorded(NamedTuple):
    """A numbered mark behind all work queued on a lane so far."""

    mark: int
    lane: str
    origin: Origin


class Waited(NamedTuple):
    """A lane goes on only after a mark. `site` is where in the source that was asked for."""

    mark: int
    lane: str
    site: str
    origin: Origin


Entry = Operation | Collective | Allocation | Free | Recorded | Waited

E = TypeVar("E", Operation, Collective, Allocation, Free, Recorded, Waited)


class Tape(Recorder):
    """All that was done, in the host's order; and the events of a `Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def note(self, entry: Entry) -> None:
        """Append `entry`."""
        self.entries.append(entry)

    def of(self, kind: type[E]) -> Iterator[E]:
        """The entries of one kind, in order."""
        return (entry for entry in self.entries if isinstance(entry, kind))

    def peak_bytes(self, *, since: int = 0, of_host: bool = False) -> int:
        """The most bytes of tensors that were alive at once in the device's memory, or in the host's beside it.

        Of memory that ranks have in common, a rank's part: what all ranks of a host need is the sum.

        Args:
            since: the place on the tape from which on to look.
            of_host: whether it is the host's.
        """
        held = peak = 0.0
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Allocation | Free) and (entry.lane == HOST) == of_host:
                held += entry.own_nbytes if isinstance(entry, Allocation) else -entry.own_nbytes
            peak = max(peak, held) if place >= since else held
        return round(peak)
