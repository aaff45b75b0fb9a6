"""Effect of one changed line: step time and memory of Lightning's DDP and of DeepSpeed, compared with integrations.

    python benchmarks/integrations.py --rounds 3

trains one model of 33 million parameters on two CPU ranks by each of them in turn, in fresh processes. It prints the
medians of a step's time and of the processor time that a rank spends on it, which other work on the machine disturbs
less, and the largest resident memory of a rank; the last line is JSON. DeepSpeed is left out where it is not installed.
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


Took = tuple[float, float]  # milliseconds that passed, and of the processor


def now() -> Took:
    return 1000 * time.perf_counter(), 1000 * time.process_time()


def since(began: Took) -> Took:
    passed, spent = now()
    return passed - began[0], spent - began[1]


def by_deepspeed(stage: int, own: bool) -> tuple[list[Took], float]:
    """Return the time of each step, and the last loss."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DEEPSPEED_LOG_LEVEL"] = "error"
    if own:
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
    took = []
    for step in range(STEPS):
        began = now()
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        took.append(since(began))
    return took, loss.item()


def by_lightning(own: bool) -> tuple[list[Took], float]:
    """Return the time of each step, and the last loss."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from fullshard.integrations.lightning import FullShardStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    took: list[Took] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, inputs: list[Tensor], index: int) -> Tensor:
            self.last = self.model(inputs[0])
            return self.last

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = now()

        def on_train_batch_end(self, *_: Any) -> None:
            took.append(since(self.began))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        strategy=FullShardStrategy() if own else DDPStrategy(),
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
    return took, module.last.item()


SYSTEMS: dict[str, tuple[Any, ...]] = {
    "Lightning, DDPStrategy": (by_lightning, False),
    "Lightning, FullShardStrategy": (by_lightning, True),
    **{
        f"{name}, stage {stage}": (by_deepspeed, stage, own)
        for stage in (1, 2, 3)
        for name, own in (("DeepSpeed", False), ("its loop here", True))
    },
}


def measure(name: str) -> dict[str, float]:
    """Return the measurements of one rank."""
    warnings.simplefilter("ignore")
    function, *arguments = SYSTEMS[name]
    took, loss = function(*arguments)
    passed, spent = (statistics.median(column) for column in zip(*took[WARM:], strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": passed, "CPU ms": spent, "MiB": peak, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="what the names of the systems to run have in them")
    options = parser.parse_args()
    there = importlib.util.find_spec("deepspeed") is not None
    names = [name for name in SYSTEMS if options.only in name and (there or not name.startswith("DeepSpeed"))]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            found[name].append(run_ranks(2, measure, name, timeout=300.0)[0])
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {versions()}; {options.rounds} rounds of {STEPS - WARM} steps"
    )
    rows = {}
    for name, its in found.items():
        of_step, of_cpu, peak = ([item[what] for item in its] for what in ("ms", "CPU ms", "MiB"))
        rows[name] = {"ms": statistics.median(of_step), "CPU ms": statistics.median(of_cpu), "MiB": max(peak)}
        spread = f"{min(of_step):.0f} to {max(of_step):.0f}"
        stated = " ".join(f"{value:7.0f} {what}" for what, value in rows[name].items())
        print(f"{name:30}{stated}; {spread} ms; loss {its[0]['loss']:.6f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
