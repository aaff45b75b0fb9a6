"""What a program needs and takes, told from a few dry runs: of models of fewer blocks, with one row and with two.

A dry run of a large model takes a while, and a search asks for many. So steps are taken by models of a few blocks (see
`shorten`), with one row and then with two. All that is read off such a tape is told for the whole model and for any
number of rows along straight lines. Times are not straight in rows (an operation takes the longer of its FLOPs and its
bytes), so there the sizes of each operation are, and the tape is laid out anew.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard import dry
from fullshard.engine.hooks import without_sync
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.plan.allocator import allocator_use
from fullshard.plan.costs import Costs
from fullshard.plan.hardware import Hardware
from fullshard.plan.memory import MemoryPeak, State, memory_curve, memory_peak
from fullshard.plan.prediction import model_flops
from fullshard.plan.timeline import Timeline, lay_out
from fullshard.planner.candidates import Candidate, Cluster, Program, sharded
from fullshard.planner.shorten import BlockList, block_lists, shortened
from fullshard.planner.subject import Subject, copy_with_memory, user_line
from fullshard.tape.recorder import Origin, Phase, note_origin
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation, Tape

__all__ = ["LIMITS", "Figures", "MakeOptimizer", "Sketch", "sketch"]

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
COMPUTE = "compute"
LIMITS = ("compute", "memory bandwidth", "host", "gathers", "reductions", "waits")
"""What a second of the compute lane may go to."""

_BETWEEN = Origin("", Phase.IDLE)
_READS_VALUES = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")
_KNOWN = ("aten.", "prim", "c10d", "_c10d", "fsdp.", "fullshard", "profiler")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One candidate, as it would be on one rank.

    Args:
        candidate: what it is.
        peak_bytes: of tensors at once.
        by_state: what memory holds then.
        where: the unit and the phase whose work asks for it.
        needed_bytes: what has to fit: with what the caching allocator holds beyond tensors.
        host_bytes: of the host's memory for each rank, beside an accelerator.
        step_s: seconds of a step.
        limits: seconds of the compute lane by what they go to, in `LIMITS`.
        flops: of the forward and backward of a step, on a rank, without what checkpoints compute again.
        sent_bytes: what a rank gives to collectives in a step.
        flops_utilisation: the share of the peak rate that `flops` come to (MFU).
    """

    candidate: Candidate
    peak_bytes: float
    by_state: Mapping[State, float]
    where: str
    needed_bytes: float
    host_bytes: float
    step_s: float
    limits: Mapping[str, float]
    flops: float
    sent_bytes: float
    flops_utilisation: float

    @property
    def seconds_a_row(self) -> float:
        """Seconds for each row of a rank: what candidates are compared by."""
        return self.step_s / (self.candidate.rows * self.candidate.microbatches)

    @property
    def exposed_s(self) -> float:
        """Seconds in which compute waits for other ranks, or for copies."""
        return sum(self.limits[name] for name in ("gathers", "reductions", "waits"))

    @property
    def limited_by(self) -> str:
        """What takes most of the step."""
        return max(self.limits, key=lambda name: self.limits[name])


