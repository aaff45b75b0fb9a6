"""Allocated and freed memory: the number of each storage and the stream that its memory belongs to."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard.tape.tape import HOST, Access, Allocation, Free, Tape

GIVEN = "given"  # instead of the name of a stream, for memory that was allocated before the trace


@dataclass(slots=True)
class _Known:
    """A storage in the trace."""

    number: int
    stream: str
    nbytes: int
    ranks: int
    end: weakref.finalize[Any, Any]


class Storages:
    """The storages in a trace, by number. Finalizers record that a storage is freed."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known: dict[int, _Known] = {}
        self._files: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._reported: dict[Access, Access] = {}  # one `Access` per byte range, shared by all uses of the same tensor
        self._last = 0

    def note_allocated(self, storage: torch.UntypedStorage, stream: str, purpose: str = "", ranks: int = 1) -> None:
        """Record that memory of `stream` is allocated for `storage`, shared by `ranks` ranks."""
        known = self._known.get(storage._cdata) or self._add(storage, stream)
        known.stream, known.nbytes, known.ranks = stream, storage.nbytes(), ranks
        if known.nbytes:
            purpose = purpose or self._tape.purpose
            self._tape.note(Allocation(known.number, known.nbytes, stream, self._tape.origin, purpose, ranks))

    def note_freed(self, storage: torch.UntypedStorage) -> None:
        """Record that the memory of `storage`, if it has any, was returned to its stream."""
        known = self._known.get(storage._cdata)
        if known is not None:
            self._free(known)

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if the trace already contains the storage of `tensor`."""
        return tensor.untyped_storage()._cdata in self._known

    def is_host(self, tensor: Tensor) -> bool:
        """Return True if the memory of `tensor` is host memory alongside an accelerator."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and known.stream == HOST

    def nbytes_from(self, stream: str) -> int:
        """Return the bytes of memory of `stream` that are in use."""
        return sum(known.nbytes for known in self._known.values() if known.stream == stream)

    def access(self, tensor: Tensor) -> Access:
        """Return the bytes that `tensor` spans."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            self.note_allocated(storage, GIVEN)
            known = self._known[storage._cdata]
        start = int(tensor.storage_offset())
        numel, size = tensor.numel(), tensor.itemsize
        stop = start + numel
        if numel and not tensor.is_contiguous():  # from the first to the last element, including gaps
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            stop = start + 1 + sum((length - 1) * stride for length, stride in strides)
        touched = numel * size if numel < stop - start else None
        access = Access(known.number, start * size, stop * size, touched)
        return self._reported.setdefault(access, access)

    def access_to_file(self, file: object, start: int, stop: int) -> Access:
        """Return a byte range of `file`. Files are numbered like storages."""
        if file not in self._files:
            self._last += 1
            self._files[file] = self._last
        return Access(self._files[file], start, stop)

    def forget(self) -> None:
        """Stop recording."""
        for known in self._known.values():
            known.end.detach()
        self._known.clear()

    def _add(self, storage: torch.UntypedStorage, stream: str) -> _Known:
        self._last += 1
        key = storage._cdata
        end = weakref.finalize(storage, self._end, key)
        end.atexit = False
        known = self._known[key] = _Known(self._last, stream, 0, 1, end)
        return known

    def _end(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._free(known)

    def _free(self, known: _Known) -> None:
        if known.nbytes:
            self._tape.note(Free(known.number, known.nbytes, known.stream, self._tape.origin, known.ranks))
            known.nbytes = 0
