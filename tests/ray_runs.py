"""Runs of Ray Train on a cluster of several nodes on this machine, disturbed on purpose.

    RAY_ADDRESS=... python ray_runs.py FOLDER

Writes `FOLDER/NAME.jsonl` for each run: a line for each step that the first worker has done, and how many there were.
`disturb` removes and adds nodes meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.integrations.ray import restore, save_and_report

STEPS = 10
WORKER_DIES_AT, NODE_DIES_AT, GROWS_AT = 3, 6, 7


def batch_of(step: int) -> Tensor:
    """Return the whole batch of a step, shape (8, 8)."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, sharded, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int) -> float:
    """One step; the loss of the whole batch, before it."""
    loss = model(batch_of(step).chunk(world)[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach()
    dist.all_reduce(whole)
    return whole.item() / world


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model, optimizer = make_model()
    restored = restore(model=model, optimizer=optimizer)
    lines = Path(config["lines"])
    for step in range(restored.step if restored else 0, STEPS):
        died = lines.with_suffix(".died")
        if config["dies"] and rank == 1 and step == WORKER_DIES_AT and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while config["dies"] and step == NODE_DIES_AT + 1 and not lines.with_suffix(".replaced").exists():
            time.sleep(0.1)  # until it is dead
        while config["grows"] and world == 2 and step == 1 and not lines.with_suffix(".replaced").exists():
            time.sleep(0.1)
        loss = train_step(model, optimizer, step, rank, world)
        save_and_report({"loss": loss}, model=model, optimizer=optimizer, step=step + 1)
        if rank == 0:
            with lines.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss, "world": world}) + "\n")
        while config["grows"] and world == 1 and step >= GROWS_AT:  # until Ray ends this worker, to have two again
            time.sleep(0.2)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a run has written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: Path, what: Callable[[dict[str, Any]], bool], patience_s: float = 240) -> None:
    """Wait until the run has written a line that satisfies `what`."""
    until = time.monotonic() + patience_s
    while not any(what(line) for line in lines_of(path)):
        if time.monotonic() > until:
            raise TimeoutError(f"{path} has {lines_of(path)}")
        time.sleep(0.1)


def disturb(cluster: Cluster, folder: Path) -> None:
    """Replace a node of the first run after a worker has died, and take a node away from the second run for a while."""
    wait_for(folder / "fixed.jsonl", lambda line: line["step"] == NODE_DIES_AT)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    (folder / "fixed.replaced").touch()
    second = cluster.add_node(num_cpus=1)

    wait_for(folder / "elastic.jsonl", lambda line: line["world"] == 2)
    cluster.remove_node(second, allow_graceful=False)
    (folder / "elastic.replaced").touch()
    wait_for(folder / "elastic.jsonl", lambda line: line["world"] == 1)
    cluster.add_node(num_cpus=1)


def run(folder: Path, name: str, workers: Any, *, dies: bool = False, grows: bool = False) -> None:
    """Train until all steps are done."""
    config = {"lines": str(folder / f"{name}.jsonl"), "dies": dies, "grows": grows}
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=4)
        ),
    ).fit()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    run(Path(sys.argv[1]), "fixed", 2, dies=True)
    run(Path(sys.argv[1]), "elastic", (1, 2), grows=True)
