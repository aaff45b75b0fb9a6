"""What does the optimizer's state on the CPU cost, and free? Steps with clipping, by fraction.

    python benchmarks/offload_to_cpu.py --json benchmarks/results/offload_to_cpu.json      # on any machine
    python benchmarks/offload_to_cpu.py --part gpu --json gpu_offload.json                 # on a GPU

reckoned  by tapes laid out in time: a rank of 8 H100, a GPT of blocks of width 4096 (8 of them; nothing depends on how
          many), bf16, microbatches of 2 x 2048 tokens, clipping. The CPU moves 20 GB/s for a rank, the bus 55 (costs as
          of `plan/costs.py`). `at once`: the CPU steps before the next forward begins, as it must where it waits for
          nothing else; otherwise each unit when its gather is to start.
host      on this machine: seconds of fused AdamW, and of a copy of what it changes: parameters and two states. Stepping
          ahead of the norm, as unclipped, needs that copy in every step, to go back to, and both again where the norm
          says so.
gpu       measured, where there is a GPU: the same model on one rank over NCCL, fractions by turns; the goal is 1.2
          with all of the state on the CPU.

The last line is the result as JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench.model import Model, Shape
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, OffloadPolicy, clip_grad_norm_, dry, fully_shard
from fullshard.optim import local_steps
from fullshard.plan.timeline import lay_out
from fullshard.versions import versions

SHAPE = Shape(vocab=8192, width=4096, layers=8, heads=32, seq=2048, batch=2)
SMALL = Shape(vocab=512, width=128, layers=3, heads=4, seq=32, batch=2)
FRACTIONS = (0.0, 0.25, 0.5, 1.0)
GOAL = 1.2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(policy: OffloadPolicy | None, shape: Shape) -> nn.Module:
    model = Model(shape)
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16, offload_policy=policy)
    return fully_shard(model, mp_policy=BF16, offload_policy=policy)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def tokens_of(shape: Shape) -> Tensor:
    return torch.zeros(shape.batch, shape.seq, dtype=torch.long)


# -- reckoned ---------------------------------------------------------------------------------------------------------


def tape_of(policy: OffloadPolicy | None, shape: Shape, steps: int, microbatches: int) -> dry.Tape:
    return dry.run(
        partial(build, policy, shape),
        partial(tokens_of, shape),
        loss=loss_of,
        world=8,
        steps=steps,
        microbatches=microbatches,
        max_norm=1.0,
    )


def reckoned(shape: Shape) -> list[dict[str, Any]]:
    policies: dict[str, OffloadPolicy | None] = {
        f"{fraction:g}": Offload(optimizer={"cpu": fraction}) for fraction in FRACTIONS
    }
    policies |= {"1, at once": policies["1"], "parameters too": CPUOffloadPolicy()}
    rows = []
    for microbatches in (4, 16):
        first = 0.0
        for name, policy in policies.items():
            never = mock.patch.object(local_steps, "can_defer", lambda *_: False)
            with never if "at once" in name else nullcontext():
                tapes = [tape_of(policy, shape, steps, microbatches) for steps in (2, 3)]
            shorter, longer = (lay_out(tape.entries).end for tape in tapes)
            first = first or longer - shorter
            rows.append(
                {
                    "on the CPU": name,
                    "microbatches": microbatches,
                    "step_ms": round(1e3 * (longer - shorter), 1),
                    "beside none": round((longer - shorter) / first, 3),
                    "device_peak_mib": round(tapes[1].peak_bytes() / 2**20),
                    "host_peak_mib": round(tapes[1].peak_bytes(of_host=True) / 2**20),
                }
            )
            print(rows[-1], flush=True)
    return rows


# -- on this machine's CPU --------------------------------------------------------------------------------------------


def best_of(run: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def host(numel: int) -> dict[str, Any]:
    """Of a parameter: fused AdamW, and what it takes to be able to go back."""
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    state = optimizer.state[param]
    now = [param.data, state["exp_avg"], state["exp_avg_sq"]]
    kept = [torch.empty_like(item) for item in now]
    step_s, copy_s = best_of(optimizer.step), best_of(lambda: torch._foreach_copy_(kept, now))
    found = {
        "threads": torch.get_num_threads(),
        "step_gb_s": round(28e-9 * numel / step_s, 1),
        "step_ns_per_parameter": round(1e9 * step_s / numel, 2),
        "copy_ns_per_parameter": round(1e9 * copy_s / numel, 2),
        "ahead, not clipped": round((step_s + copy_s) / step_s, 2),
        "ahead, clipped": round(2 * (step_s + copy_s) / step_s, 2),
    }
    print(found, flush=True)
    return found


# -- measured ---------------------------------------------------------------------------------------------------------


def gpu(shape: Shape, rounds: int) -> dict[str, Any]:
    """Return seconds per step by fraction, in turn. Each fraction has a separate model, one at a time on the device."""
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    times: dict[float, list[float]] = {fraction: [] for fraction in FRACTIONS}
    peaks: dict[float, int] = {}
    tokens = tokens_of(shape).cuda()
    for _ in range(rounds):
        for fraction in FRACTIONS:
            torch.cuda.reset_peak_memory_stats()
            with torch.device("cuda"):
                model = build(Offload(optimizer={"cpu": fraction}), shape)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for number in range(6):
                if number == 2:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                loss_of(model, tokens).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            times[fraction].append((time.perf_counter() - start) / 4)
            peaks[fraction] = torch.cuda.max_memory_allocated()
            del model, optimizer
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    ratio = statistics.median(all_ / none for all_, none in zip(times[1.0], times[0.0], strict=True))
    step_ms = {f"{fraction:g}": round(1e3 * statistics.median(its), 1) for fraction, its in times.items()}
    return {
        "step_ms": step_ms,
        "peak_mib": {f"{fraction:g}": round(nbytes / 2**20) for fraction, nbytes in peaks.items()},
        "all beside none": round(ratio, 3),
        "holds": ratio <= GOAL,
        "said": f"all of the optimizer's state on the CPU: {ratio:.2f} of the step without, the goal is {GOAL}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--small", action="store_true", help="a model of a size for a trial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SMALL if options.small else SHAPE
    if options.part == "cpu":
        found = {"reckoned": reckoned(shape), "host": host(100_000 if options.small else 50_000_000)}
    elif torch.cuda.is_available():
        found = gpu(shape, options.rounds)
    else:
        found = {"said": "no GPU: not run here"}
    found = {**found, "versions": versions()}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
