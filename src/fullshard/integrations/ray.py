"""Train on a Ray cluster: what a worker of Ray Train saves is one sharded checkpoint, and any number of workers go on.

    def train(config):                              # the function of a ray.train.torch.TorchTrainer
        model, optimizer = make_sharded_model()     # on Ray's process group and device
        restored = restore(model=model, optimizer=optimizer)
        for step in range(restored.step if restored else 0, config["steps"]):
            loss = train_step(model, optimizer, step)
            save_and_report({"loss": loss}, model=model, optimizer=optimizer, step=step + 1)

Everything else is Ray's: workers and their devices, restarts (`FailureConfig`), worker counts that change
(`ScalingConfig(num_workers=(2, 8))`), storage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.contents import HasState
from fullshard.checkpoint.loading import Restored, load
from fullshard.checkpoint.saving import save_own_files
from fullshard.errors import ConfigError
from fullshard.required import require

require("ray", "2.51", extra="ray")

import ray.train  # noqa: E402

__all__ = ["restore", "save_and_report"]


def save_and_report(
    metrics: Mapping[str, Any],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
    extra: Any = None,
) -> None:
    """Report `metrics` to Ray Train, with a checkpoint of the run. Every worker calls it; Ray waits for all of them.

    Each worker writes its own shards to its own disk, and Ray takes them to the storage of the run, where all of them
    are one checkpoint: the newest one that is whole is what `restore` gives after a failure. How many are kept says
    Ray's `CheckpointConfig`.

    Args:
        metrics: for Ray; those of the first worker count.
        model: sharded or not; its parameters, buffers and other state.
        step: names the checkpoint: each worker reports a step once.
        optimizer, scheduler, data, extra: as for `fullshard.checkpoint.save`.

    Raises:
        ConfigError: this process is no worker of Ray Train, or `step` is below 0.
        CheckpointError: some worker could not write; the same error on every worker.
    """
    _check_is_worker("save_and_report")
    with tempfile.TemporaryDirectory(prefix="fullshard-") as own:
        save_own_files(own, model=model, step=step, optimizer=optimizer, scheduler=scheduler, data=data, extra=extra)
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(own))


def restore(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: HasState | None = None,
    data: HasState | None = None,
) -> Restored | None:
    """Put back the newest checkpoint that the run has reported, into as many workers as there are now.

    Every worker calls it, before its first step. With as many workers as saved, the next losses have the same bits;
    with another number they are those of a run of that size that starts there.

    Args: as for `fullshard.checkpoint.load`.

    Returns:
        What was restored, with its step; None where nothing has been reported yet.

    Raises:
        ConfigError: this process is no worker of Ray Train.
        CheckpointError: the checkpoint is damaged, or does not fit; the same error on every worker.
    """
    _check_is_worker("restore")
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load(Path(folder), model=model, optimizer=optimizer, scheduler=scheduler, data=data)


def _check_is_worker(name: str) -> None:
    try:
        ray.train.get_context().get_world_rank()
    except Exception as error:
        raise ConfigError(
            f"{name} was called outside of a worker of Ray Train. Call it in the function that you give to "
            "ray.train.torch.TorchTrainer; elsewhere use fullshard.checkpoint."
        ) from error