@dataclass
class _Tapes:
    """Two steps of one program on a model of `lengths` blocks: with one row, and with two."""

    lengths: Mapping[str, int]
    tape: Tape
    begins: Sequence[int]  # of the first step, of that with one row, of that with two, and the end
    one: Sequence[Entry]
    two: Sequence[Entry]
    curves: dict[bool, Sequence[tuple[int, Mapping[State, int]]]] = field(default_factory=dict, repr=False)

    def curve(self, of_host: bool) -> Sequence[tuple[int, Mapping[State, int]]]:
        """The bytes by state wherever they change."""
        if of_host not in self.curves:
            self.curves[of_host] = list(memory_curve(self.tape, of_host=of_host))
        return self.curves[of_host]

    @cached_property
    def pairs(self) -> Sequence[tuple[Entry, Entry]] | None:
        """Each entry of the step with one row, and its like with two rows; None if the model does different things.

        What the engine does once, such as zeros for padding that are kept, has no like: it is the same at any rows.
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
        """True if sizes at any number of rows can be told."""
        return self.pairs is not None

    def at(self, rows: int) -> Sequence[Entry]:
        """The step with so many rows."""
        if rows <= 2:
            return (self.one, self.two)[rows - 1]
        assert self.pairs is not None
        return [_scaled(one, two, rows - 1) for one, two in self.pairs]


@dataclass
class Sketch:
    """A program on a cluster, of which `figures` are told for any number of rows and microbatches."""

    subject: Subject
    cluster: Cluster
    program: Program
    tapes: Sequence[_Tapes]
    whole: Mapping[str, int]  # the lengths of the block lists of the model itself
    _found: dict[int, dict[Any, float]] = field(default_factory=dict)

    @cached_property
    def most_rows(self) -> int | None:
        """The most rows that can be told; None if any number can."""
        if not self.subject.any_rows:
            return 1
        return None if all(each.is_straight for each in self.tapes) else 2

    @cached_property
    def dtype(self) -> str:
        """Of most products of matrices."""
        flops = Counter[str]()
        for entry in self.tapes[0].one:
            if isinstance(entry, Operation) and entry.flops:
                flops[entry.dtype] += entry.flops
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    @property
    def custom_operations(self) -> list[str]:
        """Operations of others than torch's that no FLOPs are known of: they are counted by their bytes."""
        entries = (entry for entry in self.tapes[0].one if isinstance(entry, Operation) and not entry.flops)
        return sorted({entry.name for entry in entries if not entry.name.startswith(_KNOWN)})

    def on(self, hardware: Hardware) -> Sketch:
        """The same tapes on another machine with as many ranks on a host."""
        return replace(self, cluster=replace(self.cluster, hardware=hardware), _found={})

    def figures(self, rows: int, microbatches: int) -> Figures:
        """The candidate of so many rows and microbatches.

        Raises:
            ConfigError: what is on the tape changes with the rows, so that it cannot be told for so many.
        """
        if self.most_rows is not None and rows > self.most_rows:
            raise ConfigError(
                f"{rows} rows: what the model does differs with them; up to {self.most_rows} can be told."
            )
        found = self._figures(rows)
        more = microbatches - (2 if self.program.accumulates else 1)
        peak, by_state, where = self._peak(rows)
        times = {name: found[name] + more * found["each", name] for name in (*LIMITS, "step", "flops", "sent")}
        rate = self.cluster.hardware.flops_per_s[self.dtype]
        return Figures(
            candidate=Candidate(program=self.program, rows=rows, microbatches=microbatches),
            peak_bytes=peak,
            by_state=by_state,
            where=where,
            needed_bytes=self.needed_bytes(rows),
            host_bytes=max(self._regions(rows, of_host=True).values(), default=0.0),
            step_s=times["step"],
            limits={name: max(0.0, times[name]) for name in LIMITS},
            flops=times["flops"],
            sent_bytes=times["sent"],
            flops_utilisation=times["flops"] / times["step"] / rate,
        )

    def needed_bytes(self, rows: int) -> float:
        """What has to fit with so many rows: tensors at their peak, and what the allocator holds beyond them."""
        return self._peak(rows)[0] * self._held

    @cached_property
    def _held(self) -> float:
        """Times the tensors' peak that the caching allocator of an accelerator holds, with one row."""
        if self.cluster.hardware.kind != "gpu":
            return 1.0
        found = self._whole([_reserved(each) for each in self.tapes])
        return min(_MOST_HELD, max(1.0, found["reserved"] / max(found["tensors"], 1.0)))

    def peak_moment(self) -> MemoryPeak:
        """The moment of the peak with one row, on the longest of the short models, with the largest tensors."""
        longest = max(self.tapes, key=lambda it: len(it.one))
        entries = Tape()
        entries.entries = longest.tape.entries[: longest.begins[2]]
        return memory_peak(entries, since=longest.begins[0])

    def entries(self, rows: int) -> tuple[Tape, Sequence[Entry]]:
        """The tape of the longest of the short models up to the end of a step with so many rows; and that step."""
        longest = max(self.tapes, key=lambda it: len(it.one))
        tape, step = Tape(), longest.at(rows)
        tape.entries = [*longest.tape.entries[: longest.begins[1]], *step]
        return tape, step

    def _figures(self, rows: int) -> dict[Any, float]:
        if rows not in self._found:
            costs = self.cluster.costs(self.dtype)
            self._found[rows] = self._whole([_times(each, rows, costs) for each in self.tapes])
        return self._found[rows]

    def _peak(self, rows: int) -> tuple[float, Mapping[State, float], str]:
        regions = self._regions(rows, of_host=False)
        region = max(regions, key=lambda it: regions[it] if it[-1] is None else -1.0)
        by_state = {state: max(0.0, regions.get((*region[:-1], state), 0.0)) for state in State}
        share = regions[region] / max(sum(by_state.values()), 1.0)  # parts of a moment that is told, not seen
        by_state = {state: share * nbytes for state, nbytes in by_state.items()}
        unit, phase, _ = region
        return regions[region], by_state, f"{phase.value} of {unit or 'the root'}"

    def _regions(self, rows: int, *, of_host: bool) -> dict[Any, float]:
        """Bytes at the peak of each region: (unit, phase, None) for all of it, (unit, phase, state) for its parts."""
        one, two = self._rests_of_host if of_host else self._rests
        return {key: value + (rows - 1) * (two.get(key, value) - value) for key, value in one.items()}

    @cached_property
    def _rests(self) -> Sequence[dict[Any, float]]:
        """The regions with one row, and with two."""
        both = range(2)
        return [self._whole([_region_peaks(it, step, self.whole, of_host=False) for it in self.tapes]) for step in both]

    @cached_property
    def _rests_of_host(self) -> Sequence[dict[Any, float]]:
        each = [[_region_peaks(it, step, self.whole, of_host=True) for it in self.tapes] for step in range(2)]
        found = [self._whole(it) for it in each]
        return [{key: value for key, value in it.items() if key[-1] is None} for it in found]

    def _whole(self, each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        """Figures of the whole model: those of the first short one, and what each list's further blocks add."""
        base, *longer = each
        everywhere = [key for key in base if all(key in other for other in longer)]  # blocks in the middle are not
        found = {key: base[key] for key in everywhere}
        for tapes, other in zip(self.tapes[1:], longer, strict=True):
            (fqn,) = (name for name in self.whole if tapes.lengths[name] != self.tapes[0].lengths[name])
            first = self.tapes[0].lengths[fqn]
            share = (self.whole[fqn] - first) / (tapes.lengths[fqn] - first)
            for key in found:
                found[key] += share * (other[key] - base[key])
        return found


BASE, MORE = 3, 1  # blocks of the shortest model, and how many more the next one has
_MOST_HELD = 1.25  # what an allocator holds over tensors at their peak, in a model of few blocks, says little beyond


def sketch(
    subject: Subject,
    cluster: Cluster,
    program: Program,
    *,
    max_norm: float | None = 1.0,
    make_optimizer: MakeOptimizer | None = None,
    shortens: bool = True,
) -> Sketch:
    """Take steps of `program` dry, by models of few blocks where there are lists of like ones.

    Raises:
        ConfigError: the model cannot be run dry, or reads values.
    """
    lists = block_lists(subject.model) if shortens and subject.model is not None else []
    whole = {each.fqn: each.length for each in lists}

    def run(lengths: Mapping[str, int], rows: Sequence[int] = (1, 1, 2)) -> _Tapes:
        return _taped(subject, cluster, program, dict(lengths), rows, max_norm, make_optimizer)

    def run_longer(first: _Tapes, fqn: str) -> _Tapes:
        lengths = {**few, fqn: few[fqn] + (2 if program.checkpointing == "every-2" else MORE)}
        if not first.is_straight:
            return run(lengths)
        longer = run(lengths, (1, 1))
        return _with_two_rows(longer, first) or run(lengths)

    if not lists:
        return Sketch(subject, cluster, program, [run({})], {})
    few = {each.fqn: _few(each, program) for each in lists}
    try:
        first = run(few)
        tapes = [first, *(run_longer(first, fqn) for fqn in few)]
    except (IndexError, KeyError, AttributeError, RuntimeError, ValueError):
        return Sketch(subject, cluster, program, [run({})], {})  # it counts on its blocks
    return Sketch(subject, cluster, program, tapes, whole)


def _few(blocks: BlockList, program: Program) -> int:
    """Blocks of the shortest model: as many as are needed for one that has neighbours, and even as the list is."""
    return BASE + (program.checkpointing == "every-2" and (blocks.length - BASE) % 2)


# ---------------------------------------------------------------------------------------------------------- dry runs


def _taped(
    subject: Subject,
    cluster: Cluster,
    program: Program,
    lengths: dict[str, int],
    rows_of_steps: Sequence[int],
    max_norm: float | None,
    make_optimizer: MakeOptimizer | None,
) -> _Tapes:
    """Steps with so many rows a microbatch. In the first, no order is known yet."""
    microbatches = 2 if program.accumulates else 1
    lanes: Any = "gpu" if cluster.hardware.kind == "gpu" else "cpu"
    gc.freeze()  # what is there already is not looked through again, which would take as long as a step
    with (
        dry.world(cluster.world, ranks_per_host=cluster.per_host),
        dry.taped(lanes=lanes, values=subject.values) as tape,
    ):
        try:
            model = _made(subject, cluster, program, lengths)
            params = [param for param in model.parameters() if param.requires_grad]
            optimizer = (make_optimizer or _adamw)(params)
            begins = []
            for step, rows in enumerate(rows_of_steps if subject.any_rows else (1, 1)):
                note_origin(_BETWEEN)
                begins.append(len(tape.entries))
                _step(subject, program, model, optimizer, rows, microbatches if step else 1, max_norm)
        except ConfigError as error:
            raise _told(subject, error, error.__cause__ or error) from error
        except (NotImplementedError, TypeError) as error:
            raise _told(subject, error, error) from error
        begins += [len(tape.entries)] * (4 - len(begins))
    one = tape.entries[begins[1] : begins[2]]
    two = tape.entries[begins[2] : begins[3]] or one
    if not subject.values:
        _check_reads_no_values(subject, cluster, one)
    return _Tapes(lengths, tape, begins, one, two)


def _made(subject: Subject, cluster: Cluster, program: Program, lengths: dict[str, int]) -> nn.Module:
    if subject.make_sharded is not None:
        return subject.make_sharded()
    assert subject.model is not None
    undo = shortened(subject.model, lengths)
    try:
        model = copy_with_memory(subject.model, values=subject.values)
    finally:
        for blocks, rest in undo:
            blocks.extend(rest)
    return sharded(model, program, cluster.per_host)


def _step(
    subject: Subject,
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    microbatches: int,
    max_norm: float | None,
) -> None:
    for number in range(microbatches):
        with ExitStack() as stack:
            if number < microbatches - 1 and not program.syncs_each:
                stack.enter_context(without_sync(units_in(model)))
            subject.loss(model, subject.make_batch(rows)).backward()
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def _told(subject: Subject, error: Exception, cause: BaseException) -> ConfigError:
    where = user_line(cause) or user_line(error)
    said = " ".join(str(error).split())
    return ConfigError(
        f"{subject.name}: cannot be planned without values{where}: {said} Add --measure: steps are then taken on real "
        "tensors, in this machine's memory."
    )


def _check_reads_no_values(subject: Subject, cluster: Cluster, step: Sequence[Entry]) -> None:
    """Refuse a model that asks for values on its way: what it does then depends on them, and there are none."""
    for entry in step:
        if isinstance(entry, Operation) and entry.name in _READS_VALUES and entry.origin.phase is Phase.FORWARD:
            line = _line_that_reads(subject, cluster)
            if line is None:
                return
            raise ConfigError(
                f"{subject.name}: reads a value within its forward{line}, by .item(), bool() or the like "
                f"({entry.name}), and what it does may depend on it. Add --measure: steps are then taken on real "
                "tensors, in this machine's memory."
            )


class _Reads(TorchFunctionMode):
    """A context that notes the user's line that first asks a tensor for its value.

    But not where transformers asks whether a mask leaves anything out: a dry run has it answered as by a full batch.
    """

    line: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = getattr(func, "__name__", "") in ("item", "tolist", "__bool__", "__int__", "__float__")
        if reads and self.line is None and "mask" not in _asking_file():
            self.line = user_line(None)
        return func(*args, **(kwargs or {}))


def _asking_file() -> str:
    """The name of the file that asks torch for something, if it is one of transformers."""
    files = (Path(frame.filename) for frame in reversed(traceback.extract_stack()))
    asking = next((it for it in files if "torch" not in it.parts and it != Path(__file__)), Path())
    return asking.name if "transformers" in asking.parts else ""


def _line_that_reads(subject: Subject, cluster: Cluster) -> str | None:
    """The line, if the model can be run by itself; None if none is the model's own."""
    if subject.model is None:
        return ""
    if subject.model not in _reads:  # the same of every sketch
        with dry.world(cluster.world, ranks_per_host=cluster.per_host), dry.taped(), _Reads() as reads:
            subject.loss(copy_with_memory(subject.model, values=False), subject.make_batch(1))
        _reads[subject.model] = reads.line
    return _reads[subject.model]


_reads: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


def _with_two_rows(longer: _Tapes, first: _Tapes) -> _Tapes | None:
    """`longer`, whose steps have one row, with the step of two rows that `first` tells, block by block.

    A block's entries are those of its like on `first`. None if they are not.
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
            step.append(entry)  # of more tensors at once: an optimizer's or the engine's own, whatever the rows
    tape = _joined(longer, step)
    return replace(longer, two=step, tape=tape, begins=[*longer.begins[:3], len(tape.entries)])


def _joined(longer: _Tapes, step: Sequence[Entry]) -> Tape:
    """The tape of `longer` with `step` behind its last one, whose storages it has: they are given other numbers."""
    mine = {entry.storage for entry in step if isinstance(entry, Allocation)}
    freed = {entry.storage for entry in step if isinstance(entry, Free)}
    left: dict[tuple[str, int], list[int]] = {}  # of the step before, freed in this one as earlier ones were in that
    for entry in longer.one:
        if isinstance(entry, Allocation) and entry.storage not in freed:
            left.setdefault((entry.lane, entry.nbytes), []).append(entry.storage)
    more = 1 + max(entry.storage for entry in longer.tape.entries if isinstance(entry, Allocation))
    tape = Tape()
    tape.entries = list(longer.tape.entries[: longer.begins[2]])
    renamed: set[int] = set()
    for entry in step:
        if isinstance(entry, Allocation):
            renamed.add(entry.storage)
            tape.entries.append(replace(entry, storage=entry.storage + more))
        elif isinstance(entry, Free) and entry.storage in renamed:
            renamed.discard(entry.storage)
            tape.entries.append(replace(entry, storage=entry.storage + more))
        elif isinstance(entry, Free) and (waiting := left.get((entry.lane, entry.nbytes))):
            tape.entries.append(replace(entry, storage=waiting.pop(0)))
        elif isinstance(entry, Operation | Collective):
            reads, writes = (
                tuple(replace(it, storage=it.storage + more) if it.storage in renamed else it for it in those)
                for those in (entry.reads, entry.writes)
            )
            tape.entries.append(replace(entry, reads=reads, writes=writes))
        elif not (isinstance(entry, Free) and entry.storage in mine):
            tape.entries.append(entry)
    return tape


def _kinds(step: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """What entries are like one another by, in each unit: memory by the operation that writes it first."""
    writers: dict[int, str] = {}  # by the place of the allocation
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
        found.append((type(entry), name, entry.lane, entry.origin.phase, entry.origin.microbatch))
    return found


def _likes(unit: str, lengths: Mapping[str, int], others: Mapping[str, int]) -> str:
    """The unit of a model of `others` blocks that is like `unit` of one of `lengths`: as far from the nearer end."""
    for fqn, length in lengths.items():
        if unit.startswith(f"{fqn}."):
            number, dot, rest = unit.removeprefix(f"{fqn}.").partition(".")
            place, few, more = int(number), others[fqn], length - others[fqn]
            if place >= length - 2:
                place -= more
            elif place >= few - 2:
                place = few - 2 if more == 1 or (place - few) % 2 == 0 else few - 3
            return f"{fqn}.{place}{dot}{rest}"
    return unit


def _moved(entry: Entry, one: Entry, two: Entry) -> Entry:
    """`entry` with a row more, as `two` has one more than `one`."""
    match entry, one, two:
        case Operation(), Operation(), Operation():
            if one.nbytes == two.nbytes and one.flops == two.flops:  # such as an optimizer's, of fewer tensors there
                return entry
            each = [
                tuple(Access(it.storage, 0, it.nbytes + b.nbytes - a.nbytes) for it, a, b in zip(*those, strict=False))
                for those in ((entry.reads, one.reads, two.reads), (entry.writes, one.writes, two.writes))
            ]
            flops = entry.flops + two.flops - one.flops
            return Operation(entry.name, entry.lane, entry.origin, each[0], each[1], flops, entry.copies, entry.dtype)
        case Allocation(), Allocation(), Allocation():
            return replace(entry, nbytes=entry.nbytes + two.nbytes - one.nbytes)
        case Free(), Free(), Free():
            return replace(entry, nbytes=entry.nbytes + two.nbytes - one.nbytes)
    return entry


# --------------------------------------------------------------------------------------------------------- read off


def _times(tapes: _Tapes, rows: int, costs: Costs) -> dict[Any, float]:
    """What adds up from block to block: seconds, FLOPs, bytes. ("each", ...) is of one more microbatch."""
    step = tapes.at(rows)
    laid = lay_out(step, costs)
    found = _spent(laid, costs)
    found |= {
        "flops": model_flops(step),
        "sent": float(sum(sum(it.sizes) for it in step if isinstance(it, Collective))),
    }
    second = next((place for place, entry in enumerate(step) if entry.origin.microbatch == 2), None)
    if second is None:
        each = dict.fromkeys(found, 0.0)
    else:
        first = lay_out(step[:second], costs)
        each = _spent(first, costs)
        each |= {"flops": found["flops"] / 2, "step": first.end_of(COMPUTE)}
        each["sent"] = float(sum(sum(it.sizes) for it in step[:second] if isinstance(it, Collective)))
    return {**found, **{("each", name): seconds for name, seconds in each.items()}}


def _reserved(tapes: _Tapes) -> dict[Any, float]:
    """What the caching allocator holds at most, and the tensors, with one row."""
    tape = Tape()
    tape.entries = tapes.tape.entries[: tapes.begins[2]]
    use = allocator_use(tape, since=tapes.begins[0])
    return {"reserved": float(use.reserved), "tensors": float(use.tensors)}


def _spent(laid: Timeline, costs: Costs) -> dict[Any, float]:
    """Seconds of the compute lane by what they go to; "step" is all of them, with what comes behind its last."""
    found: dict[Any, float] = dict.fromkeys((*LIMITS, "step"), 0.0)
    for placed in laid.placed:
        entry = placed.entry
        if entry.lane == COMPUTE and isinstance(entry, Operation):
            is_compute = entry.flops / costs.flops_per_s > entry.nbytes / costs.memory_bytes_per_s
            found["compute" if is_compute else "memory bandwidth"] += placed.end - placed.start
        elif entry.lane == COMPUTE:
            found[_kind(entry)] += placed.end - placed.start
    for stall in laid.stalls:
        if stall.lane == COMPUTE:
            cause = stall.cause.entry if stall.cause is not None else None
            found[_kind(cause) if isinstance(cause, Collective) else _lane_kind(cause)] += stall.seconds
    end, compute_end = laid.end, laid.end_of(COMPUTE)
    found["host"] = max(0.0, laid.starved_s(COMPUTE)) + max(0.0, laid.host_s - compute_end)
    found["reductions"] += max(0.0, end - max(compute_end, laid.host_s))
    found["step"] = end
    return found


def _kind(entry: Entry) -> str:
    name = getattr(entry, "name", "")
    return "reductions" if "reduce" in name else "gathers"


def _lane_kind(entry: Entry | None) -> str:
    lane = "" if entry is None else entry.lane
    return "reductions" if "reduce" in lane else "gathers" if "gather" in lane else "waits"


def _region_peaks(tapes: _Tapes, step: int, whole: Mapping[str, int], of_host: bool) -> dict[Any, float]:
    """The most bytes in each region of a step, and the parts of it by state.

    A region is a unit, blocks in the middle of their list taken together, and a phase.
    """
    begin, end = tapes.begins[1 + step], tapes.begins[2 + step]
    if begin == end:
        begin, end = tapes.begins[1], tapes.begins[2]
    since = tapes.begins[0] if step == 0 else begin
    found: dict[tuple[str, Phase], tuple[int, Mapping[State, int]]] = {}
    places: dict[Origin, tuple[str, Phase]] = {}
    for place, held in tapes.curve(of_host):
        if not since <= place < end:
            continue
        origin = tapes.tape.entries[place].origin
        if origin not in places:
            places[origin] = _place_of(origin.unit, tapes.lengths, whole), origin.phase
        region = places[origin]
        total = sum(held.values())
        if region not in found or total > found[region][0]:
            found[region] = total, dict(held)
    flat: dict[Any, float] = {}
    for (unit, phase), (total, by_state) in found.items():
        flat[unit, phase, None] = float(total)
        flat |= {(unit, phase, state): float(by_state.get(state, 0)) for state in State}
    return flat


def _place_of(unit: str, lengths: Mapping[str, int], whole: Mapping[str, int]) -> str:
    """The unit's name in the whole model; for blocks in the middle of a list, what they are together."""
    for fqn, length in lengths.items():
        if unit.startswith(f"{fqn}."):
            number, dot, rest = unit.removeprefix(f"{fqn}.").partition(".")
            place = int(number)
            if place >= length - 2:
                return f"{fqn}.{place + whole[fqn] - length}{dot}{rest}"
            return f"{fqn}.{'0' if place == 0 else 'N'}{dot}{rest}"
    return unit


def _scaled(one: Entry, two: Entry, more: int) -> Entry:
    """An entry with `more` rows than `one` has, which `two` has one more than."""
    match one, two:
        case Operation(), Operation():
            if one.nbytes == two.nbytes and one.flops == two.flops:
                return one
            reads, writes = _lengthened(one.reads, two.reads, more), _lengthened(one.writes, two.writes, more)
            flops = one.flops + more * (two.flops - one.flops)
            return Operation(one.name, one.lane, one.origin, reads, writes, flops, one.copies, one.dtype)
        case Allocation(), Allocation():
            return replace(one, nbytes=one.nbytes + more * (two.nbytes - one.nbytes))
        case Free(), Free():
            return replace(one, nbytes=one.nbytes + more * (two.nbytes - one.nbytes))
    return one


def _lengthened(one: Sequence[Access], two: Sequence[Access], more: int) -> tuple[Access, ...]:
    return tuple(Access(a.storage, 0, a.nbytes + more * (b.nbytes - a.nbytes)) for a, b in zip(one, two, strict=False))
