"""How long it takes to shard a large model over a large world, before anything is trained: this library and FSDP2.

    python benchmarks/large_world.py --world 4096 --layers 80

One process is rank 0 of a world that the fake backend pretends; the model has the shape of Llama 3 70B on the
meta device. Each measurement is a separate process, the two systems in turn; medians of ratios within a round.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, HIDDEN, KEYS, VOCABULARY = 8192, 28672, 1024, 128256
SYSTEMS = ("fullshard", "fsdp2")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, WIDTH), (WIDTH, KEYS), (WIDTH, KEYS), (WIDTH, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN)]
        self.matrices = nn.ModuleList(nn.Linear(*size, bias=False) for size in [*sizes, (HIDDEN, WIDTH)])
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def shard(system: str, world: int, layers: int) -> tuple[float, float]:
    """Return the CPU seconds of sharding, and the memory growth of the process in MB."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    if system == "fullshard":
        from fullshard import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    with torch.device("meta"):
        model = Model(layers)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return time.process_time() - start, grown / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SYSTEMS, help="measure one system in this process")
    args = parser.parse_args()
    if args.one:
        print(*shard(args.one, args.world, args.layers))
        return
    found: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    size = ["--world", str(args.world), "--layers", str(args.layers)]
    for _ in range(args.rounds):
        for system, measured in found.items():
            command = [sys.executable, "-W", "ignore", __file__, "--one", system, *size]
            reported = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            measured.append((float(reported[-2]), float(reported[-1])))
    for system, measured in found.items():
        seconds, grown = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{system:10} {seconds:7.2f} s of CPU, {grown:5.0f} MB")
    ratios = [own[0] / peer[0] for own, peer in zip(found["fullshard"], found["fsdp2"], strict=True)]
    print(f"fullshard / fsdp2: {statistics.median(ratios):.3f} (median of {args.rounds} rounds)")


if __name__ == "__main__":
    main()
