"""Predicted step times of this machine, compared with measurements.

    python benchmarks/predicted_time.py                           # CPU ranks: all strategies at 2 and 4 ranks
    python benchmarks/predicted_time.py --gpu --json gpu.json     # one GPU: alone, and as a rank of a simulated world

Predicted is what the engine run dry leaves on its tape, laid out with the costs of `here`: the machine as `fullshard
calibrate` has measured it. Nothing is fitted on a step.

On CPUs: GPTs whose ranks have a thread each. Measured are the time by the clock, the least and the median of some
rounds, and the time that cores were busy for the step, of all ranks, over the cores. Nothing else should run: where it
does, the clock shows that, too, and the busy time is the time of a step without it, if no rank waited for another.

On one GPU: GPTs of 30M to 1.5B parameters in bfloat16, with float32 parameters and fused AdamW. Steps are queued one
behind the other, as in training; the time is that of the GPU from the end of one step to the end of the next. Also
measured is the total time of kernels and copies, by the profiler, which does not depend on the host. In a simulated
world collectives do nothing, on both sides, and what other ranks would send is whatever the memory held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.bench.model import SIZES, Model, Shape
from benchmarks.bench.team import Team
from benchmarks.bench.trainer import Trainer
from benchmarks.bench.turns import Span
from benchmarks.bench.workload import Workload
from benchmarks.one_gpu import busy_ms, send_nothing
from fullshard import MixedPrecisionPolicy, dry, fully_shard
from fullshard._dry_compat import fake_store
from fullshard.plan.calibration import calibrate
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.cpu_costs import core_seconds, step_seconds
from fullshard.plan.hardware import Hardware, described, hardware
from fullshard.plan.timeline import Timeline, lay_out
from fullshard.tape.context import drop_if_stale
from fullshard.tape.tape import HOST, Collective, Entry, Operation

ONE_LEVEL = ("zero3", "zero2", "zero1", "ddp")
ALL = (*ONE_LEVEL, "hsdp", "hsdp_zero2")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training job whose step is predicted and measured."""

    name: str
    shape: Shape
    world: int = 1
    strategy: str = "zero3"
    dtype: str = "bf16"
    checkpointed: bool = False

    def workload(self, device_type: str) -> Workload:
        return Workload(shape=self.shape, world=self.world, dtype=self.dtype, device_type=device_type)


ON_CPUS = (
    *(
        Case(name=f"34M {item}, 2 ranks", shape=SIZES["34m"], world=2, strategy=item, dtype="fp32")
        for item in ONE_LEVEL
    ),
    *(Case(name=f"34M {item}, 4 ranks", shape=SIZES["34m"], world=4, strategy=item, dtype="fp32") for item in ALL),
    Case(name="34M zero3, bf16, 2 ranks", shape=SIZES["34m"], world=2, dtype="bf16"),
    Case(name="34M zero2, bf16, 4 ranks", shape=SIZES["34m"], world=4, strategy="zero2", dtype="bf16"),
    Case(name="34M zero3, batch 4, 2 ranks", shape=replace(SIZES["34m"], batch=4), world=2, dtype="fp32"),
    Case(name="wide 86M zero3, 2 ranks", shape=SIZES["wide86m"], world=2, dtype="fp32"),
    Case(name="wide 86M ddp, 2 ranks", shape=SIZES["wide86m"], world=2, strategy="ddp", dtype="fp32"),
)


