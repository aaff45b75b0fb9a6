"""Overhead of recording a run, and accuracy of the record.

    python benchmarks/report_overhead.py --ranks 2 --json report.json
    python benchmarks/report_overhead.py --device cuda        # one rank on a GPU, and the first number only

Three numbers, of a GPT with the shape of `fullshard train`'s medium one, on CPU ranks of this machine. On a GPU, the
GPT is GPT-2's shape with 8 sequences of 1,024 tokens, in bfloat16:

    overhead     seconds of a step with a record and without one, in turns of some steps each; the order of the two
                 changes from turn to turn, and the median over pairs of turns counts
    exposed      seconds that the record says the program started collectives or waited for them, compared with a
                 trace by torch's profiler, of the same steps; by the profiler's own events of Python's functions
    bytes        size of a rank's file after this number of steps

Goals: at most 1 %, within 3 %, and at most 5 MB after 1000 steps.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import fullshard
from benchmarks.bench.model import Model, Shape
from benchmarks.bench.workload import Workload
from fullshard.report.rank_file import path_of
from fullshard.report.reading import read_run
from fullshard.report.run import PARTS
from fullshard.testing import run_ranks

WAITING = ("comm/transport.py", "wait"), ("comm/collectives.py", "start"), ("comm/collectives.py", "_run")


ON_CPU = Workload(shape=Shape(vocab=256, width=256, layers=6, heads=4, batch=8, seq=128), world=1)
ON_GPU = Workload(shape=Shape(vocab=50304, width=768, layers=12, heads=12, batch=8, seq=1024), world=1, dtype="bf16")


def model_and_optimizer(device: str = "cpu") -> tuple[Model, torch.optim.Optimizer]:
    workload = ON_CPU if device == "cpu" else ON_GPU
    model = workload.model(torch.device(device))
    policy = fullshard.MixedPrecisionPolicy(param_dtype=workload.compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fullshard.fully_shard(block, mp_policy=policy)
    fullshard.fully_shard(model, mp_policy=policy)
    return model, workload.make_optimizer(model.parameters())


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    workload = ON_CPU if device.type == "cpu" else ON_GPU
    workload.loss(model, workload.tokens(0, 0).to(device)).backward()
    fullshard.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def overhead(folder: str, rounds: int, steps: int, device: str) -> list[dict[str, float]]:
    """Return seconds of a turn's steps, on the wall's clock and on this process's cores, for each pair of turns."""
    model, optimizer = model_and_optimizer(device)
    for _ in range(5):
        step(model, optimizer)
    found = []
    for number in range(rounds):
        pair = {}
        for kind in ("on", "off") if number % 2 else ("off", "on"):
            on = fullshard.report(model, f"{folder}/{number}", optimizer=optimizer) if kind == "on" else nullcontext()
            for _ in range(3):  # up to the step that is watched, which is one in a run
                step(model, optimizer)
            dist.barrier()
            finish(device)
            start, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(model, optimizer)
            finish(device)
            pair |= {f"{kind}_s": time.perf_counter() - start, f"{kind}_core_s": time.process_time() - used}
            if kind == "on":
                on.close(draws=False)
        found.append(pair)
    return found


def finish(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def exposed(folder: str, steps: int) -> tuple[float, float]:
    """Return seconds exposed in some steps, by the record and by a trace."""
    model, optimizer = model_and_optimizer()
    with fullshard.report(model, folder, optimizer=optimizer):
        for _ in range(4):
            step(model, optimizer)
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) as trace:
            for _ in range(steps):
                step(model, optimizer)
        step(model, optimizer)
    path = Path(folder) / f"trace{dist.get_rank()}.json"
    trace.export_chrome_trace(str(path))
    run = read_run(Path(folder))
    own = run.parts_s[dist.get_rank()][:, [PARTS.index("gather"), PARTS.index("reduce")]].sum(axis=1)
    traced = [place for place, number in enumerate(run.steps) if 4 < number <= 4 + steps]
    return float(own[traced].sum()), outermost_s(json.loads(path.read_text())["traceEvents"])


def outermost_s(events: Iterable[dict[str, Any]]) -> float:
    """Return the seconds in functions that wait; nested calls count once, for the outer one."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "python_function"
        and any(file in event["name"] and event["name"].endswith(f": {name}") for file, name in WAITING)
    )
    total = end = 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def file_bytes(folder: str, steps: int) -> int:
    """Return the bytes of this rank's file after `steps` steps of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)))
    for layer in model:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with fullshard.report(model, folder) as report:
        for _ in range(steps):
            loss = model(torch.randn(4, 8)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report.log(loss=loss)
    return path_of(Path(folder), dist.get_rank()).stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--long", type=int, default=1000, help="steps of the run whose files are weighed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        turns = f"{folder}/overhead", given.rounds, given.steps, given.device
        ranks, backend = (1, "nccl") if on_gpu else (given.ranks, "gloo")
        pairs = run_ranks(ranks, overhead, *turns, timeout=500, backend=backend)
        waits, sizes = [], []
        if not on_gpu:
            waits = run_ranks(given.ranks, exposed, f"{folder}/exposed", given.steps, timeout=500)
            sizes = run_ranks(given.ranks, file_bytes, f"{folder}/bytes", given.long, timeout=500)
    ratios = [pair["on_s"] / pair["off_s"] - 1 for pair in pairs[0]]
    cores = [item["on_core_s"] / item["off_core_s"] - 1 for rank in pairs for item in rank]
    print(f"overhead: {statistics.median(ratios):+.2%} of a step ({min(ratios):+.2%} to {max(ratios):+.2%}), ", end="")
    print(f"{statistics.median(cores):+.2%} of its seconds on cores")
    for rank, (own, traced) in enumerate(waits):
        print(f"exposed, rank {rank}: {own:.4f} s recorded, {traced:.4f} s traced: {own / traced - 1:+.2%}")
    if sizes:
        print(f"bytes: at most {max(sizes):,} a rank after {given.long} steps of 51 units")
    holds = statistics.median(ratios) <= 0.01
    found = {"holds": holds, "ratios": ratios, "core_ratios": cores, "exposed_s": waits, "bytes": sizes, "ranks": ranks}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
