"""`fullshard train --on ray`: the ranks of a run are workers of a Ray cluster, which restarts lost workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fullshard.errors import ConfigError
from fullshard.train.resuming import options_after_restart
from fullshard.versions import require

require("ray", "2.51", extra="ray")

import ray  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from ray.train.v2.api.exceptions import TrainingFailedError  # noqa: E402

_RESTARTS = 3  # the maximum number of restarts after ranks are lost


def run_on_ray(argv: Sequence[str], ranks: int, out: Path, *, address: str | None, restarts: bool) -> int:
    """Run `fullshard train argv` as `ranks` workers of Ray Train and return the exit code.

    Args:
        argv: The options of the trainer, as for any rank.
        ranks: The number of workers. Each has a core, or a GPU if the cluster has any.
        out: The folder of the run.
        address: The address of a cluster. If None, the address in `RAY_ADDRESS`, or a new cluster on this machine.
        restarts: Whether to restart lost workers, up to three times, from the newest checkpoint.

    Raises:
        ConfigError: There is no cluster at the address, or it has too few cores or GPUs.
    """
    try:
        ray.init(address=address or os.environ.get("RAY_ADDRESS", "local"))
    except ConnectionError as error:
        raise ConfigError(f"--ray-address {address}: {error}. Pass the address of a running cluster.") from error
    try:
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        kind = "GPU" if resources.get("GPU") else "CPU"
        if resources.get(kind, 0) < ranks:
            raise ConfigError(
                f"--ranks {ranks}: the Ray cluster has {resources.get(kind, 0):g} {kind}s, but each rank needs one. "
                "Use fewer ranks, or add nodes."
            )
        trainer = TorchTrainer(
            _train_on_this_worker,
            train_loop_config={"argv": list(argv), "out": str(out), "folder": os.getcwd()},
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=kind == "GPU"),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=_RESTARTS if restarts else 0)),
        )
        trainer.fit()
    except TrainingFailedError as error:
        Console(stderr=True, emoji=False).print(str(error), markup=False)
        return 1
    finally:
        ray.shutdown()
    return 0


def _train_on_this_worker(config: dict[str, Any]) -> None:
    from fullshard.train.command import train_on_this_rank

    os.chdir(config["folder"])  # paths on the command line are relative to it
    train_on_this_rank(options_after_restart(config["argv"], Path(config["out"])), has_group=True)
