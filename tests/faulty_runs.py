"""Synthetic runs, healthy or with one known fault: any size, with noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fullshard.report.run import PARTS, HostWait, OutOfMemory, RankFacts, Run, StepMemory, TensorHeld, UnitTimes

__all__ = ["FAULTS", "Fault", "healthy_run", "with_parts", "with_seconds"]

MB = 1_000_000
_STEP_S = 0.5
_USUAL = dict(zip(PARTS, (0.005, 0.30, 0.60, 0.03, 0.02, 0.03, 0.0, 0.015), strict=True))
_LINK_GB_S = 5.0


def healthy_run(
    *,
    ranks: int = 4,
    steps: int = 12,
    units: int = 12,
    per_host: int = 8,
    noise: float = 0.05,
    step_s: float = _STEP_S,
    unit_nbytes: int = 40 * MB,
    seed: int = 0,
) -> Run:
    """Build a run that computes for 93 % of each step. `noise` is the relative error of each part of each step.

    A rank that computes longer makes the others wait in their gathers, as in a real one.
    """
    chance = np.random.default_rng(seed)
    shape = (ranks, steps, len(PARTS))
    parts = step_s * np.array([_USUAL[part] for part in PARTS]) * np.exp(chance.normal(0, noise, shape))
    parts[:, 0] *= 3  # the first step
    sizes = [3 * unit_nbytes] + [unit_nbytes] * (units - 1)
    return _together(
        Run(
            name="runs/made",
            facts={},
            ranks=tuple(
                RankFacts(rank=index, host=f"node{index // per_host}", device="cpu", cores=per_host, threads=1)
                for index in range(ranks)
            ),
            steps=np.arange(1, steps + 1),
            step_s=parts.sum(-1),
            parts_s=parts,
            waited_for_s=np.zeros((ranks, steps)),
            busy_s=parts.sum(-1),
            units=tuple(
                _unit("" if place == 0 else f"layers.{place - 1}", nbytes, sum(sizes), step_s)
                for place, nbytes in enumerate(sizes)
            ),
            link_gb_s=_LINK_GB_S,
            shown_step=steps,
            spans={},
            memory=_memory(),
            held_bytes=(900 * MB + chance.integers(0, 30 * MB, (ranks, steps))).astype(np.int64),
            shards=(),
            training={},
            strategy="zero3",
            work=np.full((ranks, steps), 8192.0),
            starved_s=0.005 * parts.sum(-1),
            output_nbytes=MB,
            links_gb_s=(_LINK_GB_S,) * ranks,
        )
    )


def with_parts(run: Run, ranks: Sequence[int] | None = None, **more: float) -> Run:
    """Return the run with a part of each step that takes `more` of a usual step longer, on all ranks or on some."""
    slow = np.isin(np.arange(len(run.ranks)), range(len(run.ranks)) if ranks is None else ranks)
    each = slow[:, None] * np.full(len(run.steps), float(np.median(run.step_s)))
    return with_seconds(run, **{name: share * each for name, share in more.items()})


def with_seconds(run: Run, **more: np.ndarray) -> Run:
    """Return the run with parts that take `more` seconds longer; each of shape (ranks, steps)."""
    parts = run.parts_s.copy()
    for name, seconds in more.items():
        parts[:, :, PARTS.index(name)] += seconds
    return _together(replace(run, parts_s=parts))


def _together(run: Run) -> Run:
    """Let the ranks step together: early ones wait, in gathers."""
    parts = run.parts_s.copy()
    own = parts.sum(-1)
    parts[:, :, PARTS.index("gather")] += own.max(0) - own
    return replace(run, parts_s=parts, step_s=parts.sum(-1), waited_for_s=own - own.min(0))


def _unit(fqn: str, nbytes: int, total: int, step_s: float) -> UnitTimes:
    """Return the times of a unit with a fifth of its communication exposed."""
    gather, reduce = (step_s * _USUAL[item] * nbytes / total for item in ("gather", "reduce"))
    return UnitTimes(
        fqn=fqn,
        nbytes=nbytes,
        trains=True,
        gathers=2.0,
        gathered_bytes=2.0 * nbytes * 0.75,
        gather_s=5 * gather,
        gather_exposed_s=gather,
        reductions=1.0,
        reduced_bytes=nbytes * 0.75,
        reduce_s=5 * reduce,
        reduce_exposed_s=reduce,
        gathers_ahead=1.8,
        param_dtype="float32",
        reduce_dtype="float32",
    )


def _memory(*, activations: int = 300 * MB, limit: int = 2000 * MB, largest: Sequence[int] = ()) -> StepMemory:
    """Return a peak of 700 MB, in the middle of a step."""
    states = {"parameters at rest": 200 * MB, "optimizer state": 200 * MB, "activations": activations}
    return StepMemory(
        rank=0,
        at_s=np.array([0.0, 0.2, 0.5]),
        labels=("layers.0, forward", "the root, forward", "the root, step"),
        by_state={name: np.array([nbytes // 2, nbytes, nbytes // 2]) for name, nbytes in states.items()},
        peak=1,
        largest=tuple(TensorHeld(nbytes=item, state="activations", what="the root, forward") for item in largest),
        predicted=None,
        held=50 * MB,
        limit=limit,
    )


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, the cause that must be reported for it, and words that the report must contain."""

    planted: str
    cause: str
    stated: str
    plant: Callable[[Run, float], Run]  # so large a part of a step, 0.25 or more


