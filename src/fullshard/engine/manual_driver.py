"""Steps that are finalized manually, such as those of pipeline stages.

[Note: steps that are finalized manually]
A pipeline stage has several microbatches in flight between forward and backward, in any order. It may run a backward in
two parts, and the second part does not call hooks. So such a step does not depend on hooks. Its units stay unsharded
from `unshard_all` (or the first forward) to `reshard_all`. A backward that reaches a sharded unit gathers it. Autograd
and the schedule accumulate unsharded gradients in any order, and `finalize_backward` reduces them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fullshard._compat import in_backward, on_backward_end
from fullshard.engine.nested import tensors_in
from fullshard.engine.residency import ACTIVE
from fullshard.engine.root_state import RootState, attribute_to, cast_outputs
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Unit
from fullshard.tape.recorder import Phase


class ManualDriver:
    """Runs the steps of one root until `finalize_backward`. See [Note: steps that are finalized manually]."""

    def __init__(self, state: RootState) -> None:
        self._state = state
        self._units = state.units
        self._scheduler = state.scheduler
        self.is_open = False  # a step was begun and is not finalized
        self._has_forward = False  # a forward has begun in the open step
        self._holds_at_end = False  # gradients are held at the end of the current backward

    def reset(self) -> None:
        """Reset the state of an unfinished step."""
        self.is_open = self._has_forward = self._holds_at_end = False

    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Unshard `unit`, and return the inputs for its forward. The first forward begins the step."""
        unit.residency.check_not_summoned()
        state = self._state
        if not state.stack and not in_backward():
            self.unshard_all()
            state.activations.begin_forward()
            if self._has_forward and torch.is_grad_enabled():
                state.microbatches.count_next()
            self._has_forward = True
        prepared = state.prepare_inputs(unit, args, kwargs)
        state.stack.append((unit, None))
        self._scheduler.unshard(unit, Phase.FORWARD)
        attribute_to(unit, Phase.FORWARD)
        state.activations.enter(unit)
        return prepared

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Return the output for the caller. `unit` stays unsharded. A backward that reaches the output unshards it."""
        stack = self._state.stack
        self._state.activations.leave(unit)
        if unit.is_broken or all(entered is not unit for entered, _ in stack):
            return output  # it could not be unsharded
        while stack.pop()[0] is not unit:
            pass  # an inner forward raised an exception
        output = cast_outputs(unit, output)

        def before_backward(_: Tensor) -> None:
            self._scheduler.unshard(unit, Phase.PRE_BACKWARD)
            attribute_to(unit, Phase.BACKWARD)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(before_backward)
        return output

    def on_grad(self, unit: Unit, param: ShardedParam) -> None:
        """Hold the unsharded gradients at the end of the current backward, which has accumulated one for `param`."""
        if not self._holds_at_end:
            self._holds_at_end = True
            on_backward_end(self.hold_grads)

    def unshard_all(self) -> None:
        """Start to gather all units for the next forwards and backwards. The first call begins the step."""
        if not self.is_open:
            self._state.check_streams()
            self.is_open = True
            if torch.is_grad_enabled():  # otherwise no `finalize_backward` follows, which reports failures to all ranks
                self._state.disks.begin_pass()
            self._scheduler.order_gathers_after_compute()
            self._state.begin_microbatch()
        for unit in self._units:
            if unit.residency.state not in ACTIVE:
                self._scheduler.start_unshard(unit, Phase.FORWARD)
                unit.residency.is_unsharded_manually = True  # no other unit takes its memory

    def wait_for_all(self) -> None:
        """Unshard all units, so that modules have unsharded parameters."""
        self.unshard_all()
        for unit in self._units:
            unit.residency.wait_unshard()

    def reshard_all(self) -> None:
        """Free units that are not kept from forward to backward. The step continues."""
        for unit in self._units if self.is_open else ():
            if unit.frees_in_step:
                self._scheduler.reshard(unit, Phase.FORWARD)

    def hold_grads(self) -> None:
        """Keep the unsharded gradients of a microbatch, in the dtype of the reduction."""
        self._holds_at_end = False
        for unit in self._units:
            unit.gradients.hold()

    def finalize_backward(self) -> None:
        """Reduce all unsharded gradients, and reshard: the step has no further backward passes."""
        state = self._state
        state.reductions.finish_all()
        for unit in self._units:
            state.reshard_after_backward(unit)
        state.return_to_idle()
        self.is_open = self._has_forward = False
        state.check_backward(state.reductions.take_tallies())
