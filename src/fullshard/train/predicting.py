"""Prediction of the memory and the step time of a run, by dry runs of the engine with its model and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.device.accelerator import accelerator_for
from fullshard.device.transfers import Transfers, transfers
from fullshard.disk.folder import creating, free_bytes
from fullshard.disk.pace import pace_of
from fullshard.disk.prediction import Traffic, check_room, floored, predict_load
from fullshard.disk.speed import measure
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.plan.background import STEPS, FirstSteps
from fullshard.plan.forecast import Forecast, ForecastComparison, Forecasting, Measured, compare, forecast_of
from fullshard.plan.hardware import Hardware, hardware, hardware_named_like
from fullshard.plan.ledger import Ledger, predict_on_disk, predict_tiers
from fullshard.plan.memory import State
from fullshard.plan.memory_used import PeakMemory, memory_for_a_rank
from fullshard.plan.prediction import Prediction, predict
from fullshard.plan.stored import offloaded_activations
from fullshard.policy.strategy import Placement, resolve_placements
from fullshard.train.model import GPT, byte_losses, shape_of
from fullshard.train.parallelism import rows_of
from fullshard.train.ranks import Rank
from fullshard.train.run_folder import lines_of
from fullshard.train.settings import MemorySettings, TrainSettings
from fullshard.train.sharding import mesh_of, offload_of, shard

MEASURING_S = 3.0  # duration of a disk measurement, while other ranks wait


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The description of a run's machines for a forecast."""

    device_type: str  # "cpu" or that of an accelerator
    device_name: str  # the name of the accelerator; empty for a CPU
    memory_bytes: int  # memory of one rank
    world: int  # the number of all ranks
    local_world: int  # the ranks of one machine
    machines: int  # number of machines
    host_bytes: int | None = None  # host memory available to one rank; None for no limit


def machine_of(rank: Rank) -> Machine:
    """Return the machines of the run, assumed to be identical to that of `rank`."""
    is_cpu = rank.device.type == "cpu"
    module = torch.get_device_module(rank.device)
    return Machine(
        device_type=rank.device.type,
        device_name="" if is_cpu else module.get_device_name(rank.device),
        memory_bytes=memory_for_a_rank(rank.device, rank.local_world),
        world=rank.world,
        local_world=rank.local_world,
        machines=rank.machines,
        host_bytes=accelerator_for(rank.device).host_room(rank.local_world),
    )


@dataclass
class RunPrediction:
    """A pending forecast, and the measurement of the run to compare it with."""

    forecasting: Forecasting[Forecast]
    peak: PeakMemory
    steps: FirstSteps | None = None

    def close(self) -> None:
        """Stop the prediction and the measurement."""
        self.forecasting.close()
        if self.steps is not None:
            self.steps.close()


class DiskUse:
    """The bytes on disk and the disk traffic per step of a rank, from a dry run that calls `loss` for each microbatch.

    The dry run includes the choice of a budget and the offloaded activations.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._calls = self._stored_bytes = self._activation_bytes = 0
        self._before: Transfers = {}

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the loss of a microbatch. When the second step begins, the states have been offloaded."""
        if self._calls == self._microbatches:
            self._before = transfers.total
            self._stored_bytes = predict_tiers(model)["disk"].total
        self._calls += 1
        loss = byte_losses(model(batch), batch).mean()
        self._activation_bytes = offloaded_activations(model).get("disk", 0)
        return loss

    @property
    def traffic(self) -> Traffic:
        """The traffic of the second step. The dry run counts offloaded activations without writing them."""
        moved = [item for (place, _), item in transfers.since(self._before).items() if place == "disk"]
        states = Traffic(
            room_bytes=self._stored_bytes,
            read_bytes=sum(item.arrived for item in moved),
            written_bytes=sum(item.passed for item in moved),
        )
        return states + Traffic.of_activations(self._activation_bytes, microbatches=self._microbatches)


