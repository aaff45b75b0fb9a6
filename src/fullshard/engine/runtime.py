"""The phases of one root, driven by hooks of forward and backward: when units are gathered, freed and reduced.

[Note: one microbatch, in order]
forward    a unit's pre-forward hook waits for its gather and starts the next one; its forward hook registers hooks on
           the outputs that need a gradient, and reshards if the strategy says so.
backward   the first gradient that reaches an output of a unit gathers it again and starts the gather of the one before
           it. Autograd adds to the whole gradients; the last of them starts the reduction of the unit. When the
           gradients of the unit's inputs are known, nothing of its backward can follow, and it is resharded.
end        autograd calls back after its last node. Units without gradients, or whose end was not noticed, are settled
           then, in a fixed order.

`call.py` detects when the backward of a unit is over. `expected.py` predicts the next units.

[Note: steps that are finalized manually]
A pipeline stage has several microbatches between forward and backward, in any order. It may run a backward in two
parts, and the second part calls no hook. So such a step does not depend on hooks. Its units stay unsharded from
`unshard_all` (or the first forward) to `reshard_all`. A backward that reaches a sharded unit gathers it. Autograd and
the schedule add to whole gradients in any order, and `finalize_backward` reduces them.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard._compat import in_backward, in_backward_of_inputs, in_pipeline_stage, on_backward_end
from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.device.streams import Streams
from fullshard.engine.activations import Activations
from fullshard.engine.at_rest import read_while_sharded
from fullshard.engine.call import ForwardCall
from fullshard.engine.comparison import check_ranks_agree
from fullshard.engine.disks import Disks
from fullshard.engine.expected import Expected
from fullshard.engine.managed import number_parameters
from fullshard.engine.microbatches import Microbatches
from fullshard.engine.nested import keepers_among, map_tensors, tensors_in
from fullshard.engine.placements import placements_of
from fullshard.engine.reduction_queue import ReductionQueue
from fullshard.engine.registry import name_units, own_modules
from fullshard.engine.residency import ACTIVE, AT_REST, UnitState
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit import Unit
from fullshard.engine.unshard_scheduler import UnshardScheduler
from fullshard.errors import RankMismatchError, StateError
from fullshard.liveness.watchdog import watch
from fullshard.policy.precision import is_castable
from fullshard.tape.context import drop_if_stale
from fullshard.tape.recorder import Origin, Phase, active_recorder, note_origin

__all__ = ["Runtime", "cast_outputs", "runtime_of_last_backward", "runtime_or_none"]

_log = logging.getLogger(__name__)


class Runtime:
    """The units below one root, and their progress in a microbatch.

    Args:
        root: the outermost sharded module.
        units: its units, in the order of `root.modules()`.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        self.units = list(units)
        for unit in units:
            unit.is_root = root in unit.modules
        for unit, destination in placements_of(units).items():
            unit.shards.move_to(destination)
        self.phase = Phase.IDLE
        self.serial = 0  # of the last backward
        self.finalizes_by_hand = False  # see [Note: steps that are finalized manually]
        self._is_open = False  # such a step was begun, and not finalized
        self._has_forward = False  # in the step that is open
        self._holds_at_end = False  # of the backward that is executing, in such a step
        self._creates_graph = False  # the present backward: a later backward will differentiate it
        self._is_in_pipeline = False  # the last forward was: a stage may run its backward in two parts
        self._reached: Unit | None = None  # in this backward of a pipeline, the first with trained parameters
        self._has_grads = False  # in this backward, of any unit's parameters
        self._stack: list[tuple[Unit, ForwardCall | None]] = []
        self._calls: list[ForwardCall] = []  # those whose backward is executing
        self._ended: list[ForwardCall] = []  # those whose backward is over, in the present backward
        self._recomputed: list[Unit] = []  # by a checkpoint's forward within backward, and unsharded still
        self._postponed: list[Unit] = []  # to be gathered ahead once the backward of the present unit is over
        self.expected = Expected(self.units)
        self.reductions = ReductionQueue(self.units)
        self.scheduler = UnshardScheduler(self.units, self.reductions)
        self.microbatches = Microbatches(self.units)
        name_units(root, units)
        for unit in units:
            if unit.residency.state in AT_REST:
                unit.check_replacements()
        number_parameters(root)
        drop_if_stale()  # drops state of an earlier default process group
        watch()
        check_ranks_agree(units)
        data_ranks = units[0].axes.ranks
        for number, unit in enumerate(units):
            unit.number, unit.runtime = number, self
            unit.data_ranks = data_ranks
            unit.keepers = keepers_among(module for _, module in own_modules(unit.modules))
        _warn_of_divisors(units, data_ranks)
        self.activations = Activations(units)
        self.disks = Disks(self.units)

    def __del__(self) -> None:
        """Order the streams if an unfinished step is dropped, since its memory is reused immediately."""
        with suppress(Exception):  # the interpreter may be ending
            if (self.phase is not Phase.IDLE or self._is_open) and not is_capturing(self._device):
                self._streams.join()

    @property
    def _device(self) -> torch.device:
        """The compute device, which `Module.to` may have changed."""
        return self.units[0].device

    @property
    def _streams(self) -> Streams:
        return self.units[0].streams

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Unshard `unit`, and return the inputs for its forward."""
        unit.residency.check_not_summoned()
        recomputing = in_backward()
        if self.finalizes_by_hand:
            return self._before_forward_by_hand(unit, args, kwargs, begins=not self._stack and not recomputing)
        if not self._stack and not recomputing:
            self._begin_forward(unit)
        args, kwargs = self.prepare_inputs(unit, args, kwargs)
        within = None if recomputing else self.expected.open[-1]
        call = ForwardCall(self, unit, self.scheduler.tick(), within) if torch.is_grad_enabled() else None
        self._stack.append((unit, call))
        if recomputing and unit.residency.users == 0:
            self._free_recomputed(unit)
        self.scheduler.hold(unit)
        unit.residency.is_used_without_forward = False
        self.scheduler.unshard(unit, Phase.FORWARD)
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
        """Unshard `unit` until the next backward is over. Transforms of functions (`torch.func`) have no other event
        for its end. Call it outside of them.
        """
        unit.residency.check_not_summoned()
        if not self._stack and self.phase is not Phase.IDLE and not in_backward():
            self.recover()
        self.scheduler.show_compute_s_work()
        for needed in (unit, *unit.borrowed):
            needed.residency.notice_step()
            needed.residency.awaits_backward = needed.residency.awaits_backward or torch.is_grad_enabled()
        self.scheduler.unshard(unit, Phase.FORWARD)

    def after_transformed_forward(self, unit: Unit) -> None:
        """Free `unit` if no backward can need it. Call it outside of transforms."""
        for done in (unit, *unit.borrowed):
            if done.residency.users == 0 and not done.residency.awaits_backward:
                self.scheduler.reshard(done, Phase.FORWARD)

    def after_forward(self, unit: Unit, module: nn.Module, output: Any) -> Any:
        """Free `unit` if its strategy says so, and return the output for the caller."""
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
            call.watch_outputs(output, self.scheduler.tick())
        unit.finished_modules.add(id(module))
        if call is not None and call.within is not None:
            call.within.left.append(unit)
        self._leave(unit)
        if not self._stack and not in_backward():
            self._end_forward(unit, raised=output is None and sys.exc_info()[1] is not None)
        if self._stack:
            _note(self._stack[-1][0], Phase.FORWARD)
        else:
            _note(self.units[0], Phase.BACKWARD if in_backward() else Phase.FORWARD)
        return output

    def _begin_forward(self, top: Unit) -> None:
        if self.phase is not Phase.IDLE:
            self.recover()
        self.phase = Phase.FORWARD
        self.disks.begin_pass()
        self._is_in_pipeline = in_pipeline_stage()
        self.scheduler.show_compute_s_work()
        if is_capturing(self._device):
            for unit in [unit for unit in self.units if unit.residency.users == 0]:
                self.scheduler.reshard(unit, Phase.IDLE)  # to be filled within the graph, in memory of the graph
        self.expected.close_passed_by(top, self.serial)
        self._begin_microbatch()
        self.expected.begin_forward(top, self.serial)

    def _begin_microbatch(self) -> None:
        self.activations.begin_forward()
        self.microbatches.begin(counts=torch.is_grad_enabled() and not self.expected.open)

    def _end_forward(self, top: Unit, *, raised: bool) -> None:
        for unit in self.units:
            unit.residency.settle()  # units without a forward
        self._await_copies_of_shards()
        self.expected.end_forward(top)
        self.scheduler.forget_late()
        for unit in self.units:
            unit.shards.forget_ahead()
            unit.finished_modules.clear()
            over = not torch.is_grad_enabled() and unit.settings.reshard_after_forward is not False
            if unit.residency.users == 0 and not unit.residency.awaits_backward:
                keep = not (over or unit.residency.state is UnitState.GATHERING or unit.reshards_after_forward)
                self.scheduler.reshard(unit, Phase.FORWARD, keep=keep)
                if over:
                    unit.residency.release_secondary(Phase.FORWARD)
        accelerator_for(self._device).end_pass()
        self.phase = Phase.IDLE
        if raised:
            self.disks.forget()  # other ranks may be elsewhere
        else:
            self.disks.end_pass()

    def _await_copies_of_shards(self) -> None:
        """Make the host wait until the gather stream has read shards in host memory, which the user may write to."""
        if any(unit.shards.is_on_cpu for unit in self.units):
            self._streams.host.wait(self._streams.gather.mark())

    def _leave(self, unit: Unit) -> None:
        self.scheduler.release(unit)
        complete = len(unit.finished_modules) == len(unit.modules)
        if complete:
            unit.finished_modules.clear()
        for done in ((unit,) if complete else ()) + tuple(unit.borrowed):
            if done.residency.users == 0 and done.reshards_after_forward and not done.residency.awaits_backward:
                if in_backward():
                    self._recomputed.append(done)  # if it is the last of its checkpoint, its backward comes next
                else:
                    self.scheduler.free(done, Phase.FORWARD, self.expected.forward)

    def prepare_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of a forward of `unit` on its device and in its input dtype."""
        policy = unit.options.precision
        outermost = not self._stack
        casts = policy.cast_forward_inputs or (unit.is_root and unit.options.casts_inputs_at_root)
        dtype = policy.param_dtype if casts else None
        moves = outermost and accelerator_for(self._device).has_streams
        if dtype is None and not moves:
            return args, kwargs

        def prepare(tensor: Tensor) -> Tensor:
            if moves:
                tensor = tensor.to(self._device, non_blocking=True)
            return tensor.to(dtype) if dtype is not None and is_castable(tensor.dtype) else tensor

        prepared: tuple[Any, Any] = map_tensors(prepare, (args, kwargs), partial(_warn_of_unmapped, "input", unit.name))
        return prepared

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> int:
        """Return the number of the backward that is executing. The first call in one registers the callback at its end.

        Raises:
            StateError: it computes gradients of inputs only; those of parameters would follow later, without hooks.
        """
        if self.phase is not Phase.BACKWARD:
            if in_backward_of_inputs() and any(unit.trainable for unit in self.units):
                raise StateError(
                    f"stage_backward_input was called on {type(self.units[0].module).__name__}, which is sharded: it "
                    "takes gradients of inputs first, and those of parameters later (stage_backward_weight), when they "
                    "would not be reduced. Zero-bubble schedules do so. Make the stages by "
                    "fullshard.integrations.pipelining.PipelineStage; in a loop without stages call backward()."
                )
            self.phase = Phase.BACKWARD
            self.disks.begin_pass()
            self.serial += 1
            self._creates_graph = torch.is_grad_enabled()
            self.expected.begin_backward()
            on_backward_end(self.finish_backward)
            self.scheduler.show_compute_s_work()
        return self.serial

    def before_backward(self, call: ForwardCall) -> None:
        """Unshard the unit of `call` again, and start the gather of the next unit."""
        unit = call.unit
        self.reductions.complete_arrived()
        self.expected.arrive_at(call.within)
        self._calls.append(call)
        self._free_recomputed(unit)
        self.scheduler.hold(unit)
        if unit.settings.unshards_in_backward:
            self.scheduler.unshard(unit, Phase.PRE_BACKWARD)
        if self._creates_graph:
            for held in (unit, *unit.borrowed):
                held.residency.awaits_backward = True
        if self._is_in_pipeline and unit.trainable:
            self._reached = self._reached or unit
        self._prefetch_backward(unit)
        self._note_backward()

    def on_grad(self, unit: Unit, param: ShardedParam) -> None:
        """Record that autograd has added to `param`'s whole gradient; the last one starts the unit's reduction."""
        if self.finalizes_by_hand:
            if not self._holds_at_end:
                self._holds_at_end = True
                on_backward_end(self.hold_grads)
            return
        is_observed = unit.settings.unshards_in_backward and not unit.residency.is_used_without_forward
        if is_observed and unit.residency.state is not UnitState.UNSHARDED and not unit.has_valid_values:
            raise read_while_sharded(param.fqn, unit.name)
        self.begin_backward()
        self.reductions.complete_arrived()
        unit.gradients.arrived.add(id(param))
        self._has_grads = True
        if len(unit.gradients.arrived) == unit.trainable and not unit.settings.reduces_unused:
            self.reductions.start(unit)

    def end_calls_since(self, time: int) -> None:
        """Record that the backward of every call that began after `time` is over."""
        for call in [call for call in self._calls if call.start > time]:
            self.after_backward(call)

    def after_backward(self, call: ForwardCall) -> None:
        """Free the unit of `call` after its backward. Do nothing if this has been done already."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._ended.append(call)
        unit = call.unit
        self.scheduler.release(unit)
        if unit.residency.users == 0 and unit.settings.reduces_unused:  # only this moment occurs on every rank
            self.reductions.start_before_end(unit)
        elif unit.residency.users == 0 and self._ends_held_grads(unit):
            self.reductions.start(unit)
        for done in (unit, *unit.borrowed):
            if done.residency.users == 0 and not (done.residency.awaits_backward or self._stays_after_backward(done)):
                self.scheduler.free(done, Phase.POST_BACKWARD, self.expected.backward)
        self.scheduler.prefetch(self._postponed, Phase.BACKWARD)
        self._postponed = []
        self._note_backward()

    def _ends_held_grads(self, unit: Unit) -> bool:
        """Return True if gradients held back of `unit` can be reduced before the end of the backward: these gradients
        were the last, though some were computed in earlier backwards only.
        """
        some = unit.gradients.are_held and len(unit.gradients.arrived) > 0
        return (
            some
            and not unit.gradients.are_held_back
            and not self.expected.awaits_backward_of(unit)
            and self._has_ended_all_calls_of(unit)
        )

    def _has_ended_all_calls_of(self, unit: Unit) -> bool:
        """Return True if this backward has ended for every call that needs `unit`, in all forwards it has reached."""
        ended = [call for call in self._ended if call.within is not None]  # others were recomputed in this backward
        forwards = {id(call.within): call.within for call in ended}.values()
        needed_by = [left for forward in forwards if forward is not None for left in forward.left if left.uses(unit)]
        return len(needed_by) <= sum(call.unit.uses(unit) for call in ended)

    def _note_backward(self) -> None:
        """Attribute later events of the trace to the backward of the innermost unit that is executing."""
        if active_recorder() is not None:
            innermost = max(self._calls, key=lambda call: call.start, default=None)
            _note(self.units[0] if innermost is None else innermost.unit, Phase.BACKWARD)

    def finish_backward(self) -> None:
        """Finish the backward after the last node: reductions, unused parameters, unsharded units."""
        # Gradients of inputs only, as of a gradient penalty: the backward of the graph made here gives the others, and
        # what is held back is added to them first, as without sharding.
        makes_graph_only = self._creates_graph and not self._has_grads
        self.reductions.finish_all(starts_others=not makes_graph_only)
        self._calls.clear()
        self._ended.clear()
        self.scheduler.forget_late()
        self._recomputed.clear()
        for unit in self.units:
            unit.residency.users = 0
            if not (self._creates_graph and unit.residency.awaits_backward):
                self._reshard_after_backward(unit)
        self._end_backward()
        self.expected.end_backward()
        stays = self._creates_graph and any(unit.residency.awaits_backward for unit in self.units)
        self.scheduler.slots.end_backward(self.expected.backward, awaits_more=stays or bool(self.expected.open))
        tallies = self.reductions.take_tallies()
        self._check_whole()
        self.disks.end_pass(self.activations.disk_failures)
        self.activations.end_backward()
        self.microbatches.late_params.check()
        self.reductions.check_finite(tallies)

    def _reshard_after_backward(self, unit: Unit) -> None:
        unneeded = unit.residency.state is UnitState.GATHERING and not self._is_kept_for_backward(unit)
        self.scheduler.reshard(unit, Phase.POST_BACKWARD, keep=self._stays_after_backward(unit) and not unneeded)

    def _stays_after_backward(self, unit: Unit) -> bool:
        return not unit.settings.reshard_after_backward or self._is_kept_for_backward(unit)

    def _is_kept_for_backward(self, unit: Unit) -> bool:
        """Return True if `unit` stays unsharded for a pending backward."""
        return not unit.reshards_after_forward and self.expected.awaits_backward_of(unit)

    def _end_backward(self) -> None:
        for unit in self.units:
            unit.shards.forget_ahead()
        if any(unit.shards.is_on_cpu for unit in self.units):  # the optimizer reads their gradients next
            self._streams.host.wait(self._streams.offload.mark())
        self._await_copies_of_shards()
        accelerator_for(self._device).end_pass()
        self.phase = Phase.IDLE
        note_origin(Origin("", Phase.IDLE))
        self.microbatches.note_end()
        _note_backward_of(self)

    def _check_whole(self) -> None:
        """Refuse a backward of a pipeline stage that computed only the gradients of its inputs.

        Raises:
            StateError: gradients of the parameters would follow later, without the hooks that reduce them.
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

    @property
    def is_interrupted(self) -> bool:
        """True if an exception has ended a forward or backward."""
        return self.phase is not Phase.IDLE and not self._stack and not in_backward()

    @property
    def is_running(self) -> bool:
        """True within a forward or backward. (If ranks diverge in it, it does not end by itself.)"""
        return in_backward() or (bool(self._stack) and not any(unit.is_broken for unit in self.units))

    def recover(self) -> None:
        """Reset to idle after an exception in a forward or backward. Its gradients are dropped."""
        self.activations.recover()
        self.disks.forget()
        self._stack.clear()
        self._calls.clear()
        self._ended.clear()
        self.scheduler.forget_late()
        self._recomputed.clear()
        self.reductions.abandon()
        self._is_open = self._has_forward = self._holds_at_end = False
        self._reached, self._has_grads = None, False
        self.expected.open.clear()
        for unit in self.units:
            unit.residency.users = 0
            unit.gradients.arrived.clear()
            unit.finished_modules.clear()
            if self.phase is Phase.BACKWARD:
                unit.gradients.drop()
            self.scheduler.reshard(unit, Phase.IDLE)
        self.phase = Phase.IDLE

    def forget(self) -> None:
        """Reset to idle and drop all gradients, because the computation so far was a trial."""
        self.recover()
        for unit in self.units:
            unit.gradients.abandon()

    def abandon(self) -> None:
        """Undo the current step. This is a collective: every rank calls it.

        It completes pending communication that all ranks have started. If ranks have started different operations, this
        is detected here at the latest, and communication starts again.
        """
        collectives = dict.fromkeys(item for unit in self.units for of in unit.collectives.values() for item in of.each)
        with suppress(RankMismatchError):
            self.recover()
        for collective in collectives:
            if collective.broken is None:
                with suppress(RankMismatchError):
                    collective.meet("abandon_step", origin=Origin("", Phase.IDLE))
        broken = [collective for collective in collectives if collective.broken is not None]
        if broken:
            for unit in self.units:
                unit.residency.forget_gather()
            for item in broken:
                item.renew()
            self.recover()
        for unit in self.units:
            unit.gradients.abandon()
        self.microbatches.begin_again()

    # -- steps that are finalized manually ----------------------------------------------------------------------------

    def finalize_by_hand(self, enabled: bool, *, had_backward: bool = True) -> None:
        """Set whether steps are finalized manually, see [Note: steps that are finalized manually], or by hooks.

        The gradients of a step that was not finalized are dropped if it `had_backward`.
        """
        if self._is_open:
            self.phase = Phase.BACKWARD if had_backward else Phase.FORWARD
        if self.is_interrupted:
            self.recover()
        self.finalizes_by_hand = enabled

    def start_unshard_by_hand(self, unit: Unit) -> None:
        """Start to gather `unit` for the user. Between steps, the optimizer may write to shards next."""
        self.scheduler.start_unshard(unit, Phase.IDLE)
        unit.residency.is_used_without_forward = True
        unit.residency.is_unsharded_by_hand = True
        if self.phase is Phase.IDLE and not self._is_open:
            self.scheduler.order_writes_after(unit)

    def unshard_all(self) -> None:
        """Start to gather all units for the next forwards and backwards. The first call begins the step."""
        if not self._is_open:
            self._is_open = True
            if torch.is_grad_enabled():  # otherwise no `finalize_backward` follows, which reports failures to all ranks
                self.disks.begin_pass()
            self.scheduler.show_compute_s_work()
            self._begin_microbatch()
        for unit in self.units:
            if unit.residency.state not in ACTIVE:
                self.scheduler.start_unshard(unit, Phase.FORWARD)
                unit.residency.is_unsharded_by_hand = True  # no other unit takes its memory

    def wait_for_all(self) -> None:
        """Unshard all units, so that modules have whole parameters."""
        self.unshard_all()
        for unit in self.units:
            unit.residency.wait_unshard()

    def reshard_all(self) -> None:
        """Free units that the strategy or the user does not keep from forward to backward. The step continues."""
        for unit in self.units if self._is_open else ():
            if unit.frees_in_step:
                self.scheduler.reshard(unit, Phase.FORWARD)

    def _before_forward_by_hand(self, unit: Unit, args: Any, kwargs: Any, *, begins: bool) -> tuple[Any, Any]:
        if begins:
            self.unshard_all()
            self.activations.begin_forward()
            if self._has_forward and torch.is_grad_enabled():
                self.microbatches.count_next()
            self._has_forward = True
        prepared = self.prepare_inputs(unit, args, kwargs)
        self._stack.append((unit, None))
        self.scheduler.unshard(unit, Phase.FORWARD)
        _note(unit, Phase.FORWARD)
        self.activations.enter(unit)
        return prepared

    def _watch_outputs_by_hand(self, unit: Unit, output: Any) -> None:
        def before_backward(_: Tensor) -> None:
            self.scheduler.unshard(unit, Phase.PRE_BACKWARD)
            _note(unit, Phase.BACKWARD)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)

    def hold_grads(self) -> None:
        """Keep the whole gradients of a microbatch, in the dtype of their sums."""
        self._holds_at_end = False
        for unit in self.units:
            unit.gradients.hold()

    def finalize_backward(self) -> None:
        """Reduce all whole gradients, and reshard: the backwards of the step are over.

        Raises:
            StateError: steps are not finalized manually.
        """
        if not self.finalizes_by_hand:
            raise StateError(
                f"finalize_backward of {type(self.units[0].module).__name__}: every backward ends with its gradients "
                "reduced. Call set_manual_backward_finalization(True) before the step's first forward."
            )
        self.reductions.finish_all()
        for unit in self.units:
            self._reshard_after_backward(unit)
        self._end_backward()
        self._is_open = self._has_forward = False
        tallies = self.reductions.take_tallies()
        self.disks.end_pass(self.activations.disk_failures)
        self.activations.end_backward()
        self.microbatches.late_params.check()
        self.reductions.check_finite(tallies)

    def _prefetch_forward(self, unit: Unit) -> None:
        ahead = self.expected.ahead_in_forward(unit)
        if unit.options.prefetches_forward or unit.settings.next_forward is not None:
            self.scheduler.prefetch(ahead, Phase.FORWARD)
            for later in self.expected.beyond(unit, self.expected.forward, unit.settings.next_forward):
                later.shards.read_ahead()

    def _prefetch_backward(self, unit: Unit) -> None:
        ahead = self.expected.ahead_in_backward(unit)
        if (
            self.serial == 1
            and self._streams.gather.is_stream
            and any(module._backward_hooks for module in unit.modules)
        ):
            ahead = []  # the first backward shows which shards the user's hooks write to, see `Residency.prefetch`
        if unit.options.backward_prefetch == "pre":
            self.scheduler.prefetch(ahead, Phase.BACKWARD)
            for later in self.expected.beyond(unit, self.expected.backward, unit.settings.next_backward):
                later.shards.read_ahead()
        self._postponed = ahead if unit.options.backward_prefetch == "post" else []

    def _free_recomputed(self, needed: Unit) -> None:
        """Free units that a checkpoint has recomputed, except for `needed`, which is needed immediately."""
        for unit in self._recomputed:
            if unit.residency.users == 0 and unit is not needed and not unit.residency.awaits_backward:
                self.scheduler.reshard(unit, Phase.FORWARD)
        self._recomputed.clear()


