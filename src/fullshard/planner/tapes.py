"""The traces of a few steps, which are extrapolated to other numbers of rows, entry by entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation, Tape


@dataclass
class Tapes:
    """Two steps of a program on a model with `lengths` blocks: one with `rows` rows, and one with an additional row."""

    lengths: Mapping[str, int]
    tape: Tape
    begins: Sequence[int]  # indices of the first step, of `one`, of `two`, and of the end
    one: Sequence[Entry]
    two: Sequence[Entry]
    rows: int = 1

    @cached_property
    def pairs(self) -> Sequence[tuple[Entry, Entry]] | None:
        """Pairs of an entry of the first step and its counterpart with one more row; None if the operations differ.

        One-time work of the engine, such as zeros for padding that are kept, has no counterpart: it does not depend on
        rows.
        """
        likes: dict[Any, list[Entry]] = {}
        for entry, key in zip(self.two, _kinds(self.two), strict=True):
            likes.setdefault((entry.origin.unit, key), []).append(entry)
        counts, found = Counter[Any](), list[tuple[Entry, Entry]]()
        for entry, kind in zip(self.one, _kinds(self.one), strict=True):
            key = entry.origin.unit, kind
            known, number = likes.get(key, []), counts[key]
            counts[key] += 1
            if number < len(known):
                found.append((entry, known[number]))
            elif isinstance(entry, Operation) and entry.flops:
                return None
            else:
                found.append((entry, entry))
        return found

    @property
    def is_straight(self) -> bool:
        """True if sizes can be extrapolated to any number of rows."""
        return self.pairs is not None

    def at(self, rows: int) -> Sequence[Entry]:
        """Return the step with this number of rows."""
        more = rows - self.rows
        if more in (0, 1):
            return (self.one, self.two)[more]
        assert self.pairs is not None
        return [_scaled(one, two, more) for one, two in self.pairs]

    def trace_with(self, step: Sequence[Entry]) -> Tape:
        """Return the trace up to the end of the first step, followed by `step`."""
        tape = Tape()
        tape.entries = [*self.tape.entries[: self.begins[1]], *step]
        return tape


def with_one_more_row(longer: Tapes, first: Tapes) -> Tapes | None:
    """Return `longer`, whose steps have as many rows as `first.one`, extended by a step with one more row.

    The new step is extrapolated from `first`: the entries of a block are those of its counterpart on `first`. None if
    they differ.
    """
    pairs: dict[Any, list[tuple[Entry, Entry]]] = {}
    assert first.pairs is not None
    for pair, kind in zip(first.pairs, _kinds(first.one), strict=True):
        pairs.setdefault((pair[0].origin.unit, kind), []).append(pair)
    counts = Counter[Any]()
    step: list[Entry] = []
    for entry, kind in zip(longer.one, _kinds(longer.one), strict=True):
        unit = entry.origin.unit
        number = counts[unit, kind]
        counts[unit, kind] += 1
        known = pairs.get((_likes(unit, longer.lengths, first.lengths), kind), [])
        if number < len(known):
            step.append(_moved(entry, *known[number]))
        elif isinstance(entry, Operation) and entry.flops:
            return None
        else:
            step.append(entry)  # the optimizer or engine processes more tensors, independent of rows
    tape = _joined(longer, step)
    reported = replace(longer, two=step, tape=tape, begins=[*longer.begins[:3], len(tape.entries)])
    reported.pairs = list(zip(longer.one, step, strict=True))
    return reported


def _joined(longer: Tapes, step: Sequence[Entry]) -> Tape:
    """Return the trace of `longer` followed by `step`, with new numbers for the storages of its last step."""
    local = {entry.storage for entry in step if isinstance(entry, Allocation)}
    freed = {entry.storage for entry in step if isinstance(entry, Free)}
    left: dict[tuple[str, int], list[int]] = {}  # storages of the previous step that this step frees
    for entry in longer.one:
        if isinstance(entry, Allocation) and entry.storage not in freed:
            left.setdefault((entry.stream, entry.nbytes), []).append(entry.storage)
    more = 1 + max(entry.storage for entry in longer.tape.entries if isinstance(entry, Allocation))
    tape = Tape()
    tape.entries = list(longer.tape.entries[: longer.begins[2]])
    renamed: set[int] = set()
    for entry in step:
        if isinstance(entry, Allocation):
            renamed.add(entry.storage)
            tape.entries.append(entry._replace(storage=entry.storage + more))
        elif isinstance(entry, Free) and entry.storage in renamed:
            renamed.discard(entry.storage)
            tape.entries.append(entry._replace(storage=entry.storage + more))
        elif isinstance(entry, Free) and (waiting := left.get((entry.stream, entry.nbytes))):
            tape.entries.append(entry._replace(storage=waiting.pop(0)))
        elif isinstance(entry, Operation | Collective):
            reads, writes = (
                tuple(item._replace(storage=item.storage + more) if item.storage in renamed else item for item in those)
                for those in (entry.reads, entry.writes)
            )
            tape.entries.append(entry._replace(reads=reads, writes=writes))
        elif not (isinstance(entry, Free) and entry.storage in local):
            tape.entries.append(entry)
    return tape


def _kinds(step: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """Return keys that identify corresponding entries within a unit: memory by the operation that writes it first."""
    writers: dict[int, str] = {}  # by the index of the allocation
    waiting: dict[int, int] = {}
    for place, entry in enumerate(step):
        if isinstance(entry, Allocation):
            waiting[entry.storage] = place
        elif isinstance(entry, Operation | Collective):
            for access in entry.writes:
                if access.storage in waiting:
                    writers[waiting.pop(access.storage)] = entry.name
    last: dict[int, int] = {}
    found = []
    for place, entry in enumerate(step):
        name = getattr(entry, "name", "")
        if isinstance(entry, Allocation):
            last[entry.storage] = place
        if isinstance(entry, Allocation | Free):
            name = writers.get(last.get(entry.storage, -1), "")
        found.append((type(entry), name, entry.stream, entry.origin.phase, entry.origin.microbatch))
    return found


def _likes(unit: str, lengths: Mapping[str, int], others: Mapping[str, int]) -> str:
    """Return the counterpart of `unit` in a model of `others` blocks: as far from an end, or an inner block."""
    for fqn, length in lengths.items():
        if unit.startswith(f"{fqn}."):
            number, dot, remaining = unit.removeprefix(f"{fqn}.").partition(".")
            place, few, more = int(number), others[fqn], length - others[fqn]
            if place >= length - 2:
                place -= more
            elif place >= few - 2:
                place = few - 2 if more == 1 or (place - few) % 2 == 0 else few - 3
            return f"{fqn}.{place}{dot}{remaining}"
    return unit


def _moved(entry: Entry, one: Entry, two: Entry) -> Entry:
    """Return `entry` with one more row, changed by the difference between `one` and `two`."""
    match entry, one, two:
        case Operation(), Operation(), Operation():
            if one.nbytes == two.nbytes and one.flops == two.flops:  # e.g. the optimizer's: `one` has fewer tensors
                return entry
            each = [
                tuple(
                    Access(item.storage, 0, item.nbytes + b.nbytes - a.nbytes)
                    for item, a, b in zip(*those, strict=False)
                )
                for those in ((entry.reads, one.reads, two.reads), (entry.writes, one.writes, two.writes))
            ]
            return entry._replace(
                reads=each[0],
                writes=each[1],
                flops=entry.flops + two.flops - one.flops,
                skipped_flops=entry.skipped_flops + two.skipped_flops - one.skipped_flops,
            )
        case Allocation(), Allocation(), Allocation():
            return entry._replace(nbytes=entry.nbytes + two.nbytes - one.nbytes)
        case Free(), Free(), Free():
            return entry._replace(nbytes=entry.nbytes + two.nbytes - one.nbytes)
    return entry


def _scaled(one: Entry, two: Entry, more: int) -> Entry:
    """Return an entry with `more` rows than `one` (negative for fewer); `two` has one more row."""
    match one, two:
        case Operation(), Operation():
            if one.nbytes == two.nbytes and one.flops == two.flops:
                return one
            return Operation(
                one.name,
                one.stream,
                one.origin,
                _lengthened(one.reads, two.reads, more),
                _lengthened(one.writes, two.writes, more),
                one.flops + more * (two.flops - one.flops),
                one.copies,
                one.dtype,
                one.skipped_flops + more * (two.skipped_flops - one.skipped_flops),
                one.crosses,
            )
        case Allocation(), Allocation():
            return one._replace(nbytes=_reported(one.nbytes, two.nbytes, more))
        case Free(), Free():
            return one._replace(nbytes=_reported(one.nbytes, two.nbytes, more))
    return one


def _lengthened(one: Sequence[Access], two: Sequence[Access], more: int) -> tuple[Access, ...]:
    return tuple(Access(a.storage, 0, _reported(a.nbytes, b.nbytes, more)) for a, b in zip(one, two, strict=False))


def _reported(one: int, two: int, more: int) -> int:
    """Return the bytes with `more` rows than `one` (negative for fewer)."""
    return max(0, one + more * (two - one))
