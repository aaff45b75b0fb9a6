"""Cost and savings of activations on disk, compared with keeping them and with recomputing them.

    python benchmarks/offloaded_activations.py --folder /nvme/scratch --json
    benchmarks/results/offloaded_activations.json

A chain of transformer blocks, a unit each, is trained on two ranks in four ways: activations kept, half of the units'
on the disk, all of them there, and each block computed again by a checkpoint. Steps are timed by turns in the same
processes, one of each in a round. Memory is the most that a step adds in tensors, and the buffers. It is compared with
the formula: what a step adds where all is kept, less what travels, plus the buffers. The last line is the result as
JSON.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import Offload, fully_shard
from fullshard._dry_compat import storage_watch
from fullshard.engine.hooks import runtime_of
from fullshard.testing import run_ranks
from fullshard.versions import versions

WAYS = ("kept", "half on disk", "all on disk", "computed again")
RANKS = 2


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.second = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def build(way: str, folder: Path, blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    fraction = {"half on disk": 0.5, "all on disk": 1.0}.get(way, 0.0)
    policy = Offload(activations={"disk": fraction}, folder=folder)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    for block in model:
        if way == "computed again":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, offload_policy=policy)
    return fully_shard(model, offload_policy=policy)


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad()


def measured(folder: Path, blocks: int, width: int, rows: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return per way: seconds of each round's step, the peak bytes of tensors in one, and the transferred bytes."""
    torch.set_num_threads(1)
    models = {way: build(way, folder, blocks, width) for way in WAYS}
    x = torch.randn(1, rows, width)
    found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in WAYS}
    for number in range(-2, rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            step(models[way], x)
            dist.barrier()
            if number >= 0:
                found[way]["seconds"].append(time.perf_counter() - start)
    for way, model in models.items():
        stores = runtime_of(model).activations.stores
        before = sum(store.put_bytes for store in stores)
        with storage_watch(every_operation=True) as watch:
            step(model, x)
        found[way]["peak"] = watch.peak_bytes
        found[way]["travels"] = sum(store.put_bytes for store in stores) - before
        found[way]["buffers"] = sum(store.buffer_bytes for store in stores)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = (args.blocks, args.width, args.rows)
    found = run_ranks(RANKS, measured, args.folder, *shape, args.rounds, timeout=570)[0]
    kept = found["kept"]
    result: dict[str, Any] = {"shape": shape, "ranks": RANKS, "versions": versions(), "ways": {}}
    print(f"{'':>16} {'step ms':>9} {'over kept':>12} {'peak MiB':>9} {'formula MiB':>12} {'travels MiB':>12}")
    for way in WAYS:
        item = found[way]
        ratios = [local / its for local, its in zip(item["seconds"], kept["seconds"], strict=True)]
        formula = None if way == "computed again" else kept["peak"] - item["travels"] + item["buffers"]
        reported = result["ways"][way] = {
            "step_ms": 1e3 * statistics.median(item["seconds"]),
            "beside_kept": statistics.median(ratios),
            "peak": item["peak"] + item["buffers"],
            "formula": formula,
            "travels": item["travels"],
        }
        shown = "" if formula is None else f"{formula / 2**20:.1f}"
        print(
            f"{way:>16} {reported['step_ms']:9.1f} {reported['beside_kept']:12.2f} {reported['peak'] / 2**20:9.1f} "
            f"{shown:>12} {item['travels'] / 2**20:12.1f}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
