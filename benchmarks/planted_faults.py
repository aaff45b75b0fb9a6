"""Are the causes of slow runs found? Faults are planted in real runs of CPU ranks, and the report is asked.

    python benchmarks/planted_faults.py
    python benchmarks/planted_faults.py --pretended-clock

Ranks train a small model with the recorder on. What computes, or carries, takes its time by sleeping (in forward, in
backward, on a link of given latency and rate, in a loader), so that a fault is as large as it is meant to be on a
machine that others use, too, and a run with nothing planted is healthy there. Engine, collectives, recorder and
reader are those of every run. The last line is JSON.

With a simulated clock no rank sleeps. Each rank has a separate clock that advances by the time it would have slept, and
collectives advance it to the clocks of the other ranks. Reports are then deterministic and fast. Faults of
the machine's own cores cannot be planted on it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as recomputing

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.checkpoint import save
from fullshard.comm.collectives import Collectives
from fullshard.report import recording, usage
from fullshard.report.causes import find_causes, verdict
from fullshard.report.counters import HardwareCounters
from fullshard.report.reading import read_run
from fullshard.report.recording import report
from fullshard.report.run import Finding, Run
from fullshard.testing import run_ranks
from fullshard.wrap import ModuleWrapPolicy

MB = 1_000_000
WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A run: the fault that is planted in it, if any, and the cause that must be reported.

    Args:
        title: what is planted.
        cause: empty if the run is healthy.
        stated: words of the report that name its place.
        world: ranks.
        steps: of the run; the first two are not counted.
        blocks: of the model.
        forward_s: that a block takes; twice as many in backward.
        width: of a block, by its number.
        shard: makes units of the model.
        slow_block_s: seconds more that a block takes in forward, by rank.
        input_s: seconds that a batch takes, by rank.
        input_every: number of steps from one batch that takes these seconds to the next.
        microbatches: of a step, each gathered and reduced.
        rows: of a batch, by rank.
        latency_s: of the link.
        bytes_per_s: that it carries.
        between: what the loop does after each step.
        around: what is true while the run goes on.
        recomputes: whether blocks are recomputed in backward.
        frozen: whether blocks are frozen.
        outputs: of the head.
        of_cores: whether it is planted in the machine's cores.
    """

    title: str
    cause: str = ""
    stated: str = ""
    world: int = 2
    steps: int = 12
    blocks: int = 5
    forward_s: float = 0.006
    width: Mapping[int, int] = field(default_factory=dict)
    shard: Callable[[Model], nn.Module] | None = None  # None: each block a unit
    slow_block_s: Mapping[int, float] = field(default_factory=dict)
    input_s: Mapping[int, float] = field(default_factory=dict)
    input_every: int = 1
    microbatches: int = 1
    rows: Mapping[int, int] = field(default_factory=dict)
    row_s: float = 0.0
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    between: Callable[[Loop], None] = field(default=lambda loop: None)
    around: Callable[[int], Any] = field(default=lambda rank: ExitStack())
    recomputes: bool = False
    frozen: bool = False
    outputs: int = WIDTH
    of_cores: bool = False


