"""Kill replicas at random moments, and compare the run with an undisturbed one.

    python benchmarks/replica_kills.py --kills 50 --replicas 3

Starts a lighthouse and replicas of `--ranks` ranks on gloo, all on this machine. Over and over, at a random moment, one
replica, or a single rank of it, is killed by SIGKILL, and started again as a launcher does. The run must go on, and:

- survivors do the step that was under way once more, and no other;
- the killed replica recovers with the state of a peer;
- in the end all replicas have the same weights, bit for bit;
- each loss has the bits of one replica that takes the same batches in the same steps, one after the other.

What it measures, in seconds from the kill: until every survivor has committed a step that it began since, and until the
killed replica has. Of the latter, the time from its first question for replicas to its first forward: it waits there
for the others to end their step, and gets its state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import FSDPModule, fully_shard
from fullshard.testing import run_ranks

LAYERS = 4
ROWS = 8  # of a rank's batch
PATIENCE_S = 240.0  # for anything: a run that hangs ends with an error


def make_model(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a perceptron with a unit per layer, and its optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    for layer in model[:-1:2]:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int, index: int, width: int) -> Tensor:
    """Return this rank's rows of the batch that replica number `index` of a step takes."""
    generator = torch.Generator().manual_seed(step * 1000 + index)
    whole = torch.randn(ROWS * dist.get_world_size(), width, generator=generator)
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Compute the loss of this rank's rows."""
    return (model(rows) - rows.sum(1, keepdim=True).sin()).square().mean()


# -- a rank of a replica ----------------------------------------------------------------------------------------------


def train(folder: Path, name: str, life: int, width: int) -> None:
    """Train on one rank of a replica, until `folder`/last gives the last step."""
    from fullshard.integrations.torchft import Replicas

    dist.init_process_group("gloo")
    model, optimizer = make_model(width)
    lines = (folder / f"{name}-{life}-{dist.get_rank()}.jsonl").open("a", buffering=1)
    stated = {"name": name, "life": life}
    replicas = Replicas(model, optimizer, name=name, timeout_s=60)
    while replicas.step < last_step(folder):
        before, began = replicas.step, time.time()
        replicas.begin_step()
        step, found = replicas.step, time.time()
        loss = loss_of(model, batch_of(step, replicas.index, width))
        loss.backward()
        committed = replicas.should_commit()
        if committed:
            optimizer.step()
        optimizer.zero_grad()
        line = {
            **stated,
            "step": step,
            "index": replicas.index,
            "count": replicas.count,
            "loss": loss.item(),
            "committed": committed,
            "healed": step != before,
            "quorum_s": found - began,
            "began": began,
            "at": time.time(),
        }
        lines.write(json.dumps(line) + "\n")
    (folder / f"{name}-{dist.get_rank()}.weights").write_text(digest_of(model))
    replicas.close()


def last_step(folder: Path) -> int:
    """Return the step to end with, once it is set."""
    stated = folder / "last"
    return int(stated.read_text()) if stated.exists() else sys.maxsize


# -- the launcher -----------------------------------------------------------------------------------------------------


