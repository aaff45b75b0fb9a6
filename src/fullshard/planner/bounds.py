"""Lower bounds on the memory and the time of programs, computed before they are simulated."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from fullshard.planner.candidates import PRECISIONS, Program, checkpointed
from fullshard.planner.question import Question
from fullshard.planner.sketch import Sketch, SketchFigures
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Collective

NO_MATTER = 0.97
"""A program whose time is at least this share of the best time is not simulated: predictions are not that accurate."""
_LEAST = 3
"""The minimum number of fitting programs to simulate, if there are so many, to have alternatives for comparison."""

_LIKELY = {"none": 1.0, "selective": 1.03, "every-2": 1.16, "every-1": 1.33}  # time relative to "none", only for order
_KEPT = {"none": 1.0, "selective": 0.6, "every-2": 0.6, "every-1": 0.2}  # memory relative to "none", likewise
_AGAIN = {"every-2": 0.6, "every-1": 0.6}  # recomputed part of a forward: torch stops after the last saved tensor
_UNSURE = 2.0  # safety factor for guessed memory
_SURELY = 0.97  # lower bound relative to the activations of a program with the same checkpoints


def states_bytes(question: Question, program: Program, activations: float = 0.0) -> float:
    """Return a lower bound on a rank's bytes for `program`: parameters, their gradients and two moments.

    The formulas are those of docs/strategies.md for AdamW; messages and temporaries are not included. `activations`
    count when they are live: at the end of a forward, where the optimizer's gradients exist only with gradient
    accumulation.
    """
    model = question.subject.model
    if model is None or question.make_optimizer is not None:
        return activations
    size = _size_of(model)
    stored, trained = size.nbytes, size.trained_nbytes
    if program.offload:
        return activations
    if 0 < program.cpu < 1:
        none, every = (states_bytes(question, replace(program, cpu=share), activations) for share in (0.0, 1.0))
        return none + program.cpu * (every - none)
    placements = program.placements(question.cluster.per_host)
    _, shards = program.mesh_shape(question.cluster)
    parts = {Placement.WHOLE: 1, Placement.SHARDED: shards, Placement.GROUPED: question.cluster.per_host}
    param, reduce = PRECISIONS[program.precision]
    held = (stored + (0 if program.disk else 2 * trained)) / parts[placements.optimizer]
    if placements.parameters is not placements.optimizer:  # an additional copy in the compute dtype
        held += stored / parts[placements.parameters] / (1 if param is None else 2)
        held -= stored / parts[placements.optimizer] if param is None else 0.0
    at_step = held + trained / parts[placements.optimizer]
    if program.cpu:  # the CPU has the optimizer's data; the device has a copy in the compute dtype
        held, at_step = stored / parts[placements.parameters] / (1 if param is None else 2), 0.0
    sums = trained / parts[placements.optimizer if program.syncs_each else placements.gradients]
    if program.accumulates and not program.syncs_each and placements.gradients is Placement.SHARDED:
        sums = trained / (1 if reduce is None or reduce.itemsize == 4 else 2)  # unsharded, until they are reduced
    in_step = 0.0
    if placements.parameters_in_step is not placements.parameters:
        in_step = stored / parts[placements.parameters_in_step] / (1 if param is None else 2)
    adds_up = program.accumulates and not (program.cpu and program.syncs_each)
    forward = held + in_step + activations + (sums if adds_up else 0.0)
    return max(at_step, forward)


def leanness(question: Question, program: Program) -> tuple[float, float]:
    """Return the sort key that puts programs with the least memory per row first."""
    return _KEPT[program.checkpointing], states_bytes(question, program)


_Like = tuple[str, str]
_Kind = tuple[_Like, str]


def _like(program: Program) -> _Like:
    """Return what determines the model's own operations and saved tensors: checkpointing and dtypes."""
    return program.checkpointing, program.precision


def _kind(program: Program) -> _Kind:
    """Return what determines memory other than states: checkpointing, dtypes, and the gradient sums."""
    return _like(program), "sums" if program.syncs_each else "no_sync" if program.accumulates else ""


@dataclass(frozen=True)
class _Bytes:
    """Bytes of the first row of a microbatch, and of each additional row."""

    first: float
    more: float

    def of(self, rows: int) -> float:
        """Return the bytes of `rows` rows."""
        return max(0.0, self.first + (rows - 1) * self.more)


@dataclass(frozen=True, order=True)
class _Busy:
    """Compute seconds per row, in total and in the forwards of blocks."""

    all_s: float
    blocks_s: float


@dataclass(frozen=True)
class _Size:
    """The bytes and number of elements of a model's parameters: of all, and of trained ones."""

    nbytes: float
    trained_nbytes: float
    numel: int
    trained: int


