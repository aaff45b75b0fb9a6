"""Seconds to train again: from a fault to the next step, by four ways to resume, at two sizes of model.

    python benchmarks/train_again.py

Four ranks on gloo train the same model on this machine; once they are beyond a checkpoint, one is killed by SIGKILL.

    disk      torchrun starts all ranks again, which load the newest checkpoint from the disk
    memory    the same, from a safety copy in the memory of the host
    ray       Ray Train starts all workers again, from the newest checkpoint that they reported
    torchft   two replicas of two ranks: the other one goes on; the lost one is started again by its launcher

Two numbers each, in seconds from the kill: until any rank has done a step that it began since (`next_step_s`), and
until all ranks have done a step that none of them had done before (`all_again_s`): with checkpoints, steps since the
last one are done again first. Ways and sizes are interleaved; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replica_kills import batch_of, loss_of, make_model, read_lines, start_lighthouse
from torch import nn

from fullshard.checkpoint import latest, load, save
from fullshard.checkpoint.safety_copy import SafetyCopies

WAYS = ("disk", "memory", "ray", "torchft")
RANKS, REPLICAS, EVERY, KILLED_AT = 4, 2, 10, 25
PATIENCE_S = 300.0


# -- a rank -----------------------------------------------------------------------------------------------------------


class Lines:
    """Records this rank's steps."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}.jsonl").open("a", buffering=1)

    def record_step(self, step: int, began: float, ranks: int) -> None:
        """One step is done."""
        reported = {"step": step, "began": began, "at": time.time(), "pid": os.getpid(), "ranks": ranks}
        self._file.write(json.dumps(reported) + "\n")


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, width: int) -> None:
    """Forward, backward and the optimizer's step."""
    loss_of(model, batch_of(step, 0, width)).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_by_torchrun(folder: Path, way: str, width: int) -> None:
    """Train on a rank of torchrun, which resumes from disk or from memory."""
    dist.init_process_group("gloo")
    model, optimizer = make_model(width)
    lines = Lines(folder, f"rank{dist.get_rank()}")
    copies = SafetyCopies(Path(os.environ["COPIES"])) if way == "memory" else None
    if copies is None:
        found = latest(folder / "checkpoints")
    else:
        newest = copies.newest()
        found = None if newest is None else copies.fetch(newest)
    step = load(found, model=model, optimizer=optimizer).step or 0 if found else 0
    while True:
        began = time.time()
        one_step(model, optimizer, step, width)
        step += 1
        lines.record_step(step, began, RANKS)
        if step % EVERY == 0 and copies is None:
            save(folder / "checkpoints", model=model, optimizer=optimizer, step=step, keep=2)
        elif step % EVERY == 0:
            copies.save(model=model, optimizer=optimizer, step=step, extra=None)


def train_by_ray(config: dict[str, Any]) -> None:
    """A worker of Ray Train's."""
    from fullshard.integrations.ray import restore, save_and_report

    torch.set_num_threads(1)
    model, optimizer = make_model(config["width"])
    lines = Lines(Path(config["folder"]), f"rank{dist.get_rank()}")
    restored = restore(model=model, optimizer=optimizer)
    step = restored.step if restored else 0
    while True:
        began = time.time()
        one_step(model, optimizer, step, config["width"])
        step += 1
        lines.record_step(step, began, RANKS)
        if step % EVERY == 0:
            save_and_report({"step": step}, model=model, optimizer=optimizer, step=step)


