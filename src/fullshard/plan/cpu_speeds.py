"""Measured speeds of a core while all cores of the machine do the same work.

    products   FLOP/s of matrix products by dtype and size, with operands in the cache; and the cost per byte of
               operands that are not in the cache
    kernels    other operations, by dtype: seconds, bytes and FLOPs of a call, with tensors in the cache
    memory     additional seconds per byte read from or written to memory outside of the caches
    pages      seconds per byte of a page that is written for the first time
    steps      host time of an operation, of an operation after a large one, and of the hooks of a unit
    link       the engine's own collectives, in wall time

All except the link are measured in core time instead of wall time, so other processes on the machine affect them
little. One process per core measures, all at the same time: they share the caches and the memory as in a step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.comm.shared_memory import SharedMemoryCollectives
from fullshard.comm.transport import PartSums
from fullshard.fsdp_module import fully_shard
from fullshard.plan.operations import counted
from fullshard.plan.speeds_of_ranks import as_rank, found_by_ranks
from fullshard.tape.recorder import Origin, Phase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DIMS = (16, 64, 256, 1024, 4096)  # rows, inner and columns of products; fewer if there is little time
SLOW_FLOPS_PER_S = 25e9  # to estimate how many sizes there is time for
ROWS, WIDTH = 256, 512  # of the tensors in kernel measurements, which fit in a cache
HEADS, HEAD = 8, 64
TOKENS = (32, 128, 512)  # for attention
OUT_OF_CACHE = 2**28  # bytes
OWN_CACHE = 2**20  # size of a core's private cache in bytes
LAYERS, WIDE = 4, 256  # of the measured transformers
MISSING_PRODUCTS = ((64, 512, 2048), (128, 2048, 512), (16, 1024, 4096))
LARGEST = 2**33  # rows x inner x columns of the largest measured product
PRODUCTS_SHARE, KERNELS_SHARE = 0.45, 0.25  # of the time

ORIGIN = Origin("calibration", Phase.IDLE)

Call = Callable[[], object]


def cpu_speeds(cores: int, seconds: float) -> dict[str, Any]:
    """Measure on `cores` cores simultaneously for about `seconds`, and return the results of the first one."""
    return found_by_ranks("fullshard.plan.cpu_speeds", cores, [str(seconds)], patience_s=120 + 10 * seconds)


def measure(world: int, seconds: float) -> dict[str, Any]:
    """Run all measurements on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dims = _dims(PRODUCTS_SHARE * seconds)
    each_s = PRODUCTS_SHARE * seconds / (len(DTYPES) * len(dims) ** 3)
    products = {
        name: [[[_product(dtype, m, k, n, each_s) for n in dims] for k in dims] for m in dims]
        for name, dtype in DTYPES.items()
    }
    kernels = {name: _kernels(dtype, KERNELS_SHARE * seconds / 80) for name, dtype in DTYPES.items()}
    return {
        "dims": list(dims),
        "products": products,
        "product_miss_s": _product_miss_s(),
        "kernels": kernels,
        **_memory(seconds / 100),
        **_steps(seconds / 100),
        **_link(world),
    }


def _dims(seconds: float) -> Sequence[int]:
    """Return the sizes to measure: as many as there is time for."""
    counts = range(len(DIMS), 2, -1)
    return next((DIMS[:n] for n in counts if 2 * sum(DIMS[:n]) ** 3 / SLOW_FLOPS_PER_S < seconds), DIMS[:2])


def _core_s(call: Call, budget_s: float, least: int = 2) -> float:
    """Return the median core seconds of several calls after a warmup call. All ranks start together."""
    dist.barrier()
    call()
    found = [_timed(call, 1)]
    calls = max(1, min(100, int(50e-6 / max(found[0], 1e-7))))
    end = time.perf_counter() + budget_s
    while len(found) <= least or time.perf_counter() < end:
        found.append(_timed(call, calls))
    return statistics.median(found)


