"""Does a model of three times the memory train here? Under a hard limit, compared with a lower bound and with mmap.

    python benchmarks/offload_beyond.py --folder /nvme/scratch --json benchmarks/results/offload_beyond.json

A GPT is trained on two ranks with AdamW. Its states (parameters, gradients and two values for each parameter, in fp32)
are three times what a control group of the kernel lets all processes of a run have together: their own pages, memory in
common, and the system's caches for them. The systems, in separate processes:

    fullshard  Offload(parameters={"disk": 1.0}), on zero3; built block by block
    mmap       plain PyTorch in one process with both cores, on the same batch: parameters, gradients and states are
               torch.from_file tensors, which the system reads and writes as it likes
    deepspeed  only if it is named by --systems: ZeRO stage 3 with parameters and the optimizer on "nvme", on gloo. It
               needs `pip install deepspeed==0.19.8`, a C++ compiler and libaio's headers (libaio-dev). Gradients are
               in memory all the same: 16 layers did not fit with --times 1.5 (docs/log.md)

The floor of a step is what computing takes with everything in memory (of models of few blocks, without limit, carried
on in a straight line), or what the disk takes for the bytes that must pass in forward and backward, whichever is more;
and the same of the optimizer's step. Its rates are measured before each run. Goals: a step within 1.15 of the floor;
memory of each rank within what the dry run says + 2 %; the loss falls. The last line is the result as JSON.

malloc returns larger blocks to the system (MALLOC_MMAP_THRESHOLD_). Otherwise it would keep freed blocks between others
for good, which no plan predicts. Since this makes them new each time, PyTorch uses huge pages for them
(THP_MEM_ALLOC_ENABLE), so that few pages have to be made.

This needs Linux with a control group of memory that may be made (version 1, at /sys/fs/cgroup/memory).
"""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench.model import Block, Model, Shape
from fullshard import Offload, dry, fully_shard
from fullshard.disk.speed import DiskSpeed, measure
from fullshard.plan.process import process_memory
from fullshard.testing import run_ranks
from fullshard.versions import versions

RANKS, VOCAB = 2, 1024
TIMES, TIME_GOAL, MEMORY_GOAL = 3.0, 1.15, 1.02
STATES = 16  # bytes for each parameter
GROUPS = Path("/sys/fs/cgroup/memory")
THRESHOLD = 1 << 20  # bytes from which on malloc gives memory back when it is freed
WATCHED = 3  # steps with memory measurements
MEASURING_S = 24.0  # of the disk, before each run
FEW, FEW_STEPS = (4, 12), 8  # blocks of the models that compute in memory, and steps of each


def shape_of(layers: int, width: int, seq: int) -> Shape:
    return Shape(vocab=VOCAB, width=width, layers=layers, heads=width // 64, seq=seq)


def numel_of(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in Model(shape).parameters())


def build(shape: Shape, policy: Offload | None) -> nn.Module:
    """Return a sharded model that never was whole: one block after the other is made and sharded."""
    torch.manual_seed(0)
    model = Model(replace(shape, layers=0))
    for _ in range(shape.layers):
        model.blocks.append(fully_shard(Block(shape), offload_policy=policy))
    return fully_shard(model, offload_policy=policy)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def batch(shape: Shape, rows: range) -> Tensor:
    """Return the same rows in every step, to be learned by heart."""
    made = [torch.randint(VOCAB, (shape.seq + 1,), generator=torch.Generator().manual_seed(row)) for row in rows]
    return torch.stack(made)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, count: int) -> dict[str, list[float]]:
    """Return seconds of forward and backward, and of the optimizer's step, by step; and the losses."""
    found: dict[str, list[float]] = {"compute": [], "step": [], "loss": []}
    for _ in range(count):
        meet()
        start = time.perf_counter()
        loss = loss_of(model, tokens)
        loss.backward()
        meet()
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        meet()
        found["compute"].append(between - start)
        found["step"].append(time.perf_counter() - between)
        found["loss"].append(loss.item())
    return found


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


# -- memory -----------------------------------------------------------------------------------------------------------


def pages() -> int:
    """Return bytes of this process: its own, and its part of memory in common, but for files."""
    reported = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(reported[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))


