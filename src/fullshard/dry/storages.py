"""Memory as it comes and goes: which storage is which, and where each one's memory is from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard.tape.tape import HOST, Access, Allocation, Free, Tape

__all__ = ["GIVEN", "Storages"]

GIVEN = "given"
"""In place of the lane whose memory it is: there before the tape was."""


@dataclass(slots=True)
class _Known:
    number: int
    lane: str
    nbytes: int
    ranks: int
    end: weakref.finalize[Any, Any]


class Storages:
    """The storages that a tape tells of, by number. Finalizers notice when one is gone."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known: dict[int, _Known] = {}
        self._told: dict[Access, Access] = {}  # each once: of tensors that are used again, the same
        self._last = 0

    def note_allocated(self, storage: torch.UntypedStorage, lane: str, purpose: str = "", ranks: int = 1) -> None:
        """Note that `storage` has memory of `lane`'s from now on, which so many ranks have in common."""
        known = self._known.get(storage._cdata) or self._add(storage, lane)
        known.lane, known.nbytes, known.ranks = lane, storage.nbytes(), ranks
        if known.nbytes:
            purpose = purpose or self._tape.purpose
            self._tape.note(Allocation(known.number, known.nbytes, lane, self._tape.origin, purpose, ranks))

    def note_freed(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory of `storage`, if it has any, goes back to where it is from."""
        known = self._known.get(storage._cdata)
        if known is not None:
            self._free(known)

    def is_known(self, tensor: Tensor) -> bool:
        """True if the tape tells of the storage of `tensor` already."""
        return tensor.untyped_storage()._cdata in self._known

    def is_host(self, tensor: Tensor) -> bool:
        """True if the memory of `tensor` is the host's, beside that of an accelerator."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and known.lane == HOST

    def nbytes_from(self, lane: str) -> int:
        """Bytes of the memory of `lane`'s that is in use."""
        return sum(known.nbytes for known in self._known.values() if known.lane == lane)

    def access(self, tensor: Tensor) -> Access:
        """The bytes that `tensor` spans."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            self.note_allocated(storage, GIVEN)
            known = self._known[storage._cdata]
        start = int(tensor.storage_offset())
        numel, size = tensor.numel(), tensor.itemsize
        stop = start + (numel if tensor.is_contiguous() else _spanned(tensor))
        touched = numel * size if numel < stop - start else None
        access = Access(known.number, start * size, stop * size, touched)
        return self._told.setdefault(access, access)

    def forget(self) -> None:
        """Take no notice any more."""
        for known in self._known.values():
            known.end.detach()
        self._known.clear()

    def _add(self, storage: torch.UntypedStorage, lane: str) -> _Known:
        self._last += 1
        key = storage._cdata
        end = weakref.finalize(storage, self._end, key)
        end.atexit = False
        known = self._known[key] = _Known(self._last, lane, 0, 1, end)
        return known

    def _end(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._free(known)

    def _free(self, known: _Known) -> None:
        if known.nbytes:
            self._tape.note(Free(known.number, known.nbytes, known.lane, self._tape.origin, known.ranks))
            known.nbytes = 0


def _spanned(tensor: Tensor) -> int:
    """Elements from the first of `tensor` to its last, and those that it leaves out in between."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0