def gpt(width: int, layers: int, batch: int, seq: int = 1024, vocab: int = 50304) -> Shape:
    return Shape(vocab=vocab, width=width, layers=layers, heads=width // 64, seq=seq, batch=batch)


ON_A_GPU = (
    Case(name="30M, batch 4 x 512", shape=gpt(512, 8, 4, 512, vocab=8192)),
    Case(name="124M, batch 1", shape=gpt(768, 12, 1)),
    Case(name="124M, batch 16", shape=gpt(768, 12, 16)),
    Case(name="350M, batch 8", shape=gpt(1024, 24, 8)),
    Case(name="350M, batch 16, checkpointed", shape=gpt(1024, 24, 16), checkpointed=True),
    Case(name="760M, batch 4", shape=gpt(1536, 24, 4)),
    Case(name="1.5B, batch 2", shape=gpt(1600, 48, 2)),
    Case(name="1.5B, batch 8, checkpointed", shape=gpt(1600, 48, 8), checkpointed=True),
    Case(name="124M, batch 16, rank 0 of 8", shape=gpt(768, 12, 16), world=8),
    Case(name="1.5B, batch 4, rank 0 of 64", shape=gpt(1600, 48, 4), world=64),
)


def trainer_of(case: Case, workload: Workload, model: Model, mesh: DeviceMesh) -> Trainer:
    """Return the sharded model and its optimizer."""
    policy = MixedPrecisionPolicy(
        param_dtype=workload.compute_dtype if workload.casts else None, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        if case.checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(block, mesh=mesh, strategy=case.strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=case.strategy, mp_policy=policy)
    return Trainer(workload, model, workload.make_optimizer(model.parameters()))


# -- predicted --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Return the tape of a case's last step of several, the entries before it, and its peak bytes of tensors."""

    entries: list[Entry]
    before: list[Entry]
    peak_bytes: int


def dry_step(case: Case, *, streams: Literal["gpu", "cpu"], steps: int = 3) -> Step:
    """Return the step of rank 0, of the engine run dry."""
    workload = case.workload("cpu")
    with dry.world(case.world):
        mesh = mesh_of(case, "cpu")
        with dry.taped(streams=streams) as tape:
            trainer = trainer_of(case, workload, Model(case.shape), mesh)
            tokens = torch.zeros(case.shape.batch, case.shape.seq + 1, dtype=torch.int64)
            for _ in range(steps):
                gc.collect()
                begun = len(tape.entries)
                trainer.step(tokens)
    return Step(tape.entries[begun:], tape.entries[:begun], tape.peak_bytes(since=begun))


def mesh_of(case: Case, device_type: str) -> DeviceMesh:
    if case.strategy.startswith("hsdp"):
        return init_device_mesh(device_type, (2, case.world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (case.world,), mesh_dim_names=("shard",))


class SendsNothing:
    """Costs of a world whose collectives do nothing, as a pretended one's."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._costs, name)

    def of_collective(self, collective: Collective) -> float:
        return 0.0


def predicted_on_gpu(case: Case, here: Hardware) -> dict[str, Any]:
    """Return milliseconds from the end of a step to the end of the next, and where they go."""
    step = dry_step(case, streams="gpu")
    costs: Any = replace(costs_of(here), launch_s=here.measured["launch_s"])
    if case.world > 1:
        costs = SendsNothing(costs)
    two, three = (lay_out(step.entries * times, costs) for times in (2, 3))
    operations = [entry for entry in step.entries if isinstance(entry, Operation) and entry.stream != HOST]
    return {
        "ms": 1e3 * (three.end - two.end),
        "host_ms": 1e3 * (three.host_s - two.host_s),
        "busy_ms": 1e3 * (busy_s(three) - busy_s(two)),
        "peak_bytes": step.peak_bytes,
        "operations": len(operations),
        "collectives": sum(isinstance(entry, Collective) for entry in step.entries),
        "flops": sum(operation.flops for operation in operations),
        "bytes": sum(operation.nbytes for operation in operations),
    }


def busy_s(timeline: Timeline) -> float:
    """Return the total seconds of kernels and copies on the GPU."""
    return sum(item.end - item.start for item in timeline.placed if item.entry.stream != HOST)


# -- measured on CPUs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Seconds of one rank for a turn of steps: by the clock, and of a core; and the pages that it touched first."""

    span: Span
    core_s: float
    faults: int


class Stepping:
    """A rank that takes steps when it is asked to."""

    def __init__(self, workload: Workload, *, case: Case) -> None:
        rank = dist.get_rank()
        model = workload.model(workload.device(rank))
        self._trainer = trainer_of(case, workload, model, mesh_of(case, "cpu"))
        self._tokens = workload.tokens(0, rank)

    def run(self, steps: int) -> Turn:
        dist.barrier()
        used = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        for _ in range(steps):
            self._trainer.step(self._tokens)
        end, now = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        core_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        return Turn(Span(start, end), core_s, now.ru_minflt - used.ru_minflt)


def predicted_on_cpus(case: Case, here: Hardware) -> dict[str, Any]:
    """Return milliseconds of a step, and of a core by what they are for."""
    step = dry_step(case, streams="cpu", steps=4)
    about: dict[str, Any] = {"ranks": case.world, "dtype": "bfloat16" if case.dtype == "bf16" else "float32"}
    parts = core_seconds(step.entries, here, before=step.before, **about)
    return {
        "ms": 1e3 * step_seconds(step.entries, here, before=step.before, **about),
        "core_ms": {what: 1e3 * seconds for what, seconds in parts.items()},
        "new_pages": round(parts.get("pages", 0.0) / here.measured["page_s"] / 4096),
    }


def measured_on_cpus(case: Case, cores: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step by the clock in each round, and those that cores were busy for it, over the cores."""
    team = Team(partial(Stepping, case=case), case.workload("cpu"))
    try:
        team.ask("run", 3)
        turns = [team.ask("run", 2) for _ in range(rounds)]
    finally:
        team.end()
    clock = [1e3 * Span.seconds(item.span for item in turn) / 2 for turn in turns]
    busy = [1e3 * sum(item.core_s for item in turn) / 2 / min(cores, case.world) for turn in turns]
    return {
        "ms": statistics.median(clock),
        "least_ms": min(clock),
        "busy_ms": statistics.median(busy),
        "rounds": clock,
        "rounds_busy": busy,
        "new_pages": statistics.median(item.faults // 2 for turn in turns for item in turn),
        "load": os.getloadavg()[0],
    }


def on_cpus(cases: Sequence[Case], here: Hardware, rounds: int) -> list[dict[str, Any]]:
    print(f"{'':28} predicted   clock, least and median    busy   predicted over least, over busy   load", flush=True)
    rows = []
    for case in cases:
        predicted = predicted_on_cpus(case, here)
        measured = measured_on_cpus(case, here.ranks_per_host, rounds)
        row = {
            "case": asdict(case),
            "predicted": predicted,
            "measured": measured,
            "ratio": predicted["ms"] / measured["least_ms"],
            "ratio_of_busy": predicted["ms"] / measured["busy_ms"],
        }
        print(
            f"{case.name:28} {predicted['ms']:8.1f} ms {measured['least_ms']:9.1f} {measured['ms']:9.1f} ms "
            f"{measured['busy_ms']:9.1f} ms {row['ratio']:12.3f} {row['ratio_of_busy']:12.3f} {measured['load']:14.1f}",
            flush=True,
        )
        rows.append(row)
    return rows


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the relative errors of predictions, against the clock and against the busy time."""
    found = {}
    for what in ("ratio", "ratio_of_busy"):
        errors = [abs(row[what] - 1) for row in rows]
        found[what] = {
            "mean_error": statistics.fmean(errors),
            "worst": max(errors),
            "within_10_percent": sum(error <= 0.1 for error in errors),
            "cases": len(errors),
        }
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted over measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    for what, stated, mark in (("least_ms", "by the clock, least", "o"), ("busy_ms", "cores busy", "x")):
        measured = [row["measured"][what] for row in rows]
        axes.plot(measured, [row["predicted"]["ms"] for row in rows], mark, label=stated)
    ends = [0.8 * min(row["predicted"]["ms"] for row in rows), 1.2 * max(row["measured"]["least_ms"] for row in rows)]
    for factor, style in ((1.0, "-"), (0.9, ":"), (1.1, ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms per step", ylabel="predicted, ms per step")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


# -- measured on a GPU ------------------------------------------------------------------------------------------------


@cache
def sent_nothing() -> torch.library.Library:
    """Collectives that do nothing, from the first call on."""
    return send_nothing()


@contextmanager
def group_of(world: int) -> Iterator[None]:
    """Create a default process group of this GPU alone, or of a world with collectives that do nothing afterwards."""
    store = dist.HashStore() if world == 1 else fake_store()
    alone = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(alone if world == 1 else "fake", store=store, rank=0, world_size=world)
    if world > 1:
        sent_nothing()
    try:
        yield
    finally:
        dist.destroy_process_group()
        drop_if_stale()


def measured_on_gpu(case: Case, device: torch.device) -> dict[str, Any]:
    """Return milliseconds of a step of the GPU, by round, and the peak bytes of tensors in it."""
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS keeps memory for itself, of forward and backward each
        square = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()
        del square
    before = torch.cuda.memory_allocated()
    workload = case.workload(device.type)
    with device:
        model = Model(case.shape)
    trainer = trainer_of(case, workload, model, mesh_of(case, device.type))
    del model
    tokens = workload.tokens(0, 0).to(device)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        trainer.step(tokens)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    rounds: list[float] = []
    hosts: list[float] = []
    steps = 2
    for number in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        trainer.step(tokens)  # so that the queue is as full as in training
        start.record()
        begun = time.perf_counter()
        for _ in range(steps):
            trainer.step(tokens)
        hosts.append(1e3 * (time.perf_counter() - begun) / steps)
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / steps)
        if number == 0:  # this round determines the number of steps for the others, and does not count
            steps = max(2, min(20, int(600 / rounds.pop())))
    busy = busy_ms(lambda: trainer.step(tokens))
    found = {"ms": statistics.median(rounds), "rounds": rounds, "host_ms": min(hosts), "busy_ms": busy}
    return {**found, "peak_bytes": peak}


def on_gpu(cases: Sequence[Case], path: str | None) -> dict[str, Any]:
    """Measure the speeds of the GPU and the time of each case. Write the results after each one."""
    device = torch.device("cuda", 0)
    begun = time.monotonic()
    stated = calibrate(device, on_progress=lambda what: print(f"measuring: {what}", flush=True))
    print(f"calibrated in {time.monotonic() - begun:.0f} s: {json.dumps(stated['fitted'])}", flush=True)
    found = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "here": stated, "rows": []}
    for world in sorted({case.world for case in cases}):
        with group_of(world):
            for case in (case for case in cases if case.world == world):
                try:
                    measured = measured_on_gpu(case, device)
                except RuntimeError as error:  # such as too little memory
                    print(f"{case.name:32} failed: {error}", flush=True)
                    continue
                print(f"{case.name:32} measured: {measured['ms']:.2f} ms", flush=True)
                found["rows"].append({"case": asdict(case), "measured": measured})
                if path:
                    Path(path).write_text(json.dumps(found, indent=1))
                gc.collect()
                torch.cuda.empty_cache()
    return found


def alongside(found: dict[str, Any]) -> dict[str, Any]:
    """Return measurements of a GPU with predictions for it. No GPU is needed."""
    here = described(dict(found["here"]))
    cases = [Case(**{**item["case"], "shape": Shape(**item["case"]["shape"])}) for item in found["rows"]]
    measured = [item["measured"] for item in found["rows"]]
    rows = [row_of(case, predicted_on_gpu(case, here), item) for case, item in zip(cases, measured, strict=True)]
    return {**found, "rows": rows}


def row_of(case: Case, predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Print prediction and measurement."""
    row = {"case": asdict(case), "predicted": predicted, "measured": measured}
    row["ratio"] = predicted["ms"] / measured["ms"]
    row["ratio_of_peak"] = predicted["peak_bytes"] / measured["peak_bytes"]
    print(
        f"{case.name:32} predicted {predicted['ms']:8.2f} ms (host {predicted['host_ms']:.2f}, GPU busy "
        f"{predicted['busy_ms']:.2f}), measured {measured['ms']:8.2f} ms (host {measured['host_ms']:.2f}, GPU busy "
        f"{measured.get('busy_ms', float('nan')):.2f}): "
        f"{row['ratio']:.3f}; peak {row['ratio_of_peak']:.3f} of {measured['peak_bytes'] / 1e9:.2f} GB",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on one GPU")
    parser.add_argument("--measure-only", action="store_true", help="of a GPU that others are waiting for")
    parser.add_argument("--measured", help="the file of such a run: predicts, and takes no GPU")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=6, help="of two steps, on CPUs")
    parser.add_argument("--here", help="a description of this machine; left out, it is measured")
    parser.add_argument("--json", help="a file for all results; on CPUs, a picture is written next to it")
    args = parser.parse_args()
    if args.gpu:
        cases = [case for case in ON_A_GPU if args.only in case.name]
        found = json.loads(Path(args.measured).read_text()) if args.measured else on_gpu(cases, args.json)
        found = found if args.measure_only else alongside(found)
        path = args.json
    else:
        stated = (
            None if args.here else calibrate("cpu", on_progress=lambda what: print(f"measuring: {what}", flush=True))
        )
        here = hardware(args.here) if stated is None else described(stated)
        rows = on_cpus([case for case in ON_CPUS if args.only in case.name], here, args.rounds)
        about = {"machine": here.title, "torch": torch.__version__, "here": stated or args.here}
        found = {**about, "summary": summary_of(rows), "rows": rows}
        path = args.json or str(RESULTS / "predicted_time.json")
        draw(rows, Path(path).with_suffix(".png"))
        print(json.dumps(found["summary"]))
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({row["case"]["name"]: row.get("ratio") for row in found["rows"]}))


if __name__ == "__main__":
    main()
