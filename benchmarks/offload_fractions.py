"""Cost and savings of a fraction of the optimizer's state on disk: step time and memory compared with the formula.

    python benchmarks/offload_fractions.py --folder /nvme/scratch --json benchmarks/results/offload_fractions.json

A chain of equal layers, a unit each, is trained by AdamW on two ranks with none, a quarter, half and all of the
optimizer's state on the disk. Steps are timed by turns in the same processes, one of each in a round; a fraction's time
is compared with the straight line through those of none and all in the same round. The goal is 10 %.

Memory is measured in separate processes, one per fraction: the bytes that a rank holds alone after three steps, minus
those without offload, compared with `predict_ledger`. Three buffers of one layer's states stay, so that a
fraction of three layers frees nothing. The last line is the result as JSON.
"""

import argparse
import ctypes
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import Offload, fully_shard
from fullshard.disk.files import DiskFile
from fullshard.plan.ledger import predict_ledger, predict_on_disk
from fullshard.testing import run_ranks
from fullshard.versions import versions

FRACTIONS = (0.0, 0.25, 0.5, 1.0)
RANKS, ROWS = 2, 16
GOAL = 0.10


def build(fraction: float, folder: Path, layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    policy = Offload(optimizer={"disk": fraction}, folder=folder)
    for layer in model:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(folder: Path, layers: int, width: int, rounds: int) -> list[list[float]]:
    """Return seconds of a step of each fraction, by round; the order turns round every other time."""
    torch.set_num_threads(1)
    runs = [build(fraction, folder, layers, width) for fraction in FRACTIONS]
    x = torch.randn(ROWS, width)
    found = []
    for number in range(-2, rounds):
        seconds = [0.0] * len(runs)
        for i in list(range(len(runs)))[:: -1 if number % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            step(*runs[i], x)
            dist.barrier()
            seconds[i] = time.perf_counter() - start
        if number >= 0:
            found.append(seconds)
    return found


def weighed(fraction: float, folder: Path, layers: int, width: int) -> dict[str, int]:
    """Return bytes of this rank: its own pages, the formula's optimizer state, and what is on the disk."""
    torch.set_num_threads(1)
    model, optimizer = build(fraction, folder, layers, width)
    x = torch.randn(ROWS, width)
    for _ in range(3):
        step(model, optimizer, x)
    dist.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reported = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        "private": (int(reported["Private_Dirty"].split()[0]) + int(reported["Private_Clean"].split()[0])) * 1024,
        "predicted": predict_ledger(model).optimizer_state,
        "on_disk": predict_on_disk(model).nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = (args.folder, args.layers, args.width)
    memory = [run_ranks(RANKS, weighed, fraction, *shape, timeout=300)[0] for fraction in FRACTIONS]
    rounds = run_ranks(RANKS, timed, *shape, args.rounds, timeout=570)[0]
    file = DiskFile(args.folder, "probe", 4096)
    result: dict[str, Any] = {
        "layers": args.layers,
        "width": args.width,
        "ranks": RANKS,
        "direct": file.is_direct,
        "versions": versions(),
        "fractions": [],
    }
    file.close()
    print(f"{'fraction':>8} {'step ms':>9} {'over the line':>16} {'memory freed MiB':>17} {'by formula MiB':>15}")
    for number, fraction in enumerate(FRACTIONS):
        ratios = [
            each_round[number] / (each_round[0] + fraction * (each_round[-1] - each_round[0])) for each_round in rounds
        ]
        found = {
            "fraction": fraction,
            "step_ms": 1e3 * statistics.median(each_round[number] for each_round in rounds),
            "beside_line": statistics.median(ratios),
            "freed": memory[0]["private"] - memory[number]["private"],
            "freed_by_formula": memory[0]["predicted"] - memory[number]["predicted"],
            "on_disk": memory[number]["on_disk"],
        }
        result["fractions"].append(found)
        freed, formula = found["freed"] / 2**20, found["freed_by_formula"] / 2**20
        print(f"{fraction:8.2f} {found['step_ms']:9.1f} {found['beside_line']:16.3f} {freed:17.1f} {formula:15.1f}")
    result["goal"] = GOAL
    result["reached"] = all(abs(item["beside_line"] - 1) <= GOAL for item in result["fractions"])
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
