"""One forward of a unit: detects when its backward begins and ends.

[Note: when a unit's backward is over]
Unsharded parameters can still be needed after the last gradient of the unit's parameters. For example, a frozen weight
is read to compute the gradient of the inputs, and no hook reports that. But among the nodes that are ready, autograd
runs the one that was created last. So the backward of a call is over when a tensor that was created before the call
gets its gradient: an input of the call, or an output of a call that had ended when this one began. The graph is not
changed, so gradients are added in the same order as without sharding. A unit at the start of the graph is freed at the
end of backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, clear_autocast_cache
from torch.autograd.graph import Node

from fullshard._compat import next_node_number
from fullshard.engine.nested import map_tensors, tensors_in, tensors_kept_by
from fullshard.engine.unit import Unit


@dataclass(eq=False)
class OpenForward:
    """An outermost forward whose backward is pending: no backward pass has reached any of its calls yet.

    It does not depend on whether the outputs are alive, which may differ between ranks.
    """

    top: Unit  # whose forward it is
    serial: int  # number of the last backward before it
    left: list[Unit] = field(default_factory=list)  # in the order in which forwards ended, possibly with duplicates
    awaited: list[tuple[int, Unit]] = field(default_factory=list)  # starts of calls that a backward can reach


class Backward(Protocol):
    """The interface of the runtime to a call during its backward."""

    def begin_backward(self) -> int:
        """Return the number of the backward that is executing."""

    def end_calls_since(self, time: int) -> None:
        """Record that the backward of every call that began after `time` is over."""

    def before_backward(self, call: ForwardCall) -> None:
        """Unshard the unit of `call` again."""

    def after_backward(self, call: ForwardCall) -> None:
        """Record that the backward of `call` is over."""


class ForwardCall:
    """One forward of a unit, as needed by its backward."""

    def __init__(self, runtime: Backward, unit: Unit, start: int, within: OpenForward | None) -> None:
        self._runtime = runtime
        self.unit = unit
        self.start = start
        self.within = within
        self._end = start
        self._before: list[Node] = []  # nodes that created the inputs
        self._serial = -1  # number of the last backward that reached this call
        self._given: Any = None  # the inputs: the forward may add tensors to them
        self._first = 0  # sequence number of the first node that the forward may create

    def watch_inputs(self, given: Any) -> Any:
        """Register hooks for the gradients of the inputs, and return the inputs for the forward."""
        watched, leaf, device = list[Tensor](), None, self.unit.device
        for tensor in tensors_in(given):
            if not tensor.requires_grad:
                continue
            made_by = tensor.grad_fn
            if made_by is not None:
                self._before.append(made_by)
                if tensor.device == device:  # see `_is_in_order`
                    watched.append(tensor)
            elif leaf is None:
                leaf = tensor
        if not watched and leaf is not None:  # a leaf has no node, so forward gets a view of it, which has one
            watched = [leaf.view_as(leaf)]
            given = map_tensors(lambda tensor: watched[0] if tensor is leaf else tensor, given)
        for tensor in watched:
            tensor.register_hook(self._after_input)
        self._given, self._first = given, next_node_number()
        return given

    def watch_outputs(self, returned: Any, end: int) -> None:
        """Unshard the unit before the gradient of any output enters the call.

        Outputs are the tensors in `returned`, and tensors that the forward has created and stored in attributes of the
        unit's modules or in its arguments, such as a list of losses.
        """
        self._end, is_awaited = end, False
        outputs = tensors_in(returned)
        for tensor in outputs:
            made_by = tensor.grad_fn  # None for a parameter; an input may be returned unchanged
            if made_by is not None and made_by not in self._before:
                is_awaited = True
                tensor.register_hook(partial(self._before_output, self._is_in_order(tensor)))
        given, self._given, self._before = self._given, None, []
        known = {id(tensor) for tensor in outputs}
        for tensor in (*tensors_in(given), *tensors_kept_by(self.unit.keepers)):
            made_by = tensor.grad_fn
            if made_by is not None and id(tensor) not in known and made_by._sequence_nr() >= self._first:
                known.add(id(tensor))
                is_awaited = True
                tensor.register_hook(partial(self._before_output, self._is_in_order(tensor)))
        if self.within is not None:
            self.within.left.append(self.unit)
            if is_awaited:
                self.within.awaited.append((self.start, self.unit))

    def _is_in_order(self, tensor: Tensor) -> bool:
        """Return True if the gradient of `tensor` is complete exactly when all nodes created after it have run."""
        return tensor.grad_fn is not None and tensor.device == self.unit.device

    def _before_output(self, is_in_order: bool, grad: Tensor) -> None:
        serial = self._runtime.begin_backward()
        if is_in_order:
            self._runtime.end_calls_since(self._end)
        if self._serial != serial:
            self._serial = serial
            clear_autocast_cache()  # otherwise, the recomputation of another forward could use casts of this pass
            self._runtime.before_backward(self)

    def _after_input(self, grad: Tensor | None) -> None:
        if grad is not None and grad.requires_grad:  # with create_graph=True, a later backward enters the call here
            grad.register_hook(partial(self._before_output, False))
        self._runtime.after_backward(self)