def _note(unit: Unit, phase: Phase) -> None:
    """Attribute later events of the trace to `unit`."""
    if active_recorder() is not None:
        note_origin(unit.origin(phase))


def cast_outputs(unit: Unit, output: Any) -> Any:
    """Return the output of `unit` in its output dtype."""
    dtype = unit.options.precision.output_dtype
    if dtype is None:
        return output
    cast_one = partial(_cast_one, dtype)
    return map_tensors(cast_one, output, partial(_warn_of_unmapped, "output", unit.name))


def _cast_one(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if is_castable(tensor.dtype) else tensor


def _warn_of_unmapped(which: str, unit: str, value: Any) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if (which, kind) not in _unmapped:
        _unmapped.add((which, kind))
        _log.warning(
            "An %s of %s is a %s that holds tensors. They are neither cast to the dtype of the precision policy nor "
            "moved to the device, since fullshard cannot make a copy of such an object with other tensors. Use a "
            "dataclass, a dict, or torch.utils._pytree.register_pytree_node; or cast the tensors in the module.",
            which,
            unit or "the root",
            kind,
        )


_unmapped: set[tuple[str, str]] = set()


_last: list[weakref.ref[Runtime]] = []  # the runtime whose backward ended last, at most one


def _note_backward_of(runtime: Runtime) -> None:
    _last[:] = [weakref.ref(runtime)]


def runtime_of_last_backward() -> Runtime | None:
    """Return the runtime whose backward ended last; None if there was none, or its model no longer exists."""
    return _last[0]() if _last else None


def runtime_or_none(unit: Unit) -> Runtime | None:
    """Return the runtime that drives `unit`; None before the first forward of its root."""
    return cast("Runtime | None", unit.runtime)


def _warn_of_divisors(units: Sequence[Unit], data_ranks: frozenset[int]) -> None:
    """Log a warning if the user has set no gradient divisor and may expect another one than is used."""
    found = [
        (unit, group)
        for unit in units
        if unit.settings.gradient_divisor is None
        for group in unit.param_groups
        if group.may_be_averaged_over_own_ranks(data_ranks)
    ]
    if not found:
        return
    unit, group = found[0]
    fqn = f"{unit.name}.{group.params[0].fqn}".removeprefix(".")
    others = sum(len(group.params) for _, group in found) - 1
    own, all_ranks = group.plan.axes.world, len(data_ranks)
    _log.warning(_FEWER_RANKS_THAN_ROOT, fqn, others, own, all_ranks, all_ranks, own, unit.name or "the root", own)


_FEWER_RANKS_THAN_ROOT = (
    "%s (and %d parameters like it) is sharded over %d ranks, and the root over %d. The sum of its gradients is "
    "divided by %d. This is right if these ranks exchange tokens, as experts do. torch's FSDP divides by %d. Call "
    "set_gradient_divide_factor on %s to choose a divisor, which stops this warning: %d for the numbers of torch."
)
