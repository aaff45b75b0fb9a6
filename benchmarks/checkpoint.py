"""How long does it take to save and to load a run, and how long does training stop for it?

    python benchmarks/checkpoint.py --size 34m --rounds 7

A GPT with AdamW's state on two ranks, saved and loaded by this library, by `torch.distributed.checkpoint` from torch's
own `fully_shard` (FSDP2), and by `torch.save` on the first rank of what it has gathered. Each is a set of processes
started once and measured in turn in each round, together with `dd` with fsync for the same number of bytes. Results are
medians over the rounds and, in brackets, medians of the ratios to this library within a round. Loads find
their files in the system's cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from benchmarks.bench import peers
from benchmarks.bench.model import SIZES
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.spread import ratios
from benchmarks.bench.team import Team
from benchmarks.bench.trainer import Build
from benchmarks.bench.turns import Span
from benchmarks.bench.workload import Workload
from fullshard.checkpoint import async_save, load, save
from fullshard.checkpoint.keeper import MEMORY
from fullshard.checkpoint.safety_copy import SafetyCopies
from fullshard.plan.memory_used import PeakMemory

FULLSHARD = "fullshard"
DD = "dd with fsync"
STEPS = 2  # of training, timed without a save and with one behind it


class System:
    """One system's run on one rank, and how it is saved and loaded."""

    def __init__(self, workload: Workload, build: Build) -> None:
        torch.manual_seed(0)
        self.trainer = build(workload, workload.model(torch.device("cpu")))
        self.tokens = workload.tokens(0, dist.get_rank())
        self.pending: Any = None
        self.trainer.step(self.tokens)  # the optimizer has its state then

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def begin_save(self, folder: Path) -> None:
        raise NotImplementedError

    def timed(self, method: str, *arguments: Any) -> tuple[Span, int]:
        """Run `method`. Return its start and end on this rank, and the peak growth of this process in bytes."""
        memory = PeakMemory(torch.device("cpu"))
        memory.reset()
        dist.barrier()
        start = time.perf_counter()
        getattr(self, method)(*arguments)
        end = time.perf_counter()
        dist.barrier()
        return Span(start, end), memory.peak().process or 0

    def steps(self) -> None:
        """Train a little."""
        for _ in range(STEPS):
            self.trainer.step(self.tokens)

    def finish(self) -> None:
        """Wait for what was begun."""
        self.pending.result()


class Fullshard(System):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, fully_sharded("zero3"))
        self.copies: SafetyCopies | None = None
        self.copied = 0

    def save(self, folder: Path) -> None:
        save(folder, model=self.trainer.model, optimizer=self.trainer.optimizer, step=1)

    def load(self, folder: Path) -> None:
        load(folder, model=self.trainer.model, optimizer=self.trainer.optimizer)

    def begin_save(self, folder: Path) -> None:
        self.pending = async_save(folder, model=self.trainer.model, optimizer=self.trainer.optimizer, step=1)

    def begin_copy(self, memory: Path) -> None:
        """Begin a safety copy: each rank acts as a separate host, and also holds the shards of a peer."""
        if self.copies is None:
            folder = memory / str(dist.get_rank())
            folder.mkdir()
            self.copies = SafetyCopies(folder)
        self.pending = self.copies.save(
            model=self.trainer.model, optimizer=self.trainer.optimizer, step=self.copied, extra=None
        )
        self.copied += 1

    def finish(self) -> None:
        self.pending.wait()


class Fsdp2(System):
    """Saves and loads as in torch's documentation."""

    options: StateDictOptions | None = None

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, peers.fsdp2())
        self.group = dist.new_group(backend="gloo")

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.trainer.model, self.trainer.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def put(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.trainer.model,
            self.trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


class Dcp(Fsdp2):
    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.put(state)

    def begin_save(self, folder: Path) -> None:
        self.pending = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.group)


class Gathered(Fsdp2):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(self, folder: Path) -> None:
        state = self.state()
        if dist.get_rank() == 0:
            folder.mkdir()
            with (folder / "all").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def load(self, folder: Path) -> None:
        self.put(torch.load(folder / "all", mmap=True))


DCP = "DCP of FSDP2"
SYSTEMS: dict[str, Callable[[Workload], System]] = {FULLSHARD: Fullshard, DCP: Dcp, "torch.save of rank 0": Gathered}
BEHIND = (FULLSHARD, DCP)


