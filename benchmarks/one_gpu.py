"""Costs of sharding on one GPU, in one call; the same on a CPU, with models of a suitable size.

    python benchmarks/one_gpu.py --json one_gpu.json

Three parts, one after the other:

alone     a world of one rank over NCCL (gloo on a CPU): this library, FSDP2 and DDP compared with the plain loop.
pretend   rank 0 of 8, 64 and 512 over the fake backend, compared with FSDP2. Collectives do nothing on either side.
          Counted are the host's work, the kernels around collectives (casts, copies in and out) and the memory. The
          fake backend's own collectives would copy one part after another to its place, `world` kernels for each
          tensor, so that a library would look slow for sending several tensors, which NCCL does in one launch. It
          follows that the values of other ranks' parts are whatever the memory held: losses mean nothing here.
threads   several ranks as threads on one device, with collectives that are copies: losses compared with the plain
          loop on the whole batch. Not timed.

Each measurement of the first two is a separate process, the systems in turn, and ratios are taken within a round. A
step is forward, backward and a fused AdamW, with float32 parameters and bfloat16 compute on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.bench import peers
from benchmarks.bench.model import Model, Shape
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.trainer import Trainer
from benchmarks.bench.workload import Workload
from fullshard.device.accelerator import accelerator_for

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
# A block of the last has as many parameters as one of Llama 3 8B.
MODELS = {
    "GPT-2": Shape(vocab=50304, width=768, layers=12, heads=12, seq=1024, batch=8),
    "GPT-2 XL": Shape(vocab=50304, width=1600, layers=48, heads=25, seq=1024, batch=2),
    "Llama 3 8B": Shape(vocab=32768, width=4096, layers=24, heads=32, mlp_ratio=5, seq=2048),
}
ON_A_CPU = {"vocab": 512, "layers": 4, "seq": 16, "batch": 1}  # and a quarter of the width
BUILDS = {
    "plain": lambda workload, model: Trainer(
        workload, model, workload.make_optimizer(model.parameters()), autocast=True
    ),
    "fullshard": fully_sharded("zero3"),
    "FSDP2": peers.fsdp2(),
    "DDP": peers.ddp(bucket_views=True),
}
PARTS = {"alone": ("plain", "fullshard", "FSDP2", "DDP"), "pretend": ("fullshard", "FSDP2")}


def workload_of(model: str, world: int) -> Workload:
    shape = MODELS[model]
    if not GPU:
        shape = replace(shape, **ON_A_CPU, width=shape.width // 4)
    return Workload(shape=shape, world=world, dtype="bf16" if GPU else "fp32", device_type=DEVICE.type)


def send_nothing() -> torch.library.Library:
    """Let gathers and reductions of all libraries return immediately, while their results are kept."""
    library = torch.library.Library("c10d", "IMPL")

    def of_one(receive: torch.Tensor, *_: object) -> tuple[torch.Tensor, Any]:
        return receive, FakeWork().boxed()

    def of_several(*_: object) -> Any:
        return FakeWork().boxed()

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that kernels are overridden
        for name in ("_allgather_base_", "_reduce_scatter_base_"):
            library.impl(name, of_one, DEVICE.type.upper())
        for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
            library.impl(name, of_several, DEVICE.type.upper())
    return library


def measure(system: str, model: str, world: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step, the median; on a GPU also those until the host had asked for all of it, those of its
    kernels and copies one after the other, and the most MB that were allocated and reserved.
    """
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        nothing = send_nothing()  # noqa: F841  # until the end
        torch.set_flush_denormal(True)  # what memory held may be such, and a CPU is slow at them
    else:
        store = dist.HashStore()
        dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=0, world_size=1)
    workload = workload_of(model, world)
    trainer = BUILDS[system](workload, workload.model(DEVICE))
    tokens = workload.tokens(0, 0).to(DEVICE)
    taken, requested = [], []
    for number in range(3 + steps):
        if number == 3 and GPU:
            torch.cuda.reset_peak_memory_stats()
        finish()
        start = time.perf_counter()
        trainer.step(tokens)
        requested.append(1e3 * (time.perf_counter() - start))
        finish()
        taken.append(1e3 * (time.perf_counter() - start))
    found = {"ms": statistics.median(taken[3:])}
    if GPU:
        found |= {
            "host ms": statistics.median(requested[3:]),
            "GPU ms": busy_ms(lambda: trainer.step(tokens)),
            "allocated": torch.cuda.max_memory_allocated() / 1e6,
            "reserved": torch.cuda.max_memory_reserved() / 1e6,
        }
    return found