def run_ray(folder: Path, width: int) -> None:
    """A cluster on this machine, and a run on it."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train_by_ray,
        train_loop_config={"folder": str(folder), "width": width},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=9)),
    ).fit()


def train_by_torchft(folder: Path, name: str, width: int) -> None:
    """A rank of a replica."""
    from fullshard.integrations.torchft import Replicas

    dist.init_process_group("gloo")
    model, optimizer = make_model(width)
    lines = Lines(folder, f"{name}-rank{dist.get_rank()}")
    replicas = Replicas(model, optimizer, name=name)
    while True:
        began = time.time()
        replicas.begin_step()
        loss_of(model, batch_of(replicas.step, replicas.index, width)).backward()
        if replicas.should_commit():
            optimizer.step()
            lines.record_step(replicas.step, began, replicas.count * dist.get_world_size())
        optimizer.zero_grad()


# -- faults -----------------------------------------------------------------------------------------------------------


def start(way: str, folder: Path, width: int, around: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Return the launchers of a run."""
    own = [__file__, "--part-of", str(folder), "--widths", str(width)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--max-restarts", "9", "--monitor-interval", "0.1"]

    def begin(name: str, *command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen([*command], env=around, stdout=log, stderr=log, start_new_session=True)

    def torchrun(name: str, ranks: int) -> subprocess.Popen[bytes]:
        return begin(name, *launcher, "--nproc-per-node", str(ranks), *own, "--ways", way, "--name", name)

    if way == "ray":
        return [begin("ray", sys.executable, *own, "--ways", way)]
    if way == "torchft":
        return [torchrun(f"replica{i}", RANKS // REPLICAS) for i in range(REPLICAS)]
    return [torchrun(way, RANKS)]


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all ranks."""
    return [line for path in folder.glob("*.jsonl") for line in read_lines(path)]


def wait_until(folder: Path, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for the first line that satisfies `what` and return it."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = [line for line in lines_in(folder) if what(line)]
        if found:
            return min(found, key=lambda line: line["at"])
        time.sleep(0.02)
    logs = "".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
    raise TimeoutError(f"no rank has reported it in {folder}:\n{logs}")


def measure(way: str, width: int) -> dict[str, float]:
    """Start a run, kill a rank, and see how long it takes."""
    folder = Path(tempfile.mkdtemp(prefix=f"train-again-{way}-"))
    copies = Path(tempfile.mkdtemp(prefix="train-again-", dir="/dev/shm"))
    around = {**os.environ, "OMP_NUM_THREADS": "1", "COPIES": str(copies)}
    around |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    around["PYTHONPATH"] = os.pathsep.join(paths)
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        if way == "torchft":
            lighthouse, around["TORCHFT_LIGHTHOUSE"] = start_lighthouse(folder)
            launchers.append(lighthouse)
        launchers += start(way, folder, width, around)
        victim = wait_until(folder, lambda line: line["step"] >= KILLED_AT and line["ranks"] == RANKS)
        killed = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        next_step = wait_until(folder, lambda line: line["began"] > killed)
        done = max(line["step"] for line in lines_in(folder) if line["began"] <= killed)
        again = wait_until(
            folder, lambda line: line["began"] > killed and line["step"] > done and line["ranks"] == RANKS
        )
        return {"next_step_s": next_step["at"] - killed, "all_again_s": again["at"] - killed}
    finally:
        for launcher in launchers:
            end(launcher)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(copies, ignore_errors=True)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher with all that it has started."""
    import psutil

    try:
        below = psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for process in (launcher, *below):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    launcher.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    requested = parser.parse_args()
    if requested.part_of:
        train_part(requested)
        return
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(requested.repeats):
        for width in requested.widths:
            for way in requested.ways:
                found.setdefault((way, width), []).append(measure(way, width))
                print(repeat, way, width, found[way, width][-1], flush=True)
    table = [
        {"way": way, "width": width, "parameters": parameters(width)}
        | {name: statistics.median(one[name] for one in each) for name in each[0]}
        | {f"most_{name}": max(one[name] for one in each) for name in each[0]}
        for (way, width), each in found.items()
    ]
    print("\n| way | parameters | next step | all ranks again |\n|---|---|---|---|")
    for row in table:
        print(f"| {row['way']} | {row['parameters']:,} | {row['next_step_s']:.1f} s | {row['all_again_s']:.1f} s |")
    result = {"ranks": RANKS, "repeats": requested.repeats, "cores": os.cpu_count(), "table": table}
    print(json.dumps(result))
    if requested.out:
        requested.out.write_text(json.dumps(result, indent=1) + "\n")


def parameters(width: int) -> int:
    """How many the model has."""
    from replica_kills import LAYERS

    return LAYERS * (width * width + width) + width + 1


def train_part(requested: argparse.Namespace) -> None:
    """Run one process of a run."""
    width, way = requested.widths[0], requested.ways[0]
    parts = {
        "ray": partial(run_ray, requested.part_of, width),
        "torchft": partial(train_by_torchft, requested.part_of, requested.name, width),
    }
    parts.get(way, partial(train_by_torchrun, requested.part_of, way, width))()


if __name__ == "__main__":
    main()
