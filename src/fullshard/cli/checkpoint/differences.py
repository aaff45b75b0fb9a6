"""Differences between two checkpoints or exports, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import Progress
from fullshard.checkpoint.stored import Stored
from fullshard.checkpoint.tensor_files import Description

_PIECE = 1 << 20  # elements to compare at a time, in double precision


@dataclass(frozen=True)
class TensorDifference:
    """One tensor on both sides. A side without it is None."""

    name: str
    one: Description | None
    other: Description | None
    bit_equal: bool = False
    largest: float | None = None  # absolute difference, for equal shapes

    @property
    def stated(self) -> str:
        """The kind of difference, as a short text."""
        if self.one is None or self.other is None:
            return "missing in the first" if self.one is None else "missing in the second"
        if self.one.shape != self.other.shape:
            return "shape"
        if self.one.dtype != self.other.dtype:
            return "dtype"
        return "nothing" if self.bit_equal else "values"


def differences(one: Stored, other: Stored, progress: Progress | None = None) -> Iterator[TensorDifference]:
    """Yield the difference of each tensor of either side. Optimizers are compared if both sides have one."""
    local, peer = (one.tensors, other.tensors) if one.others and other.others else (one.weights, other.weights)
    names = list(dict.fromkeys([*local, *peer]))
    total = sum(local[name].nbytes for name in names if name in local and name in peer)
    done = 0
    for name in names:
        here, there = local.get(name), peer.get(name)
        if here is None or there is None or here.shape != there.shape:
            yield TensorDifference(name, here, there)
        else:
            bit_equal, largest = _compared(one.fetch(name), other.fetch(name))
            yield TensorDifference(name, here, there, bit_equal, largest)
        if here is not None and there is not None and progress is not None:
            done += here.nbytes
            progress(done, total)


def _compared(one: Tensor, other: Tensor) -> tuple[bool, float]:
    """Return whether two tensors of one shape are bitwise identical, and their maximum difference (NaN with a NaN)."""
    bit_equal = one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))
    if bit_equal:
        return True, 0.0
    largest = 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    for pieces in zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True):
        local, peer = (piece.to(wide) for piece in pieces)
        same = (local == peer) | (local.isnan() & peer.isnan())
        difference = (local - peer).abs().masked_fill(same, 0.0)
        found = difference.max().item() if difference.numel() else 0.0
        largest = found if math.isnan(found) else max(largest, found)
        if math.isnan(largest):
            break
    return False, largest


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
