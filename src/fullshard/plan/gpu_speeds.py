"""What a GPU reaches, measured: matrix products, memory, launches, the host's part and the way to the host's memory.

Times are those of events on the GPU, in the median of a few rounds, after calls that do not count. So a GPU that slows
down because it is hot or short of power is described as it is then.
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

__all__ = ["gpu_speeds"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PRODUCTS = (  # rows, inner, columns: squares, and layers of transformers on 8192 and on 512 tokens
    *((n, n, n) for n in (1024, 2048, 4096, 8192)),
    *((8192, width, ratio * width) for width in (768, 1600, 4096) for ratio in (1, 4)),
    *((512, width, ratio * width) for width in (1600, 4096) for ratio in (1, 4)),
)
LARGE = 2 * 4096**3  # FLOPs of a product whose rate counts as that of large ones
MIB = tuple(4**power for power in range(6))  # of a tensor that is copied, or added to another one
ROUNDS = 5
ROUND_S = 0.02
SLEEP_CYCLES = 100_000_000  # some 50 ms, in which the host queues what is timed without itself
TINY_CALLS = 400  # fewer than a queue holds

Tell = Callable[[str], None]


def gpu_speeds(device: torch.device, tell: Tell) -> dict[str, Any]:
    """The speeds of `device`: by dtype the rates of products, by size the bandwidth, and seconds of the rest."""
    with torch.cuda.device(device):
        tell("matrix products")
        products = {name: [_product(device, dtype, *size) for size in PRODUCTS] for name, dtype in DTYPES.items()}
        tell("memory")
        memory = [_bandwidth(device, mib * 2**20) for mib in MIB]
        tell("launches, and what the host does for them")
        launch_s, host_s = _launch_s(device), _host_s(device)
        tell("copies between the host and the GPU")
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
    """Seconds of the GPU for one call: the median of rounds, each of some milliseconds."""
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
    """The rate of one product. Values are random, since a GPU takes less power, and is faster, for zeros."""
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(columns, inner, device=device).to(dtype).t()  # as in a linear layer
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    seconds = _seconds(lambda: torch.mm(left, right, out=out))
    flops = 2 * rows * inner * columns
    return {"rows": rows, "inner": inner, "columns": columns, "flops_per_s": flops / seconds}


def _bandwidth(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes read and written in a second by a copy, by an addition and by a fill, of tensors of this size."""
    one, other, out = (torch.zeros(nbytes // 4, device=device) for _ in range(3))
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: out.copy_(one)),
        "add": (3, lambda: torch.add(one, other, out=out)),
        "fill": (1, lambda: out.fill_(1.0)),
    }
    return {"nbytes": nbytes, **{name: passes * nbytes / _seconds(call) for name, (passes, call) in calls.items()}}


def _launch_s(device: torch.device) -> float:
    """Seconds from one tiny kernel to the next, where all of them have been queued before the first one starts."""
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
    """Seconds of the host for an operation of a training step, Python, autograd and modules included.

    The steps are those of a transformer so narrow that the GPU is done with an operation before the next is asked for.
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
    """Counts operations as a tape has them: views and questions are none."""

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
    """Bytes in a second from pinned memory of the host to the GPU, and back."""
    host = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
    there: Tensor = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
    to_device = _seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = _seconds(lambda: host.copy_(there, non_blocking=True))
    return host.nbytes / to_device, host.nbytes / to_host


def large_rate(products: list[dict[str, float]]) -> float:
    """The rate that the large ones of measured products reach: their median."""
    large = [
        product["flops_per_s"]
        for product in products
        if 2 * product["rows"] * product["inner"] * product["columns"] >= LARGE
    ]
    return statistics.median(large)
