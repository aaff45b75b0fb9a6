"""What a program needs and takes, told from a few dry runs: of models of fewer blocks, with one row and with two.

A dry run of a large model takes a while, and a search asks for many. So steps are taken by models of a few blocks (see
`shorten`), with one row and then with two. All that is read off such a tape is told for the whole model and for any
number of rows along straight lines. Times are not straight in rows (an operation takes the longer of its FLOPs and its
bytes), so there the sizes of each operation are, and the tape is laid out anew.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fullshard.errors import ConfigError
from fullshard.plan.hardware import Hardware
from fullshard.plan.memory import MemoryPeak, State, memory_peak
from fullshard.plan.process import compute_dtype, fixed_nbytes
from fullshard.planner.candidates import Candidate, Cluster, Program
from fullshard.planner.readings import LIMITS, held_of, region_peaks, times_of
from fullshard.planner.shorten import BlockList, block_lists
from fullshard.planner.steps import MakeOptimizer, take_steps, users_mistake
from fullshard.planner.subject import Subject
from fullshard.planner.tapes import Tapes, with_one_more_row
from fullshard.state.on_disk import BUFFERS, PORTION_NBYTES
from fullshard.tape.tape import Entry, Operation, Tape

__all__ = ["Figures", "Sketch", "sketch"]

_KNOWN = ("aten.", "prim", "c10d", "_c10d", "fsdp.", "fullshard", "profiler")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One candidate, as it would be on one rank.

    Args:
        candidate: what it is.
        peak_bytes: of tensors at once.
        by_state: what memory holds then.
        where: the unit and the phase whose work asks for it.
        needed_bytes: what has to fit: with what the caching allocator, or the process, holds beyond tensors.
        host_bytes: of the host's memory for each rank, beside an accelerator.
        step_s: seconds of a step.
        limits: seconds of the compute lane by what they go to, in `LIMITS`.
        blocks_s: seconds of the compute lane in forwards of units below the root, which checkpoints do again.
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
    blocks_s: float
    flops: float
    sent_bytes: float
    flops_utilisation: float

    @property
    def seconds_a_row(self) -> float:
        """Seconds for each row of a rank: what candidates are compared by."""
        return self.step_s / (self.candidate.rows * self.candidate.microbatches)

    @property
    def busy_s(self) -> float:
        """Seconds of the compute lane in which it computes."""
        return self.limits["compute"] + self.limits["memory bandwidth"]

    @property
    def exposed_s(self) -> float:
        """Seconds in which compute waits for other ranks, or for copies."""
        return sum(self.limits[name] for name in ("gathers", "reductions", "waits", "disk"))

    @property
    def limited_by(self) -> str:
        """What takes most of the step."""
        return max(self.limits, key=lambda name: self.limits[name])


@dataclass
class Sketch:
    """A program on a cluster, of which `figures` are told for any number of rows and microbatches."""

    subject: Subject
    cluster: Cluster
    program: Program
    _tapes: Sequence[Tapes] | bytes
    whole: Mapping[str, int]  # the lengths of the block lists of the model itself
    _found: dict[int, dict[Any, float]] = field(default_factory=dict)

    @property
    def tapes(self) -> Sequence[Tapes]:
        """Those of the short models."""
        if isinstance(self._tapes, bytes):
            tapes: Sequence[Tapes] = pickle.loads(self._tapes)
            self._tapes = tapes
        return self._tapes

    def packed(self) -> Mapping[str, Any]:
        """All but the subject, for another process: what was read off the tapes, and these in one piece."""
        return vars(self) | {"subject": None, "_tapes": pickle.dumps(self.tapes, pickle.HIGHEST_PROTOCOL)}

    @staticmethod
    def unpacked(subject: Subject, packed: Mapping[str, Any]) -> Sketch:
        """The sketch again. Of most no more is asked than was read off: tapes stay in one piece until they are."""
        made = object.__new__(Sketch)
        vars(made).update(packed, subject=subject)
        return made

    @cached_property
    def least_rows(self) -> int:
        """Those of the steps that were taken."""
        return self.tapes[0].rows

    @cached_property
    def most_rows(self) -> int | None:
        """The most rows that can be told; None if any number can."""
        if not self.subject.any_rows:
            return 1
        return None if all(each.is_straight for each in self.tapes) else self.least_rows + 1

    def can_tell(self, rows: int) -> bool:
        """True if a step with so many rows can be told."""
        return self.most_rows is None or rows <= self.most_rows

    @cached_property
    def dtype(self) -> str:
        """In which most FLOPs are done."""
        return compute_dtype(self.tapes[0].one)

    @cached_property
    def custom_operations(self) -> list[str]:
        """Operations of others than torch's that no FLOPs are known of: they are counted by their bytes."""
        entries = (entry for entry in self.tapes[0].one if isinstance(entry, Operation) and not entry.flops)
        return sorted({entry.name for entry in entries if not entry.name.startswith(_KNOWN)})

    def on(self, hardware: Hardware) -> Sketch:
        """The same tapes on another machine of its kind with as many ranks on a host; so their memory is the same."""
        other = copy(self)
        other.cluster, other._found = replace(self.cluster, hardware=hardware), {}
        return other

    def with_on_disk(self, share: float) -> Sketch:
        """The same with so much of the optimizer's state on the disk: the same tapes, and what is read off them."""
        other = copy(self)
        other.program = replace(self.program, disk=share)
        return other

    @cached_property
    def states_bytes(self) -> float:
        """Of the optimizer's state of a rank, wherever it is."""
        regions = self._regions(1, of_host=False)
        return max((nbytes for (_, _, state), nbytes in regions.items() if state is State.OPTIMIZER), default=0.0)

    @property
    def disk_bytes(self) -> float:
        """Of these, what rests on the disk."""
        return self.program.disk * self.states_bytes

    @property
    def disk_buffers_bytes(self) -> float:
        """Of memory that what is on the disk passes through: see `state/on_disk.py`."""
        if not self.program.disk:
            return 0.0
        model = self.subject.model
        largest = 0.0
        if model is not None:
            trained = [param.numel() for param in model.parameters() if param.requires_grad]
            largest = self.states_bytes * max(trained, default=0) / max(1, sum(trained))
        return min(self.disk_bytes, BUFFERS * max(PORTION_NBYTES, largest))

    def least_on_disk(self, rows: int, usable: float) -> float | None:
        """The least share of the optimizer's state, in hundredths, without which so many rows fit; None if none is."""
        needed = self.with_on_disk(0.0).needed_bytes(rows)
        if needed <= usable:
            return 0.0
        shares = (hundredths / 100 for hundredths in range(1, 101))
        return next((share for share in shares if self.with_on_disk(share).needed_bytes(rows) <= usable), None)

    def figures(self, rows: int, microbatches: int) -> Figures:
        """The candidate of so many rows and microbatches.

        Raises:
            ConfigError: what is on the tape changes with the rows, so that it cannot be told for so many.
        """
        if not self.can_tell(rows):
            raise ConfigError(
                f"{rows} rows: what the model does differs with them; up to {self.most_rows} can be told."
            )
        found = self._figures(rows)
        more = microbatches - (2 if self.program.accumulates else 1)
        peak, by_state, where = self._peak(rows)
        times = {
            name: found[name] + more * found["each", name] for name in (*LIMITS, "blocks", "step", "flops", "sent")
        }
        times["disk"] = self._disk_s(found["optimizer"])
        times["step"] += times["disk"]
        rate = self.cluster.hardware.flops_per_s[self.dtype]
        return Figures(
            candidate=Candidate(program=self.program, rows=rows, microbatches=microbatches),
            peak_bytes=peak,
            by_state=by_state,
            where=where,
            needed_bytes=self.needed_bytes(rows),
            host_bytes=max(self._regions(rows, of_host=True).values(), default=0.0) + self.disk_buffers_bytes,
            step_s=times["step"],
            limits={name: max(0.0, times[name]) for name in LIMITS},
            blocks_s=times["blocks"],
            flops=times["flops"],
            sent_bytes=times["sent"],
            flops_utilisation=times["flops"] / times["step"] / rate,
        )

    def needed_bytes(self, rows: int) -> float:
        """What has to fit with so many rows: tensors at their peak, and what the allocator holds beyond them."""
        nbytes = self._peak(rows)[0]
        away = self.disk_bytes - self.disk_buffers_bytes
        return (nbytes + away) * self._held - away + self._apart

    def activations_bytes(self, rows: int) -> float:
        """Of activations at most, with so many rows: whatever else is shared out, these stay."""
        regions = self._regions(rows, of_host=False)
        return max((nbytes for (_, _, state), nbytes in regions.items() if state is State.ACTIVATIONS), default=0.0)

    def _disk_s(self, stepping_s: float) -> float:
        """Seconds of a step in which the disk is waited for, by all ranks of a host: it goes on beside the stepping."""
        nbytes = self.disk_bytes * self.cluster.per_host
        return max(0.0, self.cluster.disk.seconds(nbytes, nbytes) - self.program.disk * stepping_s)

    @cached_property
    def _held(self) -> float:
        """Times the tensors' peak that the caching allocator of an accelerator holds, or a process, with few rows."""
        found = self._whole([held_of(each, self.cluster.hardware.kind) for each in self.tapes])
        return min(_MOST_HELD, max(1.0, found["held"] / max(found["tensors"], 1.0)))

    @property
    def _apart(self) -> float:
        """Bytes that a process on a CPU takes for its steps, whatever the model's size."""
        return fixed_nbytes(self.dtype) if self.cluster.hardware.kind == "cpu" else 0.0

    def peak_moment(self) -> MemoryPeak:
        """The moment of the peak with few rows, on the longest of the short models, with the largest tensors."""
        longest = max(self.tapes, key=lambda tape: len(tape.one))
        entries = Tape()
        entries.entries = longest.tape.entries[: longest.begins[2]]
        return memory_peak(entries, since=longest.begins[0])

    def entries(self, rows: int) -> tuple[Tape, Sequence[Entry]]:
        """The tape of the longest of the short models up to the end of a step with so many rows; and that step."""
        longest = max(self.tapes, key=lambda tape: len(tape.one))
        tape, step = Tape(), longest.at(rows)
        tape.entries = [*longest.tape.entries[: longest.begins[1]], *step]
        return tape, step

    def _figures(self, rows: int) -> dict[Any, float]:
        if rows not in self._found:
            make_costs = partial(self.cluster.costs, self.dtype)
            self._found[rows] = self._whole([times_of(each, rows, make_costs) for each in self.tapes])
        return self._found[rows]

    def _peak(self, rows: int) -> tuple[float, Mapping[State, float], str]:
        regions = self._regions(rows, of_host=False)
        region = max(regions, key=lambda region: regions[region] if region[-1] is None else -1.0)
        by_state = {state: max(0.0, regions.get((*region[:-1], state), 0.0)) for state in State}
        share = regions[region] / max(sum(by_state.values()), 1.0)  # parts of a moment that is told, not seen
        by_state = {state: share * nbytes for state, nbytes in by_state.items()}
        away = self.disk_bytes - self.disk_buffers_bytes
        by_state[State.OPTIMIZER] = max(0.0, by_state[State.OPTIMIZER] - away)
        unit, phase, _ = region
        return regions[region] - away, by_state, f"{phase.value} of {unit or 'the root'}"

    def _regions(self, rows: int, *, of_host: bool) -> dict[Any, float]:
        """Bytes at the peak of each region: (unit, phase, None) for all of it, (unit, phase, state) for its parts."""
        one, two = self._rests_of_host if of_host else self._rests
        more = rows - self.least_rows
        return {key: max(0.0, value + more * (two.get(key, value) - value)) for key, value in one.items()}

    @cached_property
    def _rests(self) -> Sequence[dict[Any, float]]:
        """The regions of both steps."""
        both = range(2)
        return [
            self._whole([region_peaks(tape, step, self.whole, of_host=False) for tape in self.tapes]) for step in both
        ]

    @cached_property
    def _rests_of_host(self) -> Sequence[dict[Any, float]]:
        each = [[region_peaks(tape, step, self.whole, of_host=True) for tape in self.tapes] for step in range(2)]
        found = [self._whole(item) for item in each]
        return [{key: value for key, value in item.items() if key[-1] is None} for item in found]

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