def _timed(call: Call, calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def _product(dtype: torch.dtype, rows: int, inner: int, columns: int, budget_s: float) -> float:
    """Return the seconds of a product as in a linear layer's forward. Above `LARGEST`, measure it with fewer rows."""
    if rows * inner * columns > LARGEST:
        return 2 * _product(dtype, rows // 2, inner, columns, budget_s)
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    return _core_s(lambda: torch.mm(left, right.t(), out=out), budget_s, least=2 if out.numel() < 2**20 else 1)


def _product_miss_s(mib: int = 64) -> float:
    """Return the seconds per byte that a product accesses outside of the cache: the median over several layers.

    Before each product, more memory than any cache holds is read and written.
    """
    other = torch.zeros(mib * 2**18)

    def of(rows: int, inner: int, columns: int) -> float:
        layer, tokens = nn.Linear(inner, columns), torch.randn(rows, inner)

        def far_s() -> float:
            other.add_(1.0)
            return _timed(lambda: layer(tokens), 1)

        near_s = _core_s(lambda: layer(tokens), 0.0, least=5)
        dist.barrier()
        nbytes = 4 * (rows * inner + inner * columns + rows * columns)
        return (statistics.median(far_s() for _ in range(7)) - near_s) / nbytes

    with torch.no_grad():
        return max(0.0, statistics.median(of(*sizes) for sizes in MISSING_PRODUCTS))


def _kernels(dtype: torch.dtype, budget_s: float) -> dict[str, list[list[float]]]:
    """Return by operation, for several sizes: seconds per call, bytes read and written, and FLOPs, as in a trace.

    All are measured in the cache; operations on large memory are measured out of the cache as well. Casts to wider
    elements have a "+" in their name.
    """
    found: dict[str, list[list[float]]] = {}
    for call in _calls(dtype):
        for operation in counted(call):
            seconds = _core_s(call, budget_s)
            read, written = (sum(item.nbytes for item in those) for those in (operation.reads, operation.writes))
            name = f"{operation.name}+" if "_to_copy" in operation.name and written > read else operation.name
            found.setdefault(name, []).append([seconds, read, written, operation.flops])
    return found


def _attention(dtype: torch.dtype, tokens: int) -> list[Call]:
    aten = torch.ops.aten
    q, k, v = (torch.randn(1, HEADS, tokens, HEAD).to(dtype) for _ in range(3))
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return [
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, k, v, out, sums, 0.0, True),
    ]


def _adamw(numel: int, count: int = 1) -> Call:
    """Return a fused AdamW step of `count` parameters with `numel` elements each."""
    param, grad, mean, square = ([torch.full((numel,), 1e-3) for _ in range(count)] for _ in range(4))
    steps = [torch.ones(()) for _ in range(count)]

    def step() -> None:
        torch._fused_adamw_(
            param, grad, mean, square, [], steps,
            lr=1e-9, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def _calls(dtype: torch.dtype) -> list[Call]:
    """Return calls that each run one operation."""
    a, b, out = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(3))
    wide = torch.randn(ROWS, WIDTH)
    weight, bias = torch.ones(WIDTH, dtype=dtype), torch.zeros(WIDTH, dtype=dtype)
    aten = torch.ops.aten
    normed = aten.native_layer_norm(a, [WIDTH], weight, bias, 1e-5)
    scores = aten._log_softmax(wide, 1, False)
    targets = torch.arange(ROWS) % WIDTH
    one = torch.ones(())
    indices = torch.arange(ROWS)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    calls: list[Call] = [
        lambda: a + b,
        lambda: a.add_(b, alpha=1e-9),
        lambda: torch.mul(a, b),
        lambda: a.mul_(1.0),
        lambda: a.div_(1.0),
        lambda: out.copy_(a),
        lambda: torch._foreach_div_([a], 1.0),
        lambda: torch._foreach_mul_([a], 1.0),
        lambda: torch._foreach_add_([a], [b], alpha=1e-9),
        lambda: torch._foreach_copy_([out], [a]),
        a.zero_,
        b.clone,
        lambda: wide.to(dtype) if dtype is not torch.float32 else wide.to(other),
        lambda: torch.cat([b, b], 1),
        lambda: torch._chunk_cat([b], 0, 2),
        lambda: b.sum(0),
        b.mean,
        lambda: torch._foreach_norm([b]),
        lambda: torch.relu(b),
        lambda: F.silu(b),
        lambda: F.gelu(b),
        lambda: aten.gelu_backward(b, out),
        lambda: aten.native_layer_norm(b, [WIDTH], weight, bias, 1e-5),
        lambda: aten.native_layer_norm_backward(
            b, out, [WIDTH], normed[1], normed[2], weight, bias, [True, True, True]
        ),
        lambda: aten._log_softmax(wide, 1, False),
        lambda: aten._log_softmax_backward_data(wide, scores, 1, torch.float32),
        lambda: aten.nll_loss_forward(scores, targets, None, 1, -100),
        lambda: aten.nll_loss_backward(one, scores, targets, None, 1, -100, torch.tensor(float(ROWS))),
        lambda: aten.embedding(b, indices),
        lambda: aten.embedding_dense_backward(b, indices, ROWS, -1, False),
    ]
    for tokens in TOKENS:
        calls += _attention(dtype, tokens)
    if dtype is torch.float32:
        calls += [_adamw(ROWS * WIDTH), _adamw(ROWS * WIDTH, OUT_OF_CACHE // 16 // ROWS // WIDTH)]
    else:
        calls.append(lambda: a.to(other))
    return calls


def _memory(budget_s: float, mib: int = 64) -> dict[str, float]:
    """Return the additional seconds per byte in memory and per byte of a new page, the cache size, and bandwidths.

    The system zeroes a page on first access, so it is in the cache. The cost of a new page is the additional time of a
    write to it, compared with a write to a tensor in the cache.
    """
    numel = mib * 2**20 // 4
    small = numel // 256
    large, target = torch.ones(numel), torch.ones(numel)
    near, near_target = torch.ones(small), torch.ones(small)
    read_s = _core_s(large.sum, budget_s) / large.nbytes - _core_s(near.sum, budget_s) / near.nbytes
    copy_s = _core_s(lambda: target.copy_(large), budget_s) / large.nbytes
    copy_near_s = _core_s(lambda: near_target.copy_(near), budget_s) / near.nbytes
    other = torch.ones(numel)
    add_s = _core_s(lambda: torch.add(large, other, out=target), budget_s) / large.nbytes
    new_s = _core_s(lambda: torch.empty(numel).fill_(1.0), budget_s) / large.nbytes
    near_fill_s = _core_s(lambda: near.fill_(1.0), budget_s) / near.nbytes
    return {
        "read_s": max(read_s, 0.0),
        "write_s": max(copy_s - copy_near_s - read_s, 0.0),
        "page_s": max(new_s - near_fill_s, 0.0),
        "cache_bytes": _cache_bytes(budget_s),
        "copy_bytes_per_s": 2 / copy_s,
        "add_bytes_per_s": 3 / add_s,
    }


def _cache_bytes(budget_s: float) -> int:
    """Return the largest size at which a sum takes at most 1.5 times as long per byte as at a small size."""
    sizes = tuple(1 << power for power in range(20, 29))
    taken: list[float] = [_core_s(torch.ones(size // 4).sum, budget_s / 4) / size for size in sizes]
    fitting = itertools.takewhile(lambda place: taken[place] <= 1.5 * taken[0], range(len(sizes)))
    return sizes[max(fitting)]


def _steps(budget_s: float) -> dict[str, float]:
    """Return the host time of transformer steps, plain and sharded: everything except the work of the operations.

    One transformer is so small that everything stays in the core's private cache. The operations of the other one evict
    the cache, so that the interpreter has to fetch its next instructions from further away.
    """
    rounds = max(3, round(budget_s / 0.03))  # the same on all ranks
    near, far, sharded = (
        _HostPart.of(*item, rounds=rounds) for item in ((16, 4), (WIDE, ROWS), (WIDE, ROWS, fully_shard))
    )
    operation_s = near.seconds / near.operations
    after_s = max(0.0, far.seconds - far.operations * operation_s) / far.large
    unit_s = sharded.seconds - sharded.operations * operation_s - sharded.large * after_s
    one = torch.ones(1)
    return {
        "call_s": _core_s(lambda: one.mul_(1.0), budget_s / 4),
        "operation_s": operation_s,
        "after_large_s": after_s,
        "unit_s": max(0.0, unit_s) / (1 + LAYERS),
    }


@dataclass(frozen=True)
class _HostPart:
    """Core seconds of a step without the work of its operations, and the number of small and of large operations."""

    seconds: float
    operations: int
    large: int  # operations that access more bytes than the core's private cache has

    @classmethod
    def of(
        cls, width: int, tokens: int, shard: Callable[[nn.Module], object] = lambda module: None, *, rounds: int
    ) -> _HostPart:
        step = _step(width, tokens, shard)
        operations = counted(step)
        dist.barrier()
        step_s = statistics.median(_whole_s(step) for _ in range(rounds))
        work_s = statistics.median(_Working.of(step) for _ in range(rounds))
        return cls(step_s - work_s, len(operations), sum(operation.nbytes > OWN_CACHE for operation in operations))


class _Working(TorchDispatchMode):
    """The accumulated core seconds of operations beyond those of a tiny operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: float = 0.0
        self.call_s: float = 0.0

    @classmethod
    def of(cls, step: Call) -> float:
        one = torch.ones(1)
        working = cls()
        with working:
            for _ in range(20):
                one.mul_(1.0)
            working.call_s, working.seconds = working.seconds / 20, 0.0
            step()
        return working.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds += max(0.0, time.thread_time() - start - self.call_s)
        return result


def _link(world: int, mib: int = 32) -> dict[str, float]:
    """Return the seconds of the engine's own collectives, large and small, and the bytes per rank of the large ones."""
    if world < 2:
        return {}
    group = dist.group.WORLD
    assert group is not None
    transport = SharedMemoryCollectives(group)
    large, small = mib * 2**20 // 4 // world * world, world
    return {
        "gather_large_s": _gather_s(transport, large),
        "gather_small_s": _gather_s(transport, small),
        "reduce_large_s": _reduce_s(transport, large),
        "reduce_small_s": _reduce_s(transport, small),
        "link_bytes": 4.0 * large * (world - 1) / world,
    }


def _gather_s(transport: SharedMemoryCollectives, numel: int) -> float:
    whole, part, channel = torch.ones(numel), torch.ones(numel // transport.world), transport.channel(1)
    return _median_of(lambda: channel.all_gather([whole], [part], origin=ORIGIN).wait())


def _reduce_s(transport: SharedMemoryCollectives, numel: int) -> float:
    whole, sums, channel = torch.ones(numel), torch.ones(numel // transport.world), transport.channel(1)
    of = PartSums([sums], [whole], [sums.numel()], transport.world)
    return _median_of(lambda: channel.reduce_scatter(of, origin=ORIGIN).wait())


def _median_of(call: Call) -> float:
    """Return the median wall time, which includes waits for other ranks. The first calls are not counted."""
    found = []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def _step(width: int, tokens: int, shard: Callable[[nn.Module], object]) -> Call:
    layers = [
        nn.TransformerEncoderLayer(width, 1, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(LAYERS)
    ]
    model = nn.Sequential(*layers)
    for module in (*model, model):
        shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(1, tokens, width)

    def step() -> None:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def _whole_s(call: Call) -> float:
    """Return the core seconds of a call, over all threads of this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main(folder: str, world: str, rank: str, seconds: str) -> None:
    """Measure as one of `world` ranks and print the result as JSON."""
    as_rank("gloo", folder, int(world), int(rank), lambda: measure(int(world), float(seconds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
