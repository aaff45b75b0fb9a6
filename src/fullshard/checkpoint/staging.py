"""Memory for copies that are written during training. It is allocated once, and later saves reuse it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fullshard._compat import dtensor_like
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.plain import Path
from fullshard.device.accelerator import accelerator_for
from fullshard.device.current import finish_copies
from fullshard.disk.space import Scratch
from fullshard.disk.tensors import OnDisk


class HostMemory:
    """Copies of tensors on the CPU, in pinned memory for GPU tensors. Tensors on disk are copied on the disk."""

    def __init__(self) -> None:
        self._held: dict[Path, Tensor] = {}

    def copy(self, contents: Contents) -> Contents:
        """Return `contents` with copies of its tensors. The previous copies are overwritten.

        Raises:
            DiskError: A disk has too little free space for a second copy of the tensors on it.
        """
        taken: dict[Path, Tensor] = {}
        shards = {path: tensor.to_local() for path, tensor in contents.sharded.items()}
        self._copy_on_disk({path: shard for path, shard in shards.items() if isinstance(shard, OnDisk)}, taken)
        sharded = {
            path: dtensor_like(taken[path] if path in taken else self._copied(path, shards[path], taken), tensor)
            for path, tensor in contents.sharded.items()
        }
        plain = {path: self._copied(path, tensor, taken) for path, tensor in contents.plain.items()}
        self._held = taken
        finish_copies()
        return replace(contents, sharded=sharded, plain=plain)

    def _copied(self, path: Path, tensor: Tensor, taken: dict[Path, Tensor]) -> Tensor:
        tensor = tensor.detach()
        held = self._held.get(path)
        if isinstance(held, OnDisk) or held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pins = tensor.device.type != "cpu"
            with accelerator_for(tensor.device).on_host():
                held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
        taken[path] = held.copy_(tensor, non_blocking=True)
        return held

    def _copy_on_disk(self, tensors: dict[Path, OnDisk], taken: dict[Path, Tensor]) -> None:
        """Copy `tensors` from file to file with little memory."""
        more = sum(tensor.room for tensor in tensors.values())
        scratch: Scratch | None = None
        for path, tensor in tensors.items():
            held = self._held.get(path)
            if isinstance(held, OnDisk) and held.room == tensor.room:
                extent = held.extent
            else:
                scratch = scratch or Scratch(tensor.extent.folder, "copies")
                extent = scratch.take(tensor.room, more)
            more -= tensor.room
            taken[path] = tensor.copied_to(extent)
