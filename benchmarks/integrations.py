"""What a changed line brings: step time and memory of Lightning's DDP and of DeepSpeed, each beside its integration.

    python benchmarks/integrations.py --rounds 3

trains one model of 33 million parameters on two CPU ranks by each of them in turn, in fresh processes, and prints the
medians of step times and the largest resident memory of a rank; the last line is JSON. DeepSpeed is left out where it
is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import resource
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard.testing import run_ranks
from fullshard.versions import versions

WIDTH, LAYERS, BATCH, STEPS, WARM = 768, 7, 8, 6, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 16, WIDTH, generator=torch.Generator().manual_seed(step))


def by_deepspeed(stage: int, ours: bool) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DEEPSPEED_LOG_LEVEL"] = "error"
    if ours:
        from fullshard.integrations import deepspeed
    else:
        import deepspeed
    buckets = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 5_000_000)  # a layer, and not 2 GB
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 5_000_000, **buckets},
        "optimizer": optimizer,
    }
    engine, *_ = deepspeed.initialize(model=(model := Model()), model_parameters=model.parameters(), config=config)
    seconds = []
    for step in range(STEPS):
        began = time.perf_counter()
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds, loss.item()


def by_lightning(ours: bool) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from fullshard.integrations.lightning import FullShardStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, inputs: list[Tensor], index: int) -> Tensor:
            self.last = self.model(inputs[0])
            return self.last

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        strategy=FullShardStrategy() if ours else DDPStrategy(),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    data = TensorDataset(torch.cat([batch(step) for step in range(STEPS)]))
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return seconds, module.last.item()


SYSTEMS: dict[str, tuple[Any, ...]] = {
    "Lightning, DDPStrategy": (by_lightning, False),
    "Lightning, FullShardStrategy": (by_lightning, True),
    **{
        f"{name}, stage {stage}": (by_deepspeed, stage, ours)
        for stage in (1, 2, 3)
        for name, ours in (("DeepSpeed", False), ("its loop here", True))
    },
}


def measure(name: str) -> dict[str, float]:
    """What one rank finds: milliseconds of a step, mebibytes, loss."""
    warnings.simplefilter("ignore")
    function, *arguments = SYSTEMS[name]
    seconds, loss = function(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": 1000 * statistics.median(seconds[WARM:]), "MiB": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    there = importlib.util.find_spec("deepspeed") is not None
    names = [name for name in SYSTEMS if there or not name.startswith("DeepSpeed")]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(run_ranks(2, measure, name, timeout=300.0)[0])
    print(f"{platform.machine()}, {os.cpu_count()} cores, {versions()}; {rounds} rounds of {STEPS - WARM} steps")
    rows = {}
    for name, its in found.items():
        ms = [it["ms"] for it in its]
        rows[name] = {
            "ms": round(statistics.median(ms), 1),
            "from": round(min(ms), 1),
            "to": round(max(ms), 1),
            "MiB": round(max(it["MiB"] for it in its)),
            "loss": its[0]["loss"],
        }
        took = f"{rows[name]['ms']} ms ({rows[name]['from']} to {rows[name]['to']})"
        print(f"{name:30}{took:>32}{rows[name]['MiB']:7} MiB  loss {rows[name]['loss']:.6f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
