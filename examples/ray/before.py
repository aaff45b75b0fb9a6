"""Handwritten digits on a Ray cluster, as one writes it without fullshard: each worker has the whole model.

python examples/ray/before.py --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from sklearn.datasets import load_digits
from torch import nn


def train(config: dict[str, Any]) -> None:
    """Train on this worker: each epoch uses its part of the rows, and ends with a checkpoint of all workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    first, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", map_location=get_device())
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1

    rows = ray.train.get_dataset_shard("train")
    for epoch in range(first, config["epochs"]):
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
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                ray.train.report(report, checkpoint=Checkpoint.from_directory(folder))
            else:
                ray.train.report(report)


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
