"""All that this library claims of GPUs, checked on one in under ten minutes: the facts, the claims, the numbers.

    make gpu-check                               # python benchmarks/gpu_check.py, with the Python that is there
    python benchmarks/gpu_check.py --dry         # without a GPU: the same parts on a CPU, as far as they go

It needs torch, numpy, pytest, safetensors and xxhash, installs nothing and uses no network. Each part is a separate
process with a time limit. A part that fails or hangs is reported with the end of its output, and the others still run.
All results are in one file, which is rewritten after each part.

facts           the machine: GPU, driver, torch, NCCL, memory
tests           bits of plain PyTorch, a host that never waits, CUDA graphs, constant memory (`test_gpu.py`)
late streams    equal bits whichever stream is delayed, on one rank and between ranks (`test_late_streams.py`)
prediction      memory and launches of a steady step, compared with those of a dry run of the engine
several GPUs    the laws of `test_gpu.py` with two ranks and more (`test_gpu_ranks.py`)
eager           `one_gpu.py`: steps of plain PyTorch, DDP, FSDP2 and this library in turn, host and GPU separately
captured        the same with the whole step in a CUDA graph
compiled        the same with compiled blocks
pretend         rank 0 of 8, with collectives that do nothing, compared with FSDP2
threads         ranks as threads: losses compared with the plain loop

By name only (`make gpu-check ARGS="--parts offload"`):

offload         `offload_to_cpu.py`: the optimizer's state on the CPU, with clipping, by fraction, and FSDP2's offload
report          `report_overhead.py`: steps with and without a recording
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

ROOT = Path(__file__).parents[1]
NEEDS = "torch", "numpy", "pytest", "safetensors", "xxhash"
HOLDS, FAILS, HANGS, LEFT_OUT = "holds", "fails", "hangs", "left out"
TAIL = 6000  # characters of output that are kept of what fails


# -- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A process that checks one claim. The numbers are what it prints last, as JSON; or, of tests, how each went."""

    name: str
    claim: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class Result:
    """A part's outcome."""

    claim: str
    verdict: str
    seconds: float
    numbers: Any
    tail: str = ""


def by_pytest(name: str, claim: str, file: str, limit_s: float) -> Part:
    """Without what `conftest.py` needs, and without a cache, since the clone may be of somebody else."""
    options = ("--noconftest", "-p", "no:cacheprovider", "-v", "--color=no", "-m", "gpu and not slow")
    return Part(name, claim, ("-m", "pytest", *options, file), limit_s)


def parts(*, dry: bool) -> list[Part]:
    one = str(Path(__file__)), "--one"
    several = "ranks learn the bits of plain PyTorch by NCCL"
    return [
        Part("facts", "torch reaches the GPU", (*one, "facts"), 20),
        by_pytest(
            "tests", "one rank learns the bits of plain PyTorch, in CUDA graphs too", "tests/engine/test_gpu.py", 90
        ),
        by_pytest(
            "late streams",
            "whichever stream is delayed, the bits are the same",
            "tests/engine/test_late_streams.py",
            130,
        ),
        Part("prediction", "the tape tells a step's memory within 5 %", (*one, "prediction"), 60),
        by_pytest("several GPUs", several, "tests/engine/test_gpu_ranks.py", 100),
        *(
            Part(name, claim, (*one, "steps", name, "1" if dry else "2"), limit_s)
            for name, claim, limit_s in (
                ("eager", "no step takes 5 % longer than FSDP2's", 75),
                ("captured", "no captured step takes 5 % longer than the plain loop's", 75),
                ("compiled", "no step with compiled blocks takes 5 % longer than FSDP2's", 65),
                ("pretend", "no step of one rank of 8 takes 5 % longer than FSDP2's", 80),
                ("threads", "ranks as threads learn what the plain loop learns", 20),
            )
            if not (dry and name == "captured")
        ),
    ]