# -- the model and its loop -------------------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    """Two matrices, and the time that they would take if they were large."""

    def __init__(self, hidden: int, seconds: float, row_s: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.seconds, self.row_s, self.late_s = seconds, row_s, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        out: Tensor = _Sleep.apply(x + y, self.seconds + self.late_s + self.row_s * len(x))
        return out


class Model(nn.Module):
    def __init__(self, plant: Plant, rank: int) -> None:
        super().__init__()
        seconds = plant.forward_s + plant.slow_block_s.get(rank, 0.0)
        widths = [plant.width.get(number, 4 * WIDTH) for number in range(plant.blocks)]
        self.blocks = nn.ModuleList(Block(width, seconds, plant.row_s) for width in widths)
        self.head = nn.Linear(WIDTH, plant.outputs)
        self.recomputes = plant.recomputes
        self.blocks.requires_grad_(not plant.frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = recomputing(block, x, use_reentrant=False) if self.recomputes else block(x)
        out: Tensor = self.head(x)
        return out


@dataclass
class Loop:
    """State of a loop between two steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path
    step: int
    loss: Tensor
    kept: list[Any]


def each_block(model: Model, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def in_replicas(model: Model) -> nn.Module:
    return each_block(
        model, strategy="hsdp", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    )


def under(strategy: str) -> Callable[[Model], nn.Module]:
    return lambda model: each_block(model, strategy=strategy)


def each_layer(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block.up)
        fully_shard(block.down)
    return fully_shard(model)


def never_ahead(model: Model) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), backward_prefetch=None, forward_prefetch=False
    )


def in_bfloat16(model: Model, strategy: str = "zero3") -> nn.Module:
    return each_block(model, strategy=strategy, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


class Clock:
    """The machine's clock, which shows waits for other ranks without simulation."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the clock and the sleep of program, engine and recorder in this context."""
        yield

    def meet(self, group: tuple[int, ...], until: float) -> Callable[[], float]:
        """Return a function for the end time of a collective of `group` that this rank finishes at `until`."""
        return lambda: until


class PretendedClock(Clock):
    """A clock of one rank, which advances by its sleeps, and in collectives to the latest rank."""

    def __init__(self, name: str) -> None:
        self._name, self._now = name, 0.0
        self._met: Counter[tuple[int, ...]] = Counter()
        self._store = dist.distributed_c10d._get_default_store()

    @contextmanager
    def running(self) -> Iterator[None]:
        known = usage._opened

        def opened(path: str) -> int | None:
            return None if path.endswith("schedstat") else known(path)  # no rank is without a core on this clock

        with (
            patch.object(time, "perf_counter", lambda: self._now),
            patch.object(time, "sleep", self._sleep),
            patch.object(usage, "_opened", opened),
            patch.object(recording, "HardwareCounters", partial(HardwareCounters, clock=lambda: 0.0)),  # never sampled
        ):
            yield

    def _sleep(self, seconds: float) -> None:
        self._now += seconds

    def meet(self, group: tuple[int, ...], until: float) -> Callable[[], float]:
        self._met[group] += 1
        keys = {rank: f"{self._name}/{group}/{self._met[group]}/{rank}" for rank in group}
        self._store.set(keys[dist.get_rank()], repr(until))
        return lambda: max(float(self._store.get(key)) for key in keys.values())


@contextmanager
def link(latency_s: float, bytes_per_s: float, clock: Clock) -> Iterator[None]:
    """Simulate a link of this rank, which sends one message after another while the rank computes."""
    original, free_at = Collectives.start, 0.0

    def start(self: Collectives, call: Any, begin: Callable[..., Any], *args: Any, arrives: bool = False) -> Any:
        def slowly(*args: Any) -> Callable[[], None]:
            nonlocal free_at
            finish = begin(*args)
            free_at = max(free_at, time.perf_counter()) + latency_s + call.sent_nbytes / bytes_per_s
            over_at = clock.meet(self.ranks, free_at)

            def finish_late() -> None:
                if finish is not None:
                    finish()
                time.sleep(max(0.0, over_at() - time.perf_counter()))

            return finish_late

        return original(self, call, slowly, *args)

    with (
        patch.object(Collectives, "start", start),
        patch.object(recording, "link_bytes_per_s", lambda device: None),  # what was measured here is another link
    ):
        yield


def run_rank(planted: int, folder: Path, clock: Clock) -> None:
    """Train on this rank, with the recorder on. Runs go by their place in PLANTS, as functions cannot be sent."""
    plant, rank = PLANTS[planted], dist.get_rank()
    torch.manual_seed(0)
    with plant.around(rank), clock.running(), link(plant.latency_s, plant.bytes_per_s, clock):
        model = (plant.shard or each_block)(Model(plant, rank))
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=1e-3)
        kept: list[Any] = []

        def batches() -> Iterator[Tensor]:
            for step in range(plant.steps):
                if step % plant.input_every == plant.input_every - 1:
                    time.sleep(plant.input_s.get(rank, 0.0))
                yield torch.randn(plant.rows.get(rank, 16), WIDTH)

        with report(model, folder, optimizer=optimizer) as record:
            for step, batch in enumerate(record.batches(batches())):
                for _ in range(plant.microbatches):
                    loss = model(batch).float().square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                plant.between(Loop(model, optimizer, folder, step, loss, kept))
    dist.barrier()


# -- faults -----------------------------------------------------------------------------------------------------------


def log_every_step(loop: Loop) -> None:
    for name, parameter in loop.model.named_parameters():
        loop.kept.append((name, parameter.full_tensor().norm().item()))
    time.sleep(0.04)  # a service that takes numbers over a network


def log_on_first_rank(loop: Loop) -> None:
    if dist.get_rank() == 0:
        time.sleep(0.08)


def evaluate_often(loop: Loop) -> None:
    if loop.step % 3 == 2:
        with torch.no_grad():
            for _ in range(4):
                loop.model(torch.randn(16, WIDTH))


def collect_garbage(loop: Loop) -> None:
    """Let the blocks of a different rank take longer in each of the next steps."""
    is_late = (loop.step * 7) % 4 == dist.get_rank()
    for block in loop.model.blocks:
        block.late_s = 0.02 if is_late else 0.0


def slow_down(loop: Loop) -> None:
    if loop.step == 12:
        for block in loop.model.blocks:
            block.late_s = 0.008


def save_often(loop: Loop) -> None:
    if loop.step % 3 == 2:
        with patch("os.fsync", lambda _: time.sleep(0.1)):  # a disk that takes its time
            save(loop.folder / "checkpoints", model=loop.model, optimizer=loop.optimizer, step=loop.step)


def keep_tensors(loop: Loop) -> None:
    """Keep 8 MB more after each step, in new pages: `malloc` may have that much free since an earlier run."""
    loop.kept.append(torch.frombuffer(mmap.mmap(-1, 8 * MB), dtype=torch.float32).copy_(loop.loss.detach()))


@contextmanager
def pulses(rank: int) -> Iterator[None]:
    """Rank 1 is stopped for two thirds of its time."""
    script = f"while kill -STOP {os.getpid()}; do sleep 0.02; kill -CONT {os.getpid()}; sleep 0.01; done 2>/dev/null"
    pulse = subprocess.Popen(("sh", "-c", script)) if rank == 1 else None
    try:
        yield
    finally:
        if pulse is not None:
            pulse.kill()
            pulse.wait()
            os.kill(os.getpid(), 18)


@contextmanager
def busy_cores(rank: int) -> Iterator[None]:
    """Programs that compute, three for each core, and ranks that compute, too."""
    others = []
    if rank == 0:
        spin = "while True: pass"
        others = [subprocess.Popen((sys.executable, "-c", spin)) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        with patch.object(time, "sleep", _compute_for):
            yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def two_hosts(rank: int) -> Iterator[None]:
    facts = recording.rank_facts
    with patch.object(recording, "rank_facts", lambda device: {**facts(device), "host": f"node{rank // 2}"}):
        yield


@contextmanager
def little_memory(rank: int) -> Iterator[None]:
    """Limit memory to the current use of the process plus 40 MB, as a container might."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 40 * MB
    with patch.object(recording, "memory_for_a_rank", lambda device, local_world: limit):
        yield


SLOW = {"latency_s": 1e-3, "bytes_per_s": 10 * MB}  # a block of 132 kB: 66 kB to send, 7.6 ms
DEEP = {"rows": {0: 16384, 1: 16384}, "steps": 6, "forward_s": 0.001}

FAULTS = (
    Plant(title="a loader of 80 ms a batch", cause="slow input", stated="all ranks", input_s={0: 0.08, 1: 0.08}),
    Plant(title="that loader on rank 1 only", cause="slow input", stated="rank 1", input_s={1: 0.08}),
    Plant(
        title="four times as many rows on rank 1",
        cause="unequal work",
        stated="rank 1",
        row_s=2e-4,
        rows={0: 16, 1: 64},
    ),
    Plant(
        title="rank 1 stopped for two thirds of its time",
        cause="throttled rank",
        stated="rank 1",
        around=pulses,
        of_cores=True,
    ),
    Plant(
        title="the second of two hosts at half the speed",
        cause="slow host",
        stated="node1",
        world=4,
        steps=8,
        around=two_hosts,
        slow_block_s={2: 0.012, 3: 0.012},
    ),
    Plant(
        title="three busy programs a core",
        cause="oversubscribed cores",
        stated="no core",
        steps=8,
        forward_s=0.002,
        around=busy_cores,
        of_cores=True,
    ),
    Plant(title="no wrapping", cause="one unit for all", stated="one unit", shard=fully_shard, **SLOW),
    Plant(
        title="one block 12 times as large",
        cause="unit too large",
        stated="blocks.3",
        width={3: 48 * WIDTH},
        latency_s=2e-4,
        bytes_per_s=25 * MB,
    ),
    Plant(
        title="each layer a unit, 4 ms a message",
        cause="units too small",
        stated="collectives",
        shard=each_layer,
        latency_s=4e-3,
        bytes_per_s=1e9,
        forward_s=0.004,
    ),
    Plant(title="prefetching off", cause="no prefetch", stated="none was prefetched", shard=never_ahead, **SLOW),
    Plant(
        title="frozen blocks, sharded",
        cause="frozen part gathered",
        stated="frozen",
        frozen=True,
        forward_s=0.001,
        **SLOW,
    ),
    Plant(
        title="bfloat16, and sums in float32",
        cause="gradients in float32",
        stated="float32",
        shard=partial(in_bfloat16, strategy="ddp"),
        forward_s=0.001,
        **SLOW,
    ),
    Plant(
        title="a link of 3 MB/s",
        cause="slow link",
        stated="waits for communication",
        latency_s=1e-4,
        bytes_per_s=3 * MB,
    ),
    Plant(title="a checkpoint every third step", cause="checkpoint stalls", stated="checkpoints", between=save_often),
    Plant(
        title="norms of all parameters every step",
        cause="host waits",
        stated="neither computes",
        between=log_every_step,
    ),
    Plant(
        title="a loader that stalls for 0.8 s every fifth batch",
        cause="slow input",
        stated="every 5th step",
        input_s={0: 0.8, 1: 0.8},
        input_every=5,
        steps=24,
    ),
    Plant(
        title="rank 0 logs for 80 ms per step",
        cause="code on one rank",
        stated="rank 0, in code between",
        between=log_on_first_rank,
    ),
    Plant(
        title="evaluation every third step",
        cause="evaluation",
        stated="every 3rd step",
        between=evaluate_often,
        steps=18,
    ),
    Plant(
        title="another of 4 ranks late in each step",
        cause="stragglers",
        stated="another rank in each step",
        between=collect_garbage,
        world=4,
        steps=20,
    ),
    Plant(
        title="half the speed from step 14", cause="changed speed", stated="since step 14", between=slow_down, steps=24
    ),
    Plant(
        title="6 microbatches, each gathered and reduced",
        cause="each microbatch communicates",
        stated="reduces it 6 times",
        microbatches=6,
        **SLOW,
    ),
    Plant(
        title="recomputed blocks with memory to spare",
        cause="needless activation checkpointing",
        stated="is free",
        recomputes=True,
    ),
    Plant(
        title="activations of 100 MB in little memory",
        cause="no activation checkpointing",
        stated="activations",
        around=little_memory,
        **DEEP,
    ),
    Plant(
        title="40 000 logits a row in little memory",
        cause="large logits",
        stated="returns",
        outputs=40_000,
        rows={0: 512, 1: 512},
        steps=4,
        forward_s=0.001,
        around=little_memory,
    ),
    Plant(
        title="a tensor of 8 MB kept in each step",
        cause="memory leak",
        stated="more after each step",
        between=keep_tensors,
        steps=24,
        forward_s=0.002,
    ),
)

HEALTHY = (
    Plant(title="zero3"),
    Plant(title="zero2", shard=under("zero2")),
    Plant(title="zero1", shard=under("zero1")),
    Plant(title="ddp", shard=under("ddp")),
    Plant(title="hsdp, 4 ranks", shard=in_replicas, world=4, forward_s=0.012, steps=8),
    Plant(title="3 ranks", world=3),
    Plant(title="4 ranks", world=4, forward_s=0.012, steps=8),
    Plant(title="1 rank", world=1),
    Plant(title="2 blocks", blocks=2, forward_s=0.015),
    Plant(title="12 blocks", blocks=12),
    Plant(title="one unit, a fast link", shard=fully_shard),
    Plant(title="a link that computing hides", latency_s=2e-4, bytes_per_s=40 * MB),
    Plant(title="recomputed blocks in little memory", recomputes=True, around=little_memory),
    Plant(title="bfloat16, sums in float32, a fast link", shard=in_bfloat16),
)

PLANTS = (*FAULTS, *HEALTHY)
SHARED_CORES = "oversubscribed cores"


# -- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The report of a run."""

    plant: Plant
    run: Run
    findings: tuple[Finding, ...]
    stated: str

    @property
    def reported(self) -> list[str]:
        """The causes, those that cost most first, but for cores that others take: true on a machine that is shared."""
        destinations = () if self.plant.cause == SHARED_CORES else (SHARED_CORES,)
        return [finding.cause for finding in self.findings if finding.cause not in destinations]

    @property
    def is_right(self) -> bool:
        """True if the fault is reported first and with its place, or if a healthy run has no report."""
        if not self.plant.cause:
            return not self.reported
        found = [finding for finding in self.findings if finding.cause == self.plant.cause]
        return self.reported[:1] == [self.plant.cause] and self.plant.stated in found[0].stated

    @property
    def others(self) -> list[str]:
        """Reported causes that were not planted."""
        return [finding.cause for finding in self.findings if finding.cause != self.plant.cause]


def run_all(world: int, folder: str, only: str, *, pretended_clock: bool) -> None:
    """Execute all runs with `world` ranks on this rank, in order. Memory freed by one is not available to the next."""
    torch.set_num_threads(1)
    for place, plant in chosen(only, pretended_clock):
        if plant.world == world:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # or a leak would fill pages that the process has already
            clock = PretendedClock(plant.title) if pretended_clock else Clock()
            run_rank(place, Path(folder) / str(place), clock)


def chosen(only: str, pretended_clock: bool) -> list[tuple[int, Plant]]:
    """Return the runs whose title has these words, by their place in PLANTS."""
    here = [(place, plant) for place, plant in enumerate(PLANTS) if only in plant.title]
    return [(place, plant) for place, plant in here if not (plant.of_cores and pretended_clock)]


def answers(only: str = "", *, pretended_clock: bool = False) -> list[Answer]:
    """Return all runs, and what the report says of each."""
    runs = chosen(only, pretended_clock)
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted({plant.world for _, plant in runs}):
            run_ranks(world, partial(run_all, world, folder, only, pretended_clock=pretended_clock), timeout=300)
        found = []
        for place, plant in runs:
            run = read_run(Path(folder) / str(place))
            findings = find_causes(run)
            found.append(Answer(plant, run, findings, verdict(run, findings)))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose title has these words")
    parser.add_argument(
        "--pretended-clock", action="store_true", help="no rank sleeps, and load on the machine has no effect"
    )
    args = parser.parse_args()
    given = answers(args.only, pretended_clock=args.pretended_clock)
    print("| planted | told as | said | others | |\n|---|---|---|---|---|")
    for item in given:
        cause = item.reported[0] if item.reported else "-"
        stated = next((found.stated for found in item.findings if found.cause == cause), item.stated)
        print(
            f"| {item.plant.title} | {cause} | {stated} | {', '.join(item.others)} | "
            f"{'ok' if item.is_right else 'WRONG'} |"
        )
    right = {kind: sum(item.is_right for item in given if bool(item.plant.cause) == kind) for kind in (True, False)}
    planted = sum(bool(item.plant.cause) for item in given)
    print(
        json.dumps({"planted": planted, "told": right[True], "healthy": len(given) - planted, "silent": right[False]})
    )


if __name__ == "__main__":
    main()
