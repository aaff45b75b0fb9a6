"""How long is a step on two hosts, by strategy and by the speed of the cable between them, and what crosses it?

    python benchmarks/two_hosts.py --rounds 8

It makes two hosts on this machine (see tests/hosts.py), two ranks each, and limits what each host sends to each of
`--rates` in turn. All systems train the same GPT and take turns, one step each a round: quoted are medians over the
rounds and, in brackets, medians of the ratios to the first system within a round. Bytes are those that the kernel has
counted on the first host's end of the cable. The last line is JSON.

Started by torchrun itself, on two hosts that are real, it measures there and prints what it found as JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist

from benchmarks.bench import peers
from benchmarks.bench.model import Shape
from benchmarks.bench.sharded import fully_sharded
from benchmarks.bench.trainer import Build
from benchmarks.bench.workload import Workload
from fullshard import Placement, Placements

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from hosts import sent_bytes, torchrun, two_hosts, wait_for

S, G = Placement.SHARDED, Placement.GROUPED
HPZ = Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S)
SYSTEMS = {
    "zero3": fully_sharded("zero3"),
    "zero2": fully_sharded("zero2"),
    "zero1": fully_sharded("zero1"),
    "ddp": fully_sharded("ddp"),
    "hpZ": fully_sharded(HPZ),
    "HFSDP": fully_sharded(Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S)),
    "hsdp": fully_sharded("hsdp"),
    "zero3, bf16 sums": fully_sharded("zero3", reduce_wire="bf16"),
    "zero3, int8": fully_sharded("zero3", gather_wire="int8", reduce_wire="int8"),
    "zero3, fp8 and int4": fully_sharded("zero3", gather_wire="fp8", reduce_wire="int4"),
    "hpZ, int8": fully_sharded(HPZ, gather_wire="int8", reduce_wire="int8"),
    "hsdp, int8 sums": fully_sharded("hsdp", reduce_wire="int8"),
    "hsdp, int4 sums": fully_sharded("hsdp", reduce_wire="int4"),
    "torch FSDP2": peers.fsdp2(),
    "torch DDP": peers.ddp(),
}
NO_LIMIT = "unlimited"


def main() -> None:
    """On this machine: make the hosts, measure at every rate, print the table."""
    options = arguments()
    found = {}
    with two_hosts() as hosts:
        for rate in options.rates:
            for host in hosts:
                host.limit_rate(None if rate == NO_LIMIT else rate)
            print(f"two_hosts: {rate} ...", file=sys.stderr)
            found[rate] = measure_on(hosts, options)
    show(options, found)


def measure_on(hosts: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the first rank of a torchrun over these hosts."""
    with tempfile.NamedTemporaryFile("r") as result:
        argv = [__file__, *sys.argv[1:], "--result", result.name]
        codes = wait_for(torchrun(hosts, *argv, stderr=subprocess.DEVNULL), options.timeout)
        if any(code != 0 for code in codes):
            raise SystemExit(f"torchrun ended with {codes}.")
        return json.load(result)


class Contender:
    """One system's trainer, and how long its steps took."""

    def __init__(self, workload: Workload, build: Build) -> None:
        self.trainer = build(workload, workload.model(torch.device("cpu")))
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        """Train on `tokens`, and note the time between two barriers."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.trainer.step(tokens)
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the training task of all systems."""
    shape = Shape(
        vocab=options.vocab,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        mlp_ratio=options.ratio,
        batch=options.batch,
        seq=options.seq,
    )
    return Workload(shape=shape, world=dist.get_world_size())


def measure(options: argparse.Namespace) -> None:
    """On one rank: train with all systems in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = workload_of(options)
    contenders = {name: Contender(workload, SYSTEMS[name]) for name in options.systems}
    sent: dict[str, list[int]] = {name: [] for name in contenders}
    for step in range(options.warmup + options.rounds):
        tokens = workload.tokens(step, dist.get_rank())
        for name, contender in contenders.items():
            before = sent_bytes()  # a step begins and ends with a barrier, so no rank sends at either count
            contender.step(tokens)
            sent[name].append(sent_bytes() - before)
    if dist.get_rank() == 0:
        first = next(iter(contenders.values()))
        found = {
            "parameter_bytes": 4 * workload.parameter_count(),
            "seconds": {name: contender.seconds[options.warmup :] for name, contender in contenders.items()},
            "sent_bytes": {name: statistics.median(counts[options.warmup :]) for name, counts in sent.items()},
            "loss_differs": {
                name: max(abs(a - b) for a, b in zip(contender.losses, first.losses, strict=True))
                for name, contender in contenders.items()
            },
        }
        if options.result is None:
            print(json.dumps(found))
        else:
            options.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def show(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """The table, as Markdown, and everything in it as JSON."""
    some = next(iter(found.values()))
    print(f"parameters: {some['parameter_bytes'] / 1e6:.1f} MB\n")
    print(f"| | MB sent | {' | '.join(found)} | losses differ by |")
    print(f"|---|---{'|---' * len(found)}|---|")
    for name in options.systems:
        cells = [f"{some['sent_bytes'][name] / 1e6:.1f}"]
        for measured in found.values():
            seconds, firsts = measured["seconds"][name], next(iter(measured["seconds"].values()))
            ratio = statistics.median(a / b for a, b in zip(seconds, firsts, strict=True))
            cells.append(f"{statistics.median(seconds) * 1e3:.0f} ms ({ratio:.2f})")
        cells.append(f"{max(measured['loss_differs'][name] for measured in found.values()):.1e}")
        print(f"| {name} | {' | '.join(cells)} |")
    about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({**about, "options": vars(options), "found": found}, default=str))


def arguments() -> argparse.Namespace:
    """Return the rates, the systems, the size of the model and of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"vocab": 1024, "width": 256, "layers": 4, "heads": 4, "ratio": 4, "batch": 1, "seq": 64}
    for name, value in {**sizes, "rounds": 8, "warmup": 2, "timeout": 600}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rates", nargs="+", default=[NO_LIMIT, "1gbit", "200mbit"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--result", type=Path, help="write what was found to this file, not to the screen")
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(arguments())
    else:
        main()