def _exposing(run: Run, share: float, *, reduce: bool = False, **changes: object) -> Run:
    """Increase the exposed gathers or reductions of all units equally, and apply changes to units."""
    part = "reduce" if reduce else "gather"
    more = share * float(np.median(run.step_s)) / len(run.units)
    units = [
        replace(
            unit,
            **{
                f"{part}_s": getattr(unit, f"{part}_s") + more,
                f"{part}_exposed_s": getattr(unit, f"{part}_exposed_s") + more,
                **changes,
            },
        )
        for unit in run.units
    ]
    return with_parts(replace(run, units=tuple(units)), **{part: share})


def _one_unit(run: Run, share: float) -> Run:
    run = _exposing(run, share)
    whole = replace(run.units[0], nbytes=sum(unit.nbytes for unit in run.units))
    sums = {name: sum(getattr(unit, name) for unit in run.units) for name in _SUMMED}
    return replace(run, units=(replace(whole, **sums, gathers=1.0, gathers_ahead=0.0),))


_SUMMED = ("gathered_bytes", "gather_s", "gather_exposed_s", "reduced_bytes", "reduce_s", "reduce_exposed_s")


def _large_unit(run: Run, share: float) -> Run:
    more, large = share * float(np.median(run.step_s)), run.units[-1]
    times = 6 * large.nbytes
    grown = replace(large, nbytes=times, gather_s=large.gather_s + more, gather_exposed_s=large.gather_exposed_s + more)
    return with_parts(replace(run, units=(*run.units[:-1], grown)), gather=share)


def _heavy_root(run: Run, share: float) -> Run:
    more, root = share * float(np.median(run.step_s)), run.units[0]
    nbytes = 2 * sum(unit.nbytes for unit in run.units)
    grown = replace(root, nbytes=nbytes, gather_s=root.gather_s + more, gather_exposed_s=root.gather_exposed_s + more)
    return with_parts(replace(run, units=(grown, *run.units[1:])), gather=share)


def _small_units(run: Run, share: float) -> Run:
    run = _exposing(run, share)
    return replace(
        run, units=tuple(replace(unit, nbytes=9000, gathered_bytes=14000, reduced_bytes=7000) for unit in run.units)
    )


def _frozen(run: Run, share: float) -> Run:
    run = _exposing(run, share, reductions=0.0, reduced_bytes=0.0, reduce_s=0.0, reduce_exposed_s=0.0, trains=False)
    return replace(run, units=(*run.units[:-1], replace(run.units[-1], trains=True)))


