"""Room for copies that are written while training goes on: allocated once, and used by every later save."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fullshard._compat import dtensor_like
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.plain import Path
from fullshard.device.current import finish_copies
from fullshard.disk.space import Scratch
from fullshard.disk.tensors import OnDisk

__all__ = ["HostMemory"]


class HostMemory:
    """Copies of tensors on the CPU, in pinned memory where they come from a GPU; of what rests on a disk, on that."""

    def __init__(self) -> None:
        self._held: dict[Path, Tensor] = {}

    def copy(self, contents: Contents) -> Contents:
        """`contents` with copies in place of its tensors. The copies of the last time are overwritten.

        Raises:
            DiskError: there is no room on a disk for a second copy of what rests there.
        """
        taken: dict[Path, Tensor] = {}
        locals_ = {path: tensor.to_local() for path, tensor in contents.sharded.items()}
        self._copy_on_disk({path: local for path, local in locals_.items() if isinstance(local, OnDisk)}, taken)
        sharded = {
            path: dtensor_like(taken[path] if path in taken else self._copied(path, locals_[path], taken), tensor)
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
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        taken[path] = held.copy_(tensor, non_blocking=True)
        return held

    def _copy_on_disk(self, tensors: dict[Path, OnDisk], taken: dict[Path, Tensor]) -> None:
        """Copy `tensors` from file to file, by way of little memory."""
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
