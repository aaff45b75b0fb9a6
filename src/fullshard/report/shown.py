"""The content of a run's page as plain values. Large data is reduced, and the page states where.

Times are in seconds and sizes in bytes, as in `Run`. Reduction keeps the peak of a memory curve, late ranks, the units
with the longest waits, and means over steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fullshard.device.streams import STREAMS
from fullshard.device.transfers import STATES
from fullshard.report.run import COUNTERS, PARTS, Finding, Run, Shard, Span, StepMemory, TierBytes, UnitTimes

_POINTS = 400  # of a curve over steps, or over one step
_ROWS = 64  # of the map of ranks and steps
_COLUMNS = 160
_SPANS = 12_000  # of all displayed streams
_UNITS = 600
_RANKS = 256
_CUTS = 12_000  # row ends in the map of shards; an evenly sharded parameter has one

Numbers = NDArray[Any]


def shown(run: Run, findings: Sequence[Finding], against: Run | None = None) -> dict[str, Any]:
    """Return the content of the page of `run` as JSON values: None for NaN and for values that were not measured.

    `run` has at least one step of at least one rank, or an `out_of_memory`. The worst finding comes first.
    """
    content: dict[str, Any] = {
        "name": run.name,
        "strategy": run.strategy,
        "world": len(run.ranks),
        "devices": sorted({rank.device for rank in run.ranks}),
        "hosts": len({rank.host for rank in run.ranks}),
        "steps": _steps(run),
        "findings": [asdict(finding) for finding in findings],
        "out_of_memory": None if run.out_of_memory is None else asdict(run.out_of_memory),
        "step": _step(run),
        "over_steps": _over_steps(run),
        "host_waits": [asdict(wait) for wait in sorted(run.host_waits, key=lambda wait: -wait.waited_s)],
        "timeline": _timeline(run),
        "units": _units(run),
        "operations": [asdict(operation) for operation in run.operations],
        "memory": memory_curve(run.memory),
        "held": _held(run),
        "tiers": _tiers(run.tiers),
        "ranks": _ranks(run),
        "hardware": _hardware(run),
        "shards": _shards(run.shards),
        "training": _training(run),
        "what_ifs": [asdict(item) for item in sorted(run.what_ifs, key=lambda item: -item.gain_s)],
        "settings": dict(run.settings),
        "facts": dict(run.facts),
        "against": None if against is None else _comparison(run, against),
    }
    return {name: plain(value) for name, value in content.items()}


def plain(value: Any) -> Any:
    """Return the value with arrays as lists, and None instead of NaN and infinity."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _buckets(count: int, most: int) -> list[slice]:
    """Return at most `most` slices of similar size that cover `count` indices."""
    size = max(1, -(-count // most))
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def _thin(values: Numbers, most: int = _POINTS, by: Callable[..., Any] | None = None) -> Numbers:
    """Reduce the last axis to at most `most` buckets by their means, or by `by`. Missing values are ignored."""
    parts = [(by or _mean)(values[..., bucket], axis=-1) for bucket in _buckets(values.shape[-1], most)]
    return np.stack(parts, -1) if parts else values[..., :0].astype(float)


def _most(values: Numbers, axis: int) -> Any:
    """Return the largest of measured values, or NaN if there are none."""
    most = np.where(np.isfinite(values), values, -np.inf).max(axis=axis)
    return np.where(np.isfinite(most), most, np.nan)


def _least(values: Numbers, axis: int) -> Any:
    """Return the smallest of measured values, or NaN if there are none."""
    return -_most(-values, axis)


def _mean(values: Numbers, axis: int | tuple[int, ...] | None = None) -> Any:
    """Return the mean of measured values, or NaN if there are none."""
    there = np.isfinite(values)
    count = there.sum(axis=axis)
    total = np.where(there, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _quantile(values: Numbers, *at: float) -> list[float]:
    there = values[np.isfinite(values)]
    return [float(item) for item in np.quantile(there, at)] if there.size else [math.nan] * len(at)


def _settled(run: Run) -> Numbers:
    """Return a mask of the steps to average over, which causes are derived from too."""
    settled: Numbers = run.settled
    return settled if settled.any() else np.ones(len(run.steps), dtype=bool)


def _steps(run: Run) -> dict[str, Any]:
    clock = _mean(run.step_s[:, _settled(run)], axis=0) if run.step_s.size else np.zeros(0)
    low, median, high = _quantile(clock, 0.05, 0.5, 0.95)
    is_any = bool(len(run.steps))
    return {
        "count": len(run.steps),
        "first": int(run.steps[0]) if is_any else None,
        "last": int(run.steps[-1]) if is_any else None,
        "without_first": is_any and not _settled(run)[0],
        "median_s": median,
        "low_s": low,
        "high_s": high,
    }


def _step(run: Run) -> dict[str, Any] | None:
    """Return the mean step and its parts over ranks and steps, and the spread between ranks."""
    if not run.parts_s.size:
        return None
    of_ranks = _mean(run.parts_s[:, _settled(run)], axis=1)
    clock = float(_mean(run.step_s[:, _settled(run)]))
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(PARTS):
        low, high = _quantile(of_ranks[:, place], 0.1, 0.9)
        mean = float(_mean(of_ranks[:, place]))
        parts.append({"part": part, "mean_s": mean, "low_s": low, "high_s": high, "share": mean / clock})
    return {
        "parts": parts,
        "sum_s": sum(part["mean_s"] for part in parts if math.isfinite(part["mean_s"])),
        "clock_s": clock,
        **_percentiles(_mean(run.step_s[:, _settled(run)], axis=0)),
    }


def _percentiles(step_s: Numbers) -> dict[str, float]:
    return dict(zip(("p50_s", "p95_s", "p99_s"), _quantile(step_s, 0.5, 0.95, 0.99), strict=True))


def _over_steps(run: Run) -> dict[str, Any] | None:
    if len(run.steps) < 3 or not run.parts_s.size:
        return None
    of_steps = _mean(run.parts_s, axis=0)
    parts = np.round(_thin(of_steps.T), 6)
    return {
        **_step_axis(run),
        "most_s": np.round(_thin(of_steps.sum(1), by=_most), 6),
        "parts": {part: parts[place] for place, part in enumerate(PARTS)},
    }


def _step_axis(run: Run, most: int = _POINTS) -> dict[str, Any]:
    """Return the number of the first step in each bucket, and the number of steps per bucket."""
    buckets = _buckets(len(run.steps), most)
    return {
        "at": [int(run.steps[bucket.start]) for bucket in buckets],
        "each": buckets[0].stop if buckets else 1,
    }


def _timeline(run: Run) -> dict[str, Any] | None:
    if not any(run.spans.values()):
        return None
    return {"step": run.shown_step, **timeline([(rank, why, run.spans[rank]) for rank, why in _notable(run)])}


def timeline(ranks: Sequence[tuple[int, str, Sequence[Span]]]) -> dict[str, Any]:
    """Return spans by rank, in columns: names and units as indices into lists, starts and lengths in microseconds.

    Args:
        ranks: For each rank with spans: its number, the reason to show it, and its spans. The most informative ranks
            come first.
    """
    names: dict[str, int] = {}
    units: dict[str, int] = {}
    streams = in_order({span.stream for _, _, spans in ranks for span in spans}, STREAMS)
    place = {stream: number for number, stream in enumerate(streams)}
    rows: list[dict[str, Any]] = []
    left, cut = _SPANS, 0
    for rank, why, spans in ranks:
        if rows and len(spans) > left:
            continue
        kept = sorted(spans, key=lambda span: span.start_s - span.end_s)[:_SPANS]
        cut = max(cut, len(spans) - len(kept))
        left -= len(kept)
        rows.append({"rank": rank, "why": why, **_columns(kept, place, names, units)})
    return {
        "streams": streams,
        "names": list(names),
        "units": list(units),
        "ranks": sorted(rows, key=lambda item: item["rank"]),
        "of_ranks": len(ranks),
        "cut": cut,
    }


def _columns(
    spans: Iterable[Span], streams: Mapping[str, int], names: dict[str, int], units: dict[str, int]
) -> dict[str, list[int]]:
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    return {
        "stream": [streams[item.stream] for item in ordered],
        "name": [names.setdefault(item.name, len(names)) for item in ordered],
        "unit": [units.setdefault(item.unit, len(units)) for item in ordered],
        "start_us": [round(item.start_s * 1e6) for item in ordered],
        "took_us": [round((item.end_s - item.start_s) * 1e6) for item in ordered],
    }


def in_order(found: Iterable[str], known: Sequence[str]) -> list[str]:
    """Sort the values of `found` in the order of `known`; unknown values come last."""
    return sorted(found, key=lambda item: (known.index(item) if item in known else len(known), item))


def _notable(run: Run) -> Iterator[tuple[int, str]]:
    """Yield the ranks with spans, the most informative first, each with a reason."""
    late = _lateness(run)
    ranks = [rank for rank, spans in run.spans.items() if spans]
    by_lateness = sorted(ranks, key=lambda rank: -late[rank] if rank < len(late) and math.isfinite(late[rank]) else 0.0)
    stated = {by_lateness[0]: "comes last", by_lateness[-1]: "comes first"}
    if len(by_lateness) < 2 or not np.isfinite(late).any():
        stated = {}
    first = [*stated, *(item for item in (0, by_lateness[len(by_lateness) // 2]) if item in ranks)]
    for rank in dict.fromkeys([*first, *ranks]):
        yield rank, stated.get(rank, "")


def _lateness(run: Run) -> Numbers:
    """Return the delay of each rank relative to the earliest one, in seconds per step."""
    if not run.waited_for_s.size:
        return np.full(len(run.ranks), np.nan)
    late: Numbers = _mean(run.waited_for_s[:, _settled(run)], axis=1)
    return late


def _units(run: Run) -> dict[str, Any] | None:
    if not run.units:
        return None
    order = sorted(run.units, key=lambda unit: -_waits(unit))
    return {
        "link_gb_s": run.link_gb_s,
        "of": len(run.units),
        "waited_s": float(np.nansum([_waits(unit) for unit in run.units])),
        "left_out_s": float(np.nansum([_waits(item) for item in order[_UNITS:]])),
        "rows": [
            {
                **{name: getattr(unit, name) for name in _UNIT_FIELDS},
                "gather_gb_s": _rate(unit.gathered_bytes, unit.gather_s),
                "reduce_gb_s": _rate(unit.reduced_bytes, unit.reduce_s),
            }
            for unit in order[:_UNITS]
        ],
    }


_UNIT_FIELDS = (
    *("fqn", "nbytes", "trains", "gathers", "gathered_bytes", "gather_s", "gather_exposed_s"),
    *("reductions", "reduced_bytes", "reduce_s", "reduce_exposed_s"),
)


def _waits(unit: UnitTimes) -> float:
    return float(np.nansum([unit.gather_exposed_s, unit.reduce_exposed_s]))


def _rate(nbytes: float, seconds: float) -> float | None:
    return nbytes / seconds / 1e9 if seconds > 0 else None


def memory_curve(memory: StepMemory | None) -> dict[str, Any] | None:
    """Return the curve at moments that preserve its peaks: for each bucket, the moment with most memory."""
    if memory is None or not len(memory.at_s):
        return None
    total = np.sum(list(memory.by_state.values()), axis=0)
    chosen = {bucket.start + int(np.argmax(total[bucket])) for bucket in _buckets(len(total), _POINTS)}
    places = sorted(chosen | {memory.peak, len(total) - 1})
    return {
        "rank": memory.rank,
        "at_s": np.round(memory.at_s[places], 6),
        "labels": [memory.labels[place] for place in places],
        "by_state": {state: values[places] for state, values in memory.by_state.items() if values.any()},
        "peak": places.index(memory.peak),
        "peak_bytes": int(total[memory.peak]),
        "peak_by_state": {state: int(values[memory.peak]) for state, values in memory.by_state.items()},
        "predicted": None if memory.predicted is None else memory.predicted[places],
        "predicted_bytes": None if memory.predicted is None else int(memory.predicted.max()),
        "largest": [asdict(item) for item in memory.largest],
        "held": memory.held,
        "limit": memory.limit,
        "moments": len(total),
    }


def _held(run: Run) -> dict[str, Any] | None:
    """Return the memory of the process, or the allocator, after each step: the median and the maximum over ranks."""
    if run.held_bytes.size == 0 or run.held_bytes.shape[1] < 3 or not run.held_bytes.any():
        return None
    ends = [bucket.stop - 1 for bucket in _buckets(run.held_bytes.shape[1], _POINTS)]
    held = run.held_bytes[:, ends]
    return {"at": run.steps[ends], "median": np.median(held, axis=0).astype(np.int64), "most": held.max(axis=0)}


def _tiers(tiers: Sequence[TierBytes]) -> dict[str, Any] | None:
    """Return rows of bytes by state: those in each tier, and those copied from and to it per step."""
    if not tiers:
        return None
    rows = [_row(f"on the {tier.name}", tier.stored) for tier in tiers]
    for tier in tiers:
        for way, moved in (("from", tier.comes), ("to", tier.goes)) if tier.comes or tier.goes else ():
            rows.append({**_row(f"{way} the {tier.name}, per step", moved), "moves": True})
    found = {state for tier in tiers for each in (tier.stored, tier.comes, tier.goes) for state in each}
    return {
        "states": in_order(found, STATES),
        "rows": rows,
        "away_bytes": sum(sum(tier.stored.values()) for tier in tiers if tier.name != "device"),
        "moved_bytes": sum(sum(moved.values()) for tier in tiers for moved in (tier.comes, tier.goes)),
    }


def _row(name: str, by_state: Mapping[str, float]) -> dict[str, Any]:
    return {"name": name, "moves": False, "by_state": dict(by_state), "nbytes": sum(by_state.values())}


def _ranks(run: Run) -> dict[str, Any] | None:
    if not run.ranks or not run.step_s.size:
        return None
    settled = _settled(run)
    late = _lateness(run)
    waits = _mean(run.parts_s[:, settled][..., [PARTS.index("gather"), PARTS.index("reduce")]].sum(-1), axis=1)
    busy = _mean(run.busy_s[:, settled] / run.step_s[:, settled], axis=1) if run.busy_s.size else late * math.nan
    rows: list[dict[str, Any]] = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "device": rank.device,
            "cores": rank.cores,
            "step_s": float(_mean(run.step_s[place, settled])),
            **_percentiles(run.step_s[place, settled]),
            "late_s": float(late[place]),
            "late_high_s": _quantile(run.waited_for_s[place, settled], 0.95)[0] if run.waited_for_s.size else math.nan,
            "waits_s": float(waits[place]),
            "busy": float(busy[place]),
        }
        for place, rank in enumerate(run.ranks)
    ]
    rows.sort(key=lambda item: (-item["late_s"] if math.isfinite(item["late_s"]) else 0.0, item["rank"]))
    return {
        "rows": rows[:_RANKS],
        "of": len(rows),
        "slowest": _slowest(run, late),
        "map": _map(run),
        "skew": _skew(run),
    }


def _slowest(run: Run, late: Numbers) -> dict[str, Any] | None:
    """Return the rank that others wait for most, and the part of its step that exceeds the median most."""
    if len(run.ranks) < 2 or not np.isfinite(late).any():
        return None
    place = int(np.nanargmax(late))
    own = [index for index, part in enumerate(PARTS) if part not in ("gather", "reduce")]
    of_ranks = _mean(run.parts_s[:, _settled(run)], axis=1)[:, own]
    more = of_ranks[place] - np.median(np.delete(of_ranks, place, axis=0), axis=0)
    if not np.isfinite(more).any():  # for a run that ended within its first step
        return None
    part = int(np.nanargmax(more))
    last = np.argmax(np.nan_to_num(run.waited_for_s[:, _settled(run)]), axis=0) == place
    return {
        "rank": run.ranks[place].rank,
        "host": run.ranks[place].host,
        "late_s": float(late[place]),
        "of_step": float(late[place] / _mean(run.step_s[:, _settled(run)])),
        "last_share": float(last.mean()),
        "part": PARTS[own[part]],
        "more_s": float(more[part]),
    }


def _map(run: Run) -> dict[str, Any] | None:
    """Return the delay of each rank in each step.

    Ranks in one row are reduced to their maximum, and steps in one column to their mean and their maximum.
    """
    if len(run.ranks) < 2 or len(run.steps) < 2 or not np.isfinite(run.waited_for_s).any():
        return None
    rows = _buckets(len(run.ranks), _ROWS)
    late, most = (_thin(run.waited_for_s, _COLUMNS, by) for by in (_mean, _most))
    numbers = [str(rank.rank) for rank in run.ranks]
    columns = _step_axis(run, _COLUMNS)
    return {
        "ranks": [" to ".join(dict.fromkeys((numbers[row.start], numbers[row.stop - 1]))) for row in rows],
        "steps": columns["at"],
        "each": columns["each"],
        "late_s": [np.round(np.nan_to_num(late[row]).max(0), 6) for row in rows],
        "most_s": [np.round(np.nan_to_num(most[row]).max(0), 6) for row in rows],
    }


def _skew(run: Run) -> dict[str, Any] | None:
    """Return the delay between the first and the last rank over steps."""
    if len(run.ranks) < 2 or len(run.steps) < 3 or not np.isfinite(run.waited_for_s).any():
        return None
    skew = np.ptp(np.nan_to_num(run.waited_for_s), axis=0)
    return {
        **_step_axis(run),
        "apart_s": np.round(_thin(skew), 6),
        "most_s": np.round(_thin(skew, by=_most), 6),
    }


def _shards(shards: Sequence[Shard]) -> dict[str, Any] | None:
    """Return the rows that each rank owns of the largest parameters, and totals over all parameters."""
    if not shards:
        return None
    units: dict[str, int] = {}
    parameters, left = [], _CUTS
    for shard in sorted(shards, key=lambda shard: -_bytes_of(shard)):
        cut = _cut(shard)
        left -= len(cut) if isinstance(cut, list) else 1
        if left >= 0:
            parameters.append(_parameter(shard, units.setdefault(shard.unit, len(units)), cut))
    owned = np.zeros(max(len(shard.rows) for shard in shards))
    for shard in shards:
        row_bytes = _bytes_of(shard) / max(1, shard.shape[shard.dim] if shard.shape else 1)
        owned[: len(shard.rows)] += [row_bytes * (stop - start) for start, stop in shard.rows]
    return {
        "units": list(units),
        "parameters": parameters,
        "of": len(shards),
        "owned_bytes": owned.round().astype(np.int64),
        "padding_bytes": sum(shard.padding_bytes for shard in shards),
        "packed": sum(shard.packed for shard in shards),
        "packed_bytes": sum(_bytes_of(shard) for shard in shards if shard.packed),
        "nbytes": sum(map(_bytes_of, shards)),
    }


def _parameter(shard: Shard, unit: int, cut: int | list[int]) -> dict[str, Any]:
    return {
        "fqn": shard.fqn,
        "unit": unit,
        "shape": list(shard.shape),
        "dtype": shard.dtype.removeprefix("torch."),
        "dim": shard.dim,
        "cut": cut,
        "ranks": len(shard.rows),
        "packed": shard.packed,
        "padding_bytes": shard.padding_bytes,
        "nbytes": _bytes_of(shard),
    }


def _cut(shard: Shard) -> int | list[int]:
    """Return the rows per rank if one number describes them, as for `Shard(dim)`; otherwise the end of each."""
    rows = shard.shape[shard.dim] if shard.shape else 1
    each = -(-rows // max(1, len(shard.rows)))
    if all(
        (start, stop) == (min(at * each, rows), min((at + 1) * each, rows))
        for at, (start, stop) in enumerate(shard.rows)
    ):
        return each
    return [stop for _, stop in shard.rows]


def _bytes_of(shard: Shard) -> int:
    dtype = getattr(torch, shard.dtype.removeprefix("torch."), None)
    return math.prod(shard.shape) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 4)


def _training(run: Run) -> dict[str, Any] | None:
    curves = {name: values for name, values in run.training.items() if np.isfinite(values).any()}
    if not curves or len(run.steps) < 2:
        return None
    return {**_step_axis(run), "curves": {name: _curve(np.asarray(values)[None]) for name, values in curves.items()}}


def _curve(values: Numbers) -> dict[str, Numbers]:
    """Return the mean, minimum and maximum over ranks of `values`, by rank and step, at each point of a curve."""
    mean = _thin(_mean(values, axis=0))
    low, high = _thin(_least(values, axis=0), by=_least), _thin(_most(values, axis=0), by=_most)
    return {"mean": mean} if np.array_equal(low, high, equal_nan=True) else {"mean": mean, "low": low, "high": high}


def _hardware(run: Run) -> dict[str, Any] | None:
    """Return hardware counters over steps, and the names of counters that are always 0."""
    if len(run.steps) < 2 or not run.counters:
        return None
    used = {name: values for name, values in run.counters.items() if np.nan_to_num(values).any()}
    return {
        **_step_axis(run),
        "units": {name: COUNTERS[name] for name in used},
        "curves": {name: _curve(values) for name, values in used.items()},
        "zero": [name for name in run.counters if name not in used],
    }


def _comparison(run: Run, other: Run) -> dict[str, Any]:
    """Return the differences between two runs: settings and facts, time by part, memory by state."""
    own, peer = {**run.facts, **run.settings}, {**other.facts, **other.settings}
    return {
        "name": other.name,
        "settings": [
            {"name": name, "values": [own.get(name), peer.get(name)]}
            for name in dict.fromkeys([*own, *peer])
            if own.get(name) != peer.get(name)
        ],
        "clock_s": [_clock(run), _clock(other)],
        "parts": _pairs(_parts(run), _parts(other)),
        "states": _pairs(_states(run), _states(other)),
        "peak_bytes": [_peak(run), _peak(other)],
    }


def _pairs(own: Mapping[str, float], peer: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "values": [own.get(name), peer.get(name)]}
        for name in dict.fromkeys([*own, *peer])
        if own.get(name) or peer.get(name)
    ]


def _clock(run: Run) -> float | None:
    return float(_mean(run.step_s[:, _settled(run)])) if run.step_s.size else None


def _parts(run: Run) -> dict[str, float]:
    step = _step(run)
    return {} if step is None else {item["part"]: item["mean_s"] for item in step["parts"]}


def _states(run: Run) -> dict[str, float]:
    if run.memory is None:
        return {}
    return {state: float(values[run.memory.peak]) for state, values in run.memory.by_state.items()}


def _peak(run: Run) -> float | None:
    return sum(_states(run).values()) or None