def _slow_link(run: Run, share: float) -> Run:
    links = (run.links_gb_s[0] / 5, *run.links_gb_s[1:])
    return replace(_exposing(run, share), links_gb_s=links)


def _unequal(run: Run, share: float) -> Run:
    work = run.work.copy()
    work[-1] *= 1 + 2 * share  # some of what computes does not depend on it
    return replace(with_parts(run, [len(run.ranks) - 1], forward=share / 3, backward=share * 2 / 3), work=work)


def _starved(run: Run, share: float) -> Run:
    run = with_parts(run, backward=share)
    return replace(run, starved_s=run.starved_s + share * run.step_s)


def _with_starved_rank(run: Run, share: float) -> Run:
    run = with_parts(run, [0], backward=share)
    starved = run.starved_s.copy()
    starved[0] += share * float(np.median(run.step_s))
    return replace(run, starved_s=starved)


def _slow_host(run: Run, share: float) -> Run:
    half = len(run.ranks) // 2
    facts = tuple(replace(rank, host="node0" if place < half else "node1") for place, rank in enumerate(run.ranks))
    slow = range(half, len(run.ranks))
    return replace(with_parts(run, list(slow), forward=share / 3, backward=share * 2 / 3), ranks=facts)


def _stalls(run: Run, share: float) -> Run:
    parts = run.parts_s.copy()
    parts[:, 2::5, PARTS.index("checkpoint")] += 5 * share * float(np.median(run.step_s))
    return _together(replace(run, parts_s=parts))


def _at_times(run: Run, share: float, part: str, slow: np.ndarray) -> Run:
    """Let a part take longer in the steps or ranks that are `slow`, by `share` of all time."""
    each = share * float(np.median(run.step_s)) * slow.max(0).size / slow.max(0).sum()
    return with_seconds(run, **{part: np.broadcast_to(each * slow, run.step_s.shape)})


def _in_turn(run: Run, share: float) -> Run:
    turns = np.random.default_rng(0).permuted(np.resize(np.arange(len(run.ranks)), len(run.steps)))
    return _at_times(run, share, "backward", np.arange(len(run.ranks))[:, None] == turns)


def _ramp(run: Run) -> np.ndarray:
    return run.steps[None] / run.steps.mean()


def _every(run: Run, period: int) -> np.ndarray:
    return (run.steps % period == 0)[None].astype(float)


def _evaluating(run: Run, share: float) -> Run:
    waits = (HostWait(what="forward without gradients", waits=3.0, waited_s=share * float(np.median(run.step_s))),)
    return replace(_at_times(run, share, "other", _every(run, 5)), host_waits=waits)


def _leak(run: Run, share: float) -> Run:
    steps = np.arange(run.held_bytes.shape[1])
    return replace(run, held_bytes=run.held_bytes + (share * 120 * MB * steps).astype(np.int64))


def _logging(run: Run, share: float) -> Run:
    waits = (HostWait(what="item() in train.py:41", waits=3.0, waited_s=share * float(np.median(run.step_s))),)
    return replace(with_parts(run, other=share), host_waits=waits)


def _binding(run: Run, _: float) -> Run:
    return replace(run, memory=_memory(activations=1500 * MB))


def _full(run: Run, _: float) -> Run:
    failed = OutOfMemory(
        rank=1,
        requested_bytes=64 * MB,
        where="layers.3, forward",
        used_bytes=1990 * MB,
        limit_bytes=2000 * MB,
        by_state={"activations": 1500 * MB, "parameters at rest": 400 * MB},
        largest=(),
        would_fit=("--strategy zero3 --activation-checkpointing",),
    )
    return replace(run, memory=None, out_of_memory=failed)


def _logits(run: Run, _: float) -> Run:
    memory = _memory(activations=900 * MB, largest=(400 * MB, 200 * MB, 200 * MB, 40 * MB))
    return replace(run, output_nbytes=200 * MB, memory=memory)


