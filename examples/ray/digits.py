"""Handwritten digits on a Ray cluster: sharded over its workers, fed by Ray Data, found again after any failure.

    python examples/ray/digits.py --workers 2

Kill a worker while it runs: Ray restarts it, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from sklearn.datasets import load_digits
from torch import nn

from fullshard import fully_shard
from fullshard.integrations.ray import restore, save_and_report


def train(config: dict[str, Any]) -> None:
    """Train on this worker: each epoch uses its part of the rows, and ends with a checkpoint of all workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = model.to(get_device())
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    restored = restore(model=model, optimizer=optimizer)

    rows = ray.train.get_dataset_shard("train")
    for epoch in range(restored.step if restored else 0, config["epochs"]):
        losses = []
        for batch in rows.iter_torch_batches(batch_size=32, drop_last=True, device=get_device()):
            loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["digit"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        mean = torch.tensor(losses).mean().to(get_device())
        torch.distributed.all_reduce(mean)
        report = {"epoch": epoch, "loss": mean.item() / torch.distributed.get_world_size()}
        save_and_report(report, model=model, optimizer=optimizer, step=epoch + 1)


def trainer(workers: int, storage: Path, **config: float) -> TorchTrainer:
    """The run: rows for its workers in equal parts, two checkpoints kept, three failures forgiven."""
    digits = load_digits()
    rows = [
        {"pixels": pixels.astype("float32") / 16, "digit": int(digit)}
        for pixels, digit in zip(digits.data, digits.target, strict=True)
    ]
    return TorchTrainer(
        train,
        train_loop_config=config,
        datasets={"train": ray.data.from_items(rows)},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=bool(ray.cluster_resources().get("GPU"))),
        run_config=RunConfig(
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", type=Path, default=Path(tempfile.mkdtemp()), help="what all nodes share")
    requested = parser.parse_args()
    ray.init()
    print(trainer(requested.workers, requested.storage, lr=3e-3, epochs=requested.epochs).fit().metrics)