def optional_parts() -> list[Part]:
    """Return the parts that run by name only, because ten minutes are too short for them."""
    offload, report = (str(ROOT / "benchmarks" / name) for name in ("offload_to_cpu.py", "report_overhead.py"))
    return [
        Part(
            "offload",
            "with all states on the CPU, a clipped step of 16 microbatches takes 1.2 of one without at most",
            (offload, "--part", "gpu"),
            300,
        ),
        Part("report", "recording takes at most 1 % of a step", (report, "--device", "cuda"), 120),
    ]


def run_part(part: Part, limit_s: float) -> Result:
    """Run a part to its end, or end it with all that it has started."""
    python_path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            (sys.executable, *part.command),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
        output.seek(0)
        stated = output.read()
    numbers = outcomes_in(stated) if "pytest" in part.command else last_json(stated)
    verdict = verdict_of(code, numbers, is_test="pytest" in part.command)
    tail = stated[-TAIL:] if verdict in (FAILS, HANGS) else ""
    return Result(part.claim, verdict, round(time.monotonic() - start, 1), numbers, tail)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of its children, such as ranks that hang."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict_of(code: int | None, numbers: Any, *, is_test: bool) -> str:
    if code is None:
        return HANGS
    if is_test and code in (0, 5) and "PASSED" not in numbers.values():
        return LEFT_OUT
    if not is_test and code == 0 and isinstance(numbers, dict) and numbers.get("holds") is False:
        return FAILS
    return FAILS if code else HOLDS


def outcomes_in(stated: str) -> dict[str, str]:
    """How each test went, also of those before a hang."""
    lines = re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", stated, re.MULTILINE)
    return {name.split("::", 1)[1]: how for name, how in lines}


def last_json(stated: str) -> Any:
    for line in reversed(stated.splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


def check(
    parts: Sequence[Part], path: Path, report: Callable[[str], None], *, seconds: float = 585
) -> dict[str, dict[str, Any]]:
    """Return the results of all parts by name, which are written to `path` after each."""
    end = time.monotonic() + seconds
    results: dict[str, dict[str, Any]] = {}
    for part in parts:
        limit_s = min(part.limit_s, end - time.monotonic())
        late = Result(part.claim, LEFT_OUT, 0, None, "no time was left")
        result = run_part(part, limit_s) if limit_s > 5 or limit_s == part.limit_s else late
        results[part.name] = asdict(result)
        path.write_text(json.dumps(results, indent=1))
        report(f"{part.name:14}{result.verdict:10}{result.seconds:7.1f} s  {part.claim}{summary(result)}")
    return results


def summary(result: Result) -> str:
    numbers = result.numbers
    if isinstance(numbers, dict) and "PASSED" in numbers.values():
        how = list(numbers.values())
        return "; " + ", ".join(f"{how.count(one)} {one.lower()}" for one in sorted(set(how)))
    if isinstance(numbers, dict) and "said" in numbers:
        return f"; {numbers['said']}"
    return ""


# -- what the parts print ---------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    import platform

    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if not torch.cuda.is_available():
        return {**found, "said": f"torch {torch.__version__}, no GPU"}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    driver = subprocess.run(
        ("nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"),
        capture_output=True,
        text=True,
        check=False,
    )
    torch.ones(1, device="cuda").add_(1).cpu()
    return {
        **found,
        "gpus": [device.name for device in devices],
        "memory": [device.total_memory for device in devices],
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": driver.stdout.strip() or driver.stderr.strip(),
        "said": f"{devices[0].name}, torch {torch.__version__}",
    }


def prediction() -> dict[str, Any]:
    """Memory and launches of a step: those of the tape, and on a GPU those that are measured."""
    found = {str(world): predicted(world) for world in (1, 8)}
    import torch

    if not torch.cuda.is_available():
        return {"predicted": found, "said": "predicted only"}
    measured = {world: in_process("measured", world) for world in found}
    ratios = {world: measured[world]["peak_bytes"] / found[world]["peak_bytes"] for world in found}
    reserved = {world: measured[world]["reserved_bytes"] / found[world]["reserved_bytes"] for world in found}
    stated = ", ".join(
        f"{ratios[world]:.3f} of what is predicted at world {world} ({reserved[world]:.3f} of what is reserved)"
        for world in found
    )
    holds = all(abs(ratio - 1) < 0.05 for ratio in ratios.values())
    return {
        "predicted": found,
        "measured": measured,
        "ratios": ratios,
        "ratios_of_reserved": reserved,
        "holds": holds,
        "said": stated,
    }


def in_process(what: str, world: str) -> Any:
    """Run in a separate process: there is one default process group, and the allocator must not have a history."""
    ran = subprocess.run(
        (sys.executable, __file__, "--one", what, world), check=True, stdout=subprocess.PIPE, text=True
    )
    return last_json(ran.stdout)


def workload_of(world: int, device_type: str) -> Any:
    from benchmarks.bench.model import Shape
    from benchmarks.bench.workload import Workload

    shape = Shape(vocab=8192, width=1024, layers=8, heads=16, seq=512, batch=4)
    return Workload(shape=shape, world=world, dtype="bf16", device_type=device_type)


def sharded(workload: Any, model: Any, mesh: Any) -> Any:
    """The trainer of `model`, sharded over `mesh`: as in `benchmarks.bench`, but for the mesh, which no tape has."""
    import torch

    from benchmarks.bench.trainer import Trainer
    from fullshard import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=workload.compute_dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, strategy="zero3", mp_policy=policy)
    return Trainer(workload, model, workload.make_optimizer(model.parameters()))


