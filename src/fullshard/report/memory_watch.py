"""Memory over one real step, by state. The engine reports its own memory. The rest is observed in operations.

A dispatch mode observes the step. It runs every operation unchanged, measures its time and inspects the results. This
takes about ten microseconds per operation, so only one step of one rank is observed. That step is not timed as a whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._compat import innermost_dispatch_mode, is_wrapper_type, local_tensor
from fullshard.device.accelerator import Accelerator
from fullshard.disk.tensors import OnDisk
from fullshard.dry.storages import Storages
from fullshard.engine.nested import tensors_in
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.plan.memory import State, memory_holders, memory_turns
from fullshard.report.operations import OperationTimes, operation_name, tensor_text
from fullshard.report.run import TensorHeld
from fullshard.tape.recorder import Event, Phase, Recorder
from fullshard.tape.tape import Allocation, Free, Operation, Tape

_MOST_MOMENTS = 600
_SHOWN = 10
_SLOTS = 1 << 40  # storages of units are numbered from here


@dataclass(frozen=True, kw_only=True)
class WatchedStep:
    """Memory over a step. Each moment is a turn of the program to a unit and phase, with its largest sum."""

    at_s: list[float]  # seconds since the start of the observed step
    labels: list[str]
    by_state: dict[str, list[int]]
    peak: int  # the index of the largest sum
    largest: list[TensorHeld]
    predicted: list[int] | None


def can_be_watched(model: nn.Module) -> bool:
    """Return True if nothing in `model` is compiled. A dispatch mode runs compiled code eagerly or recompiles it."""
    return not any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


class MemoryWatch(TorchDispatchMode):
    """A dispatch mode that observes memory from `start()` to `stop()`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        recorder: Recorder,
        accelerator: Accelerator,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._tape = _TimedTape()
        self._storages = Storages(self._tape)
        self._units = {unit.name: unit for unit in units_in(model)}
        self._slots: dict[tuple[str, int], int] = {}
        self._base = list(held_between_steps(model, optimizers))
        self._made: dict[int, str] = {}  # by storage: the operation that allocated it, with its result
        self._is_on = False
        self.operations = OperationTimes(model, accelerator)
        self.host_waits: dict[str, tuple[int, float]] = {}  # by line of the program: their number and total seconds

    def start(self) -> None:
        """Start observing. Do not call it within a context that ends before `stop()` is called."""
        self._is_on = self._recorder.follows_memory = True
        self.operations.start()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> bool:
        """Stop observing. Return False if a mode entered later is still active: call it again afterwards."""
        if self._is_on:
            self.operations.stop()
        self._is_on = self._recorder.follows_memory = False
        if innermost_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._storages.forget()
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the memory that it allocates."""
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if not self._is_on:
            return func(*args, **kwargs)
        if func._opname == "_local_scalar_dense":
            self.operations.finish()
            start = time.perf_counter()
            result = func(*args, **kwargs)
            self._note_host_wait(time.perf_counter() - start)
            return result
        result = self.operations.run(func, args, kwargs, self._recorder.origin)
        if not (func.is_view or func.namespace != "aten" or func._opname in _NO_MEMORY):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tape, storages = self._tape, self._storages
        tape.origin, tape.purpose = self._recorder.origin, self._recorder.purpose
        given = tensors_in((args, kwargs))
        if tape.origin.phase is Phase.POST_BACKWARD:  # a reduction reads unsharded gradients
            reads = tuple(storages.access(item) for item in given if storages.is_known(item))
            tape.note(Operation("", "compute", tape.origin, reads, ()))
        there = {item.untyped_storage()._cdata for item in given}
        for made in tensors_in(result):
            storage = made.untyped_storage()
            if storage._cdata not in there and not storages.is_known(made):
                storages.note_allocated(storage, "compute")
                module = self.operations.module or tape.origin.unit or "the root"
                what = f"{self.operations.part(tape.origin)}: {operation_name(func)} in {module}, {tensor_text(made)}"
                self._made[storages.access(made).storage] = what

    def _note_host_wait(self, seconds: float) -> None:
        """Record that the program has waited for a value."""
        frame = sys._getframe(2)
        while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        site = f"item() in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        times, total = self.host_waits.get(site, (0, 0.0))
        self.host_waits[site] = times + 1, total + seconds

    def note_event(self, event: Event) -> None:
        """Record memory that a unit has allocated or freed outside of operations."""
        unit = self._units.get(event.origin.unit)
        if not self._is_on or event.name not in ("allocate", "free") or unit is None or unit.slot.shared:
            return
        self._tape.origin = event.origin
        number = self._slots.setdefault((event.origin.unit, event.nbytes), _SLOTS + len(self._slots))
        if event.name == "allocate":
            self._tape.note(Allocation(number, event.nbytes, "compute", event.origin, "unsharded parameters"))
        else:
            self._tape.note(Free(number, event.nbytes, "compute", event.origin))

    def watched(self, predicted: Sequence[tuple[str, int]] | None = None) -> WatchedStep | None:
        """Return the observed step; None if nothing was observed.

        Args:
            predicted: The labels and sums of the turns of a predicted step.
        """
        turns, times = memory_turns(self._tape), self._tape.times
        if not turns:
            return None
        base: dict[str, int] = {}
        for item in self._base:
            base[item.state] = base.get(item.state, 0) + item.nbytes
        expected = None if predicted is None else _aligned(predicted, [turn.label for turn in turns])
        shown = [max(part, key=lambda i: turns[i].nbytes) for part in _parts(len(turns), _MOST_MOMENTS)]
        peak = max(shown, key=lambda i: turns[i].nbytes)
        at_peak = [
            TensorHeld(
                nbytes=round(item.own_nbytes),
                state=_OF_STEP.get(state, state).value,
                what=(not item.purpose and self._made.get(item.storage))
                or f"{item.purpose or item.origin.phase.value} of {item.origin.unit or 'the root'}",
            )
            for item, state in memory_holders(self._tape, turns[peak].entry)
        ]
        return WatchedStep(
            at_s=[times[turns[i].entry] - times[0] for i in shown],
            labels=[turns[i].label for i in shown],
            by_state={
                state.value: [
                    base.get(state.value, 0)
                    + sum(nbytes for of, nbytes in turns[i].by_state.items() if _OF_STEP.get(of, of) is state)
                    for i in shown
                ]
                for state in State
            },
            peak=shown.index(peak),
            largest=sorted([*self._base, *at_peak], key=lambda item: -item.nbytes)[:_SHOWN],
            predicted=None if expected is None else [expected[i] for i in shown],
        )


_OF_STEP = {State.PARAMETERS: State.TEMPORARIES}  # created within a step and kept: the next batch
_NO_MEMORY = ("_unsafe_view", "set_", "detach", "alias", "lift_fresh")


class _TimedTape(Tape):
    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def note(self, entry: Any) -> None:
        super().note(entry)
        self.times.append(time.perf_counter())


def held_between_steps(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[TensorHeld]:
    """Yield the shards, gradients, unsharded parameters and optimizer states that are in memory between steps."""
    slots = {}
    names = {id(param): clean_fqn(name) for name, param in model.named_parameters()}
    for unit in units_in(model):
        name = unit.name or "the root"
        remaining = sum(param_group.plan.stored_nbytes for param_group in unit.param_groups)
        if remaining:
            yield TensorHeld(nbytes=remaining, state=State.PARAMETERS.value, what=f"shards of {name}")
        grads = sum(
            param_group.gradients.flat.nbytes
            for param_group in unit.param_groups
            if param_group.gradients.flat is not None
        )
        if grads:
            yield TensorHeld(nbytes=grads, state=State.SHARDED_GRADIENTS.value, what=f"gradient shards of {name}")
        if unit.slot.storage.nbytes():
            ranks = unit.axes.shard_world if unit.slot.is_rank_shared else 1
            state = State.PARAMETERS if unit.keeps_unsharded else State.UNSHARDED
            what = f"unsharded parameters of {name}" + (", in turns with others" if unit.slot.shared else "")
            nbytes = unit.slot.storage.nbytes() // ranks
            slots[id(unit.slot)] = TensorHeld(nbytes=nbytes, state=state.value, what=what)
    yield from slots.values()
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            for key, item in state.items():
                local = local_tensor(item) if isinstance(item, Tensor) else None
                if local is not None and not isinstance(local, OnDisk) and local.nbytes:
                    what = f"{key} of {names.get(id(param), 'a parameter')}, {tensor_text(local)}"
                    yield TensorHeld(nbytes=local.nbytes, state=State.OPTIMIZER.value, what=what)


def _parts(count: int, most: int) -> list[range]:
    """Split `count` numbers into at most `most` ranges of similar size."""
    step = -(-count // most)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def _aligned(predicted: Sequence[tuple[str, int]], labels: Sequence[str]) -> list[int]:
    """Return the predicted sum of each turn.

    The n-th turn with a label has the sum of the n-th predicted turn with this label. A turn that was not predicted has
    the sum of the previous turn.
    """
    by_label: dict[str, list[int]] = {}
    for label, nbytes in reversed(predicted):
        by_label.setdefault(label, []).append(nbytes)
    found, last = [], predicted[0][1] if predicted else 0
    for label in labels:
        if by_label.get(label):
            last = by_label[label].pop()
        found.append(last)
    return found
