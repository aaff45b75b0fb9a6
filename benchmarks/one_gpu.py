"""Costs of sharding on one GPU, in one call; the same on a CPU, with models of a suitable size.

    python benchmarks/one_gpu.py --json one_gpu.json
    python benchmarks/one_gpu.py --parts eager,captured,compiled --models GPT-2

Parts, one after the other. The first three have a world of one rank over NCCL (gloo on a CPU) and compare the plain
loop, DDP, FSDP2 and this library:

eager     steps as they are, with units of four blocks, and with backwards on the thread that calls `backward`, where
          hooks in Python take less time than on a thread of autograd (`torch.autograd.set_multithreading_enabled`).
captured  the whole step in a CUDA graph: by `fullshard.capture`, the others by `torch.cuda.graph`. Each system is a
          process: a capture that fails ends it.
compiled  each block compiled by `torch.compile`.
pretend   rank 0 of 8, 64 and 512 over the fake backend, compared with FSDP2. Collectives do nothing on either side.
          Counted are the host's work, the kernels around collectives (casts, copies in and out) and the memory. The
          fake backend's own collectives would copy one part after another to its place, `world` kernels for each
          tensor, so that a library would look slow for sending several tensors, which NCCL does in one launch. It
          follows that the values of other ranks' parts are whatever the memory held: losses mean nothing here.
threads   several ranks as threads on one device, with collectives that are copies: losses compared with the plain
          loop on the whole batch. Not timed.

Systems take turns, and ratios are taken within a round. Results are written as soon as they exist. A step is forward,
backward and a fused AdamW, with float32 parameters and bfloat16 compute on a GPU.
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
from functools import partial
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
from benchmarks.bench.model import Block, Model, Shape
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.trainer import Trainer
from benchmarks.bench.workload import Workload
from fullshard import capture
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
    "fullshard, units of 4 blocks": fully_sharded("zero3", blocks_per_unit=4),
    "FSDP2": peers.fsdp2(),
    "DDP": peers.ddp(bucket_views=True),
}
MODES = "eager", "captured", "compiled"
SYSTEMS = "plain", "DDP", "FSDP2", "fullshard"
ONE_THREAD = ", one thread"
MORE = {  # systems, in some modes
    "eager": ("fullshard, units of 4 blocks", f"FSDP2{ONE_THREAD}", f"fullshard{ONE_THREAD}"),
}
PRETENDERS = "fullshard", "FSDP2"
REPORT = "result "  # begins a line with a result as JSON, of a child process


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


# -- a world of one rank ----------------------------------------------------------------------------------------------


def measure_modes(mode: str, model: str, systems: list[str], rounds: int, steps: int) -> None:
    """Print a result for each system and round: milliseconds of a step, and on a GPU those of the host and of the GPU.

    A system that fails is reported with its error, and the others go on.
    """
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    workload = workload_of(model, 1)
    tokens = workload.tokens(0, 0).to(DEVICE)
    ready: dict[str, Callable[[], object]] = {}
    for system in systems:
        start = time.perf_counter()
        try:
            ready[system] = prepare(mode, system, workload, tokens)
            once = {"seconds to prepare": round(time.perf_counter() - start, 1)}
            if GPU:
                once["GPU ms"] = busy_ms(ready[system])
        except Exception as error:
            ready.pop(system, None)
            once = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(REPORT + json.dumps({"system": system, "once": once}), flush=True)
    for number in range(rounds):
        for system in list(ready)[:: 1 if number % 2 else -1]:
            print(REPORT + json.dumps({"system": system, "round": timed(ready[system], steps)}), flush=True)
    dist.destroy_process_group()


def prepare(mode: str, system: str, workload: Workload, tokens: torch.Tensor) -> Callable[[], object]:
    """Return a training step of `system` after its first steps."""
    if system.endswith(ONE_THREAD):
        threaded = prepare(mode, system.removesuffix(ONE_THREAD), workload, tokens)

        def step_on_one_thread() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                threaded()

        return step_on_one_thread
    trainer = BUILDS[system](workload, workload.model(DEVICE))
    if mode == "compiled":
        for module in trainer.model.modules():
            if isinstance(module, Block):
                module.compile()
    if mode == "captured":
        for group in trainer.optimizer.param_groups:
            group["capturable"] = True
    finish()
    aside = torch.cuda.Stream() if mode == "captured" else None
    with torch.cuda.stream(aside):
        for _ in range(12 if system == "DDP" else 4):  # DDP rearranges its buckets first
            trainer.step(tokens)
    finish()
    if mode != "captured":
        return lambda: trainer.step(tokens)
    if system == "fullshard":  # with the costs of its checks and of copying the batch
        step = capture(trainer.step, (tokens,))
        for _ in range(5):
            step(tokens)
        return lambda: step(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        trainer.step(tokens)
    return graph.replay


def timed(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step, those of steps without a synchronization in between, and on a GPU
    those until the host had queued all of a step.
    """
    taken, requested = [], []
    for _ in range(1 + steps):
        finish()
        start = time.perf_counter()
        step()
        requested.append(1e3 * (time.perf_counter() - start))
        finish()
        taken.append(1e3 * (time.perf_counter() - start))
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    in_a_row = 1e3 * (time.perf_counter() - start) / steps
    host = {"host ms": statistics.median(requested[1:])} if GPU else {}
    return {"ms": statistics.median(taken[1:]), "ms in a row": in_a_row} | host