_GPU = {
    "GPU utilization": 0.97,
    "GPU clock": 1.9e9,
    "GPU clock, at most": 1.98e9,
    "GPU power": 640.0,
    "GPU temperature": 61.0,
    "GPU slowed by heat or supply": 0.0,
    "GPU at its power limit": 0.0,
}
_HOST = {"CPU of this rank": 1.0, "CPU of the host": 8.2, "swapped in": 0.0, "swapped out": 0.0}
_NETWORK = {"network link": 3.125e9, "network errors": 3.0}


def with_counters(run: Run, cells: np.ndarray, **changes: float) -> Run:
    """Return the run with hardware counters, with `changes` in some ranks and steps. Underscores stand for spaces."""
    counters = {name: np.full(run.step_s.shape, value) for name, value in (_GPU | _HOST | _NETWORK).items()}
    counters["stalled for memory"] = np.zeros(run.step_s.shape)
    for name, value in changes.items():
        counters[name.replace("_", " ")][cells] = value
    return replace(run, counters=counters)


def _rank(run: Run, number: int) -> np.ndarray:
    return (np.arange(len(run.ranks)) == number)[:, None] & np.ones(len(run.steps), dtype=bool)


def _since_half(run: Run) -> np.ndarray:
    return np.broadcast_to(run.steps > len(run.steps) / 2, run.step_s.shape)


HOT = {"GPU_clock": 1.2e9, "GPU_temperature": 91.0, "GPU_slowed_by_heat_or_supply": 1.0}


def _hot(run: Run, share: float) -> Run:
    slow = with_parts(run, [0], forward=share / 3, backward=share * 2 / 3)
    return with_counters(slow, _rank(run, 0), **HOT)


def _all_hot(run: Run, share: float) -> Run:
    return with_counters(run, np.ones(run.step_s.shape, dtype=bool), **HOT | {"GPU_clock": 1.98e9 * (1 - share / 2)})


def _hot_later(run: Run, share: float) -> Run:
    return with_counters(_at_times(run, share, "backward", _since_half(run)[:1].astype(float)), _since_half(run), **HOT)


def _swapping_later(run: Run, share: float) -> Run:
    slow = _at_times(run, share, "backward", _since_half(run)[:1].astype(float))
    return with_counters(slow, _since_half(run), swapped_in=4e7)


def _swapping(run: Run, share: float) -> Run:
    return with_counters(run, np.ones(run.step_s.shape, dtype=bool), swapped_in=4e7, stalled_for_memory=share / 2)


def _host_bound(run: Run, share: float) -> Run:
    return with_counters(run, np.ones(run.step_s.shape, dtype=bool), GPU_utilization=0.93 / (1 + share))


def _host_bound_later(run: Run, share: float) -> Run:
    slow = _at_times(run, share, "backward", _since_half(run)[:1].astype(float))
    return with_counters(slow, _since_half(run), GPU_utilization=0.97 / (1 + share))