def disk_traffic(model: nn.Module, settings: TrainSettings) -> Traffic:
    """Return the disk traffic of a rank's states and parameters, computed by formula; empty for a budget.

    It does not include activations. With a budget, the choice of what to offload is made at the first step.
    """
    if settings.memory.offload_budget is not None:
        return Traffic(room_bytes=0, read_bytes=0, written_bytes=0)
    cost, placements = predict_on_disk(model), resolve_placements(settings.parallelism.strategy)
    gathers = 2 if placements.parameters_in_step is not Placement.WHOLE else 1
    return Traffic.of_optimizer(1, bytes_each=cost.nbytes) + Traffic.of_parameters(
        cost.shard_nbytes, gathers=gathers * settings.optimization.accumulate, clips=True
    )


def disk_lines(model: nn.Module, settings: TrainSettings, rank: Rank, step_s: float, traffic: Traffic) -> list[str]:
    """Return lines on the cost of the disk for the ranks of this machine, each with the traffic of `rank`.

    Raises:
        DiskError: The folder is not writable, or too small. The message has the options that fit.
    """
    folder, ranks = offload_of(settings.memory).disk_folder, rank.local_world
    held = ranks * pace_of(folder).held_bytes  # shards that are already on the disk
    whole = sum((traffic,) * (ranks - 1), traffic)
    ask = partial(_options_that_fit, model, settings.memory, ranks, whole.room_bytes)
    with creating(folder):
        check_room(folder, whole, free_bytes(folder) + held, ask=ask)
    speed = measure(folder, seconds=MEASURING_S)
    pace_of(folder).expect(lambda read, written: speed.seconds(ranks * read, ranks * written))
    speed = replace(speed, free_bytes=speed.free_bytes + held)
    return predict_load(speed, whole, step_s=step_s, ask=ask).lines(settings.optimization.steps)


def _options_that_fit(model: nn.Module, memory: MemorySettings, ranks: int, wanted_bytes: int, room_bytes: int) -> str:
    """Return the options with fractions that fit, all scaled down by the same factor."""
    if memory.offload_budget is not None:
        return f"Increase --offload-budget {memory.offload_budget}, so that less is offloaded"
    largest = max(sum(param.local.nbytes for param in unit.params) for unit in units_in(model))
    unit_bytes = ranks * largest * (2 * bool(memory.offload_optimizer) + 4 * bool(memory.offload_parameters))
    share = max(0.0, (room_bytes - unit_bytes) / wanted_bytes)
    fractions = {state: getattr(memory, f"offload_{state}") for state in ("optimizer", "parameters", "activations")}
    fitting = [f"--offload-{state} {floored(share * fraction)}" for state, fraction in fractions.items() if fraction]
    return f"Ask for {' '.join(fitting)}" if share else "One unit does not fit: do not offload there"


def by_state(ledger: Ledger) -> dict[str, int]:
    """Return the bytes of a ledger, under the names that forecasts use."""
    return {
        State.PARAMETERS.value: ledger.parameters,
        State.OPTIMIZER.value: ledger.optimizer_state,
        State.SHARDED_GRADIENTS.value: ledger.gradients,
        State.UNSHARDED.value: ledger.gathered_peak,
        State.ACTIVATIONS.value: ledger.activations,
    }


def comparison_of(out: Path) -> ForecastComparison:
    """Return the prediction and the measurement of the run in `out`, from its metrics.

    The measured step time is the mean over the run, except for the first three steps.

    Raises:
        ConfigError: The run does not exist, or has no prediction or measurement.
    """
    lines = list(lines_of(out))
    found = {line["kind"]: line for line in lines if line["kind"] in ("forecast", "measured")}
    if len(found) < 2:
        raise ConfigError(
            f"{out}: found no run with a prediction and three or more steps. Train with --predict, which is the "
            "default, and --steps 3 or more."
        )
    forecast = Forecast(**_fields_of(Forecast, found["forecast"]))
    measured = Measured(**_fields_of(Measured, found["measured"]))
    steps = [line for line in lines if line["kind"] == "step" and line["step"] >= STEPS]
    if len(steps) > 1:
        first, last = steps[0], steps[-1]
        mean_s = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        measured = replace(measured, step_s=mean_s)
    return compare(forecast, measured)


