"""Predictions for a program from a few dry runs: of models with fewer blocks, with one row and with two.

A dry run of a large model takes a while, and a search needs many. So dry runs use models of a few blocks (see
`shorten`), with one row and then with two. Everything derived from their traces is extrapolated linearly to the full
model and to any number of rows. Times are not linear in rows (an operation takes the longer of its FLOPs and its
bytes). So the sizes of each operation are extrapolated instead, and the trace is laid out again.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import Any

from fullshard.disk.interface import BUFFERS
from fullshard.errors import ConfigError
from fullshard.plan.hardware import Hardware
from fullshard.plan.memory import MemoryPeak, State, memory_peak
from fullshard.plan.process import compute_dtype, fixed_nbytes
from fullshard.planner.candidates import Candidate, Cluster, Program
from fullshard.planner.readings import (
    LIMITS,
    Moment,
    Region,
    moments_by_region,
    overhead_of,
    process_overhead,
    region_peaks,
    times_of,
)
from fullshard.planner.shorten import BlockList, block_lists
from fullshard.planner.steps import MakeOptimizer, take_steps, users_mistake
from fullshard.planner.subject import Subject
from fullshard.planner.tapes import Tapes, with_one_more_row
from fullshard.state.on_disk import CHUNK_NBYTES
from fullshard.tape.tape import Entry, Tape


@dataclass(frozen=True, kw_only=True)
class SketchFigures:
    """The predictions for one candidate on one rank."""

    candidate: Candidate
    peak_bytes: float  # the peak bytes of tensors
    by_state: Mapping[State, float]  # the bytes at the peak by state
    where: str  # the unit and the phase of the peak
    needed_bytes: float  # the required memory, including the overhead of the caching allocator or of the process
    host_bytes: float  # the host memory per rank alongside an accelerator
    step_s: float  # seconds per step
    limits: Mapping[str, float]  # seconds of the compute stream by cause, see `LIMITS`
    blocks_s: float  # seconds of the compute stream in forwards of units below the root, which checkpoints recompute
    flops: float  # FLOPs of forward and backward per step and rank, without recomputation for checkpoints
    sent_bytes: float  # the bytes that a rank passes to collectives per step
    flops_utilisation: float  # `flops` as a share of the peak rate (MFU)
    # The share of the step of each operation that is timed by its bytes, because it has no FLOP formula.
    unknown: Mapping[str, float]

    @property
    def seconds_a_row(self) -> float:
        """Seconds per row of a rank, the criterion for comparing candidates."""
        return self.step_s / (self.candidate.rows * self.candidate.microbatches)

    @property
    def busy_s(self) -> float:
        """Seconds during which the compute stream computes."""
        return self.limits["compute"] + self.limits["memory bandwidth"]

    @property
    def exposed_s(self) -> float:
        """Seconds during which compute waits for other ranks, or for copies."""
        return sum(self.limits[name] for name in ("gathers", "reductions", "waits", "disk"))

    @property
    def limited_by(self) -> str:
        """The cause of the largest part of the step."""
        return max(self.limits, key=lambda name: self.limits[name])


@dataclass
class Sketch:
    """A program on a cluster, with predictions for any number of rows and microbatches."""

    subject: Subject
    cluster: Cluster
    program: Program
    _tapes: Sequence[Tapes] | bytes
    whole: Mapping[str, int]  # the lengths of the block lists of the whole model
    _found: dict[int, dict[Any, float]] = field(default_factory=dict, init=False)
    _moments: dict[tuple[int, bool], list[dict[Region, list[Moment]]]] = field(default_factory=dict, init=False)
    _overheads: dict[int, float] = field(default_factory=dict, init=False)

    @property
    def tapes(self) -> Sequence[Tapes]:
        """The traces of the shortened models."""
        if isinstance(self._tapes, bytes):
            tapes: Sequence[Tapes] = pickle.loads(self._tapes)
            self._tapes = tapes
        return self._tapes

    def packed(self) -> Mapping[str, Any]:
        """Return everything except the subject, for another process: derived values and pickled traces."""
        return vars(self) | {"subject": None, "_tapes": pickle.dumps(self.tapes, pickle.HIGHEST_PROTOCOL)}

    @staticmethod
    def unpacked(subject: Subject, packed: Mapping[str, Any]) -> Sketch:
        """Return the sketch that `packed` describes. Traces stay pickled until needed; often derived values suffice."""
        made = object.__new__(Sketch)
        vars(made).update(packed, subject=subject)
        return made

    @cached_property
    def least_rows(self) -> int:
        """The smaller number of rows of the simulated steps."""
        return self.tapes[0].rows

    @cached_property
    def most_rows(self) -> int | None:
        """The maximum number of rows that can be predicted; None if any number can."""
        if not self.subject.any_rows:
            return 1
        return None if all(each.is_straight for each in self.tapes) else self.least_rows + 1

    def can_report(self, rows: int) -> bool:
        """Return True if a step with `rows` rows can be predicted."""
        return self.most_rows is None or rows <= self.most_rows

    @cached_property
    def dtype(self) -> str:
        """The dtype with the most FLOPs."""
        return compute_dtype(self.tapes[0].one)

    def on(self, hardware: Hardware) -> Sketch:
        """Return a sketch with these traces on a different machine with as many ranks per host. Memory is the same."""
        other = copy(self)
        other.cluster, other._found = replace(self.cluster, hardware=hardware), {}
        return other

    def with_on_disk(self, share: float) -> Sketch:
        """Return a copy with `share` of the optimizer state on disk. It shares the traces and the derived values."""
        other = copy(self)
        other.program = replace(self.program, disk=share)
        return other

    @cached_property
    def states_bytes(self) -> float:
        """Bytes of a rank's optimizer state in any tier. Traces contain all of it except for the part on the CPU."""
        regions = self._regions(1, of_host=False)
        traced = max((nbytes for (_, _, state), nbytes in regions.items() if state is State.OPTIMIZER), default=0.0)
        return traced / (1 - self.program.cpu) if self.program.cpu < 1 else 0.0

    @property
    def disk_bytes(self) -> float:
        """The bytes of the optimizer state on disk."""
        return self.program.disk * self.states_bytes

    @property
    def disk_buffers_bytes(self) -> float:
        """The bytes of the memory buffers for states on disk: see `state/steps_in_chunks.py`."""
        if not self.program.disk:
            return 0.0
        model = self.subject.model
        largest = 0.0
        if model is not None:
            trained = [param.numel() for param in model.parameters() if param.requires_grad]
            largest = self.states_bytes * max(trained, default=0) / max(1, sum(trained))
        return min(self.disk_bytes, BUFFERS * max(CHUNK_NBYTES, largest))

    def least_on_disk(self, rows: int, usable: float) -> float | None:
        """Return the smallest fraction of optimizer state on disk, in 1 % steps, so that `rows` rows fit, or None."""
        needed = self.with_on_disk(0.0).needed_bytes(rows)
        if needed <= usable:
            return 0.0
        most = 1 - self.program.cpu
        shares = (min(hundredths / 100, most) for hundredths in range(1, ceil(100 * most) + 1))
        return next((share for share in shares if self.with_on_disk(share).needed_bytes(rows) <= usable), None)

    def figures(self, rows: int, microbatches: int) -> SketchFigures:
        """Return the predictions for a candidate.

        Raises:
            ConfigError: The operations depend on the number of rows, so this number cannot be predicted.
        """
        if not self.can_report(rows):
            raise ConfigError(
                f"{rows} rows: the model's operations change with the number of rows; predictions exist for up to "
                f"{self.most_rows}."
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
        return SketchFigures(
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
            unknown={
                key[1]: (found[key] + more * found["each", key]) / times["step"] for key in found if key[0] == "unknown"
            },
        )

    def needed_bytes(self, rows: int) -> float:
        """Return the memory for `rows` rows: the peak of tensors plus the overhead of the allocator or process."""
        nbytes = self._peak(rows)[0]
        if self.cluster.hardware.kind == "gpu":
            return nbytes + self._overhead(rows)
        offloaded = self.disk_bytes - self.disk_buffers_bytes
        return (nbytes + offloaded) * self._process_overhead - offloaded + fixed_nbytes(self.dtype)

    def activations_bytes(self, rows: int) -> float:
        """Return the peak bytes of activations with `rows` rows, which sharding does not reduce."""
        regions = self._regions(rows, of_host=False)
        return max((nbytes for (_, _, state), nbytes in regions.items() if state is State.ACTIVATIONS), default=0.0)

    def _disk_s(self, stepping_s: float) -> float:
        """Return the seconds per step that a host's ranks wait for the disk, which overlaps with the optimizer step."""
        nbytes = self.disk_bytes * self.cluster.per_host
        return max(0.0, self.cluster.disk.seconds(nbytes, nbytes) - self.program.disk * stepping_s)

    def _overhead(self, rows: int) -> float:
        """Return the bytes that the caching allocator holds beyond tensors, for `rows` rounded up to a power of two.

        It hardly depends on the number of blocks: a shortened model has the same overhead as the full one.
        """
        rows = min(1 << (rows - 1).bit_length(), self.most_rows or 1 << 16)
        if rows not in self._overheads:
            self._overheads[rows] = overhead_of(max(self.tapes, key=lambda tape: len(tape.one)), rows)
        return self._overheads[rows]

    @cached_property
    def _process_overhead(self) -> float:
        return max(map(process_overhead, self.tapes))

    def peak_moment(self) -> MemoryPeak:
        """Return the peak with few rows, in the longest of the short models, with the largest tensors."""
        longest = max(self.tapes, key=lambda tape: len(tape.one))
        entries = Tape()
        entries.entries = longest.tape.entries[: longest.begins[2]]
        return memory_peak(entries, since=longest.begins[0])

    def entries(self, rows: int) -> tuple[Tape, Sequence[Entry]]:
        """Return the trace of the longest short model up to the end of a step with `rows` rows, and that step."""
        longest = max(self.tapes, key=lambda tape: len(tape.one))
        tape, step = Tape(), longest.at(rows)
        tape.entries = [*longest.tape.entries[: longest.begins[1]], *step]
        return tape, step

    def _figures(self, rows: int) -> dict[Any, float]:
        if rows not in self._found:
            make_costs = partial(self.cluster.costs, self.dtype)
            self._found[rows] = self._whole(
                [times_of(each, rows, make_costs, compiled=self.program.compiled) for each in self.tapes]
            )
        return self._found[rows]

    def _peak(self, rows: int) -> tuple[float, Mapping[State, float], str]:
        regions = self._regions(rows, of_host=False)
        region = max(regions, key=lambda region: regions[region] if region[-1] is None else -1.0)
        by_state = {state: max(0.0, regions.get((*region[:-1], state), 0.0)) for state in State}
        share = regions[region] / max(sum(by_state.values()), 1.0)  # the parts are extrapolated, not measured
        by_state = {state: share * nbytes for state, nbytes in by_state.items()}
        offloaded = self.disk_bytes - self.disk_buffers_bytes
        by_state[State.OPTIMIZER] = max(0.0, by_state[State.OPTIMIZER] - offloaded)
        unit, phase, _ = region
        return regions[region] - offloaded, by_state, f"{phase.value} of {unit or 'the root'}"

    def _regions(self, rows: int, *, of_host: bool) -> dict[Any, float]:
        """Return the peak bytes of each region: (unit, phase, None) is the sum, (unit, phase, state) a part of it."""
        grows = all(each.is_straight for each in self.tapes)
        few = self.least_rows if grows else rows
        if (few, of_host) not in self._moments:
            self._moments[few, of_host] = [
                moments_by_region(each, few, self.whole, of_host=of_host, grows=grows) for each in self.tapes
            ]
        found = self._whole([region_peaks(each, rows - few) for each in self._moments[few, of_host]])
        return {key: max(0.0, value) for key, value in found.items()}

    def _whole(self, each: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
        """Return the values of the full model: those of the first short model, plus those of the additional blocks."""
        base, *longer = each
        everywhere = [key for key in base if all(key in other for other in longer)]  # some may be in longer models only
        found = {key: base[key] for key in everywhere}
        for tapes, other in zip(self.tapes[1:], longer, strict=True):
            (fqn,) = (name for name in self.whole if tapes.lengths[name] != self.tapes[0].lengths[name])
            first = self.tapes[0].lengths[fqn]
            share = (self.whole[fqn] - first) / (tapes.lengths[fqn] - first)
            for key in found:
                found[key] += share * (other[key] - base[key])
        return found


_STEPS, _STEPS_FROM_TWO = (1, 1, 2), (2, 2, 3)  # rows; in the first step the order is not known yet
BASE, MORE = 3, 1  # blocks of the shortest model, and additional ones of the next


def sketch(
    subject: Subject,
    cluster: Cluster,
    program: Program,
    *,
    max_norm: float | None = 1.0,
    make_optimizer: MakeOptimizer | None = None,
    shortens: bool = True,
) -> Sketch:
    """Make dry runs of `program`, on models with few blocks if there are lists of identical blocks.

    Raises:
        ConfigError: A dry run of the model fails, the model reads values, or the user's code raises an exception.
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
    """Context manager within which fake tensors do not log unsupported operations, because the error reports them."""
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
    shortens = shortens and program.cpu in (0.0, 1.0)  # which blocks are on the CPU depends on their number
    shortens = shortens and program.blocks_per_unit == 1  # the last unit may have fewer
    lists = block_lists(subject.model) if shortens and subject.model is not None else []
    whole = {each.fqn: each.length for each in lists}

    def run(lengths: Mapping[str, int], rows: Sequence[int]) -> Tapes:
        return take_steps(subject, cluster, program, dict(lengths), rows, max_norm, make_optimizer)

    def run_first(lengths: Mapping[str, int]) -> Tapes:
        """Make a dry run with one row or, if needed, two: one-row tensors are contiguous with any strides."""
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
        return Sketch(subject, cluster, program, [run_first({})], {})  # the model depends on its number of blocks
    return Sketch(subject, cluster, program, tapes, whole)


def _few(blocks: BlockList, program: Program) -> int:
    """Return the number of blocks of the shortest model. It has inner blocks, and the parity of the list's length.

    One more is needed if gradients are copied to the CPU: with three blocks, no copy ends before all copies have
    started.
    """
    least = BASE + (program.cpu > 0)
    return least + (program.checkpointing == "every-2" and (blocks.length - least) % 2)
