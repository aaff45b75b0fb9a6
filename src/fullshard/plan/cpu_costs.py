"""Core time of the entries of a trace, from the measurements of the machine in `cpu_speeds.py`.

On a CPU the host is the only stream: everything is sequential. An operation takes the time of a call. For its bytes
or FLOPs, it takes the measured time of operations with its name, or of matrix products of its size, with tensors in the
cache. Accesses to memory that is no longer in the cache, and the first write to pages that the allocator has obtained
from the system, take additional time. If there are more ranks than cores, they take turns.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigError
from fullshard.plan.costs import Costs
from fullshard.plan.cpu_speeds import OWN_CACHE
from fullshard.plan.hardware import Hardware
from fullshard.plan.process import ProcessPages, threshold_set
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_BY_WRITTEN = ("aten.embedding", "aten.embedding_dense_backward")  # in a trace they read or write a whole table
_IDENTICAL = {"aten.mul": "aten.mul", "aten.div": "aten.mul", "aten.sub": "aten.add", "aten.ones_like": "aten.zero_"}
_USUAL = "aten.add"  # used for operations that were not measured

_NEEDED = frozenset(("after_large_s", "cache_bytes", "kernels", "operation_s", "product_miss_s", "products", "unit_s"))

_Sizes = Sequence[Sequence[float]]
"""The measurements of an operation at several sizes: seconds, bytes read, bytes written, FLOPs."""


def step_seconds(
    entries: Sequence[Entry], here: Hardware, *, ranks: int, dtype: str, before: Iterable[Entry] = ()
) -> float:
    """Return the seconds of a step of `ranks` ranks on this machine.

    This is the core time of one rank times the number of ranks per core. Waits for other ranks are not included.

    Args:
        entries: The step of one rank.
        here: The machine.
        ranks: The number of ranks on this machine.
        dtype: The compute dtype.
        before: The trace before the step. It determines the contents of the cache and of the allocator.
    """
    seconds = core_seconds(entries, here, ranks=ranks, dtype=dtype, before=before)
    return sum(seconds.values()) * max(1.0, ranks / here.ranks_per_host)


def core_seconds(
    entries: Sequence[Entry], here: Hardware, *, ranks: int, dtype: str, before: Iterable[Entry] = ()
) -> dict[str, float]:
    """Return the core seconds of one rank's step by purpose; see `step_seconds`."""
    time = CoreTime(here, ranks=ranks, dtype=dtype)
    for entry in before:
        time.note_before(entry)
    for entry in entries:
        time.note(entry)
    return time.spent