class Found:
    """Measurements of one system, by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}

    def note(self, what: str, of_ranks: list[tuple[Span, int]]) -> None:
        """One turn of all ranks."""
        self.seconds.setdefault(what, []).append(Span.seconds(span for span, _ in of_ranks))
        self.peak_bytes[what] = max(self.peak_bytes.get(what, 0), *(peak for _, peak in of_ranks))


def measure(options: argparse.Namespace) -> tuple[dict[str, Found], list[float], int]:
    """Return the measurements of each system, the seconds of dd, and the bytes of a checkpoint."""
    workload = Workload(shape=SIZES[options.size], world=2)
    teams = {name: Team(make, workload) for name, make in SYSTEMS.items()}
    found = {name: Found() for name in teams}
    disk: list[float] = []
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=MEMORY) as in_memory, ExitStack() as stack:
        memory = Path(in_memory)
        for team in teams.values():
            stack.callback(team.end)
        for number in range(-1, options.rounds):  # the first one warms up
            print(f"checkpoint: round {number + 1} of {options.rounds} ...", file=sys.stderr)
            of_round = {name: Found() for name in teams} if number < 0 else found
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                folder = Path(name)
                save_behind(teams[FULLSHARD], "begin_copy", memory, of_round[FULLSHARD], "copy: ")
                for system, team in teams.items() if number % 2 else reversed(teams.items()):
                    turn(system, team, folder, of_round[system])
                    nbytes = nbytes or size_of(folder / "saved")
                    shutil.rmtree(folder / "saved")
                if number >= 0:
                    disk.append(seconds_of_dd(folder / "zeros", nbytes))
    return found, disk, nbytes


def turn(system: str, team: Team, folder: Path, found: Found) -> None:
    """Save, load, and where the system can, save behind some steps of training."""
    saved, behind = folder / "saved", folder / "behind"
    found.note("save", team.ask("timed", "save", saved))
    found.note("load", team.ask("timed", "load", saved))
    found.note("steps", team.ask("timed", "steps"))
    if system in BEHIND:
        save_behind(team, "begin_save", behind, found, "")
        shutil.rmtree(behind)


def save_behind(team: Team, method: str, where: Path, found: Found, kind: str) -> None:
    """Start a save, train meanwhile, and wait for the end of the save."""
    found.note(f"{kind}call", team.ask("timed", method, where))
    found.note(f"{kind}steps meanwhile", team.ask("timed", "steps"))
    found.note(f"{kind}rest", team.ask("timed", "finish"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def seconds_of_dd(path: Path, nbytes: int) -> float:
    start = time.perf_counter()
    pieces = [f"of={path}", "bs=4M", f"count={nbytes >> 22}", "conv=fsync"]
    subprocess.run(["dd", "if=/dev/zero", *pieces], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def show(found: dict[str, Found], disk: list[float], nbytes: int, options: argparse.Namespace) -> None:
    """The tables, as Markdown, and everything in them as JSON."""
    first = found[FULLSHARD]

    def cell(name: str, what: str) -> str:
        seconds = found[name].seconds[what]
        ratio = statistics.median(ratios(seconds, first.seconds[what]))
        return f"{statistics.median(seconds):.2f} s ({ratio:.2f})"

    print(f"checkpoint: {nbytes / 1e6:.0f} MB; dd with fsync: {nbytes / statistics.median(disk) / 1e6:.0f} MB/s\n")
    print("| | save | of the disk's rate | load | peak above the run, save | load |")
    print("|---|---|---|---|---|---|")
    for name, item in found.items():
        rate = statistics.median(ratios(disk, item.seconds["save"]))
        peaks = (f"{item.peak_bytes[what] / 1e6:.0f} MB" for what in ("save", "load"))
        print(f"| {name} | {cell(name, 'save')} | {rate:.0%} | {cell(name, 'load')} | {' | '.join(peaks)} |")
    print("\n| saved behind the training | training stops for | of its save | steps meanwhile, to others |")
    print("|---|---|---|---|")
    for name, kind in ((FULLSHARD, ""), (DCP, ""), (FULLSHARD, "copy: ")):
        seconds = found[name].seconds
        call = seconds[f"{kind}call"]
        of_save = statistics.median(ratios(call, seconds["save"]))
        slower = statistics.median(ratios(seconds[f"{kind}steps meanwhile"], seconds["steps"]))
        of = f"{name}, safety copy" if kind else name
        print(f"| {of} | {statistics.median(call) * 1e3:.0f} ms | {of_save:.1%} | {slower:.2f} |")
    about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    reported = {name: {"seconds": item.seconds, "peak_bytes": item.peak_bytes} for name, item in found.items()}
    print(json.dumps({**about, "options": vars(options), "nbytes": nbytes, "found": reported, DD: disk}, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="34m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, help="where to write; left out: the system's folder for what is temporary"
    )
    options = parser.parse_args()
    show(*measure(options), options)


if __name__ == "__main__":
    main()
