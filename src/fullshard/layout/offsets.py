"""Offsets in buffers: strides, alignment, and contiguous slices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    sizes = [max(1, size) for size in shape]
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def align(position: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `position`."""
    return -(-position // step) * step


def aligned_offsets(sizes: Sequence[int], step: int) -> tuple[list[int], int]:
    """Return aligned starts of consecutive slices of `sizes`, and the end of the last one, aligned too."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = align(end + size, step)
    return offsets, end
