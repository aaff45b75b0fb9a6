"""The parts of disk offload that the engine always needs: sizes, and the base class of tensors on a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor

ALIGNMENT = 4096
"""Offsets, sizes and addresses are multiples of this. No disk or file system in use requires more."""
BUFFERS = 3  # of optimizer states: for the chunk that is stepped, the previous one and the next one
MOST_WRITING = 2  # the number of buffers that may still be written out or copied to a device when a new one is taken

_noting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("notes errors", default=nullcontext)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class TensorOnDisk(Tensor):
    """The base class of `OnDisk`: a tensor without memory, whose values are in an extent of a file."""

    extent: Any
    start: int  # the offset of the values in the extent, in bytes

    def fetch(self) -> Tensor:
        """Return the values in new memory on the tensor's device."""
        raise NotImplementedError


@contextmanager
def errors_noted_by(noted: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager within which values are read and written in the context `noted()`, which may catch a `DiskError`.

    If it does, values that could not be read are undefined.
    """
    token = _noting.set(noted)
    try:
        yield
    finally:
        _noting.reset(token)


def noting_errors() -> AbstractContextManager[None]:
    """Return the context for one read or write, as set by `errors_noted_by`."""
    return _noting.get()()
