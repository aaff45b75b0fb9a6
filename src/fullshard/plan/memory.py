"""Memory over time, derived from a trace: the live bytes by state at each moment, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import HOST, Allocation, Collective, Entry, Free, Operation, Tape


class State(Enum):
    """The states of a run that take memory, in the order of a stacked plot, from the bottom up."""

    PARAMETERS = "parameters at rest"
    OPTIMIZER = "optimizer state"
    SHARDED_GRADIENTS = "gradients that the optimizer sees"
    UNSHARDED = "unsharded parameters"
    ACTIVATIONS = "activations"
    WHOLE_GRADIENTS = "whole gradients"
    MESSAGES = "messages"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class MemoryPeak:
    """The moment of a run with the most bytes of live tensors.

    `by_state` adds up to `nbytes`. `origin` is the work that allocates the memory at the peak. `entry` is the index in
    the trace, and `largest` contains the largest storages that are live then, as pairs of bytes and content.
    """

    nbytes: int
    by_state: Mapping[State, int]
    origin: Origin
    entry: int
    largest: tuple[tuple[int, State], ...]

    def __str__(self) -> str:
        unit, phase = self.origin.unit or "the root", self.origin.phase.value
        states = (f"{state.value} {nbytes:,}" for state, nbytes in self.by_state.items() if nbytes)
        return f"{self.nbytes:,} bytes in {phase} of {unit}: {', '.join(states)}"


def memory_curve(tape: Tape, *, of_host: bool = False) -> Iterator[tuple[int, Mapping[State, int]]]:
    """Yield the indices in a trace at which memory is allocated or freed, and the bytes by state after each."""
    for place, held, _ in _walk(tape, of_host):
        yield place, MappingProxyType(dict(held))


def memory_peak(tape: Tape, *, since: int = 0, of_host: bool = False) -> MemoryPeak:
    """Return the peak of memory; all values are 0 if nothing is allocated.

    Args:
        tape: A trace of whole steps.
        since: The index in the trace to start from, for example after the model is sharded.
        of_host: Whether to count allocations in host memory instead of those on the device.
    """
    most, place, by_state = 0, 0, Counter[State]()
    for at, held, _ in _walk(tape, of_host):
        total = held.total()
        if total > most and at >= since:
            most, place, by_state = total, at, held.copy()
    origin = tape.entries[place].origin if tape.entries else Origin("", Phase.IDLE)
    living = next((living for at, _, living in _walk(tape, of_host) if most and at == place), {})
    largest = sorted(living.values(), key=lambda item: -item[0])[:_SHOWN]
    return MemoryPeak(most, {state: by_state[state] for state in State}, origin, place, tuple(largest))


_SHOWN = 10


@dataclass(frozen=True)
class MemoryTurn:
    """A period during which the program works for one unit in one phase, with its peak of live bytes."""

    origin: Origin
    nbytes: int
    by_state: Mapping[State, int]
    entry: int  # the index in the trace

    @property
    def label(self) -> str:
        """The unit and phase for display."""
        return f"{self.origin.phase.value} of {self.origin.unit or 'the root'}"


def memory_turns(tape: Tape, *, since: int = 0) -> list[MemoryTurn]:
    """Return the turns of the program that allocate or free memory, in order, starting from the index `since`."""
    turns: list[MemoryTurn] = []
    for place, held, _ in _walk(tape, of_host=False):
        if place < since:
            continue
        origin, total = tape.entries[place].origin, held.total()
        last = turns[-1].origin if turns else None
        is_new = last is None or (last.unit, last.phase) != (origin.unit, origin.phase)
        if is_new or total > turns[-1].nbytes:
            turns[len(turns) - (not is_new) :] = [MemoryTurn(origin, total, dict(held), place)]
    return turns


def memory_holders(tape: Tape, entry: int) -> list[tuple[Allocation, State]]:
    """Return the live allocations at the index `entry` of a trace, the largest first."""
    states, alive = _states(tape.entries), dict[int, tuple[Allocation, State]]()
    for place, each_entry in enumerate(tape.entries[: entry + 1]):
        if isinstance(each_entry, Allocation) and each_entry.stream != HOST:
            alive[each_entry.storage] = each_entry, states[place]
        elif isinstance(each_entry, Free):
            alive.pop(each_entry.storage, None)
    return sorted(alive.values(), key=lambda held: -held[0].own_nbytes)


def _walk(tape: Tape, of_host: bool) -> Iterator[tuple[int, Counter[State], dict[int, tuple[int, State]]]]:
    """Yield for each allocation and free its index, the bytes by state, and the live storages at that time."""
    states = _states(tape.entries)
    held, alive = Counter[State](), dict[int, tuple[int, State]]()
    for place, entry in enumerate(tape.entries):
        if isinstance(entry, Allocation) and (entry.stream == HOST) == of_host:
            state = states[place]
            nbytes = round(entry.own_nbytes)
            held[state] += nbytes
            alive[entry.storage] = nbytes, state
            yield place, held, alive
        elif isinstance(entry, Free) and entry.storage in alive:
            nbytes, state = alive.pop(entry.storage)
            held[state] -= nbytes
            yield place, held, alive


_PURPOSES = {
    "shards": State.PARAMETERS,
    "unsharded parameters": State.UNSHARDED,
    "gradient shards": State.SHARDED_GRADIENTS,
    "messages": State.MESSAGES,
}


def _states(entries: list[Entry]) -> dict[int, State]:
    """Return the state of each allocation by its index: as the engine declares it, or else inferred from its use."""
    states: dict[int, State] = {}
    forwards = 0  # entries in forwards so far
    open_since: dict[int, tuple[int, int]] = {}  # by live storage: the index of its allocation, and `forwards`
    reduced: set[int] = set()  # indices of allocations that a reduction has read
    for place, entry in enumerate(entries):
        phase = entry.origin.phase
        forwards += phase is Phase.FORWARD
        if isinstance(entry, Allocation):
            open_since[entry.storage] = place, forwards
        elif isinstance(entry, Operation | Collective) and phase is Phase.POST_BACKWARD:
            reduced.update(open_since[read.storage][0] for read in entry.reads if read.storage in open_since)
        elif isinstance(entry, Free) and entry.storage in open_since:
            since, before = open_since.pop(entry.storage)
            states[since] = _state(entries[since], phase, since in reduced, outlives=forwards > before)
    for since, _ in open_since.values():
        states[since] = _state(entries[since], None, since in reduced, outlives=True)
    return states


def _state(allocation: Entry, freed_in: Phase | None, is_reduced: bool, outlives: bool) -> State:
    """Return the state that an allocation is for."""
    assert isinstance(allocation, Allocation)
    known = _PURPOSES.get(allocation.purpose)
    if known is not None:
        return known
    phase = allocation.origin.phase
    if phase is Phase.STEP:
        return State.OPTIMIZER if outlives else State.TEMPORARIES
    if phase is Phase.FORWARD:
        return State.TEMPORARIES if freed_in is Phase.FORWARD else State.ACTIVATIONS
    if phase is Phase.IDLE:
        return State.PARAMETERS if freed_in is None else State.TEMPORARIES
    return State.WHOLE_GRADIENTS if is_reduced else State.TEMPORARIES
