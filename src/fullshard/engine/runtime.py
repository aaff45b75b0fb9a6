"""When units are gathered, freed and reduced: the phases of one root, driven by hooks before and after forward and
backward.

[Note: one microbatch, in order]
forward    a unit's pre-forward hook waits for its gather and starts the next one; its forward hook registers hooks on
           the outputs that need a gradient, and reshards if the strategy says so.
backward   the first gradient that reaches an output of a unit gathers it again and starts the gather of the one before
           it. Autograd adds to the whole gradients; the last of them starts the reduction of the unit. When the
           gradients of the unit's inputs are known, nothing of its backward can follow, and it is resharded.
end        autograd calls back after its last node. What never got a gradient, or never told that it was over, is
           settled then, in a fixed order.

When the backward of a unit is over, `call.py` knows.

[Note: forwards that wait for their backward]
A loss that is taken in chunks calls the head many times outside of the model's forward, each time with a backward of
its own; the backward of the model comes last. So a backward that comes to some outermost forwards ends nothing of the
others: what they keep for it stays, and what is expected next is what they left. A forward stops waiting when a
backward comes to any part of it; or when that was passed by: when, after another backward, the root's forward or one
of the same unit begins.

[Note: steps that are finalized by hand]
A stage of a pipeline has several microbatches between forward and backward, in any order, and may take a backward in
two parts, of which the second comes to no hook. So such a step asks nothing of hooks. Its units stay unsharded from
`unshard_all` (or the first forward) to `reshard_all`; a backward that comes to one that is not gathers it. Autograd and
the schedule add to whole gradients as they like, and `finalize_backward` reduces what it finds there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard._compat import in_backward, in_pipeline_stage, on_backward_end
from fullshard.comm.mesh import broadcast_from_first
from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.device.lanes import Lanes, Mark
from fullshard.engine.activations import Activations
from fullshard.engine.call import ForwardCall, OpenForward
from fullshard.engine.comparison import are_alike, check_ranks_agree
from fullshard.engine.finite import Tally, raise_on_every_rank, tally
from fullshard.engine.homes import homes_of
from fullshard.engine.nested import map_tensors, tensors_in
from fullshard.engine.order import OrderTracker
from fullshard.engine.reduction import UnitReduction
from fullshard.engine.registry import buffers_of, name_units, process_groups_along
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.slot_sharing import SlotSharing
from fullshard.engine.unit import Form, Unit
from fullshard.errors import RankMismatchError, StateError
from fullshard.liveness.watchdog import watch
from fullshard.liveness.whereabouts import here
from fullshard.policy.precision import is_castable
from fullshard.policy.switches import switches
from fullshard.tape.context import drop_if_stale
from fullshard.tape.recorder import Origin, Phase, active_recorder, note_origin

__all__ = ["Runtime", "cast_outputs", "check_not_summoned", "runtime_or_none"]

_log = logging.getLogger(__name__)

_MOST_OPEN = 256  # forwards that a backward may still come to: enough for any loss in chunks
_MOST_ORDERS = 16  # of backwards that are remembered
_LAST_COMPARISON = 64  # the step after which what no unit has is taken for looked after


class Runtime:
    """The units below one root, and where they are in a microbatch.

    Args:
        root: the outermost sharded module.
        units: its units, in the order of `root.modules()`.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.phase = Phase.IDLE
        self.serial = 0
        self._microbatch = 0  # of the step, from 1 on
        self.finalizes_by_hand = False  # see [Note: steps that are finalized by hand]
        self._is_open = False  # such a step was begun, and not finalized
        self._has_forward = False  # in the step that is open
        self._holds_at_end = False  # of the backward that is executing, in such a step
        self.outside: list[nn.Parameter] = []  # trained beside the units', and not compared between ranks yet
        self._creates_graph = False  # the backward that is executing: another will go through it
        self._buffers_differ = True  # between ranks: each has seen other data since they were broadcast
        self._is_in_pipeline = False  # the last forward was: a stage may take its backward in two parts
        self._step = 0
        self.after_optimizer: Mark | None = None  # the next forward waits for it
        self._stack: list[tuple[Unit, ForwardCall | None]] = []
        self._calls: list[ForwardCall] = []  # those in whose backward we are
        self._late: list[tuple[Unit, Phase]] = []  # to be freed once the next gather is under way
        self._recomputed: list[Unit] = []  # by a checkpoint's forward within backward, and unsharded still
        self._orders: dict[int, tuple[int, ...]] = {}  # the forward order by the number of the outermost unit
        self.forward_order: Sequence[int] = ()  # the numbers of units, as the last forward came to them
        self.backward_order: tuple[int, ...] = ()
        self._backward_orders: dict[tuple[int, ...], tuple[int, ...]] = {}  # by what open forwards had left
        self._left: tuple[int, ...] = ()  # what open forwards had left before the backward that is executing
        self._forward_tracker = OrderTracker()
        self._backward_tracker = OrderTracker()
        self._open: list[OpenForward] = []  # oldest first
        self._reductions: dict[Unit, UnitReduction] = {}  # under way, oldest first
        self._reached: Unit | None = None  # in this backward of a pipeline, the first with trained parameters
        self._has_grads = False  # in this backward, of any unit's parameters
        self._reduced: set[Unit] = set()  # in this backward, of those that reduce what is unused here, too
        self._tallies: list[Tally] = []
        self._clock = 0
        self._postponed: list[Unit] = []
        self._slots = SlotSharing(self.units)
        name_units(root, units)
        drop_if_stale()  # what belongs to an earlier default process group
        watch()
        check_ranks_agree(units)
        data_ranks = units[0].axes.ranks
        for unit, home in homes_of(units).items():
            unit.rest(home)
        for number, unit in enumerate(units):
            unit.state.number, unit.state.runtime = number, self
            unit.state.is_root = root in unit.modules
            unit.state.data_ranks = data_ranks
        self.activations = Activations(units)

    @property
    def _device(self) -> torch.device:
        """Where compute runs: `Module.to` may have changed it."""
        return self.units[0].device

    @property
    def _lanes(self) -> Lanes:
        return self.units[0].lanes

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Have `unit` unsharded. Its inputs as its forward is to see them."""
        check_not_summoned(unit)
        recomputing = in_backward()
        if self.finalizes_by_hand:
            return self._before_forward_by_hand(unit, args, kwargs, begins=not self._stack and not recomputing)
        if not self._stack and not recomputing:
            self._begin_forward(unit)
        args, kwargs = self.prepare_inputs(unit, args, kwargs)
        within = None if recomputing else self._open[-1]
        call = ForwardCall(self, unit, self._tick(), within) if torch.is_grad_enabled() else None
        self._stack.append((unit, call))
        if recomputing and unit.state.users == 0:
            self._free_recomputed(unit)
        self._hold(unit)
        self._unshard(unit, Phase.FORWARD)
        if not recomputing:
            self._prefetch_forward(unit)
        elif self.phase is Phase.BACKWARD:
            self._prefetch_backward(unit)
        if call is not None:
            args, kwargs = call.watch_inputs((args, kwargs))
        _note(unit, Phase.FORWARD)
        self.activations.enter(unit)
        return args, kwargs

    def before_transformed_forward(self, unit: Unit) -> None:
        """Have `unit` unsharded until the next backward is over, since transforms of functions (`torch.func`) tell no
        other end. Call it outside of them.
        """
        check_not_summoned(unit)
        if not self._stack and self.phase is not Phase.IDLE and not in_backward():
            self.recover()
        self._show_compute_s_work()
        for needed in (unit, *unit.borrowed):
            needed.notice_step()
            needed.state.awaits_backward = needed.state.awaits_backward or torch.is_grad_enabled()
        self._unshard(unit, Phase.FORWARD)

    def after_transformed_forward(self, unit: Unit) -> None:
        """Free `unit` if no backward can need it. Call it outside of transforms."""
        for done in (unit, *unit.borrowed):
            if done.state.users == 0 and not done.state.awaits_backward:
                self._reshard(done, Phase.FORWARD)

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Free `unit` if its strategy says so. Its output as the caller is to see it."""
        self.activations.leave(unit)
        if unit.is_broken or all(entered is not unit for entered, _ in self._stack):
            return output  # it could not be unsharded
        while self._stack[-1][0] is not unit:
            self._leave(self._stack[-1][0])  # an exception passed through a forward within
            self._stack.pop()
        call = self._stack.pop()[1]
        output = cast_outputs(unit, output)
        if self.finalizes_by_hand:
            self._watch_outputs_by_hand(unit, output)
            return output
        if call is not None:
            call.watch_outputs(output, self._tick())
        unit.state.finished_modules.add(id(module))
        if call is not None and call.within is not None:
            call.within.left.append(unit)
        self._leave(unit)
        if not self._stack and not in_backward():
            self._end_forward(unit)
        if self._stack:
            _note(self._stack[-1][0], Phase.FORWARD)
        else:
            _note(self.units[0], Phase.BACKWARD if in_backward() else Phase.FORWARD)
        return output

    def _begin_forward(self, top: Unit) -> None:
        if self.phase is not Phase.IDLE:
            self.recover()
        self.phase = Phase.FORWARD
        self._is_in_pipeline = in_pipeline_stage()
        self._show_compute_s_work()
        self._forward_tracker = OrderTracker(self._orders.get(top.state.number, ()))
        if is_capturing(self._device):
            for unit in [unit for unit in self.units if unit.state.users == 0]:
                self._reshard(unit, Phase.IDLE)  # to be filled within the graph, in memory of the graph's
        self._close_passed_by(top)
        self._begin_microbatch()
        self._open = [*self._open[1 - _MOST_OPEN :], OpenForward(top, self.serial)]

    def _close_passed_by(self, top: Unit) -> None:
        """Expect no backward any more of forwards that one has passed by, now that `top` begins another."""

        def waits(forward: OpenForward) -> bool:
            return forward.serial == self.serial or not (top.state.is_root or top is forward.top)

        self._open = [forward for forward in self._open if waits(forward)]

    def _begin_microbatch(self) -> None:
        self.activations.begin_forward()
        for unit in self.units:
            unit.notice_step()
        if torch.is_grad_enabled() and not self._open:
            self._count_microbatch()
        if self._buffers_differ:
            self._buffers_differ = False
            for unit in self.units:
                if unit.options.broadcasts_buffers and unit.axes.world > 1:
                    _broadcast_buffers(unit)

    def _count_microbatch(self) -> None:
        """A microbatch is a step's first one unless gradients of an earlier one still wait for the optimizer."""
        self._set_microbatch(self._microbatch + 1 if any(unit.has_grads_waiting for unit in self.units) else 1)
        self._step += self._microbatch == 1
        here.step = self._step
        is_due = self._microbatch == 1 and self._step.bit_count() == 1  # again, since rates may start at 0
        if self.outside and is_due and not is_capturing(self._device):
            self._compare_outside()

    def _set_microbatch(self, number: int) -> None:
        self._microbatch = number
        for unit in self.units:
            unit.microbatch = number

    def _compare_outside(self) -> None:
        unit, params = self.units[0], self.outside
        if not are_alike(params, unit):
            self.outside = []
            if unit.axes.shard_rank == 0:
                _log.warning(
                    "%d parameters that no unit has, the first of shape %s, are trained by each rank for itself: after "
                    "%d steps ranks have different values. Call fully_shard on the outermost module too, which takes "
                    "what is left; or average their gradients yourself, and list them in ignored_params.",
                    *(len(params), tuple(params[0].shape), self._step - 1),
                )
        elif self._step >= _LAST_COMPARISON:
            self.outside = []

    def _end_forward(self, top: Unit) -> None:
        if any(unit.is_on_cpu for unit in self.units):  # the user may write to shards next
            self._lanes.host.wait(self._lanes.gather.mark())
        if not self._open[-1].left:  # none of it was to be differentiated
            self._open.pop()
        self._orders[top.state.number] = tuple(self._forward_tracker.seen)
        self.forward_order = self._forward_tracker.seen
        self._late.clear()
        for unit in self.units:
            unit.state.finished_modules.clear()
            over = not torch.is_grad_enabled() and unit.state.reshard_after_forward is not False
            if unit.state.users == 0 and not unit.state.awaits_backward:
                keep = not (over or unit.form is Form.GATHERING or unit.reshards_after_forward)
                self._reshard(unit, Phase.FORWARD, keep=keep)
                if over:
                    unit.release_secondary(Phase.FORWARD)
        accelerator_for(self._device).end_pass()
        self.phase = Phase.IDLE

    def _leave(self, unit: Unit) -> None:
        self._release(unit)
        complete = len(unit.state.finished_modules) == len(unit.modules)
        if complete:
            unit.state.finished_modules.clear()
        for done in ((unit,) if complete else ()) + tuple(unit.borrowed):
            if done.state.users == 0 and done.reshards_after_forward and not done.state.awaits_backward:
                if in_backward():
                    self._recomputed.append(done)  # if it is the last of its checkpoint, its backward comes next
                else:
                    self._free(done, Phase.FORWARD)

    def prepare_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs of a forward of `unit` on its device, and in the dtype that it asks for."""
        policy = unit.options.precision
        outermost = not self._stack
        casts = policy.cast_forward_inputs or (outermost and unit.options.casts_inputs_at_root)
        dtype = policy.param_dtype if casts else None
        moves = outermost and accelerator_for(self._device).has_lanes
        if dtype is None and not moves:
            return args, kwargs

        def prepare(tensor: Tensor) -> Tensor:
            if moves:
                tensor = tensor.to(self._device, non_blocking=True)
            return tensor.to(dtype) if dtype is not None and is_castable(tensor.dtype) else tensor

        prepared: tuple[Any, Any] = map_tensors(prepare, (args, kwargs))
        return prepared

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> int:
        """The number of the backward that is executing; the first call in one arranges for its end."""
        if self.phase is not Phase.BACKWARD:
            self.phase = Phase.BACKWARD
            self.serial += 1
            self._creates_graph = torch.is_grad_enabled()
            self._left = tuple(unit.state.number for forward in self._open for unit in forward.left)
            self._backward_tracker = OrderTracker(self._backward_orders.get(self._left, self._left[::-1]))
            on_backward_end(self.finish_backward)
            self._show_compute_s_work()
        return self.serial

    def before_backward(self, call: ForwardCall) -> None:
        """Have the unit of `call` unsharded again, and start the gather of the one that comes next."""
        unit = call.unit
        self._complete_arrived()
        if call.within in self._open:
            self._open.remove(call.within)
        self._calls.append(call)
        self._free_recomputed(unit)
        self._hold(unit)
        if unit.state.unshards_in_backward:
            self._unshard(unit, Phase.PRE_BACKWARD)
        if self._creates_graph:
            for held in (unit, *unit.borrowed):
                held.state.awaits_backward = True
        if self._is_in_pipeline and unit.trainable:
            self._reached = self._reached or unit
        self._prefetch_backward(unit)
        self._note_backward()

    def on_grad(self, unit: Unit, param: ShardedParam) -> None:
        """Note that autograd has added to `param`'s whole gradient; the last one starts the unit's reduction."""
        if self.finalizes_by_hand:
            if not self._holds_at_end:
                self._holds_at_end = True
                on_backward_end(self.hold_grads)
            return
        self.begin_backward()
        self._complete_arrived()
        unit.state.arrived_grads.add(id(param))
        self._has_grads = True
        if len(unit.state.arrived_grads) == unit.trainable and not unit.state.reduces_unused:
            self._start_reduce(unit)

    def end_calls_since(self, time: int) -> None:
        """Note that the backward of every call that began after `time` is over."""
        for call in [call for call in self._calls if call.start > time]:
            self.after_backward(call)

    def after_backward(self, call: ForwardCall) -> None:
        """Free the unit of `call`, whose backward is over. Nothing happens if that was noted already."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        unit = call.unit
        self._release(unit)
        if unit.state.users == 0 and unit.state.reduces_unused:  # the one moment that comes on every rank
            self._reduced.add(unit)
            self._start_reduce(unit)
        elif unit.state.users == 0 and self._ends_held_grads(unit):
            self._start_reduce(unit)
        for done in (unit, *unit.borrowed):
            if done.state.users == 0 and not (done.state.awaits_backward or self._stays_after_backward(done)):
                self._free(done, Phase.POST_BACKWARD)
        self._prefetch(self._postponed, Phase.BACKWARD)
        self._postponed = []
        self._note_backward()

    def _ends_held_grads(self, unit: Unit) -> bool:
        """True if what was held back of `unit` need not wait for the end of the backward: these gradients were the
        last, though some came in earlier backwards only.
        """
        some = unit.holds_grads and len(unit.state.arrived_grads) > 0
        return some and not unit.holds_grads_back and not self._is_awaited(unit)

    def _note_backward(self) -> None:
        """Have what follows recorded as the backward of the innermost unit that is in its own."""
        if active_recorder() is not None:
            innermost = max(self._calls, key=lambda call: call.start, default=None)
            _note(self.units[0] if innermost is None else innermost.unit, Phase.BACKWARD)

    def finish_backward(self) -> None:
        """Settle what is left when autograd has run its last node: reductions, unused parameters, unsharded units."""
        self._reduce_rest()
        self._calls.clear()
        self._late.clear()
        self._recomputed.clear()
        for unit in self.units:
            unit.state.users = 0
            if not (self._creates_graph and unit.state.awaits_backward):
                self._reshard_after_backward(unit)
        self._end_backward()
        self.backward_order = tuple(self._backward_tracker.seen)
        if self._left not in self._backward_orders and len(self._backward_orders) == _MOST_ORDERS:
            del self._backward_orders[next(iter(self._backward_orders))]
        self._backward_orders[self._left] = self.backward_order
        if not self._open:
            self._slots.end_microbatch(is_typical=self._backward_tracker.agrees)
        tallies = self._take_tallies()
        self._check_whole()
        self._check_finite(tallies)

    def _reduce_rest(self) -> None:
        """Have the gradients of all units ready for the optimizer."""
        for unit in reversed(self.units):
            if unit not in self._reduced:
                self._start_reduce(unit)
        self._finish_reductions()
        self._reduced.clear()

    def _reshard_after_backward(self, unit: Unit) -> None:
        unneeded = unit.form is Form.GATHERING and not self._is_kept_for_backward(unit)
        self._reshard(unit, Phase.POST_BACKWARD, keep=self._stays_after_backward(unit) and not unneeded)

    def _stays_after_backward(self, unit: Unit) -> bool:
        return not unit.state.reshard_after_backward or self._is_kept_for_backward(unit)

    def _is_kept_for_backward(self, unit: Unit) -> bool:
        """True if `unit` is not to be freed before a backward that has still to come."""
        return not unit.reshards_after_forward and self._is_awaited(unit)

    def _is_awaited(self, unit: Unit) -> bool:
        return any(unit is left or unit in left.borrowed for forward in self._open for left in forward.left)

    def _end_backward(self) -> None:
        if any(unit.is_on_cpu for unit in self.units):  # the optimizer reads their gradients next
            self._lanes.host.wait(self._lanes.offload.mark())
        accelerator_for(self._device).end_pass()
        self.phase = Phase.IDLE
        note_origin(Origin("", Phase.IDLE))
        self._buffers_differ = self._buffers_differ or any(unit.state.syncs_gradients for unit in self.units)

    def _take_tallies(self) -> list[Tally]:
        tallies, self._tallies = self._tallies, []
        return tallies

    def _check_finite(self, tallies: list[Tally]) -> None:
        if switches.checks_finite:
            raise_on_every_rank(tallies, process_groups_along(self.units), self._device)

    def _check_whole(self) -> None:
        """Refuse a backward of a pipeline's stage that went for the gradients of its inputs alone.

        Raises:
            StateError: those of the parameters would be taken later, past the hooks that have them reduced.
        """
        missed = None if self._has_grads else self._reached  # a layer may be dropped, but not all of them
        self._reached, self._has_grads = None, False
        if missed is not None:
            raise StateError(
                f"the backward of a pipeline's stage came to {missed.name or 'the root'}, which is trained, and not to "
                "its parameters: a zero-bubble schedule (such as ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, "
                "ScheduleDualPipeV) takes gradients of inputs first, and those of parameters later, when they would "
                "not be reduced. Make the stages by fullshard.integrations.pipelining.PipelineStage."
            )

    def _start_reduce(self, unit: Unit) -> None:
        unit.state.arrived_grads.clear()
        if switches.checks_finite:
            self._tallies += tally(unit)
        if unit.holds_grads_back:
            unit.hold_grads()
        elif unit.has_whole_grads or unit.awaits_second_sum or (unit.state.reduces_unused and unit.is_trained):
            # One at a time: gradients of more than two units at once would be memory without a bound.
            self._finish_reductions(all_but=0 if unit in self._reductions else 1)
            self._reductions[unit] = unit.start_reduce(Phase.POST_BACKWARD)

    def _complete_arrived(self) -> None:
        """Free whole gradients as soon as other ranks' have come.

        Ranks do so at different moments, so the optimizer's gradients stay as they are: if a backward fails, all ranks
        must have the same.
        """
        for reduction in self._reductions.values():
            if not reduction.is_complete:
                reduction.complete_if_come()

    def _finish_reductions(self, *, all_but: int = 0) -> None:
        """Have the optimizer's gradients ready. `all_but` so many of those that have only second sums to wait for."""
        for unit, reduction in list(self._reductions.items()):
            if len(self._reductions) > all_but or not reduction.is_late:
                del self._reductions[unit]
                reduction.finish()
            else:
                reduction.free_whole_grads()

    @property
    def is_interrupted(self) -> bool:
        """True if a forward or backward was begun, and was left by an exception."""
        return self.phase is not Phase.IDLE and not self._stack and not in_backward()

    @property
    def is_running(self) -> bool:
        """True within a forward or backward. (One that ranks came to differently does not end by itself.)"""
        return in_backward() or (bool(self._stack) and not any(unit.is_broken for unit in self.units))

    def recover(self) -> None:
        """Be idle again after an exception left a forward or a backward unfinished. Its gradients are dropped."""
        self.activations.recover()
        self._stack.clear()
        self._calls.clear()
        self._late.clear()
        self._recomputed.clear()
        for reduction in self._reductions.values():
            reduction.abandon()
        self._reductions.clear()
        self._reduced.clear()
        self._is_open = self._has_forward = self._holds_at_end = False
        self._reached, self._has_grads = None, False
        self._tallies.clear()
        self._open = []
        for unit in self.units:
            unit.state.users = 0
            unit.state.arrived_grads.clear()
            unit.state.finished_modules.clear()
            if self.phase is Phase.BACKWARD:
                unit.drop_grads()
            self._reshard(unit, Phase.IDLE)
        self.phase = Phase.IDLE

    def forget(self) -> None:
        """Be idle, and without any gradients: what was computed so far was a trial."""
        self.recover()
        for unit in self.units:
            unit.abandon_grads()

    def abandon(self) -> None:
        """Be as if the step that is under way had never begun. A collective: every rank calls it.

        Messages under way arrive first, wherever all ranks had come to the same ones. Where they had not, all of them
        learn of it now at the latest, and begin anew.
        """
        collectives = dict.fromkeys(it for unit in self.units for of in unit.collectives.values() for it in of.each)
        with suppress(RankMismatchError):
            self.recover()
        for it in collectives:
            if it.broken is None:
                with suppress(RankMismatchError):
                    it.meet("abandon_step", origin=Origin("", Phase.IDLE))
        broken = [it for it in collectives if it.broken is not None]
        if broken:
            self._reductions.clear()
            for unit in self.units:
                unit.forget_gather()
            for it in broken:
                it.renew()
            self.recover()
        for unit in self.units:
            unit.abandon_grads()
        self._microbatch = 0
        self._buffers_differ = True

    # -- steps that are finalized by hand -----------------------------------------------------------------------------

    def finalize_by_hand(self, enabled: bool, *, had_backward: bool = True) -> None:
        """Ask nothing of hooks from now on, see [Note: steps that are finalized by hand]; or leave it to them again.

        What a step that was not finalized has left is dropped, if it `had_backward`.
        """
        if self._is_open:
            self.phase = Phase.BACKWARD if had_backward else Phase.FORWARD
        if self.is_interrupted:
            self.recover()
        self.finalizes_by_hand = enabled

    def unshard_all(self) -> None:
        """Begin to gather all units for forwards and backwards that come; the first call begins the step."""
        if not self._is_open:
            self._is_open = True
            self._show_compute_s_work()
            self._begin_microbatch()
        for unit in self.units:
            if unit.form is Form.SHARDED:
                self.start_unshard(unit, Phase.FORWARD)
                unit.state.is_unsharded_by_hand = True  # no other takes its memory

    def wait_for_all(self) -> None:
        """Have all units unsharded: the modules show whole parameters."""
        self.unshard_all()
        for unit in self.units:
            unit.wait_unshard()

    def reshard_all(self) -> None:
        """Free what the strategy, or the user, does not keep from forward to backward. The step goes on."""
        for unit in self.units if self._is_open else ():
            if unit.frees_in_step:
                self._reshard(unit, Phase.FORWARD)

    def _before_forward_by_hand(self, unit: Unit, args: Any, kwargs: Any, *, begins: bool) -> tuple[Any, Any]:
        if begins:
            self.unshard_all()
            self.activations.begin_forward()
            if self._has_forward and torch.is_grad_enabled():
                self._set_microbatch(self._microbatch + 1)
            self._has_forward = True
        prepared = self.prepare_inputs(unit, args, kwargs)
        self._stack.append((unit, None))
        self._unshard(unit, Phase.FORWARD)
        _note(unit, Phase.FORWARD)
        self.activations.enter(unit)
        return prepared

    def _watch_outputs_by_hand(self, unit: Unit, output: Any) -> None:
        def before_backward(_: Tensor) -> None:
            self._unshard(unit, Phase.PRE_BACKWARD)
            _note(unit, Phase.BACKWARD)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)

    def hold_grads(self) -> None:
        """Have what a microbatch has added to whole gradients in the dtype that they are summed in."""
        self._holds_at_end = False
        for unit in self.units:
            unit.hold_grads()

    def finalize_backward(self) -> None:
        """Reduce whole gradients, wherever they came from, and reshard: the step's backwards are over.

        Raises:
            StateError: it is not to be done by hand.
        """
        if not self.finalizes_by_hand:
            raise StateError(
                f"finalize_backward of {type(self.units[0].module).__name__}: every backward ends with its gradients "
                "reduced. Call set_manual_backward_finalization(True) before the step's first forward."
            )
        self._reduce_rest()
        for unit in self.units:
            self._reshard_after_backward(unit)
        self._end_backward()
        self._is_open = self._has_forward = False
        self._check_finite(self._take_tallies())

    # -- unshard and reshard ------------------------------------------------------------------------------------------

    def _hold(self, unit: Unit) -> None:
        for held in (unit, *unit.borrowed):
            held.state.users += 1

    def _release(self, unit: Unit) -> None:
        for held in (unit, *unit.borrowed):
            held.state.users = max(0, held.state.users - 1)

    def _unshard(self, unit: Unit, phase: Phase) -> None:
        needed = (unit, *unit.borrowed)
        for item in needed:
            self.start_unshard(item, phase)
        for item in needed:
            item.wait_unshard()

    def start_unshard(self, unit: Unit, phase: Phase) -> None:
        """Begin to gather `unit`, unless it is unsharded or on its way."""
        if unit.form is not Form.SHARDED:
            return
        check_not_summoned(unit)
        if self._awaits_hooks(unit):
            self._finish_reductions()
        if phase is Phase.IDLE:
            unit.notice_step()
        if phase is Phase.IDLE or (self._lanes.gather.is_stream and not unit.shows_its_shards):
            self._show_compute_s_work()
        if not unit.can_occupy_slot and not unit.keeps_unsharded:
            self._make_room(unit)
        unit.start_unshard(phase)
        self._slots.note_unsharded(unit, self._tick())
        self._free_late()

    def _make_room(self, unit: Unit) -> None:
        """Let `unit` have memory, though the unit that it takes turns with is unsharded."""
        other = next((other for other in self.units if other is unit.slot.occupant), None)
        held = other is None or other.state.is_unsharded_by_hand or other.state.awaits_backward
        if other is not None and other.state.users == 0 and not held:
            self._reshard(other, Phase.IDLE)  # prefetched, or kept for later: it can be gathered again
        if not unit.can_occupy_slot:
            self._slots.give_own_memory(unit)

    def _reshard(self, unit: Unit, phase: Phase, *, keep: bool = False) -> None:
        unit.state.is_unsharded_by_hand = unit.state.awaits_backward = False
        unit.reshard(phase, keep=keep)
        if not keep:
            self._slots.note_freed(unit, self._tick())

    def _free(self, unit: Unit, phase: Phase) -> None:
        """Reshard `unit`, which nobody needs; and free it now, if the gather of the next one began before, or later.

        A gather waits until compute has done with all that was freed before it. So where it is not known which unit
        comes next, this one is freed after that one's gather has begun, which has the time that this one computes.
        """
        is_late = self._lanes.gather.is_stream and not self._is_next_under_way(phase)
        self._reshard(unit, phase, keep=is_late)
        if is_late:
            self._late.append((unit, phase))

    def _is_next_under_way(self, phase: Phase) -> bool:
        """True if the unit that comes next is unsharded or on its way, or there is none."""
        order = self._forward_tracker if phase is Phase.FORWARD else self._backward_tracker
        coming = order.following(1)
        return self.units[coming[0]].form is not Form.SHARDED if coming else order.is_at_end

    def _free_late(self) -> None:
        late, self._late = self._late, []
        for unit, phase in late:
            if unit.form is Form.SHARDED:
                self._reshard(unit, phase)

    def _show_compute_s_work(self) -> None:
        """Have gathers from now on come behind all that compute has been given: shards may be others since."""
        self._lanes.compute.wait(self.after_optimizer)
        self.after_optimizer = None
        if self._lanes.gather.is_stream:
            self._lanes.gather.wait(self._lanes.compute.mark())
            for unit in self.units:
                unit.note_shown_shards()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _prefetch_forward(self, unit: Unit) -> None:
        ahead = self._ahead(unit, self._forward_tracker, unit.state.next_forward)
        if unit.options.prefetches_forward or unit.state.next_forward is not None:
            self._prefetch(ahead, Phase.FORWARD)

    def _prefetch_backward(self, unit: Unit) -> None:
        ahead = [
            it
            for it in self._ahead(unit, self._backward_tracker, unit.state.next_backward)
            if it.state.unshards_in_backward
        ]
        if unit.options.backward_prefetch == "pre":
            self._prefetch(ahead, Phase.BACKWARD)
        self._postponed = ahead if unit.options.backward_prefetch == "post" else []

    def _free_recomputed(self, needed: Unit) -> None:
        """Free what a checkpoint computed again and does not need at once, which `needed` is."""
        for unit in self._recomputed:
            if unit.state.users == 0 and unit is not needed and not unit.state.awaits_backward:
                self._reshard(unit, Phase.FORWARD)
        self._recomputed.clear()

    def _ahead(self, unit: Unit, order: OrderTracker, chosen: list[Unit] | None) -> list[Unit]:
        order.record(unit.state.number)
        if chosen is not None:
            return chosen
        return [self.units[number] for number in order.following(unit.options.prefetch_depth)]

    def _prefetch(self, units: Iterable[Unit], phase: Phase) -> None:
        for unit in units:
            may_move = unit.can_occupy_slot or unit.keeps_unsharded
            if unit.form is Form.SHARDED and may_move and not self._awaits_hooks(unit):
                self.start_unshard(unit, phase)

    def _awaits_hooks(self, unit: Unit) -> bool:
        """True if gradients of an earlier use are under way, to hooks that may step with them before this use."""
        return unit in self._reductions and self._reductions[unit].has_hooks


