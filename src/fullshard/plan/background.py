"""Comparison of predicted with measured memory and time of any training loop, in one call."""

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

STEPS = 3
"""The number of steps before predictions are compared with measurements. The last of them is measured."""
_WAITING = Path("/proc/thread-self/schedstat")  # nanoseconds running and waiting for a core; see sched-stats


class FirstSteps:
    """Measurements of the third step of a loop, including everything between two optimizer steps."""

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
        """Stop measuring."""
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
    """Predict memory and time of the training loop that follows, and compare them with measurements.

    Call it on every rank after the model is sharded and the optimizer is created. The first rank makes a dry run of two
    steps in a separate process, and reports immediately if a rank will need more memory than is available. After the
    third step it reports memory and time, predicted and measured, and a cause for differences above 10 %.

    Args:
        model: The sharded root.
        optimizer: The optimizer of its parameters. One optimizer step is one step.
        make_model: Creates and shards the model again, as for `fullshard.dry.run`. It must be a function of an
            importable module, not of the running script, as must `make_batch`, `make_mesh` and `loss`.
        make_batch: Creates one microbatch.
        hardware: A description of the machine: `here` (see `fullshard calibrate`), a name, or the path of a TOML file.
        microbatches: The number of forward and backward passes per step.
        max_norm: Clips gradients to that norm, if given.
        make_mesh: Creates the mesh, if `make_model` takes one.
        loss: Computes the loss from a model and a batch.
        tell: Called with the reports. If None, they are printed.

    Raises:
        ConfigError: The model has no units, or a function is defined in the running script. If prediction fails for
            another reason, the reason is reported.
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
    except ConfigError as error:  # other ranks continue, so this one does, too
        show(str(error))
        return
    warn_if_too_large(forecast, show)

    def done(measured: Measured) -> None:
        found = compare(forecast, measured)
        for stated in (comparison_table(found), *found.causes):
            show(stated)

    FirstSteps(model, optimizer, PeakMemory(device), done)


def _print(stated: Any) -> None:
    from rich.console import Console

    Console(emoji=False).print(stated, markup=False, highlight=False)


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


def warn_if_too_large(forecast: Forecast, log: Callable[[str], None]) -> None:
    """Report before the first step if a run will need more memory than is available, and what would fit."""
    if forecast.fits:
        return
    fitting = " or ".join(forecast.would_fit) or "`fullshard plan` looks for what does"
    log(
        f"A rank is predicted to need {forecast.needed_bytes / 1e9:.3g} GB in {forecast.peak_at}, and there are "
        f"{forecast.limit_bytes / 1e9:.3g} GB available. This would fit: {fitting}."
    )
