"""Small runs of the trainer, and what they leave in their folders."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fullshard.train.check import check
from fullshard.train.loop import train
from fullshard.train.options import parse_settings
from fullshard.train.ranks import Rank

TEXT = str(Path(__file__).parent / "small_models.py")
QUICK = [
    *("--text", TEXT, "--size", "nano", "--steps", "3", "--seq", "16", "--warmup", "1", "--lr", "0.01"),
    *("--log-every", "1", "--validate-every", "2", "--validate-bytes", "300", "--sample-bytes", "8", "--batch", "4"),
]
TIMES = ("seconds", "tokens_per_s")  # what a clock has measured


def this_rank() -> Rank:
    index, world = dist.get_rank(), dist.get_world_size()
    return Rank(index=index, world=world, local_index=index, local_world=world, device=torch.device("cpu"))


def train_here(*argv: str) -> int:
    """Return the exit code of `fullshard train` with these options, on ranks that exist."""
    rank, settings = this_rank(), parse_settings(list(argv))
    return train(settings, check(settings, rank.world), rank)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the logged lines of a run without measured times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out) if line["kind"] in ("step", "validation")]


def weights(out: Path) -> dict[str, Any]:
    return load_file(out / "model.safetensors")


def wait_for_step(out: Path, least: int) -> int:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        lines = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
        steps = [json.loads(line)["step"] for line in lines if '"kind": "step"' in line and line.endswith("}")]
        if steps and steps[-1] >= least:
            return steps[-1]
        time.sleep(0.1)
    raise AssertionError(f"{out} did not come to step {least}")