@contextmanager
def watching(found: dict[str, int], interval: float = 0.02) -> Iterator[None]:
    """A context whose highest memory is put into `found`."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(interval):
            found["peak"] = max(found.get("peak", 0), pages())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# -- systems ----------------------------------------------------------------------------------------------------------


def with_fullshard(shape: Shape, folder: Path, count: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    before, peak = pages(), dict[str, int]()
    with watching(peak):  # which takes a fifth of both cores: these steps' times count for nothing
        model = build(shape, Offload(parameters={"disk": 1.0}, folder=folder))
        built = peak.get("peak", 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        tokens = batch(shape, range(dist.get_rank(), dist.get_rank() + 1))
        watched = steps(model, optimizer, tokens, WATCHED)
    found: dict[str, Any] = steps(model, optimizer, tokens, count)
    found["loss"] = watched["loss"] + found["loss"]
    return {**found, "built_nbytes": built - before, "peak_nbytes": peak["peak"] - before, "before_nbytes": before}


def in_memory(shape: Shape, count: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = build(shape, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return steps(model, optimizer, batch(shape, range(dist.get_rank(), dist.get_rank() + 1)), count)


def with_mmap(shape: Shape, folder: Path, count: int) -> dict[str, Any]:
    """Train in one process with all parameters, gradients and states in files."""
    torch.set_num_threads(RANKS)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def mapped(like: Tensor) -> Tensor:
        paths.append(folder / f"mapped-{len(paths)}")
        with paths[-1].open("wb") as file:  # or a write to a page may find no room for it
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        return torch.from_file(str(paths[-1]), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)

    try:
        model = Model(replace(shape, layers=0))
        for param in model.parameters():
            param.data = mapped(param).copy_(param.data)
        for _ in range(shape.layers):
            block = Block(shape)
            for param in block.parameters():
                param.data = mapped(param).copy_(param.data)
            model.blocks.append(block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        for param in model.parameters():
            param.grad = mapped(param).zero_()
            moments = {name: mapped(param).zero_() for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        return steps(model, optimizer, batch(shape, range(RANKS)), count)
    finally:
        for path in paths:
            path.unlink()


def prepare_deepspeed() -> None:
    """Compile DeepSpeed's operations, which is not to happen under the limit."""
    if importlib.util.find_spec("deepspeed") is None:
        raise SystemExit("no deepspeed: pip install deepspeed==0.19.8; and have libaio-dev and a C++ compiler")
    os.environ["DS_ACCELERATOR"] = "cpu"
    run_ranks(1, deepspeed_operations, timeout=1800)


def deepspeed_operations() -> None:
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    for name in ("AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
        accelerator.create_op_builder(name).load(verbose=False)


def deepspeed_config(shape: Shape, folder: Path) -> dict[str, Any]:
    """Parameters and states on the disk, with buffers for the largest parameter, and units of the step as small.

    DeepSpeed's own sizes (buffers of 100 million elements, a step of a billion at once) are more than the limit.
    """
    largest = shape.mlp_ratio * shape.width**2
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "buffer_count": 6, "buffer_size": largest // RANKS},
            "offload_optimizer": {**nvme, "buffer_count": 5},
            "sub_group_size": largest // RANKS,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 3 * largest,
            "stage3_max_reuse_distance": 0,
            "overlap_comm": False,
        },
    }


def with_deepspeed(shape: Shape, folder: Path, count: int) -> dict[str, Any]:
    deepspeed = importlib.import_module("deepspeed")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    config = deepspeed_config(shape, folder)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model(replace(shape, layers=0))
        for _ in range(shape.layers):
            model.blocks.append(Block(shape))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return steps(engine, engine, batch(shape, range(dist.get_rank(), dist.get_rank() + 1)), count)


def ranks_with_deepspeed(shape: Shape, folder: Path, count: int) -> dict[str, Any]:
    try:
        return run_ranks(RANKS, with_deepspeed, shape, folder, count, timeout=1500)[0]
    finally:
        shutil.rmtree(folder / "zero_stage_3", ignore_errors=True)


SYSTEMS: dict[str, Callable[[Shape, Path, int], dict[str, Any]]] = {
    "fullshard": lambda *args: run_ranks(RANKS, with_fullshard, *args, timeout=1500)[0],
    "mmap": with_mmap,
    "deepspeed": ranks_with_deepspeed,
}
USUAL = ["fullshard", "mmap"]  # compared by default


# -- under a limit ----------------------------------------------------------------------------------------------------


def run_under(limit: int, arguments: list[str]) -> dict[str, Any]:
    """Run this script with `arguments` in processes that share `limit` bytes, and return the last line it prints."""
    group = GROUPS / f"offload-beyond-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        raise SystemExit(f"{group}: no control group of memory can be made: {error}") from error

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        command = [sys.executable, __file__, *arguments]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD), "THP_MEM_ALLOC_ENABLE": "1"}
        ran = subprocess.run(command, env=environment, preexec_fn=join, stdout=subprocess.PIPE, text=True, check=False)
        found: dict[str, Any] = {"exit": ran.returncode} if ran.returncode else json.loads(ran.stdout.splitlines()[-1])
        found["group_peak_nbytes"] = int((group / "memory.max_usage_in_bytes").read_text())
        return found
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a control group as soon as the kernel has taken leave of its processes."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


