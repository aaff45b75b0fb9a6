"""The interface of `make_batch`, which `fullshard parity` and `fullshard plan` share.

`make_batch(rows)` returns one microbatch with that many rows. `make_batch()` returns one microbatch. `fullshard parity`
also accepts `make_batch(number)`, which returns microbatch number 0, 1, 2, ... All microbatches have the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fullshard.errors import ConfigError
from fullshard.policy.arguments import mismatch

_TRIED = (1, 2, 3)


class BatchArgument(Enum):
    """The argument of a `make_batch`."""

    NOTHING = "nothing"
    ROWS = "the number of rows"
    NUMBER = "the number of the microbatch"


def argument_of(make_batch: Callable[..., Any]) -> BatchArgument:
    """Return the kind of argument: the number of rows if it scales the first dim of any tensor."""
    if mismatch(make_batch, (1,), {}) is not None:
        return BatchArgument.NOTHING
    try:
        tried = [shapes_of(make_batch(value)) for value in _TRIED]
    except Exception:  # for example, a list with fewer microbatches
        return BatchArgument.NUMBER
    if len({len(shapes) for shapes in tried}) > 1:
        return BatchArgument.NUMBER
    is_rows = any(map(_is_proportional, zip(*tried, strict=True)))
    return BatchArgument.ROWS if is_rows else BatchArgument.NUMBER


def _is_proportional(shapes: Sequence[tuple[int, ...]]) -> bool:
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        return False
    first = [shape[0] for shape in shapes]
    return first[0] > 0 and all(size == first[0] * value for size, value in zip(first, _TRIED, strict=True))


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in `batch`."""
    return [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def check_has_rows(batch: Any, call: str) -> None:
    """Raise `ConfigError` if a tensor in `batch` has no rows."""
    empty = next((shape for shape in shapes_of(batch) if shape and not shape[0]), None)
    if empty is not None:
        raise ConfigError(
            f"{call} returned a tensor of shape {empty}, which has no rows. make_batch(rows) must return one "
            "microbatch with that many rows."
        )