def _size_of(model: nn.Module) -> _Size:
    """Return the size of `model`. It is cached because the bounds need it often."""
    if model not in _sizes:
        params = [(param.numel(), param.element_size(), param.requires_grad) for param in model.parameters()]
        trained = [(numel, itemsize) for numel, itemsize, is_trained in params if is_trained]
        _sizes[model] = _Size(
            float(sum(numel * itemsize for numel, itemsize, _ in params)),
            float(sum(numel * itemsize for numel, itemsize in trained)),
            sum(numel for numel, *_ in params),
            sum(numel for numel, _ in trained),
        )
    return _sizes[model]


_sizes: weakref.WeakKeyDictionary[nn.Module, _Size] = weakref.WeakKeyDictionary()


class Bounds:
    """Bounds on programs that have not been simulated, from formulas and from simulated programs."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._first: dict[_Like, Sketch] = {}
        self._busy: dict[tuple[_Like, int], _Busy] = {}  # by number of rows, the minimum
        self._beyond: dict[_Kind, _Bytes] = {}  # the minimum memory beyond states
        self._costs = question.cluster.costs(self._dtype())

    def guess(self, program: Program) -> float:
        """Return the sort key of programs: likely seconds in arbitrary units."""
        compute = _LIKELY[program.checkpointing] * self._compute_guess()
        return max(compute, self._transport_s(program)) + 0.1 * min(compute, self._transport_s(program))

    def next_of(self, waiting: Sequence[Program], running: Collection[Program]) -> Program:
        """Return the program in `waiting` to simulate next: the first, or one that provides more information.

        Among programs of a kind that may not fit, the result for the one that needs least shows which of the others may
        fit. While it is in `running`, programs of other kinds come first.
        """
        under_way = {_kind(item) for item in running} - set(self._beyond)
        certain = (
            item for item in waiting if _kind(item) not in under_way or not self.is_likely_too_large(item, _UNSURE)
        )
        program = next(certain, waiting[0])
        if _kind(program) in self._beyond or not self.is_likely_too_large(program, _UNSURE):
            return program
        identical = (item for item in waiting if _kind(item) == _kind(program))
        return min(identical, key=lambda item: states_bytes(self._question, item))

    def is_likely_too_large(self, program: Program, unsure: float = 1.0) -> bool:
        """Return True if `program` probably does not fit, judged by similar programs. This only affects the order.

        Before there are any, the estimate is based on the tensors that matrix products save. It is multiplied by
        `unsure`.
        """
        kind, guess = _kind(program), _Bytes(self._kept_guess, self._kept_guess)
        identical = {item: nbytes for item, nbytes in self._beyond.items() if item[0] == kind[0]}
        known = (
            {kind: identical[kind]} if kind in identical else identical or self._beyond or {(("none", ""), ""): guess}
        )
        share = _KEPT.get(program.checkpointing, 1.0)
        rows = min(rows for rows, _ in self._question.shapes_of(program))
        likely = min(item.of(rows) * share / _KEPT.get(kept, 1.0) for ((kept, _), _), item in known.items())
        return states_bytes(self._question, program, unsure * likely) > self._question.cluster.usable_bytes

    def excludes(self, program: Program, best_s: float | None, fitting: int) -> str | None:
        """Return the reason why `program` does not need to be simulated, or None."""
        shapes = [shape for shape in self._question.shapes_of(program) if self._may_fit(program, shape[0])]
        if not shapes:
            return "whose states and activations do not fit"
        if best_s is None or self._question.global_batch is None or fitting < _LEAST:
            return None
        busy_s = min(rows * count * self._least_busy_s(program, rows) for rows, count in shapes)
        if max(busy_s, self._transport_s(program)) >= NO_MATTER * best_s:
            return f"that cannot be {1 - NO_MATTER:.0%} faster than the best"
        return None

    def learn(self, made: Sketch) -> None:
        """Update the bounds with a simulated program."""
        program = made.program
        self._first.setdefault(_like(program), made)
        shapes = [shape for shape in self._question.shapes_of(program) if made.can_report(shape[0])]
        for shape in [shape for shape in shapes if made.needed_bytes(shape[0]) <= self._question.cluster.usable_bytes]:
            self._note_busy(made.figures(*shape))
        states = states_bytes(self._question, program)
        if states:
            first = made.needed_bytes(1)
            more = made.needed_bytes(2) - first if made.most_rows is None else 0.0
            known = self._beyond.get(_kind(program), _Bytes(first - states, more))
            self._beyond[_kind(program)] = _Bytes(min(known.first, first - states), min(known.more, more))

    def _may_fit(self, program: Program, rows: int) -> bool:
        made = self._first.get(_like(program))
        activations = 0.0 if made is None or not made.can_report(rows) else _SURELY * made.activations_bytes(rows)
        return states_bytes(self._question, program, activations) <= self._question.cluster.usable_bytes

    def _note_busy(self, figures: SketchFigures) -> None:
        candidate = figures.candidate
        key, rows = (_like(candidate.program), candidate.rows), candidate.rows * candidate.microbatches
        busy = _Busy(figures.busy_s / rows, figures.blocks_s / rows)
        self._busy[key] = min(self._busy.get(key, busy), busy)

    def _least_busy_s(self, program: Program, rows: int) -> float:
        """Return the minimum compute seconds per row for microbatches of `rows` rows; 0 if unknown.

        For checkpointing that has not been simulated: the time without checkpoints plus the minimum recomputation.
        """
        like = _like(program)
        of = like if like in self._first else ("none", program.precision)
        if (of, rows) not in self._busy:
            made = self._first.get(of)
            if made is None or not made.can_report(rows):
                return 0.0
            self._note_busy(made.figures(rows, 2 if made.program.accumulates else 1))
        busy = self._busy[of, rows]
        return busy.all_s + (0.0 if of == like else self._again(program.checkpointing) * busy.blocks_s)

    def _again(self, kept: str) -> float:
        """Return the minimum fraction of the blocks' forwards that is recomputed."""
        blocks = range(self._question.blocks)
        return _AGAIN.get(kept, 0.0) * len(checkpointed(blocks, kept)) / max(1, len(blocks))

    @cached_property
    def _kept_guess(self) -> float:
        """An estimate of the saved bytes per row: the inputs and outputs of matrix products."""
        model = self._question.subject.model
        if model is None:
            return 0.0
        param, _ = PRECISIONS[self._question.precisions[0]]
        numel = sum(sum(param.shape[-2:]) for param in model.parameters() if param.ndim in (2, 3))
        return float(numel * (param.itemsize if param else 4) * self._question.subject.per_row)

    def _dtype(self) -> str:
        first = PRECISIONS.get(self._question.precisions[0], (None, None))[0]
        return "float32" if first is None else str(first).removeprefix("torch.")

    def _compute_guess(self) -> float:
        """Return an estimate of compute seconds per step: matrix products, with 6 FLOPs per parameter and token."""
        model = self._question.subject.model
        if model is None:
            return 0.0
        numel = _size_of(model).numel
        rows = (self._question.global_batch or self._question.cluster.world) / self._question.cluster.world
        return 6 * numel * rows * self._question.subject.per_row / self._costs.flops_per_s

    def _transport_s(self, program: Program) -> float:
        """Return the minimum communication seconds per step, without latency, for the bytes of docs/strategies.md."""
        model = self._question.subject.model
        cluster = self._question.cluster
        if model is None or cluster.world < 2:
            return 0.0
        param, reduce = PRECISIONS[program.precision]
        size = _size_of(model)
        trained, numel = size.trained, size.numel
        gathered = (param.itemsize if param else 4) * numel * (0.25 if program.gather_wire else 1.0)
        summed = (reduce.itemsize if reduce else 4) * trained * (0.125 if program.reduce_wire else 1.0)
        count = min(count for _, count in self._question.shapes_of(program))
        sums = count if program.syncs_each else 1
        everyone = tuple(range(cluster.world))
        strategy = program.strategy
        if strategy == "ddp":
            return sums * self._seconds("all_reduce", 4.0 * trained, everyone)
        if program.is_replicated:
            _, shards = program.mesh_shape(cluster)
            group, across = tuple(range(shards)), tuple(range(0, cluster.world, shards))
            times = 2 if strategy == "hsdp" else 1
            within = count * times * self._seconds("all_gather", gathered, group)
            within += sums * self._seconds("reduce_scatter", summed, group)
            return max(within, sums * self._seconds("all_reduce", summed / shards, across))
        if strategy == "hfsdp":
            return self._seconds("all_gather", gathered, everyone) / cluster.per_host
        times = {"zero1": sums, "zero2": count, "hpz": count, "zero3": 2 * count}[strategy]
        return times * self._seconds("all_gather", gathered, everyone) + sums * self._seconds(
            "reduce_scatter", summed, everyone
        )

    def _seconds(self, name: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        whole, part = Access(0, 0, int(nbytes)), Access(1, 0, int(nbytes / len(ranks)))
        reads, writes = ((part,), (whole,)) if name == "all_gather" else ((whole,), (part,))
        if name == "all_reduce":
            writes = (whole,)
        origin = Origin("", Phase.IDLE)
        return self._costs.of_collective(Collective(name, "gather", origin, reads, writes, ranks, (int(nbytes),)))
