"""Synthetic runs with any number of ranks, steps and units, healthy or with a known fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fullshard.plan.memory import State
from fullshard.report.run import (
    PARTS,
    Finding,
    OperationTime,
    OutOfMemory,
    RankFacts,
    Run,
    Shard,
    Span,
    StepMemory,
    TensorHeld,
    TierBytes,
    UnitTimes,
    WhatIf,
)

__all__ = ["HOSTILE", "bare_run", "exhausted", "findings_of", "hostile", "made_run", "offloaded"]

HOSTILE = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>\"&{{ 7 * 7 }}\u2028"
MIB = 2**20
_USUAL_S = (0.012, 0.212, 0.398, 0.031, 0.018, 0.046, 0.0, 0.009)  # a step, by PARTS


def made_run(
    *,
    ranks: int = 4,
    steps: int = 60,
    units: int = 12,
    per_host: int = 8,
    parts_s: tuple[float, ...] = _USUAL_S,
    late: int | None = None,
    late_s: float = 0.15,
    leak_bytes: int = 0,
    checkpoint_every: int = 0,
    name: str = "runs/small-zero3-1",
    prefix: str = "",
    report_every: int = 1,
    seed: int = 0,
) -> Run:
    """Return a run whose steps take `parts_s`, with a little noise.

    Args:
        late: a rank that computes for `late_s` longer; the others wait for it, in gathers.
        leak_bytes: that each rank holds more after each step.
        checkpoint_every: number of steps between checkpoints, each written in 0.4 s.
        prefix: of the units' names.
        report_every: number of steps between reports of loss and other numbers.
    """
    chance = np.random.default_rng(seed)
    parts = np.array(parts_s)[None, None] * chance.normal(1, 0.02, (ranks, steps, len(PARTS))).clip(0.9, 1.1)
    waited = np.abs(chance.normal(0.002, 0.0015, (ranks, steps)))
    if checkpoint_every:
        parts[:, checkpoint_every - 1 :: checkpoint_every, PARTS.index("checkpoint")] += 0.4
    if late is not None:
        parts[:, :, PARTS.index("gather")] += late_s
        parts[late, :, PARTS.index("gather")] -= late_s
        parts[late, :, PARTS.index("backward")] += late_s
        waited[late] += late_s
    counters = {"CPU of the host": 6.5, "disk reads": 3e6, "GPU clock": 1.9e9, "swapped in": 0.0}
    named = ("", *(f"{prefix}layers.{number}" for number in range(units - 1)))
    measured = tuple(_unit(fqn, number, parts.mean((0, 1)), units) for number, fqn in enumerate(named))
    at = np.arange(1, steps + 1)
    loss = 5.5 * at**-0.21 + chance.normal(0, 0.02, steps)
    step_s = parts.sum(-1)
    training = {
        "loss": loss,
        "bits per byte": loss / np.log(2),
        "gradient norm": np.abs(chance.normal(1, 0.2, steps)) * at**-0.1,
        "learning rate": 3e-4 * np.minimum(at / 20, 1) * (0.5 + 0.5 * np.cos(np.pi * at / steps)),
        "tokens/s": 8192 * ranks / step_s.mean(0),
        "MFU": np.full(steps, 0.41) * step_s.mean() / step_s.mean(0),
    }
    return Run(
        name=name,
        facts={
            "fullshard": "0.1.0",
            "torch": "2.13.0",
            "git commit": "ebe3863",
            "command": "fullshard train --size small --strategy zero3",
            "topology": f"{-(-ranks // per_host)} hosts of {min(ranks, per_host)} ranks",
            "seed": "1337",
        },
        ranks=tuple(
            RankFacts(rank=index, host=f"node-{index // per_host}", device="cpu", cores=2) for index in range(ranks)
        ),
        steps=at,
        step_s=step_s,
        parts_s=parts,
        waited_for_s=waited,
        busy_s=step_s - parts[:, :, PARTS.index("gather")],
        units=measured,
        link_gb_s=3.1,
        shown_step=max(1, steps // 2),
        spans={rank: tuple(_spans(measured, parts[rank].mean(0), late_s * (rank == late))) for rank in range(ranks)},
        memory=_memory(units, float(step_s.mean())),
        operations=_operations(units, prefix, float(step_s.mean())),
        held_bytes=(900 * MIB + chance.integers(0, 20 * MIB, (ranks, steps)) + leak_bytes * at[None]).astype(np.int64),
        shards=tuple(_shards(named, ranks)),
        counters={name: chance.normal(value, value / 20, (ranks, steps)) for name, value in counters.items()},
        training={name: np.where(at % report_every == 0, values, np.nan) for name, values in training.items()},
        strategy="zero3",
        settings={"strategy": "zero3", "batch": "8", "seq": "256", "size": "small"},
        what_ifs=(
            WhatIf(
                change="a prefetch of two units",
                step_s=0.701,
                gain_s=0.025,
                command="fullshard train --size small --prefetch 2",
            ),
            WhatIf(
                change="zero2 instead of zero3",
                step_s=0.689,
                gain_s=0.037,
                command="fullshard train --size small --strategy zero2",
            ),
        ),
    )


def offloaded(run: Run) -> Run:
    """Offload some of everything in the run."""
    on_disk = {"parameters": 190 * MIB, "gradients": 190 * MIB, "optimizer state": 570 * MIB, "activations": 820 * MIB}
    on_cpu = {"parameters": 95 * MIB, "gradients": 95 * MIB, "optimizer state": 190 * MIB}
    return replace(
        run,
        tiers=(
            TierBytes(name="device", stored=dict.fromkeys(on_disk, 400 * MIB), comes={}, goes={}),
            TierBytes(name="CPU", stored=on_cpu, comes={"parameters": 47.5 * MIB}, goes={"gradients": 95.0 * MIB}),
            TierBytes(name="disk", stored=on_disk, comes={**on_disk, "parameters": 570.0 * MIB}, goes={**on_disk}),
        ),
    )


def findings_of(run: Run) -> tuple[Finding, ...]:
    """Two findings such as a run with waits might have."""
    gather = float(run.parts_s[:, :, PARTS.index("gather")].mean() / run.step_s.mean())
    return (
        Finding(
            cause="one unit too large",
            stated=f"{100 * gather:.0f} % of a step waits for gathers, most for layers.7: that unit is 6 times larger "
            "than the others.",
            change="Wrap its experts as separate units, or use strategy hsdp.",
            lost=gather,
            gain_s=0.14,
        ),
        Finding(
            cause="slow input",
            stated="Rank 2 waits 41 ms per step for its next batch, the others 6 ms.",
            change="Give that rank's loader another worker, or move its files to a local disk.",
            lost=0.05,
        ),
    )


def exhausted(run: Run) -> Run:
    """Return the run as it is when an allocation fails on rank 1."""
    held = {state.value: (number + 1) * 190 * MIB for number, state in enumerate(State)}
    return replace(
        run,
        out_of_memory=OutOfMemory(
            rank=1,
            requested_bytes=512 * MIB,
            where="layers.7, backward",
            used_bytes=sum(held.values()),
            limit_bytes=7 * 1024 * MIB,
            by_state=held,
            largest=_largest(),
            would_fit=("--activation-checkpointing", "--batch 4 --accumulate 2"),
        ),
    )


def hostile(run: Run) -> Run:
    """Return the run with names that would harm a page that trusted them."""
    assert run.memory is not None
    worse = [replace(unit, fqn=unit.fqn + HOSTILE) for unit in run.units]
    return replace(
        run,
        name=HOSTILE,
        facts={HOSTILE: HOSTILE, "a very long one": "x" * 400},
        settings={HOSTILE: HOSTILE},
        ranks=tuple(replace(rank, host=HOSTILE, device=HOSTILE) for rank in run.ranks),
        units=tuple(worse),
        spans={
            rank: tuple(replace(span, unit=span.unit + HOSTILE, name=span.name + HOSTILE) for span in spans)
            for rank, spans in run.spans.items()
        },
        memory=replace(
            run.memory,
            labels=tuple(label + HOSTILE for label in run.memory.labels),
            largest=tuple(replace(item, what=HOSTILE) for item in run.memory.largest),
        ),
        shards=tuple(replace(shard, fqn=shard.fqn + HOSTILE, unit=shard.unit + HOSTILE) for shard in run.shards),
        operations=tuple(
            replace(item, module=HOSTILE, name=HOSTILE, inputs=HOSTILE, part=HOSTILE) for item in run.operations
        ),
        what_ifs=tuple(replace(item, change=HOSTILE, command=HOSTILE) for item in run.what_ifs),
        training={HOSTILE: run.training["loss"], "loss": run.training["loss"]},
        strategy=HOSTILE,
    )


def bare_run() -> Run:
    """Build a run with few measurements: two steps of a rank, by the clock."""
    whole = made_run(ranks=1, steps=2, units=1)
    return replace(
        whole,
        facts={},
        busy_s=np.full((1, 2), np.nan),
        waited_for_s=np.full((1, 2), np.nan),
        units=(),
        link_gb_s=None,
        spans={},
        memory=None,
        operations=(),
        held_bytes=np.zeros((1, 0), dtype=np.int64),
        shards=(),
        training={},
        settings={},
        what_ifs=(),
        counters={},
    )


def _unit(fqn: str, number: int, parts_s: np.ndarray, units: int) -> UnitTimes:
    nbytes = (6 if number == 8 else 1) * 24 * MIB
    share = (6 if number == 8 else 1) / (units + 5 * (units > 8))
    gather, reduce = (float(parts_s[PARTS.index(name)]) * share for name in ("gather", "reduce"))
    return UnitTimes(
        fqn=fqn,
        nbytes=nbytes,
        trains=True,
        gathers=2.0 if fqn else 1.0,
        gathered_bytes=1.5 * nbytes,
        gather_s=gather + 0.003,
        gather_exposed_s=gather,
        reductions=1.0,
        reduced_bytes=0.75 * nbytes,
        reduce_s=reduce + 0.004,
        reduce_exposed_s=reduce,
    )


def _spans(units: tuple[UnitTimes, ...], parts_s: np.ndarray, slower_s: float) -> Iterator[Span]:
    share = dict(zip(PARTS, parts_s, strict=True))
    now = float(share["input"])
    yield Span(stream="compute", name="input", unit="", start_s=0.0, end_s=now)
    for phase in ("forward", "backward"):
        each = (float(share[phase]) + slower_s * (phase == "backward")) / len(units)
        for unit in units if phase == "forward" else reversed(units):
            yield Span(stream="gather", name="all_gather", unit=unit.fqn, start_s=max(0, now - each), end_s=now)
            wait = unit.gather_exposed_s / 2
            yield Span(stream="compute", name="wait", unit=unit.fqn, start_s=now, end_s=now + wait)
            now += wait
            yield Span(stream="compute", name=phase, unit=unit.fqn, start_s=now, end_s=now + each)
            now += each
            if phase == "backward":
                yield Span(
                    stream="reduce", name="reduce_scatter", unit=unit.fqn, start_s=now, end_s=now + unit.reduce_s
                )
    yield Span(stream="compute", name="optimizer", unit="", start_s=now, end_s=now + float(share["optimizer"]))


def _operations(units: int, prefix: str, step_s: float) -> tuple[OperationTime, ...]:
    return tuple(
        OperationTime(
            part=("forward", "backward")[at % 2],
            unit=f"{prefix}layers.{at // 2 % units}",
            module=f"{prefix}layers.{at // 2 % units}.up",
            name=("addmm", "mm")[at % 2],
            inputs="float32 [1024, 4096], float32 [4096, 1024]",
            calls=1 + at % 3,
            seconds=step_s / (20 + at),
        )
        for at in range(100)
    )


def _largest() -> tuple[TensorHeld, ...]:
    states = [State.OPTIMIZER, State.OPTIMIZER, State.UNSHARDED, State.ACTIVATIONS, State.ACTIVATIONS]
    return tuple(
        TensorHeld(nbytes=(140 - 11 * at) * MIB, state=states[at % 5].value, what=f"layers.{at}, forward")
        for at in range(10)
    )


def _memory(units: int, step_s: float) -> StepMemory:
    moments = 8 * units
    place = np.arange(moments)
    up = 1 - np.abs(2 * place / (moments - 1) - 1)
    saw = (place % 4 == 1).astype(float) + 0.5 * (place % 4 == 2)
    shapes = {
        State.PARAMETERS: np.full(moments, 72.0),
        State.OPTIMIZER: np.full(moments, 144.0),
        State.SHARDED_GRADIENTS: 72.0 * np.clip(2 * place / moments - 1, 0, 1),
        State.UNSHARDED: 24 + 48 * saw,
        State.ACTIVATIONS: 380 * up,
        State.WHOLE_GRADIENTS: 40 * saw * (place > moments // 2),
        State.MESSAGES: 18 * saw,
        State.TEMPORARIES: 30 * (place % 3 == 0),
    }
    by_state = {state.value: (values * MIB).astype(np.int64) for state, values in shapes.items()}
    total = sum(by_state.values())
    half = moments // 2
    labels = [f"layers.{min(at, moments - 1 - at) // 4}, {'forward' if at < half else 'backward'}" for at in place]
    return StepMemory(
        rank=0,
        at_s=place * step_s / moments,
        labels=tuple(labels),
        by_state=by_state,
        peak=int(np.argmax(total)),
        largest=_largest(),
        predicted=(total * 1.03).astype(np.int64),
        held=int(total.max() * 0.2),
        limit=1024 * MIB,
    )


def _shards(units: tuple[str, ...], ranks: int) -> Iterator[Shard]:
    sizes = (("attention.weight", (3072, 1024)), ("mlp.weight", (4099, 1024)), ("norm.weight", (1024,)))
    for unit in units:
        for name, shape in sizes:
            each = -(-shape[0] // ranks)
            rows = [(min(index * each, shape[0]), min((index + 1) * each, shape[0])) for index in range(ranks)]
            yield Shard(
                fqn=f"{unit}.{name}" if unit else name,
                unit=unit,
                shape=shape,
                dtype="float32",
                dim=0,
                rows=tuple(rows),
                packed=len(shape) == 1,
                padding_bytes=(each * ranks - shape[0]) * 4 * int(np.prod(shape[1:])),
            )
