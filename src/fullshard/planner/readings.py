"""Values derived from the traces of a few steps: seconds by cause, and memory by region."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fullshard.plan.allocator import allocator_use
from fullshard.plan.costs import Costs
from fullshard.plan.fusion import fused
from fullshard.plan.memory import State, memory_curve
from fullshard.plan.operations import unknown_seconds
from fullshard.plan.prediction import model_flops
from fullshard.plan.process import process_memory
from fullshard.plan.timeline import Timeline, lay_out, lay_out_parts
from fullshard.planner.tapes import Tapes
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Collective, Entry, Operation

COMPUTE, GATHER = "compute", "gather"
_MANY = 1000  # rows
LIMITS = ("compute", "memory bandwidth", "host", "gathers", "reductions", "waits", "disk")
"""The possible causes of a second on the compute stream."""


def times_of(tapes: Tapes, rows: int, make_costs: Callable[[], Costs], *, compiled: bool = False) -> dict[Any, float]:
    """Return values that are additive over blocks: seconds, FLOPs, bytes. Keys ("each", ...) are for one more
    microbatch.

    Keys ("unknown", ...) are the seconds of operations whose time cannot be derived from the trace.

    The costs of a CPU track its cache and heap, so an equal step is processed first. With `compiled`, the operations of
    each block are fused.
    """
    step, costs = tapes.at(rows), make_costs()
    if compiled:
        step = list(fused(step))
    for entry in (*tapes.tape.entries[: tapes.begins[1]], *step):
        costs.note_before(entry)
    second = next((place for place, entry in enumerate(step) if entry.origin.microbatch == 2), len(step))
    of_first, of_all = lay_out_parts((step[:second], step[second:]), costs)
    found = _spent(of_all, costs) | _unknown(of_all) | {"flops": model_flops(step), "sent": _sent(step)}
    each = dict.fromkeys(found, 0.0)
    if second < len(step):
        again = _again(step, second)
        of_first = of_first if len(again) == second else lay_out(again, costs)
        each |= _spent(of_first, costs) | _unknown(of_first)
        each |= {"flops": found["flops"] / 2, "sent": _sent(step[:second])}
        each["step"] = of_first.end_of(COMPUTE)
    return {**found, **{("each", name): seconds for name, seconds in each.items()}}


def _unknown(laid: Timeline) -> dict[Any, float]:
    return {("unknown", name): seconds for name, seconds in unknown_seconds(laid.placed).items()}


def _sent(entries: Sequence[Entry]) -> float:
    """Return the bytes of this rank's inputs to collectives."""
    return float(sum(sum(entry.sizes) for entry in entries if isinstance(entry, Collective)))


def _again(step: Sequence[Entry], second: int) -> list[Entry]:
    """Return the work that each additional microbatch repeats from the first one, before the index `second` of `step`.

    Deferred optimizer steps of the CPU, and copies of their results, are not repeated.
    """
    copied = {entry.origin.unit for entry in step[second:] if _goes_up(entry)}
    return [
        entry
        for entry in step[:second]
        if not (entry.origin.phase is Phase.STEP or (_goes_up(entry) and entry.origin.unit not in copied))
    ]


def _goes_up(entry: Entry) -> bool:
    return isinstance(entry, Operation) and entry.crosses and entry.stream == GATHER


def overhead_of(tapes: Tapes, rows: int) -> float:
    """Return the bytes that a caching allocator holds beyond the peak of tensors, in a step with `rows` rows."""
    use = allocator_use(tapes.trace_with(tapes.at(rows)), since=tapes.begins[1])
    return float(use.reserved - use.tensors)


def process_overhead(tapes: Tapes) -> float:
    """Return the ratio of the memory of a CPU rank's process to the peak of its tensors, with few rows."""
    memory = process_memory(tapes.trace_with(tapes.one))
    return memory.held / max(memory.tensors, 1)


