"""The device of this process, of any kind in torch: its index, the number of devices, its random generator."""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import Mark, Stamp

_CPU = torch.device("cpu")


@cache
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


@cache
def has_accelerator() -> bool:
    """Return True if this machine has an accelerator."""
    return _accelerator() is not None


def _found() -> torch.device | None:
    """Return the accelerator of this machine; None without one, or if one is simulated in host memory."""
    return None if accelerator_for(_CPU).is_dry else _accelerator()


def usual_device_type() -> str:
    """Return the type of the accelerator, if there is one and the default process group supports it; else "cpu".

    This does not initialize the device, so a mesh created afterwards can still select the device by rank.
    """
    found = _found()
    on_cpu = found is None or (dist.is_initialized() and dist.get_backend() == "gloo")
    return "cpu" if on_cpu or found is None else found.type


def current_device(device_type: str) -> torch.device:
    """Return this process's device of that type. If none is selected yet, select one by `LOCAL_RANK`, if set."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    module = torch.get_device_module(device_type)
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is not None and not module.is_initialized():
        module.set_device(int(local_rank) % module.device_count())
    return torch.device(device_type, module.current_device())


def set_current_device(device: torch.device) -> None:
    """Set the compute device of this process."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def count_devices() -> int:
    """Return the number of accelerators that this process can use; 0 without any."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def finish_copies() -> None:
    """Wait on the host for all work queued on the current stream, such as copies to host memory."""
    simulated = accelerator_for(torch.device("cpu"))
    if simulated.is_dry:
        simulated.streams.host.wait(simulated.mark_here())
    if _found() is not None:
        torch.accelerator.current_stream().synchronize()


def mark_here() -> Mark | None:
    """Return a mark after all work queued on the current stream; None without an accelerator, or in a capture."""
    found = _found()
    if found is None:
        return None
    return accelerator_for(torch.device(found.type, torch.accelerator.current_device_index())).mark_here()


def stamp_here() -> Stamp | None:
    """Like `mark_here`, but return a timed event."""
    found = _found()
    if found is None:
        return None
    return accelerator_for(torch.device(found.type, torch.accelerator.current_device_index())).stamp_here()


def random_states_of_device() -> dict[str, Tensor]:
    """Return the state of the current accelerator's random generator by device type; empty on a CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return {} if found is None else {found.type: torch.get_device_module(found).get_rng_state()}


def set_random_states_of_device(states: dict[str, Tensor]) -> None:
    """Set the state of the current accelerator's generator from `states`, if there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type in states:
        torch.get_device_module(found).set_rng_state(states[found.type])
