"""The cost of comparing the ranks' collectives: steps with fingerprints and without, by turns, in the same run.

    torchrun --nproc-per-node 2 benchmarks/fingerprints.py --rounds 60

Quoted are medians of the differences within a round, in processor time (which the rest of a busy machine disturbs
less) and in wall time, over the median step. `--pairwise` has ranks exchange messages by gloo, as across hosts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist

from benchmarks.bench.model import SIZES
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.workload import Workload
from fullshard import compare_ranks, share_memory_between_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="34m")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pairwise", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    share_memory_between_ranks(not args.pairwise)
    dist.init_process_group("gloo")
    workload = Workload(shape=SIZES[args.size], world=dist.get_world_size())
    trainer = fully_sharded(args.strategy)(workload, workload.model(workload.device(dist.get_rank())))
    seconds: dict[str, dict[bool, list[float]]] = {clock: {True: [], False: []} for clock in ("processor", "wall")}
    for round_ in range(3 + args.rounds):
        tokens = workload.tokens(round_, dist.get_rank())
        for compares in (True, False) if round_ % 2 else (False, True):
            compare_ranks(compares)
            dist.barrier()
            before = time.process_time(), time.perf_counter()
            trainer.step(tokens)
            after = time.process_time(), time.perf_counter()
            for clock, start, end in zip(seconds, before, after, strict=True):
                seconds[clock][compares].append(end - start)
    shares = {}
    for clock, taken in seconds.items():
        with_fingerprints, without = taken[True][3:], taken[False][3:]
        cost = statistics.median(a - b for a, b in zip(with_fingerprints, without, strict=True))
        shares[clock] = cost / statistics.median(without)
        if dist.get_rank() == 0:
            step = statistics.median(without)
            print(f"{clock} time: {1e3 * cost:.2f} ms of a step of {1e3 * step:.0f} ms: {shares[clock]:.2%}")
    if dist.get_rank() == 0:
        print(json.dumps({"options": vars(args), "share_of_a_step": shares}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
