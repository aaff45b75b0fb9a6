"""Seconds of a core that the entries of a tape take, from what `cpu_speeds.py` has measured of the machine.

On a CPU the host is the lane: one thing after the other. An operation takes what a call costs, and for its bytes or
FLOPs what operations of its name, or matrix products of its size, were measured to take of tensors that the cache has;
beside that, what must come from memory, since it has fallen out of the cache, and pages that are touched first, since the
allocator has got them from the system. Where there are more ranks than cores they take turns.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fullshard.plan.hardware import Hardware
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation

__all__ = ["CpuCosts", "core_seconds", "step_seconds"]

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_BY_WRITTEN = ("aten.embedding", "aten.embedding_dense_backward")  # a tape has them read, or write, all of a table
_ALIKE = {"aten.mul": "aten.mul", "aten.div": "aten.mul", "aten.sub": "aten.add", "aten.ones_like": "aten.zero_"}
_USUAL = "aten.add"  # what an operation is like that was not measured
_PAGES_KEPT = 2**25  # bytes: larger ones glibc gets from the system each time, and gives back at once


def step_seconds(entries: Sequence[Entry], here: Hardware, *, ranks: int, dtype: str, before: Iterable[Entry] = ()) -> float:
    """Seconds of a step of `ranks` ranks on this machine whose entries these are: those that a rank's core is busy for,
    times the ranks that share a core. Ranks that wait for each other are not looked at.

    Args:
        entries: of a step.
        here: the machine.
        ranks: of them on this machine.
        dtype: of compute.
        before: what is on the tape before the step: what is in the cache and what the allocator holds is due to it.
    """
    return core_seconds(entries, here, ranks=ranks, dtype=dtype, before=before)["all"] * max(1.0, ranks / here.ranks_per_host)


def core_seconds(
    entries: Sequence[Entry], here: Hardware, *, ranks: int, dtype: str, before: Iterable[Entry] = ()
) -> dict[str, float]:
    """Seconds of a core of one rank, by what they are for, and of all."""
    costs = CpuCosts(here, ranks=ranks, dtype=dtype)
    for entry in before:
        costs.note(entry)
    costs.spent.clear()
    for entry in entries:
        costs.note(entry)
    units = {it.origin.unit for it in entries if isinstance(it, Operation)}
    costs.spend("units", here.measured["unit_s"] * len(units) if ranks > 1 else 0.0)
    return {**costs.spent, "all": sum(costs.spent.values())}


class CpuCosts:
    """What the entries of a tape cost, one after the other."""

    def __init__(self, here: Hardware, *, ranks: int, dtype: str) -> None:
        self.spent: dict[str, float] = {}
        self._speeds: Mapping[str, Any] = here.measured
        self._kernels: Mapping[str, Sequence[float]] = self._speeds["kernels"][dtype]
        self._cache = _Cache(self._speeds["cache_bytes"] / ranks * (1 if ranks < 2 else 2))
        self._heap = _Heap()

    def spend(self, what: str, seconds: float) -> None:
        """Count seconds for something."""
        self.spent[what] = self.spent.get(what, 0.0) + seconds

    def note(self, entry: Entry) -> None:
        """Count what `entry` costs."""
        match entry:
            case Allocation():
                self.spend("pages", self._heap.allocate(entry.storage, entry.nbytes) * self._speeds["page_s"])
            case Free():
                self._heap.free(entry.storage)
                self._cache.forget(entry.storage)
            case Operation():
                self.spend("calls", self._speeds["operation_s"])
                self.spend(_kind(entry), self._work_s(entry))
                read, written = self._missed(entry)
                self.spend("memory", read * self._speeds["read_s"] + written * self._speeds["write_s"])
            case Collective():
                pass

    def _missed(self, operation: Operation) -> tuple[int, int]:
        """Bytes read and written that the cache does not have."""
        of_table = operation.name == "aten.embedding"
        reads = () if of_table else operation.reads
        return sum(map(self._cache.miss, reads)), sum(map(self._cache.miss, operation.writes))

    def _work_s(self, operation: Operation) -> float:
        """Seconds of the work itself, of tensors that the cache has."""
        if operation.name in _PRODUCTS:
            return self._product_s(operation)
        name = operation.name
        if name not in self._kernels:
            bare = name.rstrip("_")
            name = next((it for it in (bare, f"{name}_", _ALIKE.get(bare, "")) if it in self._kernels), _USUAL)
        seconds, read, written, flops = self._kernels[name]
        seconds = max(0.0, seconds - self._speeds["call_s"])
        if flops:
            return seconds / flops * operation.flops
        if name in _BY_WRITTEN:
            return seconds / written * sum(access.nbytes for access in operation.writes)
        return seconds / (read + written) * operation.nbytes

    def _product_s(self, operation: Operation) -> float:
        left, right = sorted((access.nbytes for access in operation.reads), reverse=True)[:2]
        out = sum(access.nbytes for access in operation.writes)
        batches, (rows, inner, columns) = _dims(operation, left, right, out)
        element = max(1, round((left * right * out / (batches * (operation.flops / batches / 2) ** 2) / batches**2) ** (1 / 3)))
        table = self._speeds["products"]["float32" if element > 2 else "bfloat16"]
        flops_per_s = _rate(table, self._speeds["dims"], (rows, inner, columns))
        return operation.flops / flops_per_s


def _kind(operation: Operation) -> str:
    if operation.name in _PRODUCTS:
        return "products"
    if operation.copies:
        return "copies"
    return "attention" if "attention" in operation.name else "optimizer" if "adam" in operation.name else "others"


def _dims(operation: Operation, left: int, right: int, out: int) -> tuple[int, tuple[float, float, float]]:
    """Rows, inner and columns of a product, from its FLOPs and from the bytes of its operands and of its result.

    With m x k, k x n and m x n elements, k is the root of (m k)(k n) / (m n), and so on: whatever an element's bytes are.
    """
    volume = operation.flops / 2
    element = (left * right * out / volume**2) ** (1 / 3)  # bytes of an element, of one batch
    batches = 1
    left_n, right_n, out_n = left / element, right / element, out / element
    inner = math.sqrt(left_n * right_n / out_n)
    return batches, (left_n / inner, inner, right_n / inner)


def _rate(table: Any, dims: Sequence[int], sizes: Sequence[float]) -> float:
    """FLOP/s of a product: between those measured, linear in the logarithms."""
    places = []
    for size in sizes:
        size = min(max(size, dims[0]), dims[-1])
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
    """What a cache has that keeps what was used last: parts of storages."""

    def __init__(self, nbytes: float) -> None:
        self._room = nbytes
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._used = 0

    def miss(self, access: Access) -> int:
        """Use some bytes; how many of them were not there."""
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

    def forget(self, storage: int) -> None:
        """What is freed is used again by what comes next."""


class _Heap:
    """Of glibc's malloc: which pages it gets from the system. What is small is not looked at.

    Blocks over 32 MiB are got and given back each; others lie in a heap that grows at its end, and is cut there when
    more than twice as much is free at it.
    """

    def __init__(self) -> None:
        self._where: dict[int, tuple[int, int]] = {}  # by storage
        self._free: list[tuple[int, int]] = []  # start and stop, in order
        self._end = 0  # of what is handed out
        self._touched = 0  # of the pages that are there

    def allocate(self, storage: int, nbytes: int) -> int:
        """Bytes of pages that are touched first."""
        self.free(storage)
        if nbytes > _PAGES_KEPT:
            return nbytes
        fitting = [(stop - start, start, stop) for start, stop in self._free if stop - start >= nbytes]
        if fitting:
            _, start, stop = min(fitting)
            self._free.remove((start, stop))
            if stop - start > nbytes:
                bisect.insort(self._free, (start + nbytes, stop))
        else:
            start = self._end
            self._end += nbytes
        self._where[storage] = start, start + nbytes
        new = max(0, self._end - self._touched)
        self._touched = max(self._touched, self._end)
        return new

    def free(self, storage: int) -> None:
        """Give a block back."""
        if storage not in self._where:
            return
        start, stop = self._where.pop(storage)
        place = bisect.bisect(self._free, (start, stop))
        if place < len(self._free) and self._free[place][0] == stop:
            stop = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        if stop == self._end:
            self._end = start
            if self._touched - self._end > 2 * _PAGES_KEPT:
                self._touched = self._end
        else:
            self._free.insert(place, (start, stop))