def predicted(world: int) -> dict[str, Any]:
    """Predict the last of three steps by a dry run of the engine."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.bench.model import Model
    from fullshard import dry
    from fullshard.plan.allocator import allocator_use
    from fullshard.tape.tape import HOST, Collective, Operation

    workload = workload_of(world, "cpu")
    with dry.world(world):
        mesh = init_device_mesh("cpu", (world,))
        with dry.taped() as tape:
            trainer = sharded(workload, Model(workload.shape), mesh)
            tokens = torch.zeros(workload.shape.batch, workload.shape.seq + 1, dtype=torch.int64)
            for _ in range(3):
                start = len(tape.entries)
                trainer.step(tokens)
    step = tape.entries[start:]
    operations = [entry for entry in step if isinstance(entry, Operation) and entry.stream != HOST]
    collectives = sum(isinstance(entry, Collective) for entry in step)
    return {
        "peak_bytes": tape.peak_bytes(since=start),
        "reserved_bytes": allocator_use(tape).reserved,
        "operations": len(operations),
        "collectives": collectives,
    }


def measured(world: int) -> dict[str, Any]:
    """The same on a GPU: over NCCL alone, or as rank 0 of a world whose collectives do nothing."""
    import torch
    import torch.distributed as dist
    from one_gpu import send_nothing
    from torch.autograd import DeviceType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.profiler import ProfilerActivity, profile

    from fullshard._dry_compat import fake_store

    store = dist.HashStore() if world == 1 else fake_store()
    dist.init_process_group("nccl" if world == 1 else "fake", store=store, rank=0, world_size=world)
    nothing = send_nothing() if world > 1 else None
    device, workload = torch.device("cuda", 0), workload_of(world, "cuda")
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS keeps memory for itself, of forward and backward each
        square = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()
        del square
    before = torch.cuda.memory_allocated()
    trainer = sharded(workload, workload.model(device), init_device_mesh("cuda", (world,)))
    tokens = workload.tokens(0, 0).to(device)
    for _ in range(3):  # the last one counts, as of what is predicted
        torch.cuda.reset_peak_memory_stats()
        trainer.step(tokens)
        torch.cuda.synchronize()
    peak, stats = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as visited:
        trainer.step(tokens)
        torch.cuda.synchronize()
    del nothing
    on_gpu = [event.name for event in visited.events() if event.device_type == DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_gpu)
    return {
        "peak_bytes": peak - before,
        "libraries_bytes": before,
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "inactive_split_bytes": stats["inactive_split_bytes.all.peak"],
        "allocator_retries": stats["num_alloc_retries"],
        "kernels": len(on_gpu) - copies,
        "copies_and_fills": copies,
    }


REFERENCES = {"captured": "plain"}  # the system that a part's claim compares with, if not FSDP2


def steps(part: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of steps of one part of `one_gpu.py`, and the ratio to the system that the claim compares with."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        what = "--parts", part, "--models", "GPT-2", "--worlds", "8", "--steps", "8"
        script = str(ROOT / "benchmarks" / "one_gpu.py")
        subprocess.run((sys.executable, script, *what, "--rounds", str(rounds), "--json", str(path)), check=True)
        [table] = json.loads(path.read_text())
    if part == "threads":
        differ = max(abs(a - b) for a, b in zip(table["losses"], table["plain"], strict=True))
        return {"table": table, "holds": differ < 1e-4, "said": f"losses differ by {differ:.1e}"}
    reference = REFERENCES.get(part, "FSDP2")
    own, peer = (table["systems"][system] for system in ("fullshard", reference))
    own, peer = (rows["rounds"] if isinstance(rows, dict) else rows for rows in (own, peer))
    if not (own and peer):
        return {"table": table, "holds": bool(own), "said": f"no time of {'fullshard' if peer else reference}"}
    ratio = statistics.median(one["ms"] / other["ms"] for one, other in zip(own, peer, strict=True))
    holds = not torch.cuda.is_available() or ratio <= 1.05
    return {"table": table, "ratio": ratio, "holds": holds, "said": f"{ratio:.3f} of {reference}'s"}


ONE: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts,
    "prediction": prediction,
    "measured": measured,
    "steps": steps,
}


# -- the command ------------------------------------------------------------------------------------------------------


def missing() -> list[str]:
    return [name for name in NEEDS if find_spec(name) is None]


def results_path(name: str | None) -> Path:
    import torch

    name = name or re.sub(r"\W+", "_", torch.cuda.get_device_name(0).lower())
    return ROOT / "benchmarks" / "results" / f"gpu_{name}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="run what can be run without a GPU")
    parser.add_argument("--name", help="in the results' name, instead of the GPU's")
    parser.add_argument("--json", type=Path, help="the file for all of it, if not benchmarks/results/gpu_NAME.json")
    parser.add_argument("--parts", help="only these, with commas between them")
    parser.add_argument("--one", nargs="+", metavar=("PART", "WORLD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        numbers = (int(word) if word.isdecimal() else word for word in args.one[1:])
        print(json.dumps(ONE[args.one[0]](*numbers)))
        return 0
    if missing():
        sys.stderr.write(f"gpu-check: {sys.executable} lacks {', '.join(missing())}; nothing was run.\n")
        return 2
    import torch

    if not (args.dry or torch.cuda.is_available()):
        sys.stderr.write("gpu-check: torch finds no GPU here; nothing was run. --dry runs what needs none.\n")
        return 2
    path: Path | None = args.json
    if path is None:
        # Not a fixed name in the temporary directory, where another user could have made it.
        path = Path(tempfile.mkdtemp()) / "gpu_dry.json" if args.dry and not args.name else results_path(args.name)
    chosen = parts(dry=args.dry)
    if args.parts:
        chosen = [part for part in [*chosen, *optional_parts()] if part.name in args.parts.split(",")]
    results = check(chosen, path, lambda line: print(line, flush=True))
    print(f"all of it: {path}")
    return int(any(result["verdict"] in (FAILS, HANGS) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