def _note(unit: Unit, phase: Phase) -> None:
    """Have what follows recorded as on behalf of `unit`."""
    if active_recorder() is not None:
        note_origin(unit.origin(phase))


def cast_outputs(unit: Unit, output: Any) -> Any:
    """The output of `unit` in the dtype that it is asked for."""
    dtype = unit.options.precision.output_dtype
    if dtype is None:
        return output
    return map_tensors(lambda tensor: tensor.to(dtype) if is_castable(tensor.dtype) else tensor, output)


def _broadcast_buffers(unit: Unit) -> None:
    """Let every rank have the first one's buffers: one message for those of a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers_of(unit.modules):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    flats = [torch.cat([buffer.detach().reshape(-1) for buffer in same]) for same in by_dtype.values()]
    broadcast_from_first(flats, unit.axes, Phase.FORWARD)
    for flat, same in zip(flats, by_dtype.values(), strict=True):
        for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
            buffer.detach().copy_(values.view(buffer.shape))


def runtime_or_none(unit: Unit) -> Runtime | None:
    """The runtime that drives `unit`; None before the first forward of its root."""
    return cast("Runtime | None", unit.state.runtime)


def check_not_summoned(unit: Unit) -> None:
    """Raise if the unit's parameters are in the user's hands.

    Raises:
        StateError: they are.
    """
    if unit.state.is_summoned:
        raise StateError(
            f"{unit.name or 'the root'} is needed within summon_full_params: its parameters are in the user's "
            "hands, and changes to them are not in place yet. Leave the context first."
        )