_STEPS, _STEPS_FROM_TWO = (1, 1, 2), (2, 2, 3)  # rows; in the first no order is known yet
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
    """Take steps of `program` dry, by models of few blocks where there are lists of like ones that are stepped alike.

    Raises:
        ConfigError: the model cannot be run dry, or reads values; or a line of the user's raises something.
    """
    try:
        with _quiet_fakes():
            return _sketched(subject, cluster, program, max_norm, make_optimizer, shortens)
    except ConfigError:
        raise
    except Exception as error:
        if (mistake := users_mistake(subject, error)) is None:
            raise
        raise mistake from error


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """A context in which fake tensors do not log the operations that they refuse: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _sketched(
    subject: Subject,
    cluster: Cluster,
    program: Program,
    max_norm: float | None,
    make_optimizer: MakeOptimizer | None,
    shortens: bool,
) -> Sketch:
    shortens = shortens and program.cpu in (0.0, 1.0)  # which blocks are on the CPU depends on how many there are
    lists = block_lists(subject.model) if shortens and subject.model is not None else []
    whole = {each.fqn: each.length for each in lists}

    def run(lengths: Mapping[str, int], rows: Sequence[int]) -> Tapes:
        return take_steps(subject, cluster, program, dict(lengths), rows, max_norm, make_optimizer)

    def run_first(lengths: Mapping[str, int]) -> Tapes:
        """From one row on, or from two: a tensor of one row is contiguous however its dims lie, and saves copies."""
        first = run(lengths, _STEPS)
        if first.is_straight or not subject.any_rows:
            return first
        second = run(lengths, _STEPS_FROM_TWO)
        return second if second.is_straight else first

    def run_longer(first: Tapes, fqn: str) -> Tapes:
        lengths = {**few, fqn: few[fqn] + (2 if program.checkpointing == "every-2" else MORE)}
        steps = _STEPS if first.rows == 1 else _STEPS_FROM_TWO
        if not first.is_straight:
            return run(lengths, steps)
        longer = run(lengths, steps[:2])
        return with_one_more_row(longer, first) or run(lengths, steps)

    if not lists:
        return Sketch(subject, cluster, program, [run_first({})], {})
    few = {each.fqn: _few(each, program) for each in lists}
    try:
        first = run_first(few)
        tapes = [first, *(run_longer(first, fqn) for fqn in few)]
    except (IndexError, KeyError, AttributeError, RuntimeError, TypeError, ValueError):
        return Sketch(subject, cluster, program, [run_first({})], {})  # it counts on its blocks
    return Sketch(subject, cluster, program, tapes, whole)


def _few(blocks: BlockList, program: Program) -> int:
    """Blocks of the shortest model: as many as are needed for one that has neighbours, and even as the list is.

    One more where gradients go to the CPU: of three blocks none is over before all of them are under way.
    """
    least = BASE + (program.cpu > 0)
    return least + (program.checkpointing == "every-2" and (blocks.length - least) % 2)
