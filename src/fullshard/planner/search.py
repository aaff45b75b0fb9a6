"""The search, which simulates all programs except those that cannot fit or cannot be faster than the best so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.planner.bounds import NO_MATTER, Bounds, leanness, states_bytes
from fullshard.planner.candidates import PRECISIONS, Program, units_of
from fullshard.planner.found import FoundProgram, Plan, answer, host_fits, largest_rows
from fullshard.planner.question import Question, with_cpu, with_disk
from fullshard.planner.sketch import Sketch, SketchFigures
from fullshard.planner.steps import fractions_on_cpu
from fullshard.planner.workers import Workers


def search(
    question: Question, workers: Workers | None = None, predict_load: Callable[[Plan], None] = lambda element: None
) -> Plan:
    """Return the plan of all programs that may fit and may be the fastest, simulated by `workers` or temporary ones.

    Raises:
        ConfigError: A dry run of the model fails, or the global batch is not divisible by the number of ranks.
    """
    with _given(workers, question) as ask:
        plan = _searched(question, question.programs(), ask, predict_load=predict_load)
        if plan.best is None or question.offload:
            fitting = {element.sketch.program for element in plan.fitting}
            wanted = with_cpu(question, (program for program in question.programs() if program not in fitting))
            _add(plan, _searched_on_cpu(question, wanted, ask), "states on the CPU")
        if plan.best is None and not question.offload and question.subject.make_sharded is None:
            ask.on_progress("nothing fits: the same with shards on the CPU, or part of the optimizer state on a disk")
            offloaded = replace(question, offload=True)
            wanted = [program for program in offloaded.programs() if program.offload or program.disk]
            _add(plan, _searched(offloaded, wanted, ask, plan.found), "offload")
        _add_two_ahead(plan, ask)
        _add_larger_units(plan, ask)
        return plan


def _given(workers: Workers | None, question: Question) -> AbstractContextManager[Workers]:
    """Return a context with the given workers, which are kept, or with temporary ones."""
    return Workers(question) if workers is None else nullcontext(workers)


def _done(made: Sketch) -> Future[Any]:
    """Return a future that is already done."""
    future: Future[Any] = Future()
    future.set_result(made)
    return future


def _add(plan: Plan, more: Plan, what: str) -> None:
    """Add the results of `more`, programs with offloading, to `plan`."""
    plan.found += more.found
    plan.left_out |= {f"{reason}, with {what}": count for reason, count in more.left_out.items()}


def _add_two_ahead(plan: Plan, ask: Workers) -> None:
    """Add the best program with two prefetched units to `plan`, if its all-gathers are slow and that is faster."""
    best = plan.best
    if best is None or not plan.question.blocks or best.sketch.program.strategy in _GATHERS_NOTHING:
        return
    if best.figures.limits["gathers"] <= (1 - NO_MATTER) * best.figures.step_s:
        return
    ahead = replace(best.sketch.program, prefetch_depth=2)
    found = answer(plan.question, ask.sketch(ask(plan.question, ahead)))
    if found is not None and found.fits and found.figures.step_s < NO_MATTER * best.figures.step_s:
        plan.found.append(found)


def _add_larger_units(plan: Plan, ask: Workers) -> None:
    """Add the best program with units of 2, 4, ... blocks to `plan` if it is host-bound, as long as that is faster."""
    best, model = plan.best, plan.question.subject.model
    if best is None or model is None or plan.question.largest:
        return
    if best.sketch.program.cpu or best.sketch.program.disk:  # their fractions are those of a unit for each block
        return
    blocks = plan.question.blocks
    program, single = replace(best.sketch.program, prefetch_depth=1), best
    while best.figures.limits["host"] > (1 - NO_MATTER) * best.figures.step_s:
        program = replace(program, blocks_per_unit=2 * program.blocks_per_unit)
        if not program.blocks_per_unit < blocks <= _MOST_BLOCKS:
            return
        ask.on_progress(f"the host limits the step: {program}")
        found = answer(plan.question, ask.sketch(ask(plan.question, program)))
        if found is None or found.figures.seconds_a_row >= NO_MATTER * best.figures.seconds_a_row:
            return
        found = _with_memory_of(found, single, model)
        if not found.fits or found.figures.needed_bytes > plan.question.cluster.usable_bytes:
            return
        plan.found.append(found)
        best = found


def _with_memory_of(found: FoundProgram, single: FoundProgram, model: nn.Module) -> FoundProgram:
    """Return `found`, with at least the memory of `single`, whose units are single blocks, plus that of larger units.

    Two units are unsharded at the same time, and one has unsharded gradients. Peaks of larger units with few rows do
    not predict those with many rows.
    """
    program, count = found.sketch.program, found.figures.candidate
    compute, reduce = (dtype or torch.float32 for dtype in PRECISIONS[program.precision])
    numel = max(sum(param.numel() for param in unit.parameters()) for unit in units_of(model))
    more = (program.blocks_per_unit - 1) * numel * (2 * compute.itemsize + reduce.itemsize)
    needed = max(found.figures.needed_bytes, single.sketch.needed_bytes(count.rows) + more)
    figures = replace(found.figures, needed_bytes=needed)
    return replace(found, figures=figures, largest=min(found.largest, single.largest))


_MOST_BLOCKS = 100  # larger models are not simulated with larger units, since that requires the whole model
_GATHERS_NOTHING = ("ddp", "zero1", "own")  # no all-gather to prefetch, or sharded by the user's function


def _searched(
    question: Question,
    wanted: Iterable[Program],
    ask: Workers,
    known: Sequence[FoundProgram] = (),
    predict_load: Callable[[Plan], None] | None = None,
) -> Plan:
    """Return the plan of the programs in `wanted`. Those in `known` have been simulated already."""
    plan = Plan(question)
    sketches = {item.sketch.program: item.sketch for item in known}
    usable = question.cluster.usable_bytes
    waiting = []
    for program in wanted:
        if not question.shapes_of(program):
            continue
        if states_bytes(question, program) > usable:
            plan.leave_out("whose states do not fit")
        else:
            waiting.append(program)
    bounds = Bounds(question)
    waiting.sort(key=lambda item: (bounds.guess(item), item.syncs_each, item.accumulates))
    waiting.sort(key=bounds.is_likely_too_large)
    if question.largest:
        waiting.sort(key=lambda item: leanness(question, item))
    requested = 0
    running: dict[Future[Any], Program] = {}
    while waiting or running:
        while waiting and len(running) < ask.at_once:
            program = waiting[0]
            reason = None
            if not question.exhaustive:
                program = bounds.next_of(waiting, running.values())
                fitting = len(plan.fitting) + sum(not bounds.is_likely_too_large(item) for item in running.values())
                best_s = plan.best.figures.step_s if plan.with_margin and plan.best else None
                reason = bounds.excludes(program, best_s, fitting)
                if reason is None and 0 < question.most <= requested:
                    reason = f"behind the {question.most} likeliest (--most 0 takes all)"
            waiting.remove(program)
            if reason is not None:
                plan.leave_out(reason)
                continue
            requested += 1
            ask.on_progress(f"{requested}: {program}")
            like = sketches.get(replace(program, disk=0.0))
            running[ask(question, program) if like is None else _done(like.with_on_disk(program.disk))] = program
        if not running:
            break
        if predict_load is not None and len(running) < ask.at_once and plan.best is not None:
            predict_load(plan)
            predict_load = None
        future = next(iter(running))  # in submission order, so that results are deterministic
        del running[future]
        made = ask.sketch(future)
        bounds.learn(made)
        waiting.sort(key=bounds.is_likely_too_large)
        found = answer(question, made)
        if found is None:
            on_disk = "that need no disk, or cannot be predicted for this many rows"
            plan.leave_out(on_disk if program.disk else "that cannot be predicted for this many rows")
        else:
            plan.found.append(found)
    return plan


# --------------------------------------------------------------------------------------- optimizer states on the CPU


def _searched_on_cpu(question: Question, wanted: Iterable[Program], ask: Workers) -> Plan:
    """Return the plan of the programs in `wanted`, with the smallest part of the optimizer state on the CPU that fits.

    With all of it on the CPU, blocks are identical, and a few of them determine the rest. With a part, the whole model
    is simulated: only for the `_CHOSEN` likeliest programs, and for none that would be slower than one of them even if
    the CPU took no time. If the memory of a host is too small for every program, a part of the state is on disk.
    """
    plan = _searched(question, wanted, ask)
    candidates = [item.sketch for item in plan.found if item.fits]
    plan.found = [item for item in plan.found if not item.fits]
    if not candidates:
        return plan
    fractions = fractions_on_cpu(question.subject, question.cluster, candidates[0].program)
    spans = {made.program: _span(question, made) for made in candidates}
    for span in sorted((span for span in spans.values() if span is not None), key=lambda span: span.seconds_a_row):
        if len(plan.fitting) >= _CHOSEN:
            plan.leave_out(f"behind the {_CHOSEN} likeliest")
        elif plan.best and span.least_seconds_a_row >= NO_MATTER * plan.best.figures.seconds_a_row:
            plan.leave_out(f"that cannot be {1 - NO_MATTER:.0%} faster than the best")
        else:
            ask.on_progress(f"{span.made.program.strategy}, some {span.share:.0%} of states on the CPU")
            figures, made = _least_on_cpu(question, ask, span, fractions)
            if host_fits(question.cluster, figures):
                plan.found.append(FoundProgram(made, figures, True, largest_rows(made)))
            else:
                spans[span.made.program] = None
    for made in sorted(candidates, key=partial(_least_seconds, question)):
        if spans[made.program] is not None:
            continue
        found = None if plan.fitting else _on_cpu_and_disk(question, ask, made, fractions)
        if found is None:
            plan.leave_out(_NO_ROOM)
        else:
            plan.found.append(found)
    return plan


_CHOSEN = 2
_NO_ROOM = "of which the memory of a host is too small"


@dataclass(frozen=True)
class _Span:
    """A program with all of the optimizer state on the CPU, and an estimate with the smallest part that fits."""

    made: Sketch  # the sketch with all of it on the CPU
    rows: int  # rows per microbatch of the shape that is likely the fastest
    microbatches: int  # microbatches per step of that shape
    share: float  # the share of the state that must be on the CPU
    seconds_a_row: float  # the estimate with that share
    least_seconds_a_row: float  # the estimate if the CPU took no time


def _span(question: Question, made: Sketch) -> _Span | None:
    """Return the estimate by linear interpolation over the share on the CPU; None if host memory is too small."""
    cluster, hardware = question.cluster, question.cluster.hardware
    free = made.on(replace(hardware, host_memory_bytes_per_s=_AT_ONCE, host_link_bytes_per_s=_AT_ONCE))
    guesses = []
    for rows, count in question.shapes_of(made.program):
        needed = made.needed_bytes(rows) if made.can_report(rows) else float("inf")
        spare = cluster.limit_for(needed) - needed
        if spare < 0:
            continue
        figures, least = made.figures(rows, count), free.figures(rows, count)
        share = max(0.0, 1 - spare / (_FREED * figures.host_bytes))
        if host_fits(cluster, figures, share):
            seconds = least.seconds_a_row + share * (figures.seconds_a_row - least.seconds_a_row)
            guesses.append(_Span(made, rows, count, share, seconds, least.seconds_a_row))
    return min(guesses, key=lambda guess: guess.seconds_a_row, default=None)


_AT_ONCE = 1e30  # bytes per second
_FREED = 0.8
"""The share of the states on the CPU that is freed on the device: of AdamW's 16 bytes per parameter, all but a copy."""