def _fields_of(kind: type, line: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(kind)]
    return {name: line[name] for name in names if name in line}


def start_forecast(settings: TrainSettings, rank: Rank) -> Forecasting[Forecast] | None:
    """Start the forecast of this run in a separate process, and return it.

    Return None on ranks other than the first, for short runs, and for resumed runs, which already have a forecast.
    """
    if not (rank.leads and settings.run.predict and settings.optimization.steps >= STEPS):
        return None
    if settings.run.out is not None and any(line["kind"] == "forecast" for line in lines_of(settings.run.out)):
        return None
    return Forecasting(forecast_run, settings, machine_of(rank))


def forecast_run(settings: TrainSettings, machine: Machine) -> Forecast:
    """Return the predicted memory and time of one rank with these settings, and settings that fit if these do not."""
    described = described_here(machine)
    forecast = partial(forecast_of, limit_bytes=machine.memory_bytes, times=described is not None)
    use = DiskUse(settings.optimization.accumulate)
    found = forecast(predicted(settings, machine, described, use))
    found = replace(
        found,
        on_disk_bytes=use.traffic.room_bytes,
        disk_read_bytes=use.traffic.read_bytes,
        disk_written_bytes=use.traffic.written_bytes,
    )
    if found.fits:
        return found
    fitting = (
        log for log, other in _smaller(settings, machine.world) if forecast(predicted(other, machine, described)).fits
    )
    return replace(found, would_fit=tuple(next(([log] for log in fitting), [])))


def predicted(
    settings: TrainSettings, machine: Machine, described: Hardware | None, use: DiskUse | None = None
) -> Prediction:
    """Return the memory and time of one rank with these settings, from a dry run. `use` records its disk use."""
    rank = Rank(
        index=0,
        world=machine.world,
        local_index=0,
        local_world=machine.local_world,
        machines=machine.machines,
        device=torch.device("cpu"),
    )
    rows = rows_of(settings.optimization, machine.world) // machine.world
    gpt = partial(GPT, shape_of(settings.model), checkpoint_blocks=settings.memory.activation_checkpointing)
    return predict(
        lambda mesh: shard(gpt(), settings, mesh, machine.device_type),
        lambda: torch.zeros((rows, settings.text.seq), dtype=torch.int64),
        hardware=described or hardware("h100-80"),  # without a description, times are meaningless
        streams="cpu" if machine.device_type == "cpu" else "gpu",
        world=machine.world,
        ranks_per_host=machine.local_world,
        microbatches=settings.optimization.accumulate,
        max_norm=settings.optimization.clip or float("inf"),
        make_mesh=lambda: mesh_of(settings, rank),
        loss=(use or DiskUse(settings.optimization.accumulate)).loss,
        host_bytes=machine.host_bytes,
    )


def described_here(machine: Machine) -> Hardware | None:
    """Return the measured description of this machine, or else that of its accelerator; None if both are unknown."""
    kind = "cpu" if machine.device_type == "cpu" else "gpu"
    with suppress(ConfigError):
        here = hardware("here")
        if here.kind == kind:
            return here
    return hardware_named_like(machine.device_name, machine.memory_bytes) if kind == "gpu" else None


def _smaller(settings: TrainSettings, world: int) -> Iterator[tuple[str, TrainSettings]]:
    """Yield options that reduce memory, and the settings with them, the cheapest first."""
    sharded = replace(settings, parallelism=replace(settings.parallelism, strategy="zero3", replicas=None))
    recomputed = replace(sharded, memory=replace(sharded.memory, activation_checkpointing=True))
    yield "--strategy zero3", sharded
    yield "--strategy zero3 --activation-checkpointing", recomputed
    batch, accumulate = settings.optimization.batch, settings.optimization.accumulate
    while batch is not None and batch % (2 * world) == 0:
        batch, accumulate = batch // 2, accumulate * 2
        yield (
            f"--strategy zero3 --activation-checkpointing --batch {batch} --accumulate {accumulate}",
            replace(recomputed, optimization=replace(settings.optimization, batch=batch, accumulate=accumulate)),
        )
