"""What does the optimizer's state on the CPU cost, and free? Steps with clipping, by fraction.

    python benchmarks/offload_to_cpu.py --json benchmarks/results/offload_to_cpu.json      # on any machine
    python benchmarks/offload_to_cpu.py --part gpu --json gpu_offload.json                 # on a GPU

reckoned  by tapes laid out in time: a rank of 8 H100, a GPT of blocks of width 4096 (8 of them; nothing depends on how
          many), bf16, microbatches of 2 x 2048 tokens, clipping. The CPU moves 20 GB/s for a rank, the bus 55 (costs as
          of `plan/costs.py`). `at once`: the CPU steps before the next forward begins, as it must where it waits for
          nothing else; otherwise each unit when its gather is to start.
host      on this machine: seconds of fused AdamW, of the norm of its gradient (whole and by rows), and of a copy of
          what it changes: parameters and two states. Stepping ahead of the norm, as unclipped, needs that copy in every
          step, to go back to, and both again where the norm says so.
gpu       measured, where there is a GPU: the same model and rank of 8, with collectives that do nothing, and FSDP2 with
          its own offload. With 16 microbatches and all of the states on the CPU, the goal is 1.2 of the step without.

The last line is the result as JSON.
"""

import argparse
import gc
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
from one_gpu import DEVICE, GPU, send_nothing  # in this folder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bench.model import Model, Shape
from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, Offload, OffloadPolicy, clip_grad_norm_, dry, fully_shard
from fullshard._dry_compat import fake_store
from fullshard.optim import clipping, local_steps
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
    """Measure fused AdamW of a parameter, the norm of its gradient, and what it takes to be able to go back."""
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    state = optimizer.state[param]
    now = [param.data, state["exp_avg"], state["exp_avg_sq"]]
    kept = [torch.empty_like(item) for item in now]
    step_s, copy_s = best_of(optimizer.step), best_of(lambda: torch._foreach_copy_(kept, now))
    norms_s = {
        name: best_of(lambda offloaded=by_rows: clipping._norms([param.grad], 2.0, offloaded=offloaded))
        for name, by_rows in (("norm", False), ("norm by rows", True))
    }
    found = {
        "threads": torch.get_num_threads(),
        "step_gb_s": round(28e-9 * numel / step_s, 1),
        "step_ns_per_parameter": round(1e9 * step_s / numel, 2),
        "copy_ns_per_parameter": round(1e9 * copy_s / numel, 2),
        **{f"{name}_ns_per_parameter": round(1e9 * seconds / numel, 2) for name, seconds in norms_s.items()},
        "ahead, not clipped": round((step_s + copy_s) / step_s, 2),
        "ahead, clipped": round(2 * (step_s + copy_s) / step_s, 2),
    }
    print(found, flush=True)
    return found


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(shape: Shape, steps: int) -> dict[str, Any]:
    """Return milliseconds per step by number of microbatches and system, of rank 0 of 8. The first two do not count."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=8)
    nothing = send_nothing()
    rows: list[dict[str, Any]] = []
    for microbatches in (4, 16):
        for name, make in SYSTEMS.items():
            row: dict[str, Any] = {"on the CPU": name, "microbatches": microbatches}
            try:
                row |= measured_system(make, shape, microbatches, steps)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            print(row, flush=True)
            rows.append(row)
            gc.collect()
            torch.accelerator.empty_cache() if GPU else None
    del nothing
    dist.destroy_process_group()
    found = {(row["on the CPU"], row["microbatches"]): row.get("step_ms", float("nan")) for row in rows}
    ratio = found["1", 16] / found["0", 16]
    return {
        "measured": rows,
        "all beside none": round(ratio, 3),
        "holds": not GPU or ratio <= GOAL,
        "said": f"all states on the CPU, 16 microbatches: {ratio:.2f} of the step without",
    }


def measured_system(make: Callable[[Shape], nn.Module], shape: Shape, microbatches: int, steps: int) -> dict[str, Any]:
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    model = make(shape)
    clip = nn.utils.clip_grad_norm_ if make is fsdp2 else clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = tokens_of(shape).to(DEVICE)
    times = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            loss_of(model, tokens).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if GPU:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    row: dict[str, Any] = {"step_ms": round(statistics.median(times[2:]), 1), "all_ms": [round(ms, 1) for ms in times]}
    return row | ({"device_peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)} if GPU else {})


def on_device(policy: OffloadPolicy | None, shape: Shape) -> nn.Module:
    with DEVICE:
        return build(policy, shape)


def fsdp2(shape: Shape) -> nn.Module:
    """Return the model with FSDP2's own offload of parameters."""
    from torch.distributed import fsdp

    options: Any = {
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy(),
        "mesh": init_device_mesh(DEVICE.type, (8,)),
    }
    with DEVICE:
        model = Model(shape)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


SYSTEMS: dict[str, Callable[[Shape], nn.Module]] = {
    **{f"{item:g}": partial(on_device, Offload(optimizer={"cpu": item}) if item else None) for item in (0.0, 0.5, 1.0)},
    "parameters too": partial(on_device, CPUOffloadPolicy()),
    "parameters too, FSDP2": fsdp2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--small", action="store_true", help="a model of a size for a trial")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SMALL if options.small else SHAPE
    if options.part == "cpu":
        found = {"reckoned": reckoned(shape), "host": host(100_000 if options.small else 50_000_000)}
    else:
        found = measured(shape, options.steps)
    found = {**found, "versions": versions()}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
