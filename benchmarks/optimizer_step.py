"""Savings of stepping shards as plain tensors instead of as `DTensor`s.

    python benchmarks/optimizer_step.py

One process is rank 0 of two that the fake backend pretends; a GPT is sharded, and AdamW steps its shards as they are
and, held off by a hook of the user's, as `DTensor`s: in turn, in processor time. Quoted are medians over the rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.bench.model import SIZES
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.workload import Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="34m")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name in ("adamw-default", "adamw"):
        workload = Workload(shape=SIZES[args.size], world=2, optimizer=name)
        trainer = fully_sharded("zero3")(workload, workload.model(torch.device("cpu")))
        tokens = workload.tokens(0, 0)
        trainer.step(tokens)
        workload.loss(trainer.model, tokens).backward()
        taken: dict[str, list[float]] = {"plain tensors": [], "DTensors": []}
        for _ in range(args.rounds):
            for how, milliseconds in taken.items():
                hook = trainer.optimizer.register_step_pre_hook(lambda *_: None) if how == "DTensors" else None
                start = time.process_time()
                trainer.optimizer.step()
                milliseconds.append(1e3 * (time.process_time() - start))
                if hook is not None:
                    hook.remove()
        count = sum(1 for _ in trainer.model.parameters())
        reported = ", ".join(f"as {how} {statistics.median(taken[how]):.1f} ms" for how in taken)
        print(f"{name}, {count} shards: {reported}")


if __name__ == "__main__":
    main()
