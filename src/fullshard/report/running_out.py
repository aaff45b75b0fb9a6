"""Reports on a lack of memory: the allocation that failed or soon will, the consumers of memory, and what would fit.

An accelerator's allocator raises an error. The CPU's allocator raises one too if the process has a limit (`ulimit -v`,
`RLIMIT_AS`, `RLIMIT_DATA`). Such an error is reported when it leaves the loop, because it still refers to the stack
frames. The limit of a container ends the process without an error, so usage is reported when it is near the limit.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard._compat import local_tensor
from fullshard.engine.registry import units_in
from fullshard.errors import FullshardError
from fullshard.plan.ledger import predict_ledger
from fullshard.plan.memory import State
from fullshard.report.memory_watch import held_between_steps
from fullshard.report.run import OutOfMemory, TensorHeld
from fullshard.tape.recorder import Origin, Phase

NEAR = 0.95  # fraction of a container's limit at which usage is reported: the report needs a few dozen MB

_LOOK_EVERY_S = 0.05
_BALLAST_NBYTES = 48 << 20  # of address space, freed before a report is written
_MARGIN = 0.02  # fraction of the limit that must stay free for a change to be reported as sufficient
_SHOWN = 10


@dataclass(frozen=True)
class Limit:
    """A memory limit in bytes, the current usage that counts towards it, and whether reaching it raises an error."""

    nbytes: int
    used: Callable[[], int]
    raises: bool


class MemoryGuard:
    """Tracks the memory limits and usage of a rank. Create it after the model is sharded."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
        self._model, self._optimizers = model, optimizers
        self._limits = list(_limits(device))
        known = sum(held.nbytes for held in held_between_steps(model, optimizers))
        self._own = [max(0, limit.used() - known) for limit in self._limits]  # usage of the program itself
        self._ballast = bytearray(_BALLAST_NBYTES) if any(_of_process()) else None
        self._looked_at = 0.0
        self.has_reported = False

    def is_near(self) -> bool:
        """Return True if a limit that does not raise an error is near, and this has not been reported yet."""
        now = time.monotonic()
        if self.has_reported or now - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = now
        return any(not limit.raises and limit.used() >= NEAR * limit.nbytes for limit in self._limits)

    def state(self, rank: int, origin: Origin, error: BaseException | None = None) -> OutOfMemory:
        """Return the memory that this rank holds while it works for `origin`. This frees the reserved memory."""
        self.has_reported, self._ballast = True, None
        requested = None if error is None else requested_bytes(error)
        limit, own = min(zip(self._limits, self._own, strict=True), key=lambda item: item[0].nbytes - item[0].used())
        used = limit.used()
        held = [*held_between_steps(self._model, self._optimizers), *_gradients(self._model)]
        remaining = max(0, used - own - sum(item.nbytes for item in held))
        what = "activations and temporaries"
        held.insert(0, TensorHeld(nbytes=remaining, state=State.ACTIVATIONS.value, what=what))
        by_state = Counter[str]()
        for item in held:
            by_state[item.state] += item.nbytes
        lacking = used + (requested or 0) - limit.nbytes * (1 - _MARGIN)
        return OutOfMemory(
            rank=rank,
            requested_bytes=requested,
            where=_where(self._model, origin, error),
            used_bytes=used,
            limit_bytes=limit.nbytes,
            by_state=dict(by_state),
            largest=tuple(sorted(held, key=lambda item: -item.nbytes)[:_SHOWN]),
            would_fit=tuple(_would_fit(self._model, remaining, lacking)),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocator has raised `error`."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def requested_bytes(error: BaseException) -> int | None:
    """Return the number of bytes in the allocator's error message, or None."""
    found = re.search(r"(?:tried to allocate|Tried to allocate) ([\d.]+) (bytes|[KMG]iB)", str(error))
    if found is None:
        return None
    return round(float(found[1]) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[found[2]])


def holders_text(state: OutOfMemory) -> str:
    """Format the three largest consumers of memory."""
    return "; ".join(f"{item.nbytes / 1e6:,.0f} MB {item.what}" for item in state.largest[:3])


def _where(model: nn.Module, origin: Origin, error: BaseException | None) -> str:
    """Return the module whose forward has raised `error`, or else the unit of `origin`."""
    names = {id(module): name for name, module in model.named_modules()}
    trace, inner = None if error is None else error.__traceback__, ""
    while trace is not None:
        inner = names.get(id(trace.tb_frame.f_locals.get("self")), "") or inner
        trace = trace.tb_next
    if inner:
        return f"{inner}, forward"
    return "the loop" if origin.phase is Phase.IDLE else f"{origin.unit or 'the root'}, {origin.phase.value}"


def _gradients(model: nn.Module) -> Iterator[TensorHeld]:
    for unit in units_in(model):
        grads = (param.sharded.grad for param in unit.params)
        nbytes = sum(local_tensor(grad).nbytes for grad in grads if grad is not None)
        if nbytes:
            name = unit.name or "the root"
            yield TensorHeld(nbytes=nbytes, state=State.SHARDED_GRADIENTS.value, what=f"gradients of {name}")


def _would_fit(model: nn.Module, activations: int, lacking: float) -> Iterator[str]:
    """Yield changes that are predicted to free enough memory, the cheapest first."""
    if lacking <= 0:
        return
    with suppress(FullshardError):
        saved = predict_ledger(model).total - predict_ledger(model, strategy="zero3").total
        if saved >= lacking:
            yield "strategy zero3"
    if activations * 0.5 >= lacking:
        yield "half the rows per microbatch and twice the microbatches"
    blocks = max(2, len(units_in(model)) - 1)
    if activations * (1 - 2 / blocks) >= lacking and blocks > 2:  # the activations of one block, and the inputs of all
        yield "activation checkpointing of each block"
    if activations * 0.75 >= lacking > activations * 0.5:
        yield "a quarter of the rows per microbatch and four times the microbatches"


# -- limits -----------------------------------------------------------------------------------------------------------


def _limits(device: torch.device) -> Iterator[Limit]:
    """Yield the limits of this process. On a CPU, the memory of the machine is one of them."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield Limit(int(module.mem_get_info(device)[1]), lambda: int(module.memory_reserved(device)), raises=True)
        return
    yield from _of_process()
    if (container := _container()) is not None:
        yield container
    yield Limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), lambda: _status("VmRSS"), raises=True)


def _of_process() -> Iterator[Limit]:
    """Yield the limits on the address space of this process."""
    for which, counted in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            yield Limit(soft, partial(_status, counted), raises=True)


def _status(name: str) -> int:
    """Return one value of this process's status in bytes; 0 if there is no such file."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _container(root: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")) -> Limit | None:
    """Return the limit of this process's control group, of version 2 or 1; None if there is none."""
    with suppress(OSError, ValueError):
        for line in of.read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            folder = (root if number == "0" else root / "memory") / path.strip("/")
            limit, stat, names = folder / "memory.max", folder / "memory.stat", ("anon", "shmem")
            if "memory" in kinds.split(","):
                limit, names = folder / "memory.limit_in_bytes", ("total_rss", "total_shmem")
            if limit.is_file() and limit.read_text().strip() != "max" and int(limit.read_text()) < 1 << 60:

                def used(stat: Path = stat, names: Sequence[str] = names) -> int:
                    lines = (line.split() for line in stat.read_text().splitlines())
                    return sum(int(value) for name, value in lines if name in names)

                return Limit(int(limit.read_text()), used, raises=False)
    return None
