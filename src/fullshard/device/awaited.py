"""Tensors whose values are computed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullshard._compat import tensor_without_memory, tree_map


class Awaited(Tensor):
    """A placeholder for `tensor` until `settle()` has computed its values and put it back in its original place."""

    tensor: Tensor
    settle: Callable[[], None]

    @staticmethod
    def __new__(cls, tensor: Tensor, settle: Callable[[], None]) -> Awaited:
        made: Awaited = tensor_without_memory(cls, tensor.shape, tensor.dtype, tensor.device)
        made.tensor, made.settle = tensor, settle
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its own as disabled
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(settled, args), **tree_map(settled, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # does not compute values
        return f"Awaited({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        return settled(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return settled(self).__reduce_ex__(protocol)


def settled(value: Any) -> Any:
    """Return `value`, or the computed tensor if it is a placeholder."""
    if not isinstance(value, Awaited):
        return value
    value.settle()
    return value.tensor
