"""torch pipelines with sharded stages: one all-gather per visit to a stage and one reduction per step, under all
schedules.

`torch.distributed.pipelining` recognizes sharded stages by torch's own class. For others, it would reduce the gradients
of every microbatch, and ignore the gradients that a zero-bubble schedule computes late. So use the `PipelineStage` of
this module. For a schedule with several stages per rank, `with_actions` adds actions that gather and free stages:

    stages = [PipelineStage(part, number, 4, device, group=mesh.get_group("pp")) for number, part in parts.items()]
    schedule = with_actions(ScheduleInterleavedZeroBubble(stages, n_microbatches=8, loss_fn=loss_fn))
    schedule.step(x)
    optimizer.step()
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import Any, TypeVar

from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from fullshard.engine.hooks import runtime_of
from fullshard.engine.registry import is_unit, name_units
from fullshard.engine.runtime import Runtime
from fullshard.errors import ConfigError

__all__ = ["PipelineStage", "with_actions"]

S = TypeVar("S")


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage whose module is sharded by this library. For arguments see torch's `PipelineStage`.

    From the first use of the stage in a step, its units are unsharded, and unsharded gradients accumulate on each rank.
    They are reduced at the end of the schedule. Schedules with one stage per rank (`ScheduleGPipe`, `Schedule1F1B`)
    need nothing else. Other schedules can free a stage while it waits, see `with_actions`.
    """

    @cached_property
    def _runtimes(self) -> list[Runtime]:
        """The runtimes of the outermost units of the module, usually one."""
        runtimes = []
        for module in _outermost_units(self.submod):
            runtime = runtime_of(module)
            name_units(module, runtime.units, f"stage {self.stage_index}")
            runtimes.append(runtime)
        return runtimes

    def _begin(self) -> None:
        for runtime in self._runtimes:
            if not runtime.finalizes_manually:
                runtime.finalize_manually(True)

    def unshard(self) -> None:
        """Start the all-gather of the units of the stage."""
        self._begin()
        for runtime in self._runtimes:
            runtime.manual_driver.unshard_all()

    def reshard(self) -> None:
        """Free the parameters that the strategy does not keep for backward, until the next visit to the stage."""
        for runtime in self._runtimes:
            runtime.manual_driver.reshard_all()
        if not self.has_backward:  # nothing else ends a stage in `eval` since torch 2.15
            self._end(had_backward=False)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's `PipelineStage`."""
        if self.has_backward:
            self._begin()
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's `PipelineStage`."""
        self._wait()
        return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's `PipelineStage`. It writes gradients without calling hooks."""
        self._wait()
        result = super().backward_weight_one_chunk(*args, **kwargs)
        if self.has_backward:
            for runtime in self._runtimes:
                runtime.manual_driver.hold_grads()
        return result

    def _wait(self) -> None:
        """Make modules show unsharded parameters, because torch looks for parameters that need gradients in them."""
        if self.has_backward:
            for runtime in self._runtimes:
                runtime.manual_driver.wait_for_all()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of the step, and divide them by `grad_scale_factor`."""
        for runtime in self._runtimes if self.has_backward else ():
            if runtime.finalizes_manually:
                runtime.finalize_backward()
        self._end(had_backward=self.has_backward)
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _backward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        """See torch's `PipelineStage`. It is a trial run that determines shapes.

        A loss that runs backward itself, such as a chunked loss, leaves gradients in the trial. They are dropped,
        unless they were added to earlier gradients that have not been reduced yet.
        """
        fresh = [runtime for runtime in self._runtimes if not any(unit.gradients.are_waiting for unit in runtime.units)]
        with ExitStack() as trial:
            for runtime in self._runtimes:
                trial.enter_context(runtime.scheduler.slots.paused())
            result = super()._backward_metadata_inference(*args, **kwargs)
        for runtime in fresh:
            runtime.forget()
        return result

    def clear_runtime_states(self) -> None:
        """See torch's `PipelineStage`. Each step begins with it. It drops the state that a failed step has left."""
        super().clear_runtime_states()
        if "_runtimes" in vars(self):
            self._end(had_backward=True)

    def _end(self, *, had_backward: bool) -> None:
        for runtime in self._runtimes:
            if runtime.finalizes_manually:
                runtime.finalize_manually(False, had_backward=had_backward)


def with_actions(schedule: S) -> S:
    """Add actions to `schedule` that gather stages ahead of time and free them while they wait, and return it.

    Schedules with one stage per rank have no such actions and are not changed.

    Args:
        schedule: A schedule of `torch.distributed.pipelining` with `PipelineStage`s of this module.

    Raises:
        ConfigError: A stage has a different type.
    """
    if not isinstance(schedule, schedules._PipelineScheduleRuntime):
        return schedule
    stages: dict[int, PipelineStage] = {}
    for stage in schedule._stages:
        if not isinstance(stage, PipelineStage):
            raise ConfigError(
                f"with_actions({type(schedule).__name__}): stage {stage.stage_index} is a "
                f"{type(stage).__module__}.{type(stage).__name__}. Create all stages with "
                "fullshard.integrations.pipelining.PipelineStage."
            )
        stages[stage.stage_index] = stage

    def unshard(action: Any, ctx: object) -> None:
        stages[action.stage_index].unshard()

    def reshard(action: Any, ctx: object) -> None:
        stages[action.stage_index].reshard()

    schedule.register_custom_function(schedules.UNSHARD, unshard)
    schedule.register_custom_function(schedules.RESHARD, reshard)
    return schedule


def _outermost_units(module: nn.Module) -> list[nn.Module]:
    """Return the sharded modules in `module` that are not in another sharded module."""
    if is_unit(module):
        return [module]
    return [unit for child in module.children() for unit in _outermost_units(child)]
