"""Host overhead of sharding: calls and processor time per unit and microbatch, with tiny tensors.

    python benchmarks/host_overhead.py              # both, in worlds of 8 and 512 ranks
    python benchmarks/host_overhead.py --profile    # where the calls of this library are made

One process is rank 0 of a world that the fake backend pretends, so nothing is communicated. Blocks of twelve parameters
are trained without sharding, with this library, with FSDP2 and with FSDP1.

Calls are those of Python functions and of functions in C that the interpreter makes (`sys.setprofile`), in a step of
the steady state, divided by the number of blocks. They are the same in every run. What a system adds to the calls of
the unsharded blocks is its overhead. "On streams" is this library on a simulated device with streams: the engine queues
its work on six streams that do nothing.

Times are of the processor, of a forward and backward, in turn within each round. Quoted is the median over the rounds,
and the median of the ratios to ours within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 16
FULLSHARD, ON_STREAMS, FSDP2, FSDP1 = "fullshard", "fullshard on streams", "FSDP2", "FSDP1"
SYSTEMS = (FULLSHARD, ON_STREAMS, FSDP2, FSDP1)
PASSES, CLIP, STEP, ZERO = "forward and backward", "clip_grad_norm_", "optimizer.step", "zero_grad"
_WARM_UP = 5


class Block(nn.Module):
    """Gated mixing and an MLP, as in a transformer: four matrices and eight vectors. Optionally, more vectors."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.before_mixing, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gates, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.more = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(more)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, scale, shift = self.gates(self.before_mixing(x)).chunk(3, -1)
        x = x + self.mixed(gate * scale + shift)
        if len(self.more):
            x = x + torch.stack([*self.more._parameters.values()]).sum(0)
        return x + self.down(torch.relu(self.up(self.before_mlp(x))))


def build(units: int, more: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(more) for _ in range(units)])


def sharded(system: str, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if system == FSDP1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        with warnings.catch_warnings(action="ignore"):  # of its deprecation
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
    if system == FSDP2:
        from torch.distributed.fsdp import fully_shard
    else:
        from fullshard import fully_shard
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def pretended_streams() -> Iterator[None]:
    """Context manager that replaces the CPU by a device with streams that do nothing."""
    from fullshard.device.accelerator import Accelerator, pretending
    from fullshard.device.streams import STREAMS, Mark, Stream, Streams

    nothing = nullcontext()

    class Reached(Mark):
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    reached = Reached()

    class QueuedStream(Stream):
        is_stream = True

        def queueing(self) -> AbstractContextManager[object]:
            return nothing

        def mark(self) -> Mark:
            return reached

    class QueuedDevice(Accelerator):
        has_streams = True
        streams = Streams(*[QueuedStream(name) for name in STREAMS])

    with pretending(QueuedDevice()):
        yield


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for param in model.parameters():
        param.grad = None


@dataclass
class Calls:
    """Calls that the interpreter has made, by function."""

    python: Counter[CodeType] = field(default_factory=Counter)
    c: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Calls:
        """Count the calls of `function()` and of everything that it calls on this thread."""
        calls = cls()

        def note(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                calls.python[frame.f_code] += 1
            elif event == "c_call":
                calls.c[getattr(arg, "__qualname__", str(arg))] += 1

        gc.collect()
        gc.disable()  # finalizers would be counted
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    def per(self, units: int) -> tuple[float, float]:
        """Return the calls of Python functions and of functions in C, for each of `units`."""
        return sum(self.python.values()) / units, sum(self.c.values()) / units


def count_calls(system: str, mesh: DeviceMesh, units: int, more: int = 0) -> dict[str, Calls]:
    """Return the calls of each part of a training step in the steady state. Each block has 12 + `more` parameters."""
    from fullshard import clip_grad_norm_

    with pretended_streams() if system == ON_STREAMS else nullcontext():
        model = build(units, more)
        if system in SYSTEMS:
            model = sharded(system, model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        clip = clip_grad_norm_ if system in (FULLSHARD, ON_STREAMS) else nn.utils.clip_grad_norm_
        x = torch.randn(2, WIDTH)
        parts: dict[str, Callable[[], Any]] = {
            PASSES: lambda: model(x).sum().backward(),
            CLIP: lambda: clip(model.parameters(), 1.0),
            STEP: lambda: optimizer.step(),  # noqa: PLW0108  # not `optimizer.step` itself, which the first step replaces
            ZERO: optimizer.zero_grad,
        }
        for _ in range(_WARM_UP):
            for part in parts.values():
                part()
        return {name: Calls.of(part) for name, part in parts.items()}


def in_pretended_world(world: int) -> DeviceMesh:
    """Make this process rank 0 of `world` ranks, and return their mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return init_device_mesh("cpu", (world,))


def measure_times(mesh: DeviceMesh, units: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a unit and microbatch, round by round: those of the unsharded blocks, and what each adds."""
    systems = (FULLSHARD, FSDP2, FSDP1)
    models = {"unsharded": build(units)} | {system: sharded(system, build(units), mesh) for system in systems}
    x = torch.randn(2, WIDTH)
    for model in models.values():
        for _ in range(_WARM_UP):
            step(model, x)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = time.process_time()
            for _ in range(5):
                step(model, x)
            taken[name].append((time.process_time() - start) / 5 / units * 1e6)
    plain = taken["unsharded"]
    return {"unsharded": plain, **{s: [a - b for a, b in zip(taken[s], plain, strict=True)] for s in systems}}


def measure(world: int, units: int, rounds: int) -> dict[str, Any]:
    mesh = in_pretended_world(world)
    calls = {  # this library last, since it registers hooks of every optimizer
        system: {part: found.per(units) for part, found in count_calls(system, mesh, units).items()}
        for system in ("unsharded", FSDP2, FSDP1, FULLSHARD, ON_STREAMS)
    }
    return {"times": measure_times(mesh, units, rounds), "calls": calls}


def show(world: int, found: dict[str, Any]) -> None:
    times, calls = found["times"], found["calls"]
    print(f"world {world}: unsharded {statistics.median(times['unsharded']):.0f} us per unit and microbatch")
    for system in times:
        if system != "unsharded":
            ratio = statistics.median(a / b for a, b in zip(times[FULLSHARD], times[system], strict=True))
            print(f"  {system:21} adds {statistics.median(times[system]):5.0f} us; ours is {ratio:.2f} of it")
    print(f"  calls per unit, Python + C{'':14}", *(f"{part:>22}" for part in calls[FULLSHARD]))
    for system, parts in calls.items():
        print(f"  {system:40}", *(f"{python:>14.0f} + {c:5.0f}" for python, c in parts.values()))


def show_profile(world: int, units: int) -> None:
    mesh = in_pretended_world(world)
    for part, calls in count_calls(FULLSHARD, mesh, units).items():
        print(f"{part}: {calls.per(units)[0]:.1f} Python + {calls.per(units)[1]:.1f} C calls per unit")
        for code, number in calls.python.most_common(25):
            print(f"  {number / units:7.2f}  {code.co_qualname}  {code.co_filename}:{code.co_firstlineno}")
        for name, number in calls.c.most_common(15):
            print(f"  {number / units:7.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8,512")
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the functions that are called most often")
    parser.add_argument("--one", type=int, help="measure this world in this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.units, args.rounds)))
        return
    worlds = [int(world) for world in args.worlds.split(",")]
    if args.profile:
        show_profile(worlds[0], args.units)
        return
    for world in worlds:
        command = [sys.executable, __file__, "--one", str(world)]
        command += ["--units", str(args.units), "--rounds", str(args.rounds)]
        show(world, json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


if __name__ == "__main__":
    main()
