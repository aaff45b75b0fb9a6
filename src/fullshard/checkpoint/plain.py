"""Plain values, which can be loaded without executing code."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import CheckpointError

_ATOMS = (type(None), bool, int, float, str)


def plain_copy(value: Any, what: str) -> Any:
    """Return a copy of `value` as `load` returns it: plain values and CPU tensors in containers.

    Plain types are copied directly. Other values are written and loaded, which is much slower.

    Args:
        value: The value.
        what: The beginning of error messages, which ends with the path of a value.

    Raises:
        CheckpointError: It contains a value that cannot be loaded safely.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list or kind is tuple:
        return kind(plain_copy(item, f"{what}[{index}]") for index, item in enumerate(value))
    if kind is dict and all(type(key) in _ATOMS for key in value):
        return {key: plain_copy(item, f"{what}[{key!r}]") for key, item in value.items()}
    if kind is Tensor and not value.is_meta:
        return value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
    for place, leaf in _leaves(value, what):
        if isinstance(leaf, DTensor) or not _is_readable(leaf):
            raise CheckpointError(
                f"{place} is a {type(leaf).__module__}.{type(leaf).__qualname__}. Reading it back would execute "
                "code or need all ranks. Save plain values (numbers, strings, lists, dicts) and plain tensors."
            )
    return _read_back(value)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested lists, tuples and dicts, each with its path."""
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    else:
        yield path, value


def _is_readable(leaf: Any) -> bool:
    if type(leaf) in _ATOMS or type(leaf) is Tensor:
        return True
    try:
        _read_back(leaf)
    except Exception:  # torch.load raises many types of errors, and a __reduce__ can raise any
        return False
    return True


def _read_back(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


# -- nested values with tensors in them -------------------------------------------------------------------------------


Path = tuple[str, ...]
Outline = tuple[Any, ...]


def outline(value: Any, path: Path, put: Callable[[Path, Any], str]) -> Outline:
    """Return the structure of `value`, with a key for each tensor.

    This recurses into dicts, and into lists and tuples that contain tensors. `put(path, leaf)` stores each leaf and
    returns its key.
    """
    if isinstance(value, dict):
        return "dict", [(key, outline(item, (*path, str(key)), put)) for key, item in value.items()]
    if isinstance(value, list | tuple) and any(isinstance(leaf, Tensor) for _, leaf in _leaves(value)):
        items = [outline(item, (*path, str(index)), put) for index, item in enumerate(value)]
        return ("list" if isinstance(value, list) else "tuple"), items
    key = put(path, value)
    return ("tensor", key) if isinstance(value, Tensor) else ("value", value)


def filled(outlined: Outline, tensor: Callable[[str], Any]) -> Any:
    """Return the value of an outline, with `tensor(key)` for each tensor."""
    kind, content = outlined
    if kind == "dict":
        return {key: filled(item, tensor) for key, item in content}
    if kind in ("list", "tuple"):
        items = [filled(item, tensor) for item in content]
        return items if kind == "list" else tuple(items)
    return tensor(content) if kind == "tensor" else content


def keys_in(outlined: Outline) -> Iterator[str]:
    """Yield the keys of the tensors in an outline."""
    kind, content = outlined
    if kind == "tensor":
        yield content
    elif kind != "value":
        for item in content:
            yield from keys_in(item[1] if kind == "dict" else item)


def are_same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal, with bitwise equal tensors."""
    local, peer = list(_leaves(one)), list(_leaves(other))
    return len(local) == len(peer) and all(
        path == other_path and (torch.equal(leaf, other_leaf) if isinstance(leaf, Tensor) else leaf == other_leaf)
        for (path, leaf), (other_path, other_leaf) in zip(local, peer, strict=True)
    )
