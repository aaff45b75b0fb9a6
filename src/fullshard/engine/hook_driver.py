"""Steps that hooks of forward and backward drive: when units are gathered, freed and reduced.

[Note: one microbatch, in order]
forward    a unit's pre-forward hook waits for its gather and starts the next one; its forward hook registers hooks on
           the outputs that need a gradient, and reshards if the strategy requires it.
backward   the first gradient that reaches an output of a unit gathers it again and starts the gather of the unit before
           it. Autograd accumulates the unsharded gradients; the last of them starts the reduction of the unit. Once the
           gradients of the unit's inputs are known, its backward has ended, and it is resharded.
end        autograd calls back after its last node. Units without gradients, or whose end was not detected, are reduced
           and resharded then, in a fixed order.

`call.py` detects when the backward of a unit is over. `expected.py` predicts the next units.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard._compat import (
    in_backward,
    in_backward_of_inputs,
    in_pass_for_inputs,
    in_pipeline_stage,
    on_backward_end,
)
from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.engine.call import ForwardCall
from fullshard.engine.residency import UnitState
from fullshard.engine.returned_params import copy_returned_params
from fullshard.engine.root_state import RootState, attribute_to, cast_outputs
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.sharded_use import read_while_sharded
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.tape.recorder import Phase, active


class HookDriver:
    """Runs the steps of one root in hooks. See [Note: one microbatch, in order]."""

    def __init__(self, state: RootState, recover: Callable[[], None]) -> None:
        self._state = state
        self._recover = recover
        self._units = state.units
        self._stack = state.stack
        self._expected = state.expected
        self._reductions = state.reductions
        self._scheduler = state.scheduler
        self._serial = 0  # number of the last backward
        self._callback: Callable[[], Any] = int  # the callback of the last backward, or None
        self._creates_graph = False  # the current backward has create_graph=True
        self._is_for_inputs = False  # the current backward computes the gradients of given tensors only
        self._is_in_pipeline = False  # the last forward was in a pipeline stage, whose backward may have two parts
        self._reached: Unit | None = None  # the first trained unit that a pipeline stage's current backward reached
        self._has_grads = False  # a parameter of any unit got a gradient in the current backward
        self._calls: list[ForwardCall] = []  # calls whose backward is executing
        self._ended: list[ForwardCall] = []  # calls whose backward ended in the current backward
        self._recomputed: list[Unit] = []  # recomputed by a checkpoint in backward, and still unsharded
        self._postponed: list[Unit] = []  # to be prefetched after the backward of the current unit
        self._transformed: list[Unit] = []  # units in forwards within function transforms, outermost first

    def reset(self) -> None:
        """Reset the state of an interrupted forward or backward."""
        self._calls.clear()
        self._ended.clear()
        self._recomputed.clear()
        self._transformed.clear()
        self._reached, self._has_grads = None, False

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Unshard `unit`, and return the inputs for its forward."""
        if unit.residency.state is UnitState.SUMMONED:
            unit.residency.check_not_summoned()
        recomputing = in_backward()
        if not self._stack and not recomputing:
            self._begin_forward(unit)
        args, kwargs = self._state.prepare_inputs(unit, args, kwargs)
        within = None if recomputing else self._expected.open[-1]
        call = ForwardCall(self, unit, self._scheduler.tick(), within) if torch.is_grad_enabled() else None
        self._stack.append((unit, call))
        if recomputing and unit.residency.users == 0:
            self._free_recomputed(unit)
        self._scheduler.hold(unit)
        unit.residency.is_used_without_forward = False
        self._scheduler.unshard(unit, Phase.FORWARD)
        if not recomputing:
            self._prefetch_forward(unit)
        elif self._state.phase is Phase.BACKWARD:
            self._prefetch_backward(unit)
        if call is not None:
            args, kwargs = call.watch_inputs((args, kwargs))
        if active.recorder is not None:
            attribute_to(unit, Phase.FORWARD)
        self._state.activations.enter(unit)
        return args, kwargs

    def before_transformed_forward(self, unit: Unit) -> None:
        """Unshard `unit` before a forward within a transform of `torch.func`, and keep it until the next backward ends.

        Transforms have no other event that marks the end. Call this outside of them.
        """
        unit.residency.check_not_summoned()
        if not self._stack and self._state.phase is not Phase.IDLE and not in_backward():
            self._recover()
        self._transformed.append(unit)
        self._scheduler.order_gathers_after_compute()
        for needed in (unit, *unit.borrowed):
            needed.residency.invalidate_if_stepped()
            needed.residency.awaits_backward = needed.residency.awaits_backward or torch.is_grad_enabled()
        self._scheduler.unshard(unit, Phase.FORWARD)

    def after_transformed_forward(self, unit: Unit) -> None:
        """Free `unit` if no backward can need it. Call this outside of transforms."""
        for done in (unit, *unit.borrowed):
            if done.residency.users == 0 and not done.residency.awaits_backward:
                self._scheduler.reshard(done, Phase.FORWARD)
        _leave_transformed(self._transformed, unit, self._units)

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Free `unit` if it is resharded after forward, and return the output for the caller."""
        self._state.activations.leave(unit)
        is_entered = bool(self._stack) and self._stack[-1][0] is unit
        if unit.is_broken or not (is_entered or any(entered is unit for entered, _ in self._stack)):
            return output  # it could not be unsharded
        while self._stack[-1][0] is not unit:
            self._leave(self._stack[-1][0])  # an inner forward raised an exception
            self._stack.pop()
        call = self._stack.pop()[1]
        evaluated = () if self._stack or torch.is_grad_enabled() else self._units
        output = copy_returned_params(unit, cast_outputs(unit, output), evaluated)
        if call is None:
            torch.clear_autocast_cache()  # gradients of these casts would arrive after the backward of a later call
        else:
            call.watch_outputs(output, self._scheduler.tick())
        unit.finished_modules.add(id(module))
        self._leave(unit)
        if not self._stack and not in_backward():
            self._end_forward(unit, raised=output is None and sys.exc_info()[1] is not None)
        if active.recorder is not None:
            self._note_forward()
        return output

    def _note_forward(self) -> None:
        """Attribute later events of the trace to the forward or backward that the unit's forward was part of."""
        if self._stack:
            attribute_to(self._stack[-1][0], Phase.FORWARD)
        else:
            attribute_to(self._units[0], Phase.BACKWARD if in_backward() else Phase.FORWARD)

    def _begin_forward(self, top: Unit) -> None:
        if self._state.phase is not Phase.IDLE:
            self._recover()
        self._state.phase = Phase.FORWARD
        self._state.disks.begin_pass()
        self._is_in_pipeline = in_pipeline_stage()
        self._scheduler.order_gathers_after_compute()
        if is_capturing(self._state.device):
            for unit in [unit for unit in self._units if unit.residency.users == 0]:
                self._scheduler.reshard(unit, Phase.IDLE)  # to be filled within the graph, in memory of the graph
        self._expected.close_skipped(top, self._serial)
        if not self._expected.open and torch.is_autocast_enabled(self._state.device.type):
            torch.clear_autocast_cache()  # gradients of casts of an earlier microbatch would arrive after resharding
        self._state.begin_microbatch()
        self._expected.begin_forward(top, self._serial)

    def _end_forward(self, top: Unit, *, raised: bool) -> None:
        for unit in self._units:
            if unit.residency.deferred_steps:
                unit.residency.run_deferred_steps()  # units without a forward
        self._state.await_reads_of_shards()
        self._expected.end_forward(top)
        self._scheduler.forget_deferred_frees()
        for unit in self._units:
            if unit.shards.is_on_disk:
                unit.shards.forget_ahead()
            unit.finished_modules.clear()
            over = not torch.is_grad_enabled() and unit.settings.reshard_after_forward is not False
            if unit.residency.users == 0 and not unit.residency.awaits_backward:
                keep = not (over or unit.residency.state is UnitState.GATHERING or unit.reshards_after_forward)
                self._scheduler.reshard(unit, Phase.FORWARD, keep=keep)
                if over:
                    unit.residency.release_secondary(Phase.FORWARD)
        _show_shards(self._units)
        accelerator_for(self._state.device).end_pass()
        self._state.phase = Phase.IDLE
        if raised:
            self._state.disks.forget()  # other ranks may be in another operation
        else:
            self._state.disks.end_pass()

    def _leave(self, unit: Unit) -> None:
        self._scheduler.release(unit)
        complete = len(unit.finished_modules) == len(unit.modules)
        if complete:
            unit.finished_modules.clear()
        for done in ((unit,) if complete else ()) + tuple(unit.borrowed):
            if done.residency.users == 0 and done.reshards_after_forward and not done.residency.awaits_backward:
                if in_backward():
                    self._recomputed.append(done)  # if it is the last of its checkpoint, its backward comes next
                else:
                    self._scheduler.free(done, Phase.FORWARD, self._expected.forward)

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> int:
        """Return the number of the current backward pass. The first call in a pass registers the callback at its end.

        Raises:
            StateError: Gradients of parameters would be computed later, without hooks; or a forward is running.
        """
        if self._state.phase is Phase.BACKWARD and self._callback() is None:
            self._recover()  # an exception ended the earlier backward
        if self._state.phase is not Phase.BACKWARD:
            if self._stack:
                raise _within_forward(self._stack[0][0])
            if in_backward_of_inputs() and any(unit.trainable for unit in self._units):
                raise StateError(
                    f"stage_backward_input was called on {type(self._units[0].module).__name__}, which is sharded. It "
                    "computes gradients of inputs first and gradients of parameters later (stage_backward_weight), "
                    "when they would not be reduced. Zero-bubble schedules call it. Create the stages with "
                    "fullshard.integrations.pipelining.PipelineStage. In a loop without stages, call backward()."
                )
            self._state.begin_backward()
            self._serial += 1
            self._creates_graph = torch.is_grad_enabled()
            self._is_for_inputs = in_pass_for_inputs()
            self._expected.begin_backward()
            callback = self.finish_backward
            on_backward_end(callback)
            self._callback = weakref.ref(callback)
            self._scheduler.order_gathers_after_compute()
        return self._serial

    def before_backward(self, call: ForwardCall) -> None:
        """Unshard the unit of `call` again, and start the gather of the next unit."""
        unit = call.unit
        if self._reductions.incomplete:
            self._reductions.complete_arrived()
        self._expected.arrive_at(call.within)
        self._calls.append(call)
        if self._recomputed:
            self._free_recomputed(unit)
        self._scheduler.hold(unit)
        if unit.settings.unshards_in_backward:
            self._scheduler.unshard(unit, Phase.PRE_BACKWARD)
        if self._creates_graph:
            for held in (unit, *unit.borrowed):
                held.residency.awaits_backward = True
        if self._is_in_pipeline and unit.trainable:
            self._reached = self._reached or unit
        self._prefetch_backward(unit)
        if active.recorder is not None:
            self._note_backward()

    def on_grad(self, unit: Unit, param: ShardedParam) -> None:
        """Record that autograd has accumulated the unsharded gradient of `param`. The last one starts the reduction."""
        if unit.residency.state is not UnitState.UNSHARDED:
            _check_read(unit, param)
        if self._state.phase is not Phase.BACKWARD:
            self.begin_backward()
        if self._reductions.incomplete:
            self._reductions.complete_arrived()
        arrived = unit.gradients.arrived
        arrived[param] = True
        self._has_grads = True
        if len(arrived) == unit.trainable and not unit.settings.reduces_unused:
            self._reductions.start(unit)

    def end_calls_since(self, time: int) -> None:
        """Record that the backward of every call that began after `time` is over."""
        for call in self._calls.copy():
            if call.start > time:
                self.after_backward(call)

    def after_backward(self, call: ForwardCall) -> None:
        """Free the unit of `call` after its backward. Do nothing if this was done before."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._ended.append(call)
        unit = call.unit
        self._scheduler.release(unit)
        reduces_unused = unit.settings.reduces_unused and not self._is_for_inputs
        if unit.residency.users == 0 and reduces_unused:  # every rank gets here, with or without gradients
            self._reductions.start_before_end(unit)
        elif unit.residency.users == 0 and unit.gradients.are_held and self._ends_held_grads(unit):
            self._reductions.start(unit)
        for done in (unit, *unit.borrowed):
            stays = done.residency.awaits_backward or self._state.stays_after_backward(done)
            is_next = len(done.modules) > 1 and _is_next(done, call, [*self._calls, *self._ended])
            if done.residency.users == 0 and not (stays or is_next):
                self._scheduler.free(done, Phase.POST_BACKWARD, self._expected.backward)
        if self._postponed:
            self._scheduler.prefetch(self._postponed, Phase.BACKWARD)
            self._postponed = []
        if active.recorder is not None:
            self._note_backward()

    def _ends_held_grads(self, unit: Unit) -> bool:
        """Return True if the held gradients of `unit` are complete, so they can be reduced before the backward ends."""
        return (
            len(unit.gradients.arrived) > 0
            and not unit.gradients.holds_back
            and not self._expected.awaits_backward_of(unit)
            and _has_ended_all_calls(self._ended, unit)
        )

    def _note_backward(self) -> None:
        """Attribute later events of the trace to the backward of the innermost unit that is executing."""
        innermost = max(self._calls, key=lambda call: call.start, default=None)
        attribute_to(self._units[0] if innermost is None else innermost.unit, Phase.BACKWARD)

    def finish_backward(self) -> None:
        """Finish the backward after its last node: reductions, unused parameters, and units still unsharded."""
        # If only gradients of inputs were computed, as for a penalty, a later backward computes those of parameters.
        # Gradients held back are not reduced before these are added to them, as without sharding.
        self._reductions.finish_all(starts_others=self._has_grads or not self._is_for_inputs)
        self._calls.clear()
        self._ended.clear()
        self._scheduler.forget_deferred_frees()
        self._recomputed.clear()
        for unit in self._units:
            unit.residency.users = 0
            if self._creates_graph and unit.residency.awaits_backward:
                unit.residency.reshard(Phase.POST_BACKWARD, keep=True)  # users may write to shards before that backward
            else:
                self._state.reshard_after_backward(unit)
        self._state.return_to_idle(trained=self._has_grads or not self._is_for_inputs)
        self._expected.end_backward()
        stays = self._creates_graph and any(unit.residency.awaits_backward for unit in self._units)
        self._scheduler.slots.end_backward(self._expected.backward, awaits_more=stays or bool(self._expected.open))
        tallies = self._reductions.take_tallies()
        self._check_whole()
        self._state.check_backward(tallies)

    def _check_whole(self) -> None:
        """Raise if a backward of a pipeline stage computed only the gradients of its inputs.

        Raises:
            StateError: gradients of the parameters would follow later, without the hooks that reduce them.
        """
        missed = None if self._has_grads else self._reached  # a layer may be dropped, but not all of them
        self._reached, self._has_grads = None, False
        if missed is not None:
            raise StateError(
                f"the backward of a pipeline stage reached {missed.name or 'the root'}, which is trained, but not its "
                "parameters: a zero-bubble schedule (such as ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, "
                "ScheduleDualPipeV) computes gradients of inputs first and gradients of parameters later, when they "
                "would not be reduced. Create the stages with fullshard.integrations.pipelining.PipelineStage."
            )

    def _prefetch_forward(self, unit: Unit) -> None:
        ahead = self._expected.to_prefetch(unit, self._expected.forward, unit.settings.next_forward)
        if unit.options.prefetches_forward or unit.settings.next_forward is not None:
            self._scheduler.prefetch(ahead, Phase.FORWARD)
            if self._state.disks.are_in_pass:
                for later in self._expected.to_read_ahead(unit, self._expected.forward, unit.settings.next_forward):
                    later.shards.read_ahead()

    def _prefetch_backward(self, unit: Unit) -> None:
        ahead = self._expected.to_prefetch(unit, self._expected.backward, unit.settings.next_backward)
        for later in ahead:
            if not later.settings.unshards_in_backward:
                ahead = [other for other in ahead if other.settings.unshards_in_backward]
                break
        if (
            self._serial == 1
            and self._state.streams.gather.is_stream
            and any(module._backward_hooks for module in unit.modules)
        ):
            ahead = []  # the first backward shows which shards hooks write to, see `UnshardScheduler.prefetch`
        if unit.options.backward_prefetch == "pre":
            self._scheduler.prefetch(ahead, Phase.BACKWARD)
            if self._state.disks.are_in_pass:
                for later in self._expected.to_read_ahead(unit, self._expected.backward, unit.settings.next_backward):
                    later.shards.read_ahead()
        self._postponed = ahead if unit.options.backward_prefetch == "post" else []

    def _free_recomputed(self, needed: Unit) -> None:
        """Free units that a checkpoint has recomputed, except for `needed`, which is needed immediately."""
        for unit in self._recomputed:
            if unit.residency.users == 0 and unit is not needed and not unit.residency.awaits_backward:
                self._scheduler.reshard(unit, Phase.FORWARD)
        self._recomputed.clear()


def _check_read(unit: Unit, param: ShardedParam) -> None:
    is_observed = unit.settings.unshards_in_backward and not unit.residency.is_used_without_forward
    if is_observed and not unit.has_valid_values:
        raise read_while_sharded(param.fqn, unit.name)


def _within_forward(outer: Unit) -> StateError:
    return StateError(
        f"a backward through a unit began within the forward of {outer.name or 'the root'}, as by torch.autograd.grad. "
        "Its end would free units that the forward still needs. Use torch.func.grad or torch.func.vjp, or do not make "
        "units of the modules that are differentiated there: they can be part of the unit whose forward is running."
    )


def _leave_transformed(stack: list[Unit], unit: Unit, units: Sequence[Unit]) -> None:
    """Remove `unit` from the `stack` of transformed forwards. After the outermost one, modules show shards again."""
    while stack and stack.pop() is not unit:
        pass  # an inner forward raised an exception
    if not stack:
        _show_shards(units)


def _show_shards(units: Sequence[Unit]) -> None:
    """Show modules the sharded parameters of those `units` that are kept for the next backward, but not in use."""
    for unit in units:
        residency = unit.residency
        if residency.awaits_backward and residency.users == 0 and not residency.is_unsharded_manually:
            residency.reshard(Phase.FORWARD, keep=True)


def _has_ended_all_calls(ended: Sequence[ForwardCall], unit: Unit) -> bool:
    """Return True if this backward has ended every call that needs `unit`, in all forwards that it has reached."""
    ended = [call for call in ended if call.within is not None]  # recomputed calls may not be the last ones
    forwards = {id(call.within): call.within for call in ended}.values()
    needed_by = [left for forward in forwards if forward is not None for left in forward.left if left.uses(unit)]
    return bool(ended) and len(needed_by) <= sum(call.unit.uses(unit) for call in ended)


def _is_next(unit: Unit, ended: ForwardCall, reached: Sequence[ForwardCall]) -> bool:
    """Return True if a backward that needs `unit` is expected next, after that of the call `ended`.

    The backwards of calls in `reached` have begun or ended.
    """
    if ended.within is None:
        return False
    starts = {call.start for call in reached}
    following = next((awaited for start, awaited in reversed(ended.within.awaited) if start not in starts), None)
    return following is not None and following.uses(unit)
