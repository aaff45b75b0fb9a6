"""The exchange of sharded parameters for plain shards in a step, prepared once for all steps that do not change it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.disk.tensors import OnDisk
from fullshard.engine.managed import managed_by

_MOST_PREPARATIONS = 3  # of one optimizer: if its states are replaced in every step, none is worth its time

_GRAD, _LOCAL, _DTYPE = attrgetter("grad"), attrgetter("_local_tensor"), attrgetter("dtype")
_SHARDED, _PARAMS = attrgetter("param.sharded"), itemgetter("params")

_prepared: weakref.WeakKeyDictionary[Optimizer, PreparedStep] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class PreparedStep:
    """The plain shards of all parameters of an optimizer, and its state as plain tensors.

    Both remain valid until a parameter, a shard or a state tensor is another object. Comparing objects costs a fraction
    of exchanging them, since functions of C do it without the interpreter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [[*group["params"]] for group in optimizer.param_groups]
        self._params = [param for its in self._groups for param in its]
        self._managed = [weakref.ref(managed_by(param)) for param in self._params]
        self._shards_of_groups = [[param._local_tensor for param in its] for its in self._groups]
        self._shards = [shard for its in self._shards_of_groups for shard in its]
        self._dtypes = [*map(_DTYPE, self._shards)]
        self._states = [*optimizer.state.values()]
        self._values = [[*state.values()] for state in self._states]
        self._sharded_values = [value for its in self._values for value in its if isinstance(value, DTensor)]
        self._shards_of_values = [*map(_LOCAL, self._sharded_values)]
        self._stepped: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, state in optimizer.state.items():
            plain = {name: _LOCAL(value) if isinstance(value, DTensor) else value for name, value in state.items()}
            self._stepped[_LOCAL(param)] = plain
        self._plain_values = [[*state.values()] for state in self._stepped.values()]

    def fits(self, optimizer: Optimizer) -> bool:
        """Return True if `optimizer` still has these parameters and states, and a gradient for each parameter."""
        managed = [entry() for entry in self._managed]
        grads = [*map(_GRAD, self._params)]
        return (
            len(self._groups) == len(optimizer.param_groups)
            and all(map(_are_same, self._groups, map(_PARAMS, optimizer.param_groups)))
            and None not in managed
            and all(map(is_, map(_SHARDED, managed), self._params))
            and not any(unit.shards.is_on_cpu for unit in {entry.unit for entry in managed if entry is not None})
            and {*map(type, grads)} == {DTensor}
            and [*map(_DTYPE, map(_LOCAL, grads))] == self._dtypes
            and all(map(is_, map(_LOCAL, self._params), self._shards))
            and _are_same(self._states, optimizer.state.values())
            and all(map(is_, optimizer.state, self._params))
            and all(map(_are_same, self._values, map(dict.values, self._states)))
            and all(map(is_, map(_LOCAL, self._sharded_values), self._shards_of_values))
        )

    @contextmanager
    def exchanged(self, optimizer: Optimizer) -> Iterator[None]:
        """Context manager in which `optimizer` has the shards and the plain states. Its groups keep the shards."""
        sharded_states = optimizer.state
        for shard, grad in zip(self._shards, map(_GRAD, self._params), strict=True):
            shard.grad = grad._local_tensor
        for group, shards in zip(optimizer.param_groups, self._shards_of_groups, strict=True):
            group["params"] = shards
        optimizer.state = self._stepped
        try:
            yield
        finally:
            optimizer.state = sharded_states
            for shard in self._shards:
                shard.grad = None
            torch.autograd.graph.increment_version(self._params)

    def replaced_values(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the state values that the step has made, or replaced: parameter, name, and plain value."""
        states, known_values = self._stepped, self._plain_values
        if len(states) == len(known_values) and all(map(_are_same, known_values, map(dict.values, states.values()))):
            return
        sharded = {id(shard): param for shard, param in zip(self._shards, self._params, strict=True)}
        for number, (shard, state) in enumerate(states.items()):
            is_known = number < len(known_values)
            known = dict(zip(self._states[number], known_values[number], strict=True)) if is_known else {}
            for name, value in state.items():
                if name not in known or known[name] is not value:
                    yield sharded[id(shard)], name, value


def _are_same(known: Any, given: Any) -> bool:
    return len(known) == len(given) and all(map(is_, known, given))


def prepared_step(optimizer: Optimizer) -> PreparedStep | None:
    """Return what was prepared for the steps of `optimizer`; None if something is not as it was."""
    prepared = _prepared.get(optimizer)
    if prepared is None or prepared.fits(optimizer):
        return prepared
    del _prepared[optimizer]
    return None


def prepare_steps(optimizer: Optimizer) -> None:
    """Prepare the next steps of `optimizer`, which has just stepped its parameters, if each of them allows it."""
    count = _counts.get(optimizer, 0)
    if count >= _MOST_PREPARATIONS:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = optimizer.state
    if (
        all(isinstance(param, DTensor) and param.ndim and managed_by(param) is not None for param in params)
        and all(map(is_, states, params))
        and len(states) in (0, len(params))
        and all(_is_plain(value) for state in states.values() for value in state.values())
    ):
        _prepared[optimizer] = PreparedStep(optimizer)
        _counts[optimizer] = count + 1


def _is_plain(value: Any) -> bool:
    return not isinstance(value, DTensor) or (value.ndim > 0 and not isinstance(value._local_tensor, OnDisk))