# -- what it would take at least --------------------------------------------------------------------------------------


def predicted(shape: Shape, folder: Path) -> int:
    """Return bytes of a rank's process beyond what it has before, by the dry run."""
    policy = Offload(parameters={"disk": 1.0}, folder=folder)
    make: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    tape = dry.run(
        lambda: build(shape, policy),
        lambda: batch(shape, range(1)),
        loss=loss_of,
        world=RANKS,
        steps=3,
        streams="cpu",
        make_optimizer=make,
    )
    return process_memory(tape, threshold=THRESHOLD).nbytes


def floor_of(shape: Shape, speed: DiskSpeed, few: dict[int, dict[str, list[float]]]) -> dict[str, float]:
    """Return seconds of a step that cannot be had faster, by its parts."""

    def carried_on(part: str) -> float:
        low, high = (statistics.median(few[layers][part][1:]) for layers in FEW)
        return low + (shape.layers - FEW[0]) * (high - low) / (FEW[1] - FEW[0])

    numel = numel_of(shape)
    compute, optimizer = carried_on("compute"), carried_on("step")
    passing = speed.seconds(8 * numel, 4 * numel)  # shards for forward and for backward; gradients
    stepped = speed.seconds(16 * numel, 12 * numel)  # shard, gradient and two states; all but the gradient
    return {
        "compute_s": compute,
        "optimizer_s": optimizer,
        "disk_in_passes_s": passing,
        "disk_in_step_s": stepped,
        "floor_s": max(compute, passing) + max(optimizer, stepped),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--times", type=float, default=TIMES, help="the states, of the limit")
    parser.add_argument("--systems", nargs="+", default=USUAL, choices=list(SYSTEMS))
    parser.add_argument("--system", choices=list(SYSTEMS), help=argparse.SUPPRESS)  # run it, under the limit
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = shape_of(args.layers, args.width, args.seq)
    if args.system:
        print(json.dumps(SYSTEMS[args.system](shape, args.folder, args.steps)))
        return
    states = STATES * numel_of(shape)
    limit = int(states / args.times)
    if "deepspeed" in args.systems:
        prepare_deepspeed()
    print(f"{numel_of(shape) / 1e6:.0f} million parameters: {states / 1e9:.2f} GB of states under {limit / 1e9:.2f} GB")
    plan = predicted(shape, args.folder)
    result: dict[str, Any] = {
        "layers": args.layers,
        "width": args.width,
        "seq": args.seq,
        "ranks": RANKS,
        "states_nbytes": states,
        "limit_nbytes": limit,
        "planned_nbytes": plan,
        "versions": versions(),
        "systems": {},
    }
    for system in args.systems:
        speed = measure(args.folder, seconds=MEASURING_S)
        few = {
            layers: run_ranks(RANKS, in_memory, shape_of(layers, args.width, args.seq), FEW_STEPS, timeout=300)[0]
            for layers in FEW
        }
        given = [f"--{name}={getattr(args, name)}" for name in ("folder", "layers", "width", "seq", "steps")]
        found = run_under(limit, [*given, f"--system={system}"])
        found |= floor_of(shape, speed, few)
        found |= {"read_bytes_per_s": speed.read_bytes_per_s, "write_bytes_per_s": speed.write_bytes_per_s}
        found |= {"both_bytes_per_s": speed.both_bytes_per_s}
        result["systems"][system] = found
        if "loss" not in found:
            print(f"{system}: ended with {found['exit']}")
            continue
        found["step_s"] = statistics.median(a + b for a, b in zip(found["compute"][1:], found["step"][1:], strict=True))
        found["of_floor"] = found["step_s"] / found["floor_s"]
        print(
            f"{system}: loss {found['loss'][0]:.2f} to {found['loss'][-1]:.2f}; step {found['step_s']:.1f} s, "
            f"{found['of_floor']:.2f} of the floor {found['floor_s']:.1f} s; "
            f"in all {found['group_peak_nbytes'] / 1e9:.2f} GB"
        )
        if "peak_nbytes" in found:
            found["of_plan"] = found["peak_nbytes"] / plan
            print(f"  a rank's memory {found['peak_nbytes'] / 1e6:.0f} MB, {found['of_plan']:.3f} of the plan")
    own = result["systems"].get("fullshard", {})
    result["goals"] = {"of_floor": TIME_GOAL, "of_plan": MEMORY_GOAL}
    result["reached"] = (
        own.get("of_floor", 9) <= TIME_GOAL
        and own.get("of_plan", 9) <= MEMORY_GOAL
        and own["loss"][-1] < own["loss"][0]
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
