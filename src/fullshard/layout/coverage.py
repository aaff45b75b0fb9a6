"""A check that boxes cover a tensor exactly: every element once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

_MOST_DIMS = 8  # maximum number of dims that a tensor is split along; a mesh has fewer axes

Box = tuple[Sequence[int], Sequence[int]]  # the offset of a box along each dim, and its size along each dim


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return None if `boxes` cover a tensor of `shape` exactly, else the reason why they do not.

    By the inclusion-exclusion principle, a box is the sum of its corners with alternating signs. Boxes cover the tensor
    exactly if and only if the signed corners of all boxes add up to those of the tensor. So the cost is proportional to
    the number of boxes, whatever their order.
    """
    filled = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return (
                f"a part of shape {tuple(sizes)} at {tuple(offsets)} has a different number of dims than {tuple(shape)}"
            )
        if min((*offsets, *sizes), default=0) < 0:
            return f"a part of shape {tuple(sizes)} at {tuple(offsets)} is negative"
        if 0 in sizes:
            continue
        if any(start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a part of shape {tuple(sizes)} at {tuple(offsets)} exceeds {tuple(shape)}"
        filled.append((offsets, sizes))
    cut = [
        dim
        for dim, whole in enumerate(shape)
        if any(offsets[dim] != 0 or sizes[dim] != whole for offsets, sizes in filled)
    ]
    if len(cut) > _MOST_DIMS:
        return f"its parts are split along {len(cut)} dims; at most {_MOST_DIMS} are supported"
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in filled:
        _add_corners(corners, [(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut], 1)
    if 0 not in shape:
        _add_corners(corners, [(0, shape[dim]) for dim in cut], -1)
    if not any(corners.values()):
        return None
    return f"its {len(filled)} parts do not cover each element of {tuple(shape)} exactly once"


def _add_corners(corners: Counter[tuple[int, ...]], spans: Sequence[tuple[int, int]], sign: int) -> None:
    for ends in product((0, 1), repeat=len(spans)):
        corner = tuple(span[end] for span, end in zip(spans, ends, strict=True))
        corners[corner] += -sign if sum(ends) % 2 else sign