def busy_ms(step: Callable[[], object]) -> float:
    """Return the total milliseconds of kernels and copies on the GPU in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as visited:
        step()
        finish()
    of_gpu = (event for event in visited.events() if event.device_type == DeviceType.CUDA)
    return sum(event.device_time for event in of_gpu if not event.is_user_annotation) / 1e3


def finish() -> None:
    if GPU:
        torch.cuda.synchronize()


def alongside(part: str, model: str, world: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure every system of a part in each round, in turn."""
    found: dict[str, list[dict[str, float]]] = {system: [] for system in PARTS[part]}
    for number in range(rounds):
        for system in list(found)[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, "--one", system, model, str(world), str(steps)]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[system].append(json.loads(ran.stdout.splitlines()[-1]))
    print(f"{part}: {model}, rank 0 of {world}")
    for system, rows in found.items():
        reported = []
        for what in rows[0]:
            middle = statistics.median(row[what] for row in rows)
            ratio = statistics.median(
                fully_sharded[what] / row[what] for fully_sharded, row in zip(found["fullshard"], rows, strict=True)
            )
            reported.append(f"{what} {middle:8.1f}, ours is {ratio:.3f} of it")
        print(f"  {system:10} {'; '.join(reported)}", flush=True)
    return {"part": part, "model": model, "world": world, "systems": found}


# -- ranks as threads -------------------------------------------------------------------------------------------------


def in_threads(world: int, steps: int) -> dict[str, Any]:
    """The losses of ranks that are threads, averaged over them, and of the plain loop on all of their batches."""
    from threads import run_threads  # in this folder

    shape = Shape(vocab=512, width=256, layers=4, heads=4, seq=64)
    workload = Workload(shape=shape, world=world, device_type=DEVICE.type)

    def run(rank: int, lock: threading.Lock) -> list[float]:
        with lock:
            model = workload.model(DEVICE)
        trainer = fully_sharded("zero3")(workload, model)
        return [trainer.step(workload.tokens(number, rank).to(DEVICE)).item() for number in range(steps)]

    assert accelerator_for(DEVICE).streams  # made before threads ask for them
    losses = run_threads(world, run)
    model: Model = workload.model(DEVICE)
    optimizer = workload.make_optimizer(model.parameters())
    plain = []
    for number in range(steps):
        of_ranks = [workload.loss(model, workload.tokens(number, rank).to(DEVICE)) for rank in range(world)]
        loss = sum(of_ranks[1:], of_ranks[0]) / world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    mean = [statistics.fmean(row[number] for row in losses) for number in range(steps)]
    differs = max(abs(a - b) for a, b in zip(mean, plain, strict=True))
    print(f"threads: {world} ranks on {DEVICE}, {steps} steps: losses differ by {differs:.2e} at most")
    return {"part": "threads", "world": world, "losses": mean, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="alone,pretend,threads")
    parser.add_argument("--models", default="GPT-2 XL,Llama 3 8B", help=", ".join(MODELS))
    parser.add_argument("--worlds", default="8,64,512", help="that the fake backend pretends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="a file for all of it")
    parser.add_argument("--one", nargs=4, metavar=("SYSTEM", "MODEL", "WORLD", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        system, model, world, steps = args.one
        print(json.dumps(measure(system, model, int(world), int(steps))))
        return
    print(f"on {torch.cuda.get_device_name(0) if GPU else 'a CPU'}, torch {torch.__version__}")
    found = []
    for part in args.parts.split(","):
        if part == "threads":
            found.append(in_threads(4, 5))
            continue
        models, worlds = args.models.split(","), [int(world) for world in args.worlds.split(",")]
        if part == "alone":
            models, worlds = models[:1], [1]  # with all of its optimizer's state, no larger one fits
        for model in models:
            for world in worlds:
                found.append(alongside(part, model, world, args.rounds, args.steps))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
