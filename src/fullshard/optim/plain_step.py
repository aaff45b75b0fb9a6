"""A fast path for updates of plain shards if every parameter has a gradient and all states are tensors in memory.

Parameters, gradients and states are replaced by plain tensors using C functions. This takes a fraction of the time of
the general case in `local_steps.py`. Only the units of the parameters are kept between steps, so states and shards can
be replaced, moved and freed at any time.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.managed import Managed, managed_by

_GRAD, _LOCAL, _DTYPE, _NDIM = map(attrgetter, ("grad", "_local_tensor", "dtype", "ndim"))
_SHARDED = attrgetter("param.sharded")

_managed: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Managed]]] = weakref.WeakKeyDictionary()
"""The entries of the parameters of each optimizer, in order. Looking them up takes longer than comparing them."""


class PlainStep:
    """The replacement of tensors for one step of an optimizer.

    Args:
        optimizer: The optimizer. It has a state for each of `params`, in the same order, or none.
        params: Its parameters, sharded, each with a gradient.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        self._optimizer, self._params = optimizer, params
        self._shards: list[Tensor] = [*map(_LOCAL, params)]
        self._grads: list[Tensor] = [*map(_LOCAL, map(_GRAD, params))]
        self._states: list[dict[str, Any]] = [*optimizer.state.values()]
        self._values = [
            [value._local_tensor if type(value) is DTensor else value for value in state.values()]
            for state in self._states
        ]

    @property
    def is_possible(self) -> bool:
        """True if shards, gradients and states are plain and not 0-dim, and each gradient has its shard's dtype."""
        wholes = [value for state in self._states for value in state.values() if type(value) is DTensor]
        kinds = {*map(type, self._shards), *map(type, self._grads), *map(type, map(_LOCAL, wholes))}
        dims = {*map(_NDIM, self._shards), *map(_NDIM, wholes)}
        return kinds == {Tensor} and 0 not in dims and [*map(_DTYPE, self._shards)] == [*map(_DTYPE, self._grads)]

    @contextmanager
    def exchanged(self) -> Iterator[dict[Tensor, dict[str, Any]]]:
        """Context manager within which the optimizer has plain shards and a plain state, which is yielded."""
        optimizer, states = self._optimizer, self._optimizer.state
        plain: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for shard, state, values in zip(self._shards, self._states, self._values, strict=bool(states)):
            plain[shard] = dict(zip(state, values, strict=True))
        remaining = iter(self._shards)
        for group in optimizer.param_groups:
            group["params"] = [shard for _, shard in zip(group["params"], remaining, strict=False)]
        try:
            for shard, grad in zip(self._shards, self._grads, strict=True):
                shard.grad = grad
            optimizer.state = plain
            yield plain
        finally:
            optimizer.state = states
            for shard in self._shards:
                shard.grad = None
            torch.autograd.graph.increment_version(self._params)

    def replaced_values(self, plain: dict[Tensor, dict[str, Any]]) -> Iterator[tuple[Any, str, Any]]:
        """Yield the state values that the step has created or replaced, as (parameter, name, plain value)."""
        if len(plain) == len(self._values) and all(map(_are_same, self._values, map(dict.values, plain.values()))):
            return
        params = {id(shard): param for shard, param in zip(self._shards, self._params, strict=True)}
        for number, (shard, state) in enumerate(plain.items()):
            is_known = number < len(self._values)
            known = dict(zip(self._states[number], self._values[number], strict=True)) if is_known else {}
            for name, value in state.items():
                if name not in known or known[name] is not value:
                    yield params[id(shard)], name, value


def plain_step(optimizer: Optimizer) -> PlainStep | None:
    """Return the replacement for the next step of `optimizer`; None if the fast path does not support it."""
    entries = [entry() for entry in _managed.get(optimizer, ())]
    params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
    if None in entries or not _are_same([*map(_SHARDED, entries)], params):
        _managed.pop(optimizer, None)
        return None
    if any(unit.shards.is_on_cpu for unit in {entry.unit for entry in entries if entry is not None}):
        return None
    if len(optimizer.state) not in (0, len(params)) or not all(map(is_, optimizer.state, params)):
        return None
    if {*map(type, map(_GRAD, params))} != {DTensor}:
        return None
    step = PlainStep(optimizer, params)
    return step if step.is_possible else None


def note_params(optimizer: Optimizer) -> None:
    """Look up the units of the parameters of `optimizer`, for its next steps."""
    if optimizer not in _managed:
        found = [managed_by(param) for group in optimizer.param_groups for param in group["params"]]
        if None not in found:
            _managed[optimizer] = [weakref.ref(managed) for managed in found if managed is not None]


def _are_same(known: Any, given: Any) -> bool:
    return len(known) == len(given) and all(map(is_, known, given))
