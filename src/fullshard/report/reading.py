"""Reading of a run from the files of all ranks. Files may be missing, and the run may still be in progress."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.device.streams import STREAMS
from fullshard.device.transfers import STATES
from fullshard.errors import ConfigError
from fullshard.layout.shard_spec import ShardSpec
from fullshard.plan.memory import State
from fullshard.report.rank_file import lines_in, parsed, rank_files
from fullshard.report.run import (
    COUNTERS,
    PARTS,
    HostWait,
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
from fullshard.report.steps import WATCHED_STEP, UnitCounts

_NAMES = {"tokens_per_s": "tokens/s", "mfu": "MFU"}  # names that loops log; for others, underscores become spaces
_OPERATION = tuple(item.name for item in fields(OperationTime))
_WAITS = {"gradient norm": "clipping"}


def is_recorded(folder: Path) -> bool:
    """Return True if a run is recorded in `folder`."""
    return bool(rank_files(folder))


@dataclass
class _RankLog:
    """The record of one rank."""

    start: dict[str, Any] = field(default_factory=dict)
    untimed: set[int] = field(default_factory=set)  # the first steps after each start
    model: dict[str, Any] = field(default_factory=dict)
    units: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    operations: dict[str, Any] = field(default_factory=dict)
    out_of_memory: dict[str, Any] = field(default_factory=dict)
    what_ifs: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    reported: dict[int, dict[str, float | None]] = field(default_factory=dict)
    counters: dict[int, list[float | None]] = field(default_factory=dict)
    spans: dict[int, bytes] = field(default_factory=dict)  # unparsed lines
    damaged: list[int] = field(default_factory=list)  # the numbers of lines that were dropped

    @classmethod
    def of(cls, path: Path) -> _RankLog:
        rank = cls()
        for line in lines_in(path, rank.damaged):
            kind = line.pop("kind")
            if kind == "step":
                rank.steps[line["n"]] = line
            elif kind == "told":
                rank.reported.setdefault(line["n"], {}).update(line["v"])
            elif kind == "counters":
                rank.counters[line["n"]] = line["v"]
            elif kind == "spans":
                rank.spans[line["n"]] = line["line"]
            elif kind in ("start", "model", "units", "memory", "operations", "out_of_memory", "what_ifs"):
                setattr(rank, kind, line)
            if kind == "start":
                rank.untimed |= {line["first_step"] + nth for nth in range(WATCHED_STEP)}
        return rank

    @property
    def number(self) -> int:
        """The rank."""
        return int(self.start["rank"]["rank"])


def read_run(folder: Path) -> Run:
    """Return the run that is recorded in `folder`.

    Raises:
        ConfigError: No run is recorded there.
    """
    every = [rank for rank in map(_RankLog.of, rank_files(folder)) if rank.start]
    if not every:
        raise ConfigError(
            f"{folder}: no run was recorded there. fullshard train records its runs. In your own training loop, call "
            "fullshard.report(model, folder) before the first step."
        )
    newest = max(every, key=lambda rank: rank.start["first_step"]).start  # of the first rank, if it has started
    ranks = sorted((rank for rank in every if rank.number < newest["world"]), key=lambda rank: rank.number)
    first = ranks[0]
    steps = _steps(ranks)
    table = _table(ranks, steps)
    parts = table[:, :, : len(PARTS)]
    busy_s, starved_s, held, work = np.moveaxis(table[:, :, len(PARTS) :], 2, 0)
    step_s = parts.sum(axis=2)
    exposed = parts[:, :, PARTS.index("gather")] + parts[:, :, PARTS.index("reduce")]
    known = np.where(np.isnan(exposed), -np.inf, exposed)
    most = known.max(axis=0) if exposed.size else np.zeros(len(steps))
    links = tuple(float(rank.units.get("best_bytes_per_s", 0.0)) / 1e9 for rank in ranks)
    link = newest["link_bytes_per_s"]
    shown = _shown_step(ranks, steps, step_s)
    return Run(
        name=newest["name"],
        facts=newest["facts"] | _offloaded(ranks) | _dropped(ranks),
        ranks=tuple(RankFacts(**rank.start["rank"]) for rank in ranks),
        steps=np.array(steps, dtype=np.int64),
        step_s=step_s,
        parts_s=parts,
        waited_for_s=np.where(np.isinf(most), np.nan, most) - exposed,
        busy_s=busy_s,
        units=_units(ranks),
        link_gb_s=link / 1e9 if link else max(links, default=0.0) or None,
        shown_step=shown,
        spans={rank.number: tuple(_spans(rank.spans[shown])) for rank in ranks if shown in rank.spans},
        memory=_memory(first, step_s),
        held_bytes=np.nan_to_num(held).astype(np.int64),
        shards=tuple(_shard(item) for item in first.model.get("shards", ())),
        training=_training(ranks, steps),
        strategy=newest["strategy"],
        settings=newest["settings"],
        work=work,
        starved_s=None if np.isnan(starved_s).all() else starved_s,
        output_nbytes=first.model.get("output_nbytes", 0),
        host_waits=_host_waits(ranks),
        operations=tuple(
            OperationTime(**dict(zip(_OPERATION, row, strict=True))) for row in first.operations.get("v", ())
        ),
        what_ifs=tuple(WhatIf(**item) for item in first.what_ifs.get("v", ())),
        out_of_memory=next((_out_of_memory(rank.out_of_memory) for rank in ranks if rank.out_of_memory), None),
        reports_input=first.units.get("reports_input", True),
        links_gb_s=links if all(links) else (),
        tiers=_tiers(first),
        counters=_counters(ranks, steps),
    )


def _offloaded(ranks: Sequence[_RankLog]) -> dict[str, str]:
    """Return facts about offloading: the settings, bytes on disks and bytes copied per step, summed over ranks."""
    found = {"offload": "; ".join(ranks[0].model.get("offload", ()))}
    disks: dict[str, list[list[float]]] = {}
    for rank in ranks:
        for folder, (held, *moved) in rank.units.get("disks", {}).items():
            disks.setdefault(folder, []).append([held, *(item / rank.units["steps"] for item in moved)])
    for folder, numbers in disks.items():
        columns = list(zip(*numbers, strict=True))
        held, read, written = (sum(column) / 1e9 for column in columns[:3])
        busy_s, waited_s = map(max, columns[3:])
        found[f"disk {folder}"] = (
            f"{held:.3g} GB of files on all ranks; a step reads {read:.3g} GB and writes {written:.3g} GB in "
            f"{busy_s:.3g} s, and a rank waits for at most {waited_s:.3g} s of this"
        )
    return {name: stated for name, stated in found.items() if stated}


def _dropped(ranks: Sequence[_RankLog]) -> dict[str, str]:
    """Return a fact about dropped records if any were damaged."""
    by_rank = ", ".join(f"{len(rank.damaged)} of rank {rank.number}" for rank in ranks if rank.damaged)
    return {DROPPED: by_rank} if by_rank else {}


DROPPED = "damaged records dropped"  # the fact with the number of damaged records that were dropped, by rank

_TIERS = {"device": "device", "cpu": "CPU", "disk": "disk"}


def _tiers(rank: _RankLog) -> tuple[TierBytes, ...]:
    """Return the bytes of this rank in each tier and those copied per step; empty without offloading."""
    moved: dict[str, list[dict[str, float]]] = {}
    for place, state, *each in sorted(
        rank.units.get("transferred", ()), key=lambda item: [*STATES, item[1]].index(item[1])
    ):
        for ways, nbytes in zip(moved.setdefault(place, [{}, {}]), each, strict=True):
            if nbytes:
                ways[state] = nbytes / rank.units["steps"]
    stored = rank.units.get("stored", {})
    if not any(sum(held.values()) for tier, held in stored.items() if tier != "device"):
        return ()
    held = {tier: {state: nbytes for state, nbytes in states.items() if nbytes} for tier, states in stored.items()}
    kept = rank.memory.get("by_state", {}).get(State.ACTIVATIONS.value)
    if kept:
        held["device"]["activations"] = max(kept)
    return tuple(
        TierBytes(name=name, stored=held[tier], comes=moved.get(tier, [{}, {}])[0], goes=moved.get(tier, [{}, {}])[1])
        for tier, name in _TIERS.items()
        if tier == "device" or held[tier] or tier in moved
    )


def _steps(ranks: Sequence[_RankLog]) -> list[int]:
    """Return the numbers of the steps that any rank has recorded, without untimed ones unless all are untimed."""
    numbers = sorted({number for rank in ranks for number in rank.steps})
    untimed = {number for rank in ranks for number in rank.untimed}
    return [number for number in numbers if number not in untimed] or numbers


def _table(ranks: Sequence[_RankLog], steps: Sequence[int]) -> NDArray[np.float64]:
    """Return the numbers of each rank and step: the parts, then busy and starved seconds, bytes held, and work.

    Missing steps are NaN. The shape is (ranks, steps, numbers).
    """
    missing = [float("nan")] * (len(PARTS) + 4)
    rows = [[_numbers(rank.steps[step]) if step in rank.steps else missing for step in steps] for rank in ranks]
    return np.array(rows, dtype=np.float64).reshape(len(ranks), len(steps), len(missing))


def _numbers(line: Mapping[str, Any]) -> list[float]:
    starved = line["s"]
    return [*line["p"], line["b"], float("nan") if starved is None else starved, line["h"], line["w"]]


def _shown_step(ranks: Sequence[_RankLog], steps: Sequence[int], step_s: NDArray[np.float64]) -> int:
    """Return the step whose duration is nearest the median, of those with spans of all (or else some) ranks."""
    if not steps:
        return 0
    held = [set(rank.spans) for rank in ranks]
    candidates = sorted((set.intersection(*held) or set.union(*held)) & set(steps))
    if not candidates:
        return steps[-1]
    mean = np.nanmean(step_s, axis=0)
    usual, place = np.nanmedian(mean), {number: column for column, number in enumerate(steps)}
    return min(candidates, key=lambda number: abs(mean[place[number]] - usual))


def _spans(line: bytes) -> list[Span]:
    content = parsed(line)
    if content is None:
        return []
    names, units = content["names"], content["units"]
    return [
        Span(STREAMS[stream], names[name], units[unit], start / 1e6, (start + length) / 1e6)
        for stream, name, unit, start, length in content["v"]
    ]


def _counted_steps(ranks: Sequence[_RankLog]) -> int:
    """Return the number of steps that the totals cover, summed over ranks; 1 if there are none."""
    return max(1, sum(int(rank.units.get("steps", 0)) for rank in ranks))


def _units(ranks: Sequence[_RankLog]) -> tuple[UnitTimes, ...]:
    """Return the collectives of each unit as means over ranks and steps."""
    sums: defaultdict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(UnitCounts.__slots__)))
    for rank in ranks:
        for name, values in rank.units.get("v", {}).items():
            sums[name] += values
    found, counted = [], _counted_steps(ranks)
    for unit in ranks[0].model.get("units", ()):
        mean = dict(zip(UnitCounts.__slots__, (sums[unit["fqn"]] / counted).tolist(), strict=True))
        recomputed = bool(mean.pop("recomputed"))
        found.append(UnitTimes(**unit, **mean, recomputed=recomputed))
    return tuple(found)


def _host_waits(ranks: Sequence[_RankLog]) -> tuple[HostWait, ...]:
    counted = _counted_steps(ranks)
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank in ranks:
        for name, (times, seconds) in rank.units.get("waits", {}).items():
            sums[name][0] += times / counted
            sums[name][1] += seconds / counted
    for name, (times, seconds) in ranks[0].memory.get("questions", {}).items():
        sums[name] = [times, seconds]
    found = [
        HostWait(what=_WAITS.get(name, name), waits=times, waited_s=seconds) for name, (times, seconds) in sums.items()
    ]
    return tuple(sorted(found, key=lambda item: -item.waited_s))


def _memory(rank: _RankLog, step_s: NDArray[np.float64]) -> StepMemory | None:
    line = rank.memory
    if not line:
        return None
    at = np.array(line["at_s"])
    usual = np.nanmedian(step_s) if step_s.size else np.nan
    if at[-1] > 0 and np.isfinite(usual):  # observing a step makes it longer
        at *= usual / at[-1]
    sums = np.array(list(line["by_state"].values()))
    held = max((step["h"] for step in rank.steps.values()), default=0)
    return StepMemory(
        rank=rank.number,
        at_s=at,
        labels=tuple(line["labels"]),
        by_state={state: np.array(values, dtype=np.int64) for state, values in line["by_state"].items()},
        peak=line["peak"],
        largest=tuple(TensorHeld(**item) for item in line["largest"]),
        predicted=None if line["predicted"] is None else np.array(line["predicted"], dtype=np.int64),
        held=max(0, held - int(sums.sum(axis=0).max(initial=0))),
        limit=rank.start["limit"],
    )


def _out_of_memory(line: Mapping[str, Any]) -> OutOfMemory:
    largest = tuple(TensorHeld(**item) for item in line["largest"])
    return OutOfMemory(**{**line, "largest": largest, "would_fit": tuple(line["would_fit"])})


def _shard(line: Mapping[str, Any]) -> Shard:
    spec = ShardSpec(tuple(line["shape"]), line["dim"], line["world"])
    rows = tuple((spec.span(rank).start, spec.span(rank).stop) for rank in range(spec.world))
    return Shard(
        fqn=line["fqn"],
        unit=line["unit"],
        shape=spec.shape,
        dtype=line["dtype"],
        dim=line["dim"] or 0,
        rows=rows,
        packed=line["packed"],
        padding_bytes=line["padding"],
    )


def _training(ranks: Sequence[_RankLog], steps: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Return the logged numbers by step: the mean over the ranks that have logged them."""
    names = dict.fromkeys(name for rank in ranks for reported in rank.reported.values() for name in reported)
    found = {}
    for name in names:
        values = np.array([[_value(rank.reported.get(number, {}).get(name)) for number in steps] for rank in ranks])
        known = ~np.isnan(values)
        total, times = np.where(known, values, 0.0).sum(axis=0), known.sum(axis=0)
        mean = np.divide(total, times, out=np.full(len(steps), np.nan), where=times > 0)
        found[_NAMES.get(name, name.replace("_", " "))] = mean
    return found


def _counters(ranks: Sequence[_RankLog], steps: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Return the measured counters. Each step has the first sample at its end or later, or else the last one."""
    table = np.full((len(COUNTERS), len(ranks), len(steps)), np.nan)
    for place, rank in enumerate(ranks):
        if rank.counters:
            numbers = np.array(sorted(rank.counters))
            values = np.array([[_value(item) for item in rank.counters[number]] for number in numbers])
            table[:, place] = values[np.minimum(np.searchsorted(numbers, steps), len(numbers) - 1)].T
    known = ~np.isnan(table).all((1, 2))
    return {name: table[place] for place, name in enumerate(COUNTERS) if known[place]}


def _value(reported: float | None) -> float:
    return float("nan") if reported is None else reported