_BY_LINE = 5
"""The number of simulations that use linear interpolation. Later ones use bisection."""


def _least_on_cpu(
    question: Question, ask: Workers, span: _Span, fractions: Sequence[float]
) -> tuple[SketchFigures, Sketch]:
    """Simulate the program with the first of `fractions` that fits; if none does, with all of the state on the CPU.

    Two are simulated simultaneously: the one that is likely the first that fits, and the one before it as a check.
    """
    program, limit = span.made.program, span.made.cluster.limit_for(span.made.needed_bytes(span.rows))
    fits_not, fits = -1, len(fractions) - 1
    made = {fits: span.made}
    over = {fits: span.made.needed_bytes(span.rows) - limit}
    share = span.share
    while fits - fits_not > 1:
        place = min(max(bisect_left(fractions, share), fits_not + 1), fits - 1)
        pair = [item for item in (place - 1, place) if fits_not < item]
        futures = [ask(question, replace(program, cpu=fractions[item])) for item in pair]
        made |= {item: ask.sketch(future) for item, future in zip(pair, futures, strict=True)}
        over |= {item: made[item].needed_bytes(span.rows) - limit for item in pair}
        fits_not = max([fits_not, *(item for item in pair if over[item] > 0)])
        fits = min([fits, *(item for item in pair if over[item] <= 0)])
        share = (fractions[max(0, fits_not)] + fractions[fits]) / 2
        if fits_not >= 0 and len(made) <= _BY_LINE:
            part = over[fits_not] / (over[fits_not] - over[fits])
            share = fractions[fits_not] + part * (fractions[fits] - fractions[fits_not])
    return made[fits].figures(span.rows, span.microbatches), made[fits]