def modes(mode: str, model: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return the results of each system in a mode. What a process printed before it failed is kept."""
    everyone = [*SYSTEMS, *MORE.get(mode, ())]
    together = [everyone] if mode != "captured" else [[system] for system in everyone]
    found: dict[str, dict[str, Any]] = {system: {"rounds": []} for system in everyone}
    for systems in together:
        what = ("--one", mode, model, ";".join(systems), str(rounds), str(steps))
        with subprocess.Popen([sys.executable, __file__, *what], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if not line.startswith(REPORT):
                    continue
                print(line, end="", flush=True)  # kept even if this process is ended
                row = json.loads(line.removeprefix(REPORT))
                results = found[row["system"]]
                results.update(row.get("once", {}))
                results["rounds"] += [row["round"]] if "round" in row else []
        for system in systems:
            if child.returncode and "error" not in found[system]:
                found[system]["error"] = f"The process ended with exit code {child.returncode}."
    print(f"{mode}: {model}, world size 1")
    for system, results in found.items():
        print(f"  {system:28} {stated(results, found['fullshard'])}", flush=True)
    return {"part": mode, "model": model, "world": 1, "systems": found}


def stated(results: dict[str, Any], own: dict[str, Any]) -> str:
    """Return a line for a system's results, with the ratio of this library to it."""
    rows = results["rounds"]
    if not rows:
        return results.get("error", "no result")
    parts = [f"{what} {statistics.median(row[what] for row in rows):8.2f}" for what in rows[0]]
    parts += [f"GPU ms {results['GPU ms']:8.2f}"] if "GPU ms" in results else []
    ratios = [a["ms"] / b["ms"] for a, b in zip(own["rounds"], rows, strict=False)]
    return "; ".join(parts) + (f"; ours is {statistics.median(ratios):.3f} of it" if ratios else "")


# -- rank 0 of a simulated world --------------------------------------------------------------------------------------


def measure(system: str, model: str, world: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step, the median; on a GPU also those until the host had asked for all of it, those of its
    kernels and copies one after the other, and the most MB that were allocated and reserved.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    nothing = send_nothing()  # noqa: F841  # until the end
    torch.set_flush_denormal(True)  # what memory held may be such, and a CPU is slow at them
    workload = workload_of(model, world)
    trainer = BUILDS[system](workload, workload.model(DEVICE))
    tokens = workload.tokens(0, 0).to(DEVICE)
    for _ in range(3):
        trainer.step(tokens)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    found = timed(lambda: trainer.step(tokens), steps)
    if GPU:
        found |= {
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


def alongside(model: str, world: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure this library and FSDP2 in each round, in turn."""
    found: dict[str, list[dict[str, float]]] = {system: [] for system in PRETENDERS}
    for number in range(rounds):
        for system in PRETENDERS[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, "--one", "pretend", model, system, str(world), str(steps)]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[system].append(json.loads(ran.stdout.splitlines()[-1]))
    print(f"pretend: {model}, rank 0 of {world}")
    for system, rows in found.items():
        reported = []
        for what in rows[0]:
            middle = statistics.median(row[what] for row in rows)
            ratio = statistics.median(
                fully_sharded[what] / row[what] for fully_sharded, row in zip(found["fullshard"], rows, strict=True)
            )
            reported.append(f"{what} {middle:8.1f}, ours is {ratio:.3f} of it")
        print(f"  {system:10} {'; '.join(reported)}", flush=True)
    return {"part": "pretend", "model": model, "world": world, "systems": found}


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
    parser.add_argument("--parts", default=",".join((*MODES[: 3 if GPU else 1], "pretend", "threads")))
    parser.add_argument(
        "--models", default="GPT-2,GPT-2 XL,Llama 3 8B", help="the first is that of a world of one rank"
    )
    parser.add_argument("--worlds", default="8,64,512", help="that the fake backend pretends")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="a file for all of it, written after each part")
    parser.add_argument(
        "--one", nargs=5, metavar=("PART", "MODEL", "SYSTEMS", "ROUNDS", "STEPS"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.one:
        part, model, systems, number, steps = args.one
        if part == "pretend":
            print(json.dumps(measure(systems, model, int(number), int(steps))))
        else:
            measure_modes(part, model, systems.split(";"), int(number), int(steps))
        return
    print(f"on {torch.cuda.get_device_name(0) if GPU else 'a CPU'}, torch {torch.__version__}")
    models, worlds = args.models.split(","), [int(world) for world in args.worlds.split(",")]
    measurements: list[Callable[[], dict[str, Any]]] = []
    for part in args.parts.split(","):
        if part in MODES:
            measurements.append(partial(modes, part, models[0], args.rounds, args.steps))
        elif part == "pretend":
            pairs = [(model, world) for model in models for world in worlds]
            measurements += [partial(alongside, *pair, args.rounds, args.steps) for pair in pairs]
        else:
            measurements.append(partial(in_threads, 4, 5))
    found = []
    for measurement in measurements:
        found.append(measurement())
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