class CoreTime:
    """The accumulated costs of trace entries. The allocator is configured as in this process's environment."""

    def __init__(self, here: Hardware, *, ranks: int, dtype: str) -> None:
        self.spent: dict[str, float] = {}
        self._speeds: Mapping[str, Any] = here.measured
        by_dtype: Mapping[str, Mapping[str, _Sizes]] = self._speeds["kernels"]
        usual = {**by_dtype["float32"], **by_dtype[dtype]}
        self._kernels = defaultdict(lambda: usual, {name: {**usual, **own} for name, own in by_dtype.items()})
        self._cache = _Cache(self._speeds["cache_bytes"] * min(1.0, here.ranks_per_host / ranks))
        self._pages = ProcessPages(threshold_set())
        self._new: dict[int, int] = {}  # bytes of storages whose pages have not been written to
        self._after_s = 0.0  # extra time of the next call
        self._unit_s: float = self._speeds["unit_s"] if ranks > 1 else 0.0
        self._begun = set[tuple[int, str]]()  # microbatches of units that have started

    def _spend(self, what: str, seconds: float) -> None:
        self.spent[what] = self.spent.get(what, 0.0) + seconds

    def note_before(self, entry: Entry) -> None:
        """Process `entry`, which precedes the measured part, without counting its cost."""
        self.note(entry)
        self.spent.clear()
        self._begun.clear()

    def note(self, entry: Entry) -> None:
        """Add the cost of `entry`."""
        new = self._pages.note(entry)
        self._spend("pages", new * self._speeds["page_s"])
        match entry:
            case Allocation():
                self._new[entry.storage] = min(new, entry.nbytes)
            case Free():
                self._new.pop(entry.storage, None)
            case Operation():
                if (begun := (entry.origin.microbatch, entry.origin.unit)) not in self._begun:
                    self._begun.add(begun)
                    self._spend("hooks", self._unit_s)
                self._spend("calls", self._speeds["operation_s"] + self._after_s)
                self._after_s = self._speeds["after_large_s"] if entry.nbytes > OWN_CACHE else 0.0
                read, written = self._missed(entry)
                kernels = self._kernels[entry.dtype]
                name = _identical(entry, kernels)
                sizes = kernels[name]
                if len(sizes) > 1 and not entry.flops:  # measured with tensors out of the cache, too
                    share = min(1.0, (read + written) / max(1, sum(access.nbytes for access in entry.reads)))
                    near, far = (self._for_bytes(name, item, entry) for item in (sizes[0], sizes[-1]))
                    self._spend(_kind(entry), near + share * (far - near))
                    return
                self._spend(_kind(entry), self._work_s(entry, name, sizes))
                if entry.name in _PRODUCTS:
                    self._spend("memory", (read + written) * self._speeds["product_miss_s"])
                else:
                    self._spend("memory", read * self._speeds["read_s"] + written * self._speeds["write_s"])
            case Collective():  # its implementation is not visible in a dry run
                nbytes = sum(access.nbytes for access in (*entry.reads, *entry.writes))
                self._spend("copies", nbytes / self._speeds["copy_bytes_per_s"])

    def _missed(self, operation: Operation) -> tuple[int, int]:
        """Return the bytes read and the bytes written that are not in the cache."""
        of_table = operation.name == "aten.embedding"
        reads = () if of_table else operation.reads
        return sum(map(self._cache.miss, reads)), sum(map(self._written_behind, operation.writes))

    def _written_behind(self, access: Access) -> int:
        """Return the bytes of `access` that are not in the cache. New pages are in it, since they were just zeroed."""
        missed = self._cache.miss(access)
        new = min(missed, self._new.get(access.storage, 0))
        if new:
            self._new[access.storage] -= new
        return missed - new

    def _work_s(self, operation: Operation, name: str, sizes: _Sizes) -> float:
        """Return the seconds of an operation's work itself, with tensors in the cache."""
        if operation.name in _PRODUCTS:
            return self._product_s(operation)
        if operation.flops and sizes[0][3]:
            return operation.flops * self._for_a_flop(sizes, operation.flops / operation.nbytes)
        by_bytes = self._for_bytes(name, sizes[0], operation)
        if not operation.flops:
            return by_bytes
        table, dims = (
            self._speeds["products"]["bfloat16" if operation.dtype == "bfloat16" else "float32"],
            self._speeds["dims"],
        )
        return max(by_bytes, operation.flops / _rate(table, dims, dims[-1:] * 3))  # not measured: as a large product

    def _for_bytes(self, name: str, measured: Sequence[float], operation: Operation) -> float:
        seconds, read, written, _ = measured
        if name in _BY_WRITTEN:
            read, nbytes = 0.0, _nbytes(operation.writes)
        else:
            nbytes = operation.nbytes
        call_s: float = self._speeds["call_s"]
        return max(0.0, seconds - call_s) / (read + written) * nbytes

    def _for_a_flop(self, measured: _Sizes, flops_a_byte: float) -> float:
        """Return the seconds per FLOP of attention, whose FLOPs per byte grow with the number of tokens."""
        points = [
            (math.log(flops / (read + written)), math.log(max(1e-9, seconds - self._speeds["call_s"]) / flops))
            for seconds, read, written, flops in measured
        ]
        at = min(max(math.log(flops_a_byte), points[0][0]), points[-1][0])
        for (start, low), (end, high) in itertools.pairwise(points):
            if at <= end:
                return math.exp(low + (high - low) * (at - start) / (end - start))
        return math.exp(points[-1][1])

    def _product_s(self, operation: Operation) -> float:
        """Return the seconds of a matrix product, from its FLOPs and the bytes of its operands and result.

        With m x k, k x n and m x n elements, k squared is (m k)(k n) / (m n), and so on. The product of all three is
        the square of m k n, which determines the bytes per element.
        """
        left, right = (access.nbytes for access in operation.reads[-2:])  # preceded by the matrix that is added
        out = sum(access.nbytes for access in operation.writes)
        element = (left * right * out / (operation.flops / 2) ** 2) ** (1 / 3)
        inner = math.sqrt(left * right / out / element)
        sizes = left / element / inner, inner, right / element / inner
        table = self._speeds["products"]["float32" if element > 3 else "bfloat16"]
        return operation.flops / _rate(table, self._speeds["dims"], sizes)