def _spent(laid: Timeline, costs: Costs) -> dict[Any, float]:
    """Return the seconds of the compute stream by cause; "step" is the total, including work after its last operation.

    "optimizer" is the update of parameters, "blocks" the forwards of units below the root. The disk is not in a trace.
    """
    found: dict[Any, float] = dict.fromkeys((*LIMITS, "step", "optimizer", "blocks"), 0.0)
    for placed in laid.placed:
        entry = placed.entry
        if entry.stream == COMPUTE and entry.origin.phase is Phase.STEP:
            found["optimizer"] += placed.end - placed.start
        if entry.stream == COMPUTE and entry.origin.phase is Phase.FORWARD and entry.origin.unit:
            found["blocks"] += placed.end - placed.start
        if entry.stream == COMPUTE and isinstance(entry, Operation):
            is_compute = entry.flops / costs.flops_per_s > entry.nbytes / costs.memory_bytes_per_s
            found["compute" if is_compute else "memory bandwidth"] += placed.end - placed.start
        elif entry.stream == COMPUTE:
            found[_kind(entry)] += placed.end - placed.start
    for stall in laid.stalls:
        if stall.stream == COMPUTE:
            cause = stall.cause.entry if stall.cause is not None else None
            found[_kind(cause) if isinstance(cause, Collective) else _stream_kind(cause)] += stall.seconds
    end, compute_end = laid.end, laid.end_of(COMPUTE)
    found["host"] = max(0.0, laid.starved_s(COMPUTE)) + max(0.0, laid.host_s - compute_end)
    found["reductions"] += max(0.0, end - max(compute_end, laid.host_s))
    found["step"] = end
    return found


def _kind(entry: Entry) -> str:
    name = getattr(entry, "name", "")
    return "reductions" if "reduce" in name else "gathers"


def _stream_kind(entry: Entry | None) -> str:
    stream = "" if entry is None else entry.stream
    return "reductions" if "reduce" in stream else "gathers" if "gather" in stream else "waits"


Region = tuple[str, Phase]
"""A unit and a phase of a step. Blocks in the middle of a list form one region per phase."""


@dataclass(frozen=True)
class Moment:
    """The bytes by state at a moment of a step, with few rows, and for each additional row."""

    few: Mapping[State, int]
    each: Mapping[State, float]

    @cached_property
    def line(self) -> tuple[float, float]:
        """The sum of all states with few rows, and for each additional row."""
        return float(sum(self.few.values())), sum(self.each.values())

    def total(self, more: int) -> float:
        """Return the sum of all states for `more` additional rows."""
        few, each = self.line
        return few + more * each


def moments_by_region(
    tapes: Tapes, rows: int, whole: Mapping[str, int], *, of_host: bool, grows: bool
) -> dict[Region, list[Moment]]:
    """Return the moments of each region that have its peak for `rows` rows or, if the step `grows`, for some number of
    rows.

    The bytes at a moment are linear in rows, but which moment has the peak of a region depends on rows.
    """
    traces = [tapes.trace_with(tapes.at(number)) for number in (rows, rows + _MANY if grows else rows)]
    few, many = (memory_curve(trace, of_host=of_host) for trace in traces)
    places = dict[Origin, Region]()
    found: dict[Region, list[Moment]] = {}
    for (place, held), (_, more) in zip(few, many, strict=True):
        if place < tapes.begins[0]:
            continue
        origin = traces[0].entries[place].origin
        if origin not in places:
            places[origin] = _place_of(origin.unit, tapes.lengths, whole), origin.phase
        each = {state: (more.get(state, 0) - held.get(state, 0)) / _MANY for state in {*held, *more}}
        found.setdefault(places[origin], []).append(Moment(dict(held), each))
    return {region: _highest(moments) for region, moments in found.items()}


def _highest(moments: list[Moment]) -> list[Moment]:
    """Return the moments that no other moment exceeds both with few rows and in growth."""
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda moment: moment.line, reverse=True):
        if not kept or moment.line[1] > kept[-1].line[1]:
            kept.append(moment)
    return kept


def region_peaks(moments: Mapping[Region, Sequence[Moment]], more: int) -> dict[Any, float]:
    """Return the peak bytes of each region for `more` additional rows: under (unit, phase, None), and by state."""
    flat: dict[Any, float] = {}
    for (unit, phase), known in moments.items():
        peak = max(known, key=lambda moment: moment.total(more))
        flat[unit, phase, None] = peak.total(more)
        for state in State:
            flat[unit, phase, state] = peak.few.get(state, 0) + more * peak.each.get(state, 0.0)
    return flat


def _place_of(unit: str, lengths: Mapping[str, int], whole: Mapping[str, int]) -> str:
    """Return the unit's name in the full model. Blocks in the middle of a list share one name."""
    for fqn, length in lengths.items():
        if unit.startswith(f"{fqn}."):
            number, dot, remaining = unit.removeprefix(f"{fqn}.").partition(".")
            place = int(number)
            if place >= length - 2:
                return f"{fqn}.{place + whole[fqn] - length}{dot}{remaining}"
            return f"{fqn}.{'0' if place == 0 else 'N'}{dot}{remaining}"
    return unit