def _least_seconds(question: Question, made: Sketch) -> float:
    """Return the seconds per row of the fastest shape of a program, even if it does not fit."""
    shapes = [shape for shape in question.shapes_of(made.program) if made.can_report(shape[0])]
    return min(made.figures(*shape).seconds_a_row for shape in shapes)


def _on_cpu_and_disk(question: Question, ask: Workers, made: Sketch, fractions: Sequence[float]) -> FoundProgram | None:
    """Simulate the program with as much of the optimizer state on the CPU as fits there, and some on disk if needed.

    Args:
        question: The question.
        ask: The workers.
        made: The sketch with all of the state on the CPU.
        fractions: The possible fractions on the CPU.
    """
    cluster = question.cluster
    rows, count = next(shape for shape in question.shapes_of(made.program) if made.can_report(shape[0]))
    figures = made.figures(rows, count)
    shares = [item for item in fractions if item < 1 and host_fits(cluster, figures, item)]
    for share in reversed(shares[-_TRIED:]):  # a smaller one leaves more memory of the host to the buffers of the disk
        ask.on_progress(f"{made.program.strategy}, {share:.0%} of states on the CPU, and some on disk")
        part = ask.sketch(ask(question, replace(made.program, cpu=share)))
        for some in (part, part.with_on_disk(1 - share)):
            found = answer(question, some)
            if found is not None and found.fits:
                return found
    return None


