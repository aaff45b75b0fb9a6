"""Deferred optimizer steps on the CPU, which run when their results are needed.

[Note: deferred steps]
The shards of some units are on the CPU, and their steps can overlap with work of the device. After `optimizer.step()`,
the next forward needs the first unit immediately and the last one much later. So the CPU updates a unit just before its
gather starts, while the device computes the earlier units. With more such units, more of the CPU time is hidden.

The inputs of the step are recorded when it is deferred: gradients, states, and options of the groups. Until the step
runs, the parameters, their gradients and their states hold `Awaited` tensors. Any access to one of them runs the step
first. So a deferred step has no visible effect except the time at which it runs.

A step is not deferred in these cases: other code refers to shards or states, and would see old values; the step is the
first one, which creates the states; it has a closure, hooks or a gradient scaler; or it runs within a backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import held_twice, in_backward, local_tensor, set_local_tensor
from fullshard.device.awaited import Awaited
from fullshard.engine.unit import Unit


def can_defer(optimizer: Optimizer, unit: Unit, params: Sequence[nn.Parameter]) -> bool:
    """Return True if the update of `params`, which belong to `unit`, can be deferred without a visible effect."""
    if any(param.grad is None for param in params):
        return False
    if in_backward() or not all(param_group.has_shards_alone for param_group in unit.param_groups):
        return False
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    states = [optimizer.state.get(param, {}) for param in params]
    if not all(states):
        return False
    if not all(isinstance(value, Tensor) for state in states for value in state.values()):
        return False
    return held_twice([local_tensor(value) for state in states for value in state.values()])


class _Deferred:
    """A pending step. The constructor replaces the tensors that the step will change by placeholders."""

    def __init__(self, optimizer: Optimizer, params: Sequence[nn.Parameter], run: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._run = run
        ids = set(map(id, params))
        self._groups = [
            {
                **{name: _own(value) for name, value in group.items() if name != "params"},
                "params": [param for param in group["params"] if id(param) in ids],
            }
            for group in optimizer.param_groups
        ]
        self._states: dict[Tensor, Any] = {param: optimizer.state[param] for param in params}
        self._grads = {param: param.grad for param in params}
        self._awaited: list[tuple[DTensor, Awaited]] = []
        self._counts: list[tuple[dict[str, Any], str, Awaited]] = []
        self._is_taken = False
        for param in params:
            self._placeholder(param)
            self._placeholder(param.grad)
        for state in self._states.values():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    self._placeholder(value)
                else:
                    state[name] = Awaited(value, self.take)
                    self._counts.append((state, name, state[name]))

    def _placeholder(self, tensor: Any) -> None:
        awaited = Awaited(tensor._local_tensor, self.take)
        set_local_tensor(tensor, awaited)
        self._awaited.append((tensor, awaited))

    @torch.inference_mode(False)
    def take(self) -> None:
        """Remove the placeholders and run the step, unless this was done already."""
        if self._is_taken:
            return
        self._is_taken = True
        for tensor, awaited in self._awaited:
            if tensor._local_tensor is awaited:
                set_local_tensor(tensor, awaited.tensor)
        for state, name, awaited in self._counts:
            if state.get(name) is awaited:
                state[name] = awaited.tensor
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        grads = {param: param.grad for param in self._grads}
        optimizer.param_groups, optimizer.state = self._groups, defaultdict(dict, self._states)
        try:
            for param, grad in self._grads.items():
                param.grad = grad
            self._run()
        finally:
            optimizer.param_groups, optimizer.state = groups, states
            for param, present in grads.items():
                param.grad = present
        self._groups, self._states, self._grads = [], {}, {}
        self._awaited, self._counts = [], []


def defer(optimizer: Optimizer, unit: Unit, params: Sequence[nn.Parameter], run: Callable[[], None]) -> None:
    """Defer `run`, which updates only `params` of `optimizer`, until `unit` is needed or a parameter is accessed."""
    unit.residency.deferred_steps.append(_Deferred(optimizer, params, run).take)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
