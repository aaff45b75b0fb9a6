"""Training on a Ray cluster. Workers save one sharded checkpoint, which any number of workers can resume.

    def train(config):                              # the function of a ray.train.torch.TorchTrainer
        model, optimizer = make_sharded_model()     # on Ray's process group and device
        restored = restore(model=model, optimizer=optimizer)
        for step in range(restored.step if restored else 0, config["steps"]):
            loss = train_step(model, optimizer, step)
            save_and_report({"loss": loss}, model=model, optimizer=optimizer, step=step + 1)

Ray provides everything else: workers and their devices, restarts (`FailureConfig`), changing numbers of workers
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
from fullshard.versions import require

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
    """Report `metrics` to Ray Train, with a checkpoint of the run.

    Every worker must call it; Ray waits for all of them. Each worker writes its own shards to its own disk. Ray copies
    them to the storage of the run, where they form one checkpoint. After a failure, `restore` loads the newest complete
    one. Ray's `CheckpointConfig` sets how many are kept.

    Args:
        metrics: Metrics for Ray. Those of the first worker are used.
        model: The model, sharded or not: its parameters, buffers and other state.
        step: The number that names the checkpoint. Each worker reports a step once.
        optimizer: See `fullshard.checkpoint.save`.
        scheduler: See `fullshard.checkpoint.save`.
        data: See `fullshard.checkpoint.save`.
        extra: See `fullshard.checkpoint.save`.

    Raises:
        ConfigError: This process is not a worker of Ray Train, or `step` is below 0.
        CheckpointError: A worker could not write. The same error is raised on every worker.
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
    """Restore the newest checkpoint that the run has reported, with the current number of workers.

    Every worker must call it before its first step. With the same number of workers as the save, the following losses
    are bitwise equal. With a different number, they are those of a run that starts from this checkpoint with that many
    workers.

    Args:
        model: The model, sharded or not.
        optimizer: An optimizer of parameters of `model`.
        scheduler: An object with `load_state_dict()`.
        data: The position in the data: an object with `load_state_dict()`.

    Returns:
        The restored data with its step; None if nothing has been reported yet.

    Raises:
        ConfigError: This process is not a worker of Ray Train.
        CheckpointError: The checkpoint is damaged, or does not match. The same error is raised on every worker.
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
            f"{name} was called outside a Ray Train worker. Call it in the function that you pass to "
            "ray.train.torch.TorchTrainer. Elsewhere use fullshard.checkpoint."
        ) from error
