"""Search for a learning rate: Ray Tune tries several, each on separate sharded workers.

    python examples/ray/learning_rates.py --workers 2

The run is that of `digits.py`; all that Tune needs is to be told of its reports.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
from digits import trainer
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback


def trial(config: dict[str, Any]) -> None:
    """One learning rate: a whole run, whose reports Tune gets."""
    run = trainer(config["workers"], Path(config["storage"]), lr=config["lr"], epochs=config["epochs"])
    run.run_config.name = f"lr-{config['lr']:g}"
    run.run_config.callbacks = [TuneReportCallback()]
    run.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-3, 1e-1])
    parser.add_argument("--at-once", type=int, default=1, help="trials")
    parser.add_argument("--storage", type=Path, default=Path(tempfile.mkdtemp()), help="what all nodes share")
    requested = parser.parse_args()
    ray.init()
    tuner = tune.Tuner(
        tune.with_resources(trial, {"memory": 100e6}),  # no core: the workers that it starts ask for theirs
        param_space={
            "lr": tune.grid_search(requested.rates),
            "epochs": requested.epochs,
            "workers": requested.workers,
            "storage": str(requested.storage),
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=requested.at_once),
        run_config=tune.RunConfig(name="tune", storage_path=str(requested.storage)),
    )
    best = tuner.fit().get_best_result()
    print({"lr": best.config["lr"], "loss": best.metrics["loss"]})
