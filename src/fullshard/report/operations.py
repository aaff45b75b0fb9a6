"""The operations of one step by unit, module and shapes, with their times.

A `MemoryWatch` calls `run` for each operation of the step that it observes. On a CPU the time of an operation is that
of the call. On an accelerator it is the time between two events on the stream. In an observed step, the host launches
kernels more slowly than the device runs them. So before each operation, the device is kept busy for longer than a
launch takes. Otherwise the time would include the launch.

The module of an operation in forward is the innermost one whose forward runs. In backward it is the module of the
forward operation that created the autograd node. Both have the same sequence number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fullshard._compat import backward_number, current_autograd_node, in_backward, next_node_number
from fullshard.device.accelerator import Accelerator
from fullshard.device.streams import Stamp
from fullshard.engine.nested import tensors_in
from fullshard.engine.registry import clean_fqn, units_in
from fullshard.tape.recorder import Origin, Phase

_MOST_ROWS = 200
_SHAPES = 4  # the maximum number of inputs that are described
_NONE = -1  # the number of the backward, outside of any backward
_LAUNCH_S = 100e-6  # longer than a host takes to launch a kernel


class _Row(NamedTuple):
    part: str  # "forward", "backward", "forward again" or "optimizer"
    unit: str
    module: str
    name: str
    inputs: str


class OperationTimes:
    """Times of operations from `start()` to `stop()`."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._names = {id(module): clean_fqn(name) for name, module in model.named_modules()}
        self._units = {unit.name for unit in units_in(model)}
        self._running: list[str] = []  # modules whose forward runs, the innermost last
        # The module of each autograd node, by the backward in which it was created (-1 for none) and sequence number.
        self._modules: dict[int, dict[int, str]] = {_NONE: {}}
        self._creators: dict[int, int] = {}  # by backward: the one in which its nodes were created
        self._last = _NONE  # the backward in which the last node was created
        self._times: dict[_Row, list[tuple[float, Stamp | None, Stamp | None]]] = {}
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Follow the modules whose forward runs."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Stop following modules."""
        for hook in self._hooks:
            hook.remove()
        self._modules = {_NONE: {}}

    @property
    def module(self) -> str:
        """The FQN of the module that the current operation belongs to; empty if it is unknown."""
        node = current_autograd_node()
        if node is None or self._running:
            return self._running[-1] if self._running else ""
        created_in = self._creators.setdefault(backward_number(), self._last)
        return self._modules.get(created_in, {}).get(node._sequence_nr(), "")

    def part(self, origin: Origin) -> str:
        """Return the part of the step of the current operation, which is attributed to `origin`."""
        if origin.phase is Phase.STEP:
            return "optimizer"
        if not in_backward():
            return "forward" if origin.phase is Phase.FORWARD else "backward"
        return "forward again" if self._running else "backward"

    def run(self, func: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        """Return `func(*args, **kwargs)`, and record its time."""
        if self._running:
            self._note_node()
        if func.is_view or func.namespace == "c10d" or origin.phase is Phase.IDLE:
            return func(*args, **kwargs)
        module = self.module
        row = _Row(
            self.part(origin),
            self._unit_of(module) if module else origin.unit,
            module,
            operation_name(func),
            ", ".join(map(tensor_text, tensors_in((args, kwargs))[:_SHAPES])),
        )
        self._accelerator.keep_busy(_LAUNCH_S)
        began, start = self._accelerator.stamp_here(), time.perf_counter()
        result = func(*args, **kwargs)
        seconds, ended = time.perf_counter() - start, self._accelerator.stamp_here()
        self._times.setdefault(row, []).append((seconds, began, ended))
        return result

    def finish(self) -> None:
        """Make the host wait for the current stream, which is behind the host because it was kept busy."""
        now = self._accelerator.stamp_here()
        if now is not None:
            now.synchronize()

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return part, unit, module, name, inputs, calls and seconds of the slowest operations, the slowest first.

        The host waits for the streams.
        """
        found = [(*row, len(times), sum(map(_seconds, times))) for row, times in self._times.items()]
        self._times.clear()
        return sorted(found, key=lambda row: -row[-1])[:_MOST_ROWS]

    def _unit_of(self, module: str) -> str:
        """Return the FQN of the innermost unit that contains a module."""
        while module and module not in self._units:
            module = module.rpartition(".")[0]
        return module

    def _note_node(self) -> None:
        """Record the current module for the autograd node that was created last, unless one is known already.

        A reentrant checkpoint runs the nodes that it has recomputed in a separate backward. Their numbers may equal
        those of other nodes, since each thread counts separately.
        """
        current = backward_number()
        if current == _NONE:
            self._creators.clear()
        else:
            self._creators.setdefault(current, self._last)
        self._last = current
        self._modules.setdefault(current, {}).setdefault(next_node_number() - 1, self._running[-1])

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._names and self._running:
            self._running.pop()


def _seconds(times: tuple[float, Stamp | None, Stamp | None]) -> float:
    seconds, began, ended = times
    if began is None or ended is None:
        return seconds
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def operation_name(func: Any) -> str:
    """Return the name of an operation without its overload, as in "addmm"."""
    return str(func.overloadpacket).removeprefix("aten.")


def tensor_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape of `tensor`, as in "float32 [8, 1024]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
