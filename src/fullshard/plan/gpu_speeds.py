"""Measured speeds of a GPU: matrix products, memory, launches, host time and the link to host memory.

Times, except host time, are measured by events on the GPU. Each is the median of several rounds after warmup calls. So
a GPU that is throttled due to heat or a power limit is described in that state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PRODUCTS = (  # rows, inner, columns: squares, and transformer layers with 8192 and 512 tokens
    *((n, n, n) for n in (1024, 2048, 4096, 8192)),
    *((8192, width, ratio * width) for width in (768, 1600, 4096) for ratio in (1, 4)),
    *((512, width, ratio * width) for width in (1600, 4096) for ratio in (1, 4)),
)
LARGE = 2 * 4096**3  # products with at least this many FLOPs count as large
MIB = tuple(4**power for power in range(6))  # sizes of a tensor that kernels read or write
OF_TRAINING = "add", "gelu", "adamw"  # kernels that are limited by memory, as in training steps
ROUNDS = 5
ROUND_S = 0.02
SLEEP_CYCLES = 100_000_000  # about 50 ms, while the host queues the timed calls, so that host time does not count
TINY_CALLS = 400  # fewer than a queue can hold

Report = Callable[[str], None]


def gpu_speeds(device: torch.device, on_progress: Report) -> dict[str, Any]:
    """Return the speeds of `device`: product rates by dtype, bandwidth by size, and the other times in seconds."""
    with torch.cuda.device(device):
        on_progress("matrix products")
        products = {name: [_product(device, dtype, *size) for size in PRODUCTS] for name, dtype in DTYPES.items()}
        on_progress("memory")
        memory = [_bandwidth(device, mib * 2**20) for mib in MIB]
        on_progress("kernel launches and their host time")
        launch_s, host_s = _launch_s(device), _host_s(device)
        on_progress("copies between the host and the GPU")
        to_device, to_host = _host_link(device)
    return {
        "products": products,
        "memory": memory,
        "launch_s": launch_s,
        "host_s": host_s,
        "to_device_bytes_per_s": to_device,
        "to_host_bytes_per_s": to_host,
    }


def _seconds(call: Callable[[], object]) -> float:
    """Return the GPU seconds of one call: the median of rounds of about `ROUND_S` each."""
    for _ in range(3):
        call()
    once = _timed(call, 3)
    calls = max(3, min(1000, int(ROUND_S / max(once, 1e-6))))
    return statistics.median(_timed(call, calls) for _ in range(ROUNDS))


def _timed(call: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def _product(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> dict[str, float]:
    """Return the rate of one product. Values are random, because a GPU uses less power, and is faster, for zeros."""
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype).t()  # as in a linear layer
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    seconds = _seconds(lambda: torch.mm(left, right, out=out))
    flops = 2 * rows * inner * columns
    return {"rows": rows, "inner": inner, "columns": columns, "flops_per_s": flops / seconds}


def _bandwidth(device: torch.device, nbytes: int) -> dict[str, float]:
    """Return the bytes per second that kernels read and write, for tensors of this size.

    GELU and AdamW are limited by memory, too, but reach less of its bandwidth than the others.
    """
    one, other, out = (torch.zeros(nbytes // 4, device=device) for _ in range(3))
    half = torch.randn(nbytes // 2, device=device, dtype=torch.bfloat16)
    activated = torch.empty_like(half)
    param = nn.Parameter(one)
    param.grad = other
    optimizer = torch.optim.AdamW([param], fused=True)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: out.copy_(one)),
        "add": (3, lambda: torch.add(one, other, out=out)),
        "fill": (1, lambda: out.fill_(1.0)),
        "gelu": (2, lambda: torch.ops.aten.gelu.out(half, out=activated)),
        "adamw": (7, optimizer.step),
    }
    return {"nbytes": nbytes, **{name: passes * nbytes / _seconds(call) for name, (passes, call) in calls.items()}}


def _launch_s(device: torch.device) -> float:
    """Return the seconds from one tiny kernel to the next, if all are queued before the first starts."""
    one = torch.zeros(1, device=device)
    one.add_(1.0)
    found: list[float] = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        for _ in range(TINY_CALLS):
            one.add_(1.0)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / TINY_CALLS)
    return statistics.median(found)


def _host_s(device: torch.device) -> float:
    """Return the host seconds per operation of a training step, including Python, autograd and modules.

    The steps are those of a transformer so narrow that the GPU finishes each operation before the next is launched.
    """
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 1, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(1, 8, 64, device=device)

    def step() -> None:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with _counted() as counted:
        step()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / 5)
    return statistics.median(found) / counted.operations


class _Counted(TorchDispatchMode):
    """The number of operations as in a trace: without views and queries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._overloadpacket)
        self.operations += not (func.is_view or name in ("aten._unsafe_view", "aten.detach", "aten.empty_like"))
        return result


@contextmanager
def _counted() -> Iterator[_Counted]:
    with _Counted() as counted:
        yield counted


def _host_link(device: torch.device, mib: int = 256) -> tuple[float, float]:
    """Return the bytes per second from pinned host memory to the GPU, and back."""
    host = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
    there: Tensor = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    to_device = _seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = _seconds(lambda: host.copy_(there, non_blocking=True))
    return host.nbytes / to_device, host.nbytes / to_host


def large_rate(products: list[dict[str, float]]) -> float:
    """Return the median rate of the large products."""
    large = [
        product["flops_per_s"]
        for product in products
        if 2 * product["rows"] * product["inner"] * product["columns"] >= LARGE
    ]
    return statistics.median(large)
