"""Host overhead of sharding: Python time per unit and microbatch, with tiny tensors and without communication.

    python benchmarks/host_overhead.py --worlds 8,512

One process is rank 0 of a world that the fake backend pretends. Blocks of twelve parameters are trained without
sharding, with this library, with FSDP2 and with FSDP1, in turn within each round, in processor time. What a system
takes beyond the unsharded blocks is its overhead; quoted is the median over the rounds, and the median of the ratios
to ours within a round. `--profile fullshard` prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 16
SYSTEMS = ("fullshard", "FSDP2", "FSDP1")


class Block(nn.Module):
    """Gated mixing and an MLP, as in a transformer: four matrices and eight vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.before_mixing, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gates, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, scale, shift = self.gates(self.before_mixing(x)).chunk(3, -1)
        x = x + self.mixed(gate * scale + shift)
        return x + self.down(torch.relu(self.up(self.before_mlp(x))))


def build(units: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(units)])


def sharded(system: str, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if system == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        with warnings.catch_warnings(action="ignore"):  # of its deprecation
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
    if system == "FSDP2":
        from torch.distributed.fsdp import fully_shard
    else:
        from fullshard import fully_shard
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for param in model.parameters():
        param.grad = None


def measure(world: int, units: int, rounds: int, profiled: str | None) -> dict[str, list[float]]:
    """Microseconds a unit and microbatch, round by round: those of the unsharded blocks, and what each adds."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    models = {"unsharded": build(units)}
    models |= {system: sharded(system, build(units), mesh) for system in SYSTEMS}
    x = torch.randn(2, WIDTH)
    for model in models.values():
        for _ in range(5):
            step(model, x)
    if profiled is not None:
        with cProfile.Profile() as profile:
            for _ in range(20):
                step(models[profiled], x)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return {}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.process_time()
            for _ in range(5):
                step(model, x)
            taken[name].append((time.process_time() - start) / 5 / units * 1e6)
    plain = taken["unsharded"]
    added = {s: [a - b for a, b in zip(taken[s], plain, strict=True)] for s in SYSTEMS}
    return {"unsharded": plain, **added}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8,512")
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", choices=["unsharded", *SYSTEMS])
    parser.add_argument("--one", type=int, help="measure this world in this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.units, args.rounds, args.profile)))
        return
    options = ["--units", str(args.units), "--rounds", str(args.rounds)]
    for world in map(int, args.worlds.split(",")):
        command = [sys.executable, __file__, "--one", str(world), *options]
        if args.profile:
            subprocess.run([*command, "--profile", args.profile], check=True)
            continue
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"world {world}: unsharded {statistics.median(found['unsharded']):.0f} us per unit and microbatch")
        for system in SYSTEMS:
            ratio = statistics.median(a / b for a, b in zip(found["fullshard"], found[system], strict=True))
            print(f"  {system:10} adds {statistics.median(found[system]):5.0f} us; ours is {ratio:.2f} of it")


if __name__ == "__main__":
    main()
