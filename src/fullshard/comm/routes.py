"""The collectives of each process group, by the name of its backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.collectives import Collectives
from fullshard.comm.native import NativeCollectives
from fullshard.device.accelerator import accelerator_for
from fullshard.errors import ConfigError
from fullshard.tape.context import Kept

_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "hccl", "mccl", "fake")
_registered: dict[str, type[Collectives]] = {}  # on every device


def register_backend(backend: str, kind: type[Collectives]) -> None:
    """Use collectives of `kind` for process groups with the backend `backend`, on every device.

    `NativeCollectives` fits all backends with coalesced collectives on a queue, such as NCCL. Call this on every rank,
    before the first model is sharded.
    """
    _registered[backend] = kind


def _close(collectives: Collectives) -> None:
    collectives.close()


_Key = tuple[dist.ProcessGroup, str, type[Collectives], object]
_of_group: Kept[_Key, Collectives] = Kept("collectives of process groups", _close)


def collectives_for(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """Return the collectives of `group` for tensors on `device`: always the same object, so that channels are unique.

    Raises:
        ConfigError: the backend is not a known one.
    """
    kind = _kind(group, device)
    accelerator = accelerator_for(device) if kind.is_of_accelerator else None
    return _of_group.get_or_make((group, device.type, kind, accelerator), lambda: kind(group))


def collectives_of(group: dist.ProcessGroup) -> Collectives:
    """Return the collectives of `group` for tensors on its preferred device. For objects, any device works."""
    accelerator = torch.accelerator.current_accelerator()
    on_cpu = dist.get_backend(group) in ("gloo", "fake")
    return collectives_for(group, torch.device("cpu") if on_cpu or accelerator is None else accelerator)


def _kind(group: dist.ProcessGroup, device: torch.device) -> type[Collectives]:
    config = dist.get_backend_config(group)  # such as "gloo", or "cpu:gloo,cuda:nccl"
    by_device = dict(pair.split(":", 1) for pair in config.split(",")) if ":" in config else {}
    backend = by_device.get(device.type, by_device.get("cpu", config))
    if backend in _registered:
        return _registered[backend]
    if backend not in _BACKENDS:
        known = ", ".join([*_BACKENDS, *_registered])
        raise ConfigError(
            f"process group with backend {backend!r} for {device.type} tensors is not supported. Supported: {known}. "
            "Create the process group with one of these, or call fullshard.comm.routes.register_backend to define "
            "how this backend moves data."
        )
    accelerator = accelerator_for(device)
    if accelerator.has_streams:
        return NativeCollectives  # for any backend, since its work is queued in order
    if backend == "gloo":
        from fullshard.comm.shared_memory import SharedMemoryCollectives  # imported here, because GPUs do not need it

        return SharedMemoryCollectives
    if accelerator.is_dry and backend == "fake":
        from fullshard.comm.pretended import PretendedCollectives  # needed in dry runs only

        return PretendedCollectives
    return NativeCollectives