_TRIED = 3
"""The number of fractions on the CPU that are combined with a disk, the largest first."""


def least_hosts(question: Question, workers: Workers | None = None, *, most: int = 4096) -> Plan | None:
    """Return the plan for the smallest number of ranks, on up to `most` hosts, that fits one row; None if none does.

    World sizes are powers of two within a host, then any number of whole hosts. Whether one fits is decided with the
    strategy that shards most, with and without activation checkpointing. For the smallest number of ranks, all
    requested programs are searched.
    """
    with _given(workers, question) as ask:
        whole = question.cluster.per_host
        within = [(1, ranks) for ranks in (2**n for n in range(20)) if ranks < whole]
        sizes = [*within, *((2**n, whole) for n in range(20) if 2**n <= most)]
        leanest = next((plan for plan in (_leanest(question, *size, ask) for size in sizes) if plan is not None), None)
        if leanest is None:
            return None
        below, above = leanest.question.cluster.hosts // 2, leanest.question.cluster.hosts
        while above - below > 1:
            middle = (below + above) // 2
            fewer = _leanest(question, middle, whole, ask)
            below, above = (middle, above) if fewer is None else (below, middle)
            leanest = fewer or leanest
        plan = search(replace(question, cluster=leanest.question.cluster, global_batch=None), ask)
        known = {item.sketch.program for item in plan.found}
        plan.found += [item for item in leanest.found if item.sketch.program not in known]
        return plan


def _leanest(question: Question, hosts: int, per_host: int, ask: Workers) -> Plan | None:
    """Return a plan of the strategy that shards most on this many ranks; None if nothing fits with a margin."""
    cluster = replace(question.cluster, hosts=hosts, per_host=per_host)
    kept = [item for item in ("none", "every-1") if item in question.checkpointing] or list(question.checkpointing)
    strategies = question.strategies if cluster.world > 1 else ("ddp",)
    requested = replace(
        question, cluster=cluster, global_batch=None, strategies=strategies, checkpointing=kept, exhaustive=True
    )
    wanted = requested.programs()
    if not wanted:
        return None
    least = min(wanted, key=lambda item: (states_bytes(requested, item), item.strategy != "zero3")).strategy
    wanted = [item for item in wanted if item.strategy == least]
    if min(states_bytes(requested, item) for item in wanted) > cluster.usable_bytes:
        return None
    ask.on_progress(f"{cluster.world} ranks")
    plan = _searched(requested, wanted, ask)
    return plan if plan.with_margin else None


def nearest(question: Question, program: Program, ask: Workers) -> list[FoundProgram]:
    """Simulate `program`, and variants with different checkpointing or with reductions after each microbatch.

    The programs that need least memory come first. If none of them fits, as much of the optimizer state as necessary is
    on the CPU, and then on disk. Programs whose states do not fit are skipped. If steps can have any number of rows,
    they have one per rank.
    """
    everything = replace(question, exhaustive=True, global_batch=question.global_batch or question.cluster.world)
    likes = [replace(program, checkpointing=kept) for kept in question.distinct_checkpointing]
    likes += [replace(like, syncs_each=True) for like in likes if like.accumulates and like.strategy != "ddp"]
    found = _searched(everything, likes, ask).found
    if not any(item.fits for item in found):
        found += _searched_on_cpu(everything, with_cpu(question, likes), ask).found
    if not any(item.fits for item in found):
        found += _searched(everything, with_disk(likes), ask, found).found
    return sorted(found, key=lambda item: item.figures.needed_bytes)
