"""Predicted beside measured: any training loop, by one call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.plan.forecast import (
    Forecast,
    Forecasting,
    Measured,
    check_importable,
    compare,
    comparison_table,
    forecast_of,
)
from fullshard.plan.hardware import hardware
from fullshard.plan.memory_used import PeakMemory, memory_for_a_rank
from fullshard.plan.prediction import predict
from fullshard.tape.recorder import Event, Recorder, recording

__all__ = ["STEPS", "FirstSteps", "predict_beside", "say_if_too_large"]

STEPS = 3
"""After so many steps what was predicted is held against what was measured: the last of them is measured."""
_WAITING = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and ready but without one; see sched-stats


class FirstSteps:
    """Measures the first three steps of a loop: whatever it does between an optimizer's step and the next.

    Args:
        model: the root that is called in each step.
        optimizer: that takes one step in each.
        peak: of this process and device, since before there was a model.
        done: called with what was measured, once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        peak: PeakMemory,
        done: Callable[[Measured], None],
    ) -> None:
        self._device = units_in(model)[0].device
        self._peak, self._done = peak, done
        self._ended = 0
        self._since = self._waited = 0.0
        self._input_s: float | None = None
        self._recorder = Recorder()
        self._recording = ExitStack()
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._recording.close()

    def _before_forward(self, *_: Any) -> None:
        if self._ended == STEPS - 1 and self._input_s is None:
            self._input_s = time.perf_counter() - self._since

    def _after_step(self, *_: Any) -> None:
        self._ended += 1
        if self._ended >= STEPS - 1 and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        now, waited = time.perf_counter(), _waited_s()
        if self._ended == STEPS - 1:
            self._since, self._waited = now, waited
            if self._device.type == "cpu":
                self._recorder = self._recording.enter_context(recording())
        elif self._ended == STEPS:
            self.close()
            self._done(self._measured(now - self._since, waited - self._waited))

    def _measured(self, step_s: float, core_s: float) -> Measured:
        used, is_cpu = self._peak.peak(), self._device.type == "cpu"
        gathers = [collective for collective in self._recorder.collectives() if collective.name == "all_gather"]
        others = [collective for collective in self._recorder.collectives() if collective.name != "all_gather"]
        return Measured(
            step_s=step_s,
            needed_bytes=used.process if is_cpu else used.reserved,
            gather_s=_seconds(gathers) if is_cpu else None,
            reduce_s=_seconds(others) if is_cpu else None,
            input_s=self._input_s,
            core_s=core_s if is_cpu else None,
        )


def _seconds(events: list[Event]) -> float:
    return sum(event.end - event.start for event in events if event.end is not None)


def _waited_s() -> float:
    with suppress(OSError, IndexError, ValueError):
        return int(_WAITING.read_text().split()[1]) / 1e9
    return 0.0


def predict_beside(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[[], Any],
    *,
    hardware: str = "here",
    microbatches: int = 1,
    max_norm: float | None = None,
    make_mesh: Callable[[], Any] | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    tell: Callable[[Any], None] | None = None,
) -> None:
    """Predict what the loop that follows needs, and after its third step show that beside what it did need.

    To be called on every rank once the model is sharded and has its optimizer. The first rank runs two steps dry, in a
    process of its own, and says at once if a rank will need more memory than there is. After the third step it shows
    memory and time, predicted and measured, and a cause where they differ by more than 10 %.

    Args:
        model: the root, sharded.
        optimizer: over its parameters. One of its steps is a step.
        make_model: makes the model anew and shards it, as for `fullshard.dry.run`; a function of a module, not of the
            script that runs. `make_batch`, `make_mesh` and `loss` likewise.
        make_batch: makes one microbatch.
        hardware: a description of the machine: `here` (see `fullshard calibrate`), a name, or the path of a TOML file.
        microbatches: forward and backward passes of a step.
        max_norm: clips gradients to that norm, if given.
        make_mesh: makes the mesh, where `make_model` needs one that it is given.
        loss: the loss of a model and a batch.
        tell: called with what is to be shown; prints it, if None.

    Raises:
        ConfigError: the model has no units; or a function is of the script that runs. If nothing can be predicted for
            another reason, that is shown.
    """
    units = units_in(model)
    if not units:
        raise ConfigError(f"{type(model).__name__} has no units, so nothing can be predicted. Call fully_shard first.")
    arguments = (make_model, make_batch, hardware, microbatches, max_norm, make_mesh, loss)
    check_importable(arguments)  # on every rank
    if dist.get_rank() != 0:
        return
    device = units[0].device
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    limit = memory_for_a_rank(device, local_world)
    show = tell or _print
    try:
        forecast = Forecasting(_forecast, dist.get_world_size(), local_world, limit, *arguments).result()
    except ConfigError as error:  # other ranks are on their way: this one goes on, too
        show(str(error))
        return
    say_if_too_large(forecast, show)

    def done(measured: Measured) -> None:
        found = compare(forecast, measured)
        for said in (comparison_table(found), *found.causes):
            show(said)

    FirstSteps(model, optimizer, PeakMemory(device), done)


def _print(said: Any) -> None:
    from rich.console import Console

    Console().print(said, markup=False, highlight=False)


def _forecast(
    world: int,
    local_world: int,
    limit_bytes: int,
    make_model: Callable[..., nn.Module],
    make_batch: Callable[[], Any],
    machine: str,
    microbatches: int,
    max_norm: float | None,
    make_mesh: Callable[[], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None,
) -> Forecast:
    found = predict(
        make_model,
        make_batch,
        hardware=hardware(machine),
        world=world,
        ranks_per_host=local_world,
        microbatches=microbatches,
        max_norm=max_norm,
        make_mesh=make_mesh,
        loss=loss,
    )
    return forecast_of(found, limit_bytes=limit_bytes)


def say_if_too_large(forecast: Forecast, tell: Callable[[str], None]) -> None:
    """Say before the first step that a run will need more memory than there is, and what would fit."""
    if forecast.fits:
        return
    fitting = " or ".join(forecast.would_fit) or "`fullshard plan` looks for what does"
    tell(
        f"A rank is predicted to need {forecast.needed_bytes / 1e9:.3g} GB in {forecast.peak_at}, and there are "
        f"{forecast.limit_bytes / 1e9:.3g} GB. What would fit: {fitting}."
    )
