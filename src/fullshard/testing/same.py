"""Bitwise comparison of two nested structures of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def assert_same(actual: Any, expected: Any, *, name: str = "") -> None:
    """Raise an error unless both have the same structure of dicts, lists and tuples and bitwise identical tensors.

    Tensors must agree in dtype, shape and bits (`-0.0` is not `0.0`, and bits of NaNs must agree), but not in device,
    strides or `requires_grad`. A `DTensor` is compared by its full tensor, so all ranks of its mesh must call this, and
    they get the same result. Other values must be equal.

    Args:
        actual: The result.
        expected: The value to compare with.
        name: The name of the result in the message.

    Raises:
        AssertionError: The values differ. The message contains the first difference and, for tensors, the number of
            elements that differ and the largest difference.
    """
    if isinstance(expected, Tensor):
        _assert_same_tensor(actual, expected, name or "the tensor")
    elif isinstance(expected, Mapping):
        _assert_type(actual, Mapping, "a mapping", name)
        missing = [key for key in expected if key not in actual]
        extra = [key for key in actual if key not in expected]
        if missing or extra:
            raise AssertionError(f"{name or 'top level'}: missing keys {missing}, unexpected keys {extra}")
        for key, value in expected.items():
            assert_same(actual[key], value, name=f"{name}[{key!r}]")
    elif isinstance(expected, list | tuple):
        _assert_type(actual, type(expected), f"a {type(expected).__name__}", name)
        if len(actual) != len(expected):
            raise AssertionError(f"{name or 'top level'}: {len(actual)} items instead of {len(expected)}")
        for index, (own, peer) in enumerate(zip(actual, expected, strict=True)):
            assert_same(own, peer, name=f"{name}[{index}]")
    elif not (actual == expected or (actual != actual and expected != expected)):
        raise AssertionError(f"{name or 'top level'}: {actual!r} instead of {expected!r}")


def _assert_type(actual: Any, wanted: type[Any], description: str, name: str) -> None:
    if not isinstance(actual, wanted):
        raise AssertionError(f"{name or 'top level'}: {type(actual).__name__} instead of {description}")


def _assert_same_tensor(actual: Any, expected: Tensor, name: str) -> None:
    _assert_type(actual, Tensor, "a tensor", name)
    own, peer = _whole(actual), _whole(expected)
    if (own.dtype, own.shape) != (peer.dtype, peer.shape):
        raise AssertionError(
            f"{name}: {own.dtype} of {tuple(own.shape)} instead of {peer.dtype} of {tuple(peer.shape)}"
        )
    differs = differing(own, peer)
    if differs.any():
        raise AssertionError(f"{name}: {_describe_difference(own, peer, differs)}")


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def differing(own: Tensor, peer: Tensor) -> Tensor:
    """Return a mask of the elements that differ in any bit: -0.0 is not 0.0, and NaN bits must agree."""
    return (_bytes(own) != _bytes(peer)).any(dim=-1).reshape(own.shape)


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    # `contiguous()` may keep any stride in dimensions of size 1, and `view` of another item size needs a stride of 1.
    copied = tensor.clone(memory_format=torch.contiguous_format)
    return copied.reshape(-1, 1).view(torch.uint8)  # (numel, itemsize)


def gaps(own: Tensor, peer: Tensor, differs: Tensor) -> Tensor:
    """Return absolute differences in float64: 0 where no bits differ, infinite if either element is NaN."""
    wide = torch.complex128 if own.is_complex() else torch.float64
    return (own.to(wide) - peer.to(wide)).abs().where(differs, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _describe_difference(own: Tensor, peer: Tensor, differs: Tensor) -> str:
    gap = gaps(own, peer, differs)
    worst = int(gap.argmax()) if bool(gap.max() > 0) else int(differs.int().argmax())
    index = tuple(int(place) for place in torch.unravel_index(torch.tensor(worst), own.shape))
    return (
        f"{int(differs.sum())} of {own.numel()} elements differ, by at most {float(gap.max()):.3g} "
        f"(at {index}: {own.flatten()[worst].item()!r} instead of {peer.flatten()[worst].item()!r})"
    )