FAULTS = (
    Fault("a loader without workers", "slow input", "on all ranks", lambda run, item: with_parts(run, input=item)),
    Fault("a slow disk on rank 1", "slow input", "rank 1", lambda run, item: with_parts(run, [1], input=item)),
    Fault("long rows on the last rank", "unequal work", "mean of the ranks", _unequal),
    Fault(
        "a hot device",
        "throttled rank",
        "rank 0",
        lambda run, item: with_parts(run, [0], forward=item / 2, backward=item),
    ),
    Fault("another program next to rank 0", "throttled rank", "rank 0", _with_starved_rank),
    Fault("a hot device, with its counters", "throttled rank", "1.20 instead of 1.90 GHz, at 91 °C and 640 W", _hot),
    Fault("hot devices since mid-run, with their counters", "changed speed", "Check fans", _hot_later),
    Fault("hot devices all the time", "reduced clocks", "instead of 1.98 GHz", _all_hot),
    Fault("a host that swaps since mid-run", "changed speed", "swaps 40 MB/s", _swapping_later),
    Fault("a host that swaps all the time", "swapping", "swaps 40 MB/s", _swapping),
    Fault("a host with half the clock", "slow host", "node1", _slow_host),
    Fault("as many threads as cores on each rank", "oversubscribed cores", "no core", _starved),
    Fault("no wrapping", "one unit for all", "the root", _one_unit),
    Fault("experts in one unit", "unit too large", "6 times", _large_unit),
    Fault("each norm a unit", "units too small", "collectives of", _small_units),
    Fault(
        "prefetching off",
        "no prefetch",
        "none was prefetched",
        lambda run, item: _exposing(run, item, gathers_ahead=0.0),
    ),
    Fault("frozen blocks, sharded", "frozen part gathered", "frozen units", _frozen),
    Fault(
        "bfloat16 with sums in float32",
        "gradients in float32",
        "in float32",
        lambda run, item: _exposing(run, item, reduce=True, param_dtype="bfloat16"),
    ),
    Fault("a bad cable at rank 0", "slow link", "rank 0", _slow_link),
    Fault("a network too slow for the model", "slow link", "B/s", lambda run, item: _exposing(run, item)),
    Fault("checkpoints on a slow disk", "checkpoint stalls", "for checkpoints", _stalls),
    Fault(
        "a network that others use at times",
        "network stalls",
        "every 4th step",
        lambda run, item: _at_times(run, item, "gather", _every(run, 4)),
    ),
    Fault("rank 0 logs", "code on one rank", "rank 0", lambda run, item: with_parts(run, [0], other=item)),
    Fault("garbage collection at different times", "stragglers", "another rank in each step", _in_turn),
    Fault(
        "recompilation",
        "slow steps",
        "every 4th step",
        lambda run, item: _at_times(run, item, "forward", _every(run, 4)),
    ),
    Fault(
        "hot devices since mid-run",
        "changed speed",
        "since step",
        lambda run, item: _at_times(run, item, "backward", (run.steps > len(run.steps) / 2)[None].astype(float)),
    ),
    Fault(
        "a graph that grows", "changed speed", "growing", lambda run, item: _at_times(run, item, "backward", _ramp(run))
    ),
    Fault("an optimizer in Python", "slow optimizer", "optimizer", lambda run, item: with_parts(run, optimizer=item)),
    Fault("evaluation every fifth step", "evaluation", "every 5th step", _evaluating),
    Fault(
        "waits whose units are unknown",
        "unexplained waits",
        "gather",
        lambda run, item: replace(with_parts(run, gather=item + 0.25), units=()),
    ),
    Fault("item() in the loop", "host waits", "train.py:41", _logging),
    Fault("a host that launches slowly since mid-run", "changed speed", "instead of 97 %", _host_bound_later),
    Fault("small kernels, launched one by one", "host-bound steps", "run kernels for", _host_bound),
    Fault("no checkpointing in little memory", "no activation checkpointing", "activations", _binding),
    Fault("no checkpointing in too little memory", "no activation checkpointing", "activations", _full),
    Fault(
        "each microbatch gathered and reduced",
        "each microbatch communicates",
        "set_requires_gradient_sync(False)",
        lambda run, item: _exposing(run, item, gathers=8.0, reductions=4.0),
    ),
    Fault(
        "most of the model in the root",
        "unit too large",
        "the root",
        _heavy_root,
    ),
    Fault(
        "recomputing with memory to spare",
        "needless activation checkpointing",
        "memory is free",
        lambda run, _: replace(
            run,
            units=tuple(replace(unit, recomputed=True) for unit in run.units),
            memory=_memory(activations=30 * MB),
        ),
    ),
    Fault("a large vocabulary", "large logits", "200 MB", _logits),
    Fault("losses kept in a list", "memory leak", "more after each step", _leak),
)
