"""How fast do ranks on one host exchange memory: through shared memory, by pairwise messages, by gloo's own calls?

    torchrun --nproc-per-node 2 benchmarks/wire.py --rounds 20

Each way takes its turn in every round, with the same tensors. Quoted are medians over the rounds, and medians of the
ratios within a round, since a machine's speed drifts. The floor is what the bytes cost at the speed of a copy that all
ranks make at once: a gather must write a whole, and a reduction must read the others' parts and this rank's own and
write sums. The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import compare_ranks
from fullshard.comm.pairwise import PairwiseCollectives
from fullshard.comm.shared_memory import SharedMemoryCollectives
from fullshard.comm.transport import PartSums
from fullshard.device.memory import typed_view
from fullshard.tape.recorder import Origin, Phase

ORIGIN = Origin("benchmark", Phase.IDLE)
Call = Callable[[], object]


def calls(options: argparse.Namespace) -> dict[str, dict[str, Call]]:
    """Return calls by collective and then by transport. Each call exchanges `--mib` of unsharded tensors."""
    world = dist.get_world_size()
    numel = options.mib * 2**20 // 4 // options.tensors // world * world
    wholes = [torch.ones(numel) for _ in range(options.tensors)]
    parts = [torch.ones(numel // world) for _ in range(options.tensors)]
    numels = [numel // world] * options.tensors
    other = torch.ones_like(parts[0])

    def copies(count: int) -> Call:
        return lambda: [part.copy_(other) for part in parts for _ in range(count)]

    gathers: dict[str, Call] = {"floor": copies(world)}
    scatters: dict[str, Call] = {"floor": copies(world)}
    for name, kind in {"shared memory": SharedMemoryCollectives, "pairwise": PairwiseCollectives}.items():
        transport = kind(dist.group.WORLD)
        gather, scatter = transport.channel(options.tensors), transport.channel(options.tensors)
        gathers[name] = lambda gather=gather: gather.all_gather(wholes, parts, origin=ORIGIN).wait()
        scatters[name] = lambda scatter=scatter: scatter.reduce_scatter(
            PartSums(parts, wholes, numels, world), origin=ORIGIN
        ).wait()
        if isinstance(transport, SharedMemoryCollectives):
            gathers["in common"] = gather_into_shared(transport, parts)
    gathers["gloo's own"] = lambda: [gloo_gather(w, p) for w, p in zip(wholes, parts, strict=True)]
    scatters["gloo's own"] = lambda: [gloo_scatter(p, w) for w, p in zip(wholes, parts, strict=True)]
    return {"all_gather": gathers, "reduce_scatter": scatters}


def gather_into_shared(transport: SharedMemoryCollectives, parts: list[Tensor]) -> Call:
    """A gather into wholes that all ranks have in common, to which each copies its own parts."""
    numels = [transport.world * part.numel() for part in parts]
    storages = transport.rank_shared_storages([4 * numel for numel in numels], "benchmark")
    wholes = [typed_view(storage, torch.float32, 0, (n,)) for storage, n in zip(storages, numels, strict=True)]
    channel = transport.channel(len(parts))
    return lambda: channel.all_gather(wholes, parts, origin=ORIGIN, into_shared=True).wait()


def gloo_gather(whole: Tensor, part: Tensor) -> None:
    """gloo's all-gather."""
    dist.all_gather_into_tensor(whole, part)


def gloo_scatter(part: Tensor, whole: Tensor) -> None:
    """gloo's reduce-scatter, with the mean taken."""
    dist.reduce_scatter_tensor(part, whole)
    part.div_(dist.get_world_size())


def seconds(call: Call) -> float:
    """Return the seconds from a barrier until all ranks have ended `call`."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    """Run all in turn and print the table."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare_ranks(options.compare)
    rows = {}
    for collective, ways in calls(options).items():
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.warmup + options.rounds):
            for name, call in ways.items():
                taken[name].append(seconds(call))
        rows[collective] = {name: summary(options, taken, name) for name in ways}
    if dist.get_rank() == 0:
        show(options, rows)
    dist.barrier()
    dist.destroy_process_group()


def summary(options: argparse.Namespace, taken: dict[str, list[float]], name: str) -> dict[str, float]:
    """Medians over the rounds: milliseconds, MB/s of the full tensors, and the ratios within a round."""
    local, floor = taken[name][options.warmup :], taken["floor"][options.warmup :]
    pairwise = taken["pairwise"][options.warmup :]
    return {
        "median_ms": statistics.median(local) * 1e3,
        "mb_per_s": options.mib * 2**20 / 1e6 / statistics.median(local),
        "over_floor": statistics.median(a / b for a, b in zip(local, floor, strict=True)),
        "over_pairwise": statistics.median(a / b for a, b in zip(local, pairwise, strict=True)),
    }


def show(options: argparse.Namespace, rows: dict[str, dict[str, dict[str, float]]]) -> None:
    """The tables, and everything in them as JSON."""
    for collective, ways in rows.items():
        print(f"\n{collective:16}{'median ms':>10}{'MB/s':>8}{'over floor':>12}{'over pairwise':>15}")
        for name, row in ways.items():
            print(
                f"{name:16}{row['median_ms']:10.2f}{row['mb_per_s']:8.0f}{row['over_floor']:12.2f}"
                f"{row['over_pairwise']:15.2f}"
            )
    about = {"torch": torch.__version__, "machine": platform.machine(), "ranks": dist.get_world_size()}
    print(json.dumps({**about, "options": vars(options), "collectives": rows}))


def arguments() -> argparse.Namespace:
    """Sizes of the tensors and of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"mib": 64, "tensors": 4, "rounds": 20, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="compare what ranks do")
    return parser.parse_args()


if __name__ == "__main__":
    main()