class ForkedRank:
    """A rank that is forked from a process with all imports, with the methods of a `subprocess.Popen`."""

    def __init__(self, requested: list[str], environment: dict[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess = context.Process(target=forked_rank, args=(requested, environment, log))
        self._process.start()

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait for the end of the process."""
        self._process.join()

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self._process.kill()


def forked_rank(requested: list[str], environment: dict[str, str], log: Path) -> None:
    """Run the command of a rank in this process."""
    os.environ.update(environment)
    torch.set_num_threads(1)  # too late for OMP_NUM_THREADS
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run_command(requested)


def started_rank(requested: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a rank as a launcher does."""
    with log.open("wb") as file:
        command = [sys.executable, __file__, *requested]
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


@dataclass
class Replica:
    """The processes of one replica."""

    name: str
    folder: Path
    ranks: int
    width: int
    lighthouse: str
    fork: bool
    life: int = -1
    processes: list[subprocess.Popen[bytes] | ForkedRank] = field(default_factory=list)

    def start(self) -> None:
        """Start all ranks, as another life of the same replica."""
        self.life += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(self.ranks)}
        environment |= {"TORCHFT_LIGHTHOUSE": self.lighthouse, "MASTER_ADDR": "localhost"}
        environment["MASTER_PORT"] = str(free_port())
        for rank in range(self.ranks):
            requested = ["--rank-of", self.name, "--life", str(self.life), "--folder", str(self.folder)]
            self.processes.append(
                (ForkedRank if self.fork else started_rank)(
                    [*requested, "--width", str(self.width)],
                    {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    self.folder / f"{self.name}-{self.life}-{rank}.log",
                )
            )

    def kill(self, victims: list[int]) -> None:
        """Kill some ranks by SIGKILL, and the others as a launcher does when it has noticed."""
        for rank in victims:
            self.processes[rank].kill()
        for rank in victims:
            self.processes[rank].wait()
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of the first rank, from all its lives."""
        lives = range(self.life + 1)
        return [line for life in lives for line in read_lines(self.folder / f"{self.name}-{life}-0.jsonl")]

    def check(self) -> None:
        """Raise if a rank has ended without a kill."""
        for rank, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                log = (self.folder / f"{self.name}-{self.life}-{rank}.log").read_text()
                raise RuntimeError(f"rank {rank} of {self.name} ended by itself:\n{log[-3000:]}")


def start_lighthouse(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """torchft's lighthouse, which takes a replica for lost after a second of silence; and its address."""
    port = free_port()
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    options = {"bind": f"[::]:{port}", "min_replicas": 1, "join_timeout_ms": 1000}
    options |= {"quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
    command = [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    with (folder / "lighthouse.log").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
    return started, f"http://localhost:{port}"


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are complete."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def wait_for(what: str, has_arrived: Any, replicas: list[Replica]) -> None:
    """Wait until `has_arrived()`."""
    until = time.monotonic() + PATIENCE_S
    while not has_arrived():
        for replica in replicas:
            replica.check()
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {PATIENCE_S:g} s: see {replicas[0].folder}")
        time.sleep(0.05)


def committed_since(replica: Replica, at: float) -> list[dict[str, Any]]:
    """Return the steps that a replica has begun and committed since a moment."""
    return [line for line in replica.lines if line["committed"] and line["began"] > at]


@dataclass
class Kill:
    """One kill, and what it cost; times in seconds from the kill."""

    replica: str
    ranks: list[int]
    survivors_next_step_s: float
    rejoined_s: float
    restored_s: float  # of these: until the state was there, with the wait for other replicas to end their step
    abandoned: list[int]  # steps that a survivor began and gave up, each


def run_with_kills(
    folder: Path, *, replicas: int, ranks: int, kills: int, width: int, seed: int, gap_s: float, fork: bool
) -> tuple[list[Kill], list[Replica]]:
    """Run training that loses replicas."""
    chance = random.Random(seed)
    lighthouse, address = start_lighthouse(folder)
    each = [Replica(f"replica{i}", folder, ranks, width, address, fork) for i in range(replicas)]
    found: list[Kill] = []
    try:
        for replica in each:
            replica.start()
        wait_for("the first steps", lambda: all(len(committed_since(item, 0)) > 2 for item in each), each)
        for _ in range(kills):
            time.sleep(chance.uniform(0, gap_s))
            found.append(kill_one(each, chance))
            print(json.dumps(asdict(found[-1])), flush=True)
        last = max(line["step"] for item in each for line in item.lines) + 40
        (folder / "last.new").write_text(str(last))
        (folder / "last.new").rename(folder / "last")
        wait_for("the end", lambda: all(p.poll() == 0 for item in each for p in item.processes), each)
    finally:
        for replica in each:
            for process in replica.processes:
                process.kill()
                process.wait()
        lighthouse.kill()
        lighthouse.wait()
    return found, each


def kill_one(each: list[Replica], chance: random.Random) -> Kill:
    """Kill one replica, or a rank of it; and wait until all of them have committed steps together again."""
    victim = chance.choice(each)
    ranks = list(range(victim.ranks)) if chance.random() < 0.5 else [chance.randrange(victim.ranks)]
    survivors = [item for item in each if item is not victim]
    at = time.time()
    victim.kill(ranks)
    if not victim.fork:
        victim.start()
    wait_for("a survivor's next step", lambda: all(committed_since(survivor, at) for survivor in survivors), each)
    if victim.fork:  # it would be back before the lighthouse misses it
        victim.start()
    wait_for("the replica's return", lambda: committed_since(victim, at), each)
    back = committed_since(victim, at)[0]
    wait_for(
        "a step of all replicas",
        lambda: all(any(line["count"] == len(each) for line in committed_since(item, back["at"])) for item in each),
        each,
    )
    next_steps = [committed_since(survivor, at)[0]["at"] - at for survivor in survivors]
    given_up = [
        sum(not line["committed"] for line in survivor.lines if at < line["at"] < back["at"]) for survivor in survivors
    ]
    return Kill(victim.name, ranks, max(next_steps), back["at"] - at, back["quorum_s"], given_up)


# -- the same run without a kill --------------------------------------------------------------------------------------


class OneAfterTheOther:
    """Sums over the batches that one replica takes one after the other, added as gloo adds them over replicas.

    gloo's order of addition depends on how many there are, and on the size. So for each number of replicas there is a
    group of gloo's, all of whose members are in this process.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 1
        self._terms: list[list[Tensor]] = []  # by batch and call
        self._groups: dict[int, list[dist.ProcessGroupGloo]] = {}
        for module in (model, *model.children()):
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(self._hook)

    def begin_batch(self, index: int) -> None:
        """Start batch number `index` of a step. The next sums belong to it."""
        self._terms = [*self._terms[:index], []]

    def _hook(self, sums: Tensor) -> None:
        self._terms[-1].append(sums.clone())
        if len(self._terms) == self.count:
            terms = [of_batch[len(self._terms[-1]) - 1] for of_batch in self._terms]
            if self.count > 1:
                members = zip(self._group_of(self.count), terms, strict=True)
                for work in [member.allreduce([term]) for member, term in members]:
                    work.wait()
            sums.copy_(terms[0])
            sums /= self.count

    def _group_of(self, count: int) -> list[dist.ProcessGroupGloo]:
        if count not in self._groups:
            store, patience = dist.HashStore(), timedelta(seconds=60)
            with ThreadPoolExecutor(count) as pool:
                make = partial(dist.ProcessGroupGloo, store, size=count, timeout=patience)
                self._groups[count] = list(pool.map(lambda rank: make(rank=rank), range(count)))
        return self._groups[count]


def replayed(counts: list[int], width: int) -> tuple[list[list[float]], str]:
    """Return the losses by step and index of one replica that takes the batches of all, and a digest of its weights."""
    model, optimizer = make_model(width)
    batches = OneAfterTheOther(model)
    losses = []
    for step, batches.count in enumerate(counts):
        losses.append([])
        for index in range(batches.count):
            optimizer.zero_grad()
            batches.begin_batch(index)
            loss = loss_of(model, batch_of(step, index, width))
            loss.backward()
            losses[-1].append(loss.item())
        optimizer.step()
    return losses, digest_of(model)


def digest_of(model: nn.Module) -> str:
    """Return a digest of this rank's shards."""
    digest = sha256()
    for param in model.parameters():
        digest.update(param.to_local().detach().numpy().tobytes())
    return digest.hexdigest()


def compare(each: list[Replica], width: int, folder: Path) -> dict[str, Any]:
    """Compare the run that lost replicas with the one that lost none."""
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for line in sorted(
        (line for item in each for line in item.lines if line["committed"]), key=lambda line: line["at"]
    ):
        of_step = by_step.setdefault(line["step"], {})
        if any(other["count"] != line["count"] for other in of_step.values()):
            of_step.clear()  # done again, by replicas that did not have it from those that died
        of_step[line["index"]] = line
    counts = [next(iter(by_step[step].values()))["count"] for step in range(len(by_step))]
    losses, weights = run_ranks(each[0].ranks, replayed, counts, width, timeout=600)[0]
    worst = max(
        abs(line["loss"] - losses[step][index]) / abs(losses[step][index])
        for step, of_step in by_step.items()
        for index, line in of_step.items()
    )
    same = sum(line["loss"] == losses[step][index] for step, of in by_step.items() for index, line in of.items())
    found = {
        rank: {(folder / f"{item.name}-{rank}.weights").read_text() for item in each} for rank in range(each[0].ranks)
    }
    return {
        "steps": len(counts),
        "steps_by_participants": {count: counts.count(count) for count in sorted(set(counts))},
        "losses_compared": sum(map(len, by_step.values())),
        "losses_of_the_same_bits": same,
        "largest_relative_difference": worst,
        "replicas_have_the_same_weights": all(len(digests) == 1 for digests in found.values()),
        "weights_have_the_bits_of_the_replay": found[0] == {weights},
    }


def run_command(argv: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=2.0, help="maximum seconds between a recovery and a kill")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--fork", action="store_true", help="fork ranks, which skips the seconds of their imports")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, help=argparse.SUPPRESS)
    requested = parser.parse_args(argv)
    if requested.rank_of:
        train(requested.folder, requested.rank_of, requested.life, requested.width)
        return
    with tempfile.TemporaryDirectory(prefix="replica-kills-") as made:
        folder = requested.folder or Path(made)
        folder.mkdir(exist_ok=True)
        width = requested.width
        options = {"replicas": requested.replicas, "ranks": requested.ranks, "kills": requested.kills, "width": width}
        kills, each = run_with_kills(folder, **options, seed=requested.seed, gap_s=requested.gap, fork=requested.fork)
        result = {**options, **compare(each, width, folder)}
    if kills:
        for name in ("survivors_next_step_s", "rejoined_s", "restored_s"):
            values = [getattr(kill, name) for kill in kills]
            result[name] = {"median": statistics.median(values), "largest": max(values)}
        params = LAYERS * (width * width + width) + width + 1
        result["state_gb_a_rank"] = 3 * 4 * params / requested.ranks / 1e9  # weights, and AdamW's two moments
        result["most_abandoned_by_a_survivor"] = max(max(kill.abandoned) for kill in kills)
    print(json.dumps(result))
    if requested.out:
        requested.out.write_text(json.dumps({**result, "each": [asdict(kill) for kill in kills]}, indent=1) + "\n")


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["__main__", "fullshard.integrations.torchft"])
    run_command(sys.argv[1:])
