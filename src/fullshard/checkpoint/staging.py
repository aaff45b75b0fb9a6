"""Host memory for copies that are written while training goes on: allocated once, and used by every later save."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fullshard._compat import dtensor_like
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.plain import Path
from fullshard.device.current import finish_copies

__all__ = ["HostMemory"]


class HostMemory:
    """Copies of tensors on the CPU, in pinned memory where they come from a GPU."""

    def __init__(self) -> None:
        self._held: dict[Path, Tensor] = {}

    def copy(self, contents: Contents) -> Contents:
        """`contents` with copies in place of its tensors. The copies of the last time are overwritten."""
        taken: dict[Path, Tensor] = {}
        sharded = {
            path: dtensor_like(self._copied(path, tensor.to_local(), taken), tensor)
            for path, tensor in contents.sharded.items()
        }
        plain = {path: self._copied(path, tensor, taken) for path, tensor in contents.plain.items()}
        self._held = taken
        finish_copies()
        return replace(contents, sharded=sharded, plain=plain)

    def _copied(self, path: Path, tensor: Tensor, taken: dict[Path, Tensor]) -> Tensor:
        tensor = tensor.detach()
        held = self._held.get(path)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        taken[path] = held.copy_(tensor, non_blocking=True)
        return held
