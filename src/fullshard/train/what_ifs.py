"""Step times with other settings, simulated like the run's own forecast, and the commands to try them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fullshard.errors import ConfigError
from fullshard.plan.forecast import Forecasting
from fullshard.report.run import WhatIf
from fullshard.train.predicting import Machine, described_here, machine_of, predicted
from fullshard.train.ranks import Rank
from fullshard.train.run_folder import SETTINGS
from fullshard.train.settings import TrainSettings

_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def simulate_changes(settings: TrainSettings, rank: Rank, folder: str) -> tuple[WhatIf, ...]:
    """Return the gains of other settings for the run in `folder`; none without a description of this machine.

    The simulation runs in a separate process for some seconds.
    """
    machine = replace(machine_of(rank), host_bytes=None)  # unlimited: the run already uses the host memory it needs
    return Forecasting(what_ifs_of, settings, machine, folder).result() if described_here(machine) else ()


def what_ifs_of(settings: TrainSettings, machine: Machine, folder: str) -> tuple[WhatIf, ...]:
    """Return the changes that fit into memory, sorted by gain. Incompatible changes are skipped."""
    here = described_here(machine)
    if here is None:
        return ()
    step_s = predicted(settings, machine, here).step_s
    found = []
    for change, options, other in _changes(settings, machine):
        try:
            simulated = predicted(other, machine, here)
        except ConfigError:  # such as parameters on a disk, under a strategy that keeps them whole
            continue
        if simulated.needed_bytes <= machine.memory_bytes:
            command = f"fullshard train --config {folder}/{SETTINGS} {options}"
            gain_s = step_s - simulated.step_s
            found.append(WhatIf(change=change, step_s=simulated.step_s, gain_s=gain_s, command=command))
    return tuple(sorted(found, key=lambda item: -item.gain_s))


def _changes(settings: TrainSettings, machine: Machine) -> Iterator[tuple[str, str, TrainSettings]]:
    """Yield each change with its options and the changed settings."""
    for strategy in (*_STRATEGIES, *(("hsdp",) if machine.machines > 1 else ())):
        if strategy != settings.parallelism.strategy:
            replicas = machine.machines if strategy == "hsdp" else None
            parallelism = replace(settings.parallelism, strategy=strategy, replicas=replicas)
            yield strategy, f"--strategy {strategy}", replace(settings, parallelism=parallelism)
    memory = settings.memory
    change = replace(memory, activation_checkpointing=not memory.activation_checkpointing)
    no = "no " if memory.activation_checkpointing else ""
    option = f"--{no}activation-checkpointing".replace(" ", "-")
    yield f"{no}activation checkpointing", option, replace(settings, memory=change)
    if memory.dtype == "bfloat16" and memory.reduce_dtype == "float32":
        change = replace(memory, reduce_dtype="bfloat16")
        yield "reductions in bfloat16", "--reduce-dtype bfloat16", replace(settings, memory=change)
    if memory.reduce_wire is None and memory.reduce_dtype == "float32":
        change = replace(memory, reduce_wire="bf16")
        yield "gradients sent in bfloat16", "--reduce-wire bf16", replace(settings, memory=change)