@dataclass(frozen=True, kw_only=True)
class CpuCosts(Costs):
    """Costs for `lay_out`, of the entries of one trace in order."""

    time: CoreTime  # the costs of the trace so far
    turns: float  # the number of ranks that share a core
    host_s: float = 0.0  # the host is the stream
    host_collective_s: float = 0.0
    host_mark_s: float = 0.0

    @classmethod
    def of(cls, here: Hardware, *, dtype: str, ranks: int) -> CpuCosts:
        """Return the costs for this number of ranks on a measured machine."""
        if missing := sorted(_NEEDED - here.measured.keys()):
            raise ConfigError(
                f"{here.name}: its description lacks the measured costs of {', '.join(missing)}. Run `fullshard "
                "calibrate` on that machine and pass the file that it writes."
            )
        return cls(time=CoreTime(here, ranks=ranks, dtype=dtype), turns=max(1.0, ranks / here.ranks_per_host))

    def note_before(self, entry: Entry) -> None:
        self.time.note_before(entry)

    def note_memory(self, entry: Allocation | Free) -> None:
        self.time.note(entry)

    def of_operation(self, operation: Operation | Collective) -> float:
        """Return the seconds of an operation, and of pages allocated since the previous one."""
        self.time.note(operation)
        seconds = sum(self.time.spent.values())
        self.time.spent.clear()
        return self.turns * seconds

    def of_collective(self, collective: Collective) -> float:
        return self.of_operation(collective)


def _identical(operation: Operation, kernels: Mapping[str, _Sizes]) -> str:
    """Return the name of the measured operation that is most similar to `operation`."""
    name = operation.name
    if name in ("aten.copy_", "aten._to_copy") and (read := _nbytes(operation.reads)) != _nbytes(operation.writes):
        wider = "aten._to_copy+"
        return wider if wider in kernels and _nbytes(operation.writes) > read else "aten._to_copy"
    bare = name.rstrip("_")
    return next((item for item in (name, bare, f"{bare}_", _IDENTICAL.get(bare, "")) if item in kernels), _USUAL)


def _kind(operation: Operation) -> str:
    if operation.name in _PRODUCTS:
        return "products"
    if operation.copies:
        return "copies"
    return "attention" if "attention" in operation.name else "optimizer" if "adam" in operation.name else "others"


def _nbytes(accesses: Iterable[Access]) -> int:
    return sum(access.nbytes for access in accesses)


def _rate(table: Any, dims: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the FLOP/s of a product, interpolated linearly in the logarithms between measurements."""
    places = []
    for size in (min(max(size, dims[0]), dims[-1]) for size in sizes):
        after = min(max(bisect.bisect_right(dims, size), 1), len(dims) - 1)
        share = math.log(size / dims[after - 1]) / math.log(dims[after] / dims[after - 1])
        places.append(((after - 1, 1 - share), (after, share)))
    log_rate = 0.0
    for i, a in places[0]:
        for j, b in places[1]:
            for k, c in places[2]:
                flops = 2 * dims[i] * dims[j] * dims[k]
                log_rate += a * b * c * math.log(flops / table[i][j][k])
    return math.exp(log_rate)


class _Cache:
    """A simulated cache that keeps the most recently used parts of storages."""

    def __init__(self, nbytes: float) -> None:
        self._room = nbytes
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._used = 0

    def miss(self, access: Access) -> int:
        """Access some bytes and return how many of them were not in the cache."""
        key = (access.storage, access.start)
        held = self._held.pop(key, 0)
        self._used -= held
        nbytes = access.nbytes
        self._held[key] = max(held, nbytes)
        self._used += max(held, nbytes)
        while self._used > self._room and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._used -= dropped
        return max(0, nbytes - held)
