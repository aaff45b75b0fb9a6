"""The search: what cannot fit, and what cannot be faster than the best so far, is left out; all else is simulated."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fullshard.planner.candidates import (
    PRECISIONS,
    STRATEGIES,
    Cluster,
    Program,
    programs,
    share_rows,
)
from fullshard.planner.sketch import Figures, Sketch, sketch
from fullshard.planner.steps import MakeOptimizer, fractions_on_cpu
from fullshard.planner.subject import Subject
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Collective

__all__ = [
    "ALIKE",
    "Found",
    "Plan",
    "Question",
    "Workers",
    "largest_rows",
    "least_hosts",
    "nearest",
    "search",
    "states_bytes",
]

_NO_MATTER = 0.97
"""What cannot take less than this share of the best time is not simulated any more: predictions are not that sharp."""
ALIKE = 1.005
"""Times that differ by less are taken to be the same."""
_LEAST = 3
"""Programs that are simulated at least, if so many may fit: so that there is something to compare with."""

_LIKELY = {"none": 1.0, "selective": 1.03, "every-2": 1.16, "every-1": 1.33}  # times that of none: for the order only
_KEPT = {"none": 1.0, "selective": 0.6, "every-2": 0.6, "every-1": 0.2}  # of the memory of none, likewise
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # where no global batch is given


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked for.

    Args:
        subject: the model.
        cluster: the machines.
        global_batch: rows that a step learns from on all ranks; None for any.
        strategies: those to consider.
        checkpointing: likewise.
        precisions: likewise.
        offload: whether the optimizer's state on the CPU or on a disk, and shards on the CPU, are considered even where
            something fits without.
        wires: encodings of gathers and of reductions, which change the numbers.
        max_norm: clips gradients, if given.
        make_optimizer: makes the optimizer of parameters; fused AdamW if None.
        most: programs that are simulated at most; 0 for all that may be the fastest.
        exhaustive: whether all that may fit are simulated, whatever they can reach.
        largest: whether those come first that take the least memory for a row, not those that are likely the fastest.
    """

    subject: Subject
    cluster: Cluster
    global_batch: int | None = None
    strategies: Sequence[str] = STRATEGIES
    checkpointing: Sequence[str] = ("none", "selective", "every-2", "every-1")
    precisions: Sequence[str] = ("bf16",)
    offload: bool = False
    wires: tuple[str | None, str | None] = (None, None)
    max_norm: float | None = 1.0
    make_optimizer: MakeOptimizer | None = None
    most: int = 8
    exhaustive: bool = False
    largest: bool = False

    def shapes(self) -> list[tuple[int, int]]:
        """Rows of a microbatch and microbatches of a step that may be chosen.

        Raises:
            ConfigError: the ranks cannot share the global batch.
        """
        if self.global_batch is None:
            return [(rows, 1) for rows in (_ROWS if self.subject.any_rows else (1,))]
        mine = self.global_batch // self.cluster.world
        rows = share_rows(self.global_batch, self.cluster.world)
        return [(each, mine // each) for each in rows if self.subject.any_rows or each == 1]

    def programs(self) -> list[Program]:
        """The programs to consider."""
        counts = [count for _, count in self.shapes()]
        if self.subject.make_sharded is not None:
            several = [False] * (1 in counts) + [True] * (max(counts) > 1)
            each = [Program(strategy="own", precision="own", accumulates=it) for it in several]
            return [*each, *(replace(it, syncs_each=True) for it in each if it.accumulates)]
        found = programs(
            self.cluster,
            strategies=self.strategies,
            checkpointing=self.checkpointing,
            precisions=self.precisions,
            offloads=(False, True) if self.offload else (False,),
            accumulates=[False] * (1 in counts) + [True] * (max(counts) > 1),
            wires=self.wires,
        )
        every = list(found)
        return every + (with_disk(every) if self.offload else [])

    def shapes_of(self, program: Program) -> list[tuple[int, int]]:
        """Those of `shapes` that are of `program`."""
        return [(rows, count) for rows, count in self.shapes() if (count > 1) == program.accumulates]

    def asked(self, program: Program) -> Sketch:
        """The sketch of `program`."""
        return sketch(self.subject, self.cluster, program, max_norm=self.max_norm, make_optimizer=self.make_optimizer)


def with_cpu(question: Question, programs: Iterable[Program]) -> list[Program]:
    """Those of `programs` that have all on the device, with as much of the optimizer's state on the CPU as is needed.

    None where the CPU computes, or where the user's function says where states are.
    """
    if question.cluster.hardware.kind == "cpu" or question.subject.make_sharded is not None:
        return []
    return [replace(program, cpu=1.0) for program in programs if not (program.offload or program.disk)]


def with_disk(programs: Iterable[Program]) -> list[Program]:
    """Those of `programs` that have all in memory, with as much on a disk as is needed."""
    return [replace(program, disk=1.0) for program in programs if not program.offload]


@dataclass(frozen=True)
class Found:
    """A program, the fastest of its candidates that fit, or else the one that needs least."""

    sketch: Sketch
    figures: Figures
    fits: bool
    largest: int  # rows of a microbatch that fit at most, whatever the global batch


@dataclass
class Plan:
    """What the search has found: programs in order of time, those that fit first.

    `left_out` says how many were not simulated, by reason.
    """

    question: Question
    found: list[Found] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def fitting(self) -> list[Found]:
        """Those that fit, the fastest first."""
        return sorted((it for it in self.found if it.fits), key=lambda it: it.figures.seconds_a_row)

    @property
    def best(self) -> Found | None:
        """Of the fastest that fit, which predictions cannot tell apart, the one that needs the least memory."""
        fitting = self.fitting
        alike = (it for it in fitting if it.figures.seconds_a_row <= ALIKE * fitting[0].figures.seconds_a_row)
        return min(alike, key=lambda it: it.figures.needed_bytes, default=None)

    @property
    def runner_up(self) -> Found | None:
        """The fastest that is not the best one's strategy and checkpointing."""
        best = self.best
        if best is None:
            return None
        chosen = best.sketch.program
        others = (
            it
            for it in self.fitting
            if (it.sketch.program.strategy, it.sketch.program.checkpointing) != (chosen.strategy, chosen.checkpointing)
        )
        return next(others, None)

    def leave_out(self, reason: str) -> None:
        """Count a program that is not simulated."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def search(question: Question, *, tell: Callable[[str], None] = lambda it: None) -> Plan:
    """The plan: every program that may fit and may be the fastest, simulated.

    Raises:
        ConfigError: the model cannot be run dry, or the ranks cannot share the global batch.
    """
    plan = _searched(question, question.programs(), tell)
    if plan.best is None or question.offload:
        fitting = {it.sketch.program for it in plan.fitting}
        wanted = with_cpu(question, (it for it in question.programs() if it not in fitting))
        _add(plan, _searched_on_cpu(question, wanted, tell), "states on the CPU")
    if plan.best is None and not question.offload and question.subject.make_sharded is None:
        tell("nothing fits: the same with shards on the CPU, or part of the optimizer's state on a disk")
        offloaded = replace(question, offload=True)
        wanted = [it for it in offloaded.programs() if it.offload or it.disk]
        _add(plan, _searched(offloaded, wanted, tell, plan.found), "offload")
    best = plan.best
    if best is not None and best.figures.limits["gathers"] > (1 - _NO_MATTER) * best.figures.step_s:
        ahead = replace(best.sketch.program, prefetch_depth=2)
        if ahead.strategy in ("ddp", "zero1", "own"):  # gather nothing within a step, or as the user's function says
            return plan
        with Workers(question) as ask:  # not here: what has run backward may not be able to fork
            found = _answer(question, ask.sketch(ask(ahead)))
        if found is not None and found.fits and found.figures.step_s < _NO_MATTER * best.figures.step_s:
            plan.found.append(found)
    return plan


def _add(plan: Plan, more: Plan, what: str) -> None:
    """Have in `plan` what was found with something elsewhere, too."""
    plan.found += more.found
    plan.left_out |= {f"{reason}, with {what}": count for reason, count in more.left_out.items()}


def _searched(
    question: Question, wanted: Iterable[Program], tell: Callable[[str], None], known: Sequence[Found] = ()
) -> Plan:
    """The plan of the programs that are `wanted`. `known` have been simulated already."""
    plan = Plan(question)
    sketches = {it.sketch.program: it.sketch for it in known}
    usable = question.cluster.usable_bytes
    waiting = []
    for program in wanted:
        if not question.shapes_of(program):
            continue
        if states_bytes(question, program) > usable:
            plan.leave_out("whose states alone do not fit")
        else:
            waiting.append(program)
    bounds = _Bounds(question)
    waiting.sort(key=lambda it: (bounds.guess(it), it.syncs_each, it.accumulates))
    waiting.sort(key=bounds.is_likely_too_large)
    if question.largest:
        waiting.sort(key=lambda it: (_KEPT[it.checkpointing], states_bytes(question, it)))
    asked = 0
    with Workers(question) as ask:
        running: dict[Future[Any], Program] = {}
        while waiting or running:
            while waiting and len(running) < ask.at_once:
                program = waiting.pop(0)
                reason = None if question.exhaustive else bounds.excludes(program, plan, asked)
                if reason is None and 0 < question.most <= asked and not question.exhaustive:
                    reason = f"behind the {question.most} likeliest (--most 0 takes all)"
                if reason is not None:
                    plan.leave_out(reason)
                    continue
                asked += 1
                tell(f"{asked}: {program}")
                like = sketches.get(replace(program, disk=0.0))
                running[ask(program) if like is None else _done(like.with_on_disk(program.disk))] = program
            if not running:
                break
            future = next(iter(running))  # in the order of asking, so that the same question has the same answer
            del running[future]
            made = ask.sketch(future)
            bounds.learn(made)
            waiting.sort(key=bounds.is_likely_too_large)
            found = _answer(question, made)
            if found is None:
                on_disk = "that need no disk, or cannot be told for so many rows"
                plan.leave_out(on_disk if program.disk else "that cannot be told for so many rows")
            else:
                plan.found.append(found)
    return plan


def _answer(question: Question, made: Sketch) -> Found | None:
    """The best candidate of a program; None if it cannot be told, or fits without the disk that it is to have."""
    usable = question.cluster.usable_bytes
    if made.program.disk:
        return _answer_on_disk(question, made)
    shapes = [it for it in question.shapes_of(made.program) if made.can_tell(it[0])]
    if not shapes:
        return None
    small = [made.figures(rows, count) for rows, count in shapes if made.needed_bytes(rows) <= usable]
    fitting = [it for it in small if made.program.cpu == 1 or _host_fits(question.cluster, it)]  # a part of it may
    if fitting:
        chosen = min(fitting, key=lambda it: it.seconds_a_row)
    else:
        chosen = made.figures(*min(shapes, key=lambda it: made.needed_bytes(it[0])))
    return Found(made, chosen, bool(fitting), largest_rows(made, usable))


def _answer_on_disk(question: Question, made: Sketch) -> Found | None:
    """Of candidates with the least on the disk with which they fit, the fastest; with all on it, if none does."""
    usable = question.cluster.usable_bytes
    shapes = [it for it in question.shapes_of(made.program) if made.can_tell(it[0])]
    shares = {shape: made.least_on_disk(shape[0], usable) for shape in shapes}
    if not shapes or any(share == 0 for share in shares.values()):
        return None
    parts = {shape: made.with_on_disk(share) for shape, share in shares.items() if share is not None}
    fitting = [
        (part, figures)
        for (rows, count), part in parts.items()
        if _host_fits(question.cluster, figures := part.figures(rows, count))
        and part.disk_bytes * question.cluster.per_host <= question.cluster.disk.free_bytes
    ]
    if fitting:
        part, figures = min(fitting, key=lambda it: it[1].seconds_a_row)
    else:
        part, figures = made, made.figures(*min(shapes))
    return Found(part, figures, bool(fitting), largest_rows(part, usable))


def _host_fits(cluster: Cluster, figures: Figures, share: float = 1.0) -> bool:
    """True if all ranks of a host have room in its memory for what is offloaded, or for `share` of that."""
    if cluster.hardware.kind == "cpu":
        return True
    return share * figures.host_bytes * cluster.per_host <= 0.9 * cluster.hardware.host_memory_bytes


# ---------------------------------------------------------------------------------- the optimizer's state on the CPU


def _searched_on_cpu(question: Question, wanted: Iterable[Program], tell: Callable[[str], None]) -> Plan:
    """The plan of `wanted`, which have all of the optimizer's state on the CPU: with the least there that fits.

    With all of it blocks are alike, and few of them tell of the rest. Of a part the whole model is simulated: only of
    the `_CHOSEN` likeliest, and of none that would be no faster than one of them even if the CPU took no time.
    """
    plan = _searched(question, wanted, tell)
    candidates = [it.sketch for it in plan.found if it.fits]
    plan.found = [it for it in plan.found if not it.fits]
    if not candidates:
        return plan
    fractions = fractions_on_cpu(question.subject, question.cluster, candidates[0].program)
    spans = [_span(question, made) for made in candidates]
    with Workers(question) as ask:
        for span in sorted((it for it in spans if it is not None), key=lambda it: it.seconds_a_row):
            if len(plan.fitting) >= _CHOSEN:
                plan.leave_out(f"behind the {_CHOSEN} likeliest")
            elif plan.best and span.least_seconds_a_row >= _NO_MATTER * plan.best.figures.seconds_a_row:
                plan.leave_out(f"that cannot be {1 - _NO_MATTER:.0%} faster than the best")
            else:
                tell(f"{span.made.program.strategy}, some {span.share:.0%} of states on the CPU")
                figures, made = _least_on_cpu(ask, span, fractions)
                if _host_fits(question.cluster, figures):
                    plan.found.append(Found(made, figures, True, largest_rows(made, question.cluster.usable_bytes)))
                else:
                    plan.leave_out(_NO_ROOM)
    if no_room := spans.count(None):
        plan.left_out[_NO_ROOM] = plan.left_out.get(_NO_ROOM, 0) + no_room
    return plan


_CHOSEN = 2
_NO_ROOM = "of which a host's memory cannot hold enough"


@dataclass(frozen=True)
class _Span:
    """A program with all of the optimizer's state on the CPU, and what is guessed of it with the least that fits.

    Args:
        made: with all of it there.
        rows: of a microbatch, of the shape that is likely to be the fastest.
        microbatches: of a step, likewise.
        share: of the state that has to be there.
        seconds_a_row: with that share, likewise.
        least_seconds_a_row: if the CPU took no time.
    """

    made: Sketch
    rows: int
    microbatches: int
    share: float
    seconds_a_row: float
    least_seconds_a_row: float


def _span(question: Question, made: Sketch) -> _Span | None:
    """The guess, along a line from no state on the CPU to all of it; None if a host has no room for so much."""
    cluster, hardware = question.cluster, question.cluster.hardware
    free = made.on(replace(hardware, host_memory_bytes_per_s=_AT_ONCE, host_link_bytes_per_s=_AT_ONCE))
    guesses = []
    for rows, count in question.shapes_of(made.program):
        spare = cluster.usable_bytes - made.needed_bytes(rows) if made.can_tell(rows) else -1.0
        if spare < 0:
            continue
        figures, least = made.figures(rows, count), free.figures(rows, count)
        share = max(0.0, 1 - spare / (_FREED * figures.host_bytes))
        if _host_fits(cluster, figures, share):
            seconds = least.seconds_a_row + share * (figures.seconds_a_row - least.seconds_a_row)
            guesses.append(_Span(made, rows, count, share, seconds, least.seconds_a_row))
    return min(guesses, key=lambda it: it.seconds_a_row, default=None)


_AT_ONCE = 1e30  # bytes a second
_FREED = 0.8
"""About so much of what is on the CPU is free on the device: of 16 bytes of a parameter of AdamW's all but a copy."""


_BY_LINE = 5
"""Simulations up to which the next is chosen along a line; in the middle from then on."""


def _least_on_cpu(ask: Workers, span: _Span, fractions: Sequence[float]) -> tuple[Figures, Sketch]:
    """The program with the first of `fractions` with which it fits, simulated; with all, if no other one does.

    Two are simulated at once: the one that is likely to be the first, and the one before it, to know that it is.
    """
    program, usable = span.made.program, span.made.cluster.usable_bytes
    fits_not, fits = -1, len(fractions) - 1
    made = {fits: span.made}
    over = {fits: span.made.needed_bytes(span.rows) - usable}
    share = span.share
    while fits - fits_not > 1:
        place = min(max(bisect_left(fractions, share), fits_not + 1), fits - 1)
        pair = [it for it in (place - 1, place) if fits_not < it]
        futures = [ask(replace(program, cpu=fractions[it])) for it in pair]
        made |= {it: ask.sketch(future) for it, future in zip(pair, futures, strict=True)}
        over |= {it: made[it].needed_bytes(span.rows) - usable for it in pair}
        fits_not = max([fits_not, *(it for it in pair if over[it] > 0)])
        fits = min([fits, *(it for it in pair if over[it] <= 0)])
        share = (fractions[max(0, fits_not)] + fractions[fits]) / 2
        if fits_not >= 0 and len(made) <= _BY_LINE:
            part = over[fits_not] / (over[fits_not] - over[fits])
            share = fractions[fits_not] + part * (fractions[fits] - fractions[fits_not])
    return made[fits].figures(span.rows, span.microbatches), made[fits]


def largest_rows(made: Sketch, usable: float) -> int:
    """The most rows of a microbatch that fit; 0 if not even one does."""
    if made.needed_bytes(1) > usable:
        return 0
    if made.most_rows is not None:
        return max(rows for rows in range(1, made.most_rows + 1) if made.needed_bytes(rows) <= usable)
    below, above = 1, 2
    while made.needed_bytes(above) <= usable and above < 1 << 16:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if made.needed_bytes(middle) <= usable else (below, middle)
    return below


def least_hosts(question: Question, *, most: int = 4096, tell: Callable[[str], None] = lambda it: None) -> Plan | None:
    """The plan for the fewest ranks on which one row fits, on part of a host or several; None if none up to `most` do.

    Worlds are powers of two within a host, then whole hosts, any number of them: what shards most decides, with and
    without checkpoints. On the fewest, everything that was asked for is looked through.
    """
    whole = question.cluster.per_host
    within = [(1, ranks) for ranks in (2**n for n in range(20)) if ranks < whole]
    sizes = [*within, *((2**n, whole) for n in range(20) if 2**n <= most)]
    leanest = next((plan for plan in (_leanest(question, *size, tell) for size in sizes) if plan is not None), None)
    if leanest is None:
        return None
    below, above = leanest.question.cluster.hosts // 2, leanest.question.cluster.hosts
    while above - below > 1:
        middle = (below + above) // 2
        fewer = _leanest(question, middle, whole, tell)
        below, above = (middle, above) if fewer is None else (below, middle)
        leanest = fewer or leanest
    plan = search(replace(question, cluster=leanest.question.cluster, global_batch=None), tell=tell)
    known = {it.sketch.program for it in plan.found}
    plan.found += [it for it in leanest.found if it.sketch.program not in known]
    return plan


def _leanest(question: Question, hosts: int, per_host: int, tell: Callable[[str], None]) -> Plan | None:
    """What fits on so many ranks of the strategy that shards most, simulated; None if nothing does."""
    cluster = replace(question.cluster, hosts=hosts, per_host=per_host)
    kept = [it for it in ("none", "every-1") if it in question.checkpointing] or list(question.checkpointing)
    strategies = question.strategies if cluster.world > 1 else ("ddp",)
    asked = replace(
        question, cluster=cluster, global_batch=None, strategies=strategies, checkpointing=kept, exhaustive=True
    )
    wanted = asked.programs()
    if not wanted:
        return None
    least = min(wanted, key=lambda it: (states_bytes(asked, it), it.strategy != "zero3")).strategy
    wanted = [it for it in wanted if it.strategy == least]
    if min(states_bytes(asked, it) for it in wanted) > cluster.usable_bytes:
        return None
    tell(f"{cluster.world} ranks")
    plan = _searched(asked, wanted, tell)
    return plan if plan.best is not None else None


def nearest(question: Question, program: Program) -> list[Found]:
    """`program` and its like with other checkpoints, or with sums after each microbatch, those that need least first;
    if none of these fits, with as much of the optimizer's state on the CPU as is needed; and then on a disk.

    None of those whose states alone do not fit. Steps of any number of rows are taken to have one a rank.
    """
    everything = replace(question, exhaustive=True, global_batch=question.global_batch or question.cluster.world)
    likes = [replace(program, checkpointing=kept) for kept in question.checkpointing]
    likes += [replace(it, syncs_each=True) for it in likes if it.accumulates and it.strategy != "ddp"]
    found = _searched(everything, likes, lambda it: None).found
    if not any(it.fits for it in found):
        found += _searched_on_cpu(everything, with_cpu(question, likes), lambda it: None).found
    if not any(it.fits for it in found):
        found += _searched(everything, with_disk(likes), lambda it: None, found).found
    return sorted(found, key=lambda it: it.figures.needed_bytes)


# ------------------------------------------------------------------------------------------------------------- bounds


def states_bytes(question: Question, program: Program, activations: float = 0.0) -> float:
    """Bytes on a rank that no candidate of `program` can do without: parameters, their gradients and two moments.

    The formulas are those of docs/strategies.md for AdamW; messages and temporaries come on top. `activations` count
    where they are alive: at the end of a forward, when the optimizer's gradients are there only if they add up.
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
    shards = question.cluster.per_host if placements.replicated else question.cluster.world
    parts = {Placement.WHOLE: 1, Placement.SHARDED: shards, Placement.GROUPED: question.cluster.per_host}
    param, reduce = PRECISIONS[program.precision]
    held = (stored + (0 if program.disk else 2 * trained)) / parts[placements.optimizer]
    if placements.parameters is not placements.optimizer:  # a copy beside the optimizer's own, in the compute dtype
        held += stored / parts[placements.parameters] / (1 if param is None else 2)
        held -= stored / parts[placements.optimizer] if param is None else 0.0
    at_step = held + trained / parts[placements.optimizer]
    if program.cpu:  # which has all that the optimizer needs; here there is a copy in the compute dtype
        held, at_step = stored / parts[placements.parameters] / (1 if param is None else 2), 0.0
    sums = trained / parts[placements.gradients]
    if program.accumulates and not program.syncs_each and placements.gradients is Placement.SHARDED:
        sums = trained / (1 if reduce is None or reduce.itemsize == 4 else 2)  # whole, until they are reduced
    in_step = 0.0
    if placements.parameters_in_step is not placements.parameters:
        in_step = stored / parts[placements.parameters_in_step] / (1 if param is None else 2)
    adds_up = program.accumulates and not (program.cpu and program.syncs_each)
    forward = held + in_step + activations + (sums if adds_up else 0.0)
    return max(at_step, forward)


@dataclass(frozen=True)
class _Size:
    """Of a model's parameters: bytes and numbers of all, and of those that are trained."""

    nbytes: float
    trained_nbytes: float
    numel: int
    trained: int


def _size_of(model: nn.Module) -> _Size:
    """That of `model`, counted once: the bounds ask for it again and again."""
    if model not in _sizes:
        params = [(it.numel(), it.element_size(), it.requires_grad) for it in model.parameters()]
        trained = [(numel, itemsize) for numel, itemsize, is_trained in params if is_trained]
        _sizes[model] = _Size(
            float(sum(numel * itemsize for numel, itemsize, _ in params)),
            float(sum(numel * itemsize for numel, itemsize in trained)),
            sum(numel for numel, *_ in params),
            sum(numel for numel, _ in trained),
        )
    return _sizes[model]


_sizes: weakref.WeakKeyDictionary[nn.Module, _Size] = weakref.WeakKeyDictionary()


class _Bounds:
    """What is known of programs that have not been simulated, from formulas and from those that have been."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._busy: dict[str, float] = {}  # of the compute lane for a row, the least there was, by checkpointing
        self._beyond: dict[str, tuple[float, float]] = {}  # bytes beyond states, of the first row and of each more
        self._costs = question.cluster.costs(self._dtype())

    def guess(self, program: Program) -> float:
        """What programs are ordered by: likely seconds, in units of nothing."""
        compute = _LIKELY[program.checkpointing] * self._compute_guess()
        return max(compute, self._wire_s(program)) + 0.1 * min(compute, self._wire_s(program))

    def is_likely_too_large(self, program: Program) -> bool:
        """Whether `program` probably does not fit, by what others take that keep more or less: for the order only."""
        if not self._beyond:
            return False
        least = min(rows for rows, _ in self._question.shapes_of(program))
        share = _KEPT.get(program.checkpointing, 1.0)
        known = self._beyond.items()
        likely = min((first + (least - 1) * each) * share / _KEPT[kept] for kept, (first, each) in known)
        return states_bytes(self._question, program, likely) > self._question.cluster.usable_bytes

    def excludes(self, program: Program, plan: Plan, asked: int) -> str | None:
        """Why `program` need not be simulated, if it need not. `asked` is how many have been."""
        usable = self._question.cluster.usable_bytes
        least = min(rows for rows, _ in self._question.shapes_of(program))
        first, each = self._beyond.get(program.checkpointing, (0.0, 0.0))
        if states_bytes(self._question, program, 0.97 * (first + (least - 1) * each)) > usable:
            return "whose states and activations do not fit"
        best = plan.best
        if best is None or self._question.global_batch is None or asked < _LEAST:
            return None
        count = self._question.global_batch // self._question.cluster.world
        known = self._busy.get(program.checkpointing, self._busy.get("none", 0.0))
        if max(known * count, self._wire_s(program)) >= _NO_MATTER * best.figures.step_s:
            return f"that cannot be {1 - _NO_MATTER:.0%} faster than the best"
        return None

    def learn(self, made: Sketch) -> None:
        """Take in what was simulated."""
        usable = self._question.cluster.usable_bytes
        shapes = [it for it in self._question.shapes_of(made.program) if made.can_tell(it[0])]
        fitting = [it for it in shapes if made.needed_bytes(it[0]) <= usable] or [min(shapes)] if shapes else []
        kept = made.program.checkpointing
        if fitting:
            rows, count = max(fitting)
            figures = made.figures(rows, count)
            busy = (figures.limits["compute"] + figures.limits["memory bandwidth"]) / (rows * count)
            self._busy[kept] = min(self._busy.get(kept, busy), busy)
        states = states_bytes(self._question, made.program)
        if states:
            first = max(0.0, made.needed_bytes(1) - states)
            each = max(0.0, made.needed_bytes(2) - made.needed_bytes(1)) if made.most_rows is None else 0.0
            known = self._beyond.get(kept, (first, each))
            self._beyond[kept] = min(known[0], first), min(known[1], each)

    def _dtype(self) -> str:
        first = PRECISIONS.get(self._question.precisions[0], (None, None))[0]
        return "float32" if first is None else str(first).removeprefix("torch.")

    def _compute_guess(self) -> float:
        """Seconds of products of matrices in a step: 6 FLOPs for each parameter and token."""
        model = self._question.subject.model
        if model is None:
            return 0.0
        numel = _size_of(model).numel
        rows = (self._question.global_batch or self._question.cluster.world) / self._question.cluster.world
        return 6 * numel * rows * self._question.subject.per_row / self._costs.flops_per_s

    def _wire_s(self, program: Program) -> float:
        """Seconds that the messages of a step take at least: all bytes at once, by docs/strategies.md."""
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
        everyone, host = tuple(range(cluster.world)), tuple(range(cluster.per_host))
        across = tuple(range(0, cluster.world, cluster.per_host))
        strategy = program.strategy
        if strategy == "ddp":
            return sums * self._seconds("all_reduce", 4.0 * trained, everyone)
        if strategy in ("hsdp", "hsdp_zero2"):
            times = 2 if strategy == "hsdp" else 1
            within = count * times * self._seconds("all_gather", gathered, host)
            within += sums * self._seconds("reduce_scatter", summed, host)
            return max(within, sums * self._seconds("all_reduce", summed / cluster.per_host, across))
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


# ------------------------------------------------------------------------------------------------- processes at once


class Workers:
    """Sketches made by other processes, as far as there are cores; they are forked, and so know the question.

    By this one, one after the other, where a fork cannot run backward: threads that autograd has for devices are
    missing in it. They start with the first backward beside a GPU, or after fake tensors of a torch built for CUDA.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._pool: ProcessPoolExecutor | None = None
        self.at_once = 1

    def __enter__(self) -> Workers:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if sys.platform == "linux" and cores > 1 and not self._question.subject.values:
            context = multiprocessing.get_context("fork")
            _ASKED.append(self._question)
            gc.freeze()  # what is there already is not looked through again, which would copy it in each process
            self.at_once = min(cores, 8)
            self._pool = ProcessPoolExecutor(self.at_once, mp_context=context)
            if self._pool.submit(_run_backward).exception() is not None:
                self._end()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end()

    def _end(self) -> None:
        """All processes; what is still asked for is made by this one."""
        pool, self._pool, self.at_once = self._pool, None, 1
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            gc.unfreeze()  # the caller's garbage is to be found again
            _ASKED.pop()

    def __call__(self, program: Program) -> Future[Any]:
        if self._pool is None:
            future: Future[Any] = Future()
            try:
                future.set_result(self._question.asked(program))
            except BaseException as error:
                future.set_exception(error)
            return future
        return self._pool.submit(_sketched, program)

    def sketch(self, future: Future[Any]) -> Sketch:
        """The sketch that a call has promised."""
        made = future.result()
        if isinstance(made, Sketch):
            return made
        return Sketch(self._question.subject, self._question.cluster, *made)


def _done(made: Sketch) -> Future[Any]:
    """As if it had been asked for."""
    future: Future[Any] = Future()
    future.set_result(made)
    return future


_ASKED: list[Question] = []  # by this process, of those that it forks: the functions in a question cannot be sent


def _run_backward() -> None:
    """In a forked process: an error if it cannot."""
    torch.ones((), requires_grad=True).backward()


def _sketched(program: Program) -> tuple[Any, ...]:
    """In a forked process: all of a sketch that can be sent back."""
    made = _ASKED[-1].asked(program)
    return made.program, made.tapes, made.whole
