"""Validity of the values of unsharded parameters, in a form that autograd checks.

[Note: versions of unsharded parameters]
Autograd saves a tensor together with its version, and compares versions when backward unpacks the tensor. It does so in
C++, on every device. Views share the version counter of their base. While the memory of a parameter group has no valid
values (it was freed, belongs to another unit, or is being filled), the counters of its unsharded parameters are set to
a number that no sequence of operations reaches. A backward that reads them then fails in autograd, instead of computing
with whatever is in memory. When the values are valid again, the counters are set back.

A counter that has changed since it was set back indicates an in-place write to the parameter. Such a write is lost when
the memory is freed. The counter then continues from a new number, so that a backward through a graph that saved the
written values also fails: the next all-gather does not restore them.

Autograd does not compare versions of tensors that saved-tensor hooks return. `activations.py` compares them instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import Any

from torch import Tensor

from fullshard._compat import holds_tensors, inner_names, set_versions

_log = logging.getLogger(__name__)

_INVALID = 1 << 31  # plus the number of the parameter; torch counts with 32 bits
_RENEWED = 1 << 30  # plus _STEP for each renewal
_STEP = 1 << 8

_VERSION = attrgetter("_version")

_numbers = count()
_renewals = count()
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def owner_of_version(version: int) -> Any | None:
    """Return the `ShardedParam` that was assigned the special `version`, or None."""
    if _RENEWED <= version < _INVALID:
        return next((param for param in list(_owners.values()) if version in param.counters.valid), None)
    return _owners.get(version)


def is_invalid(version: int) -> bool:
    """Return True if `version` is that of a parameter without valid values."""
    return version >= _INVALID


class Counters:
    """The version counters of one unsharded parameter."""

    def __init__(self, param: Any) -> None:
        self.invalid = _INVALID + next(_numbers)
        self.tensors: list[Tensor] = []
        self.valid: list[int] = []  # versions while the values are valid
        self.was_written = False  # by the user, in place, and the write was lost
        self.ignored = 0  # the number of versions of the sharded parameter that autograd need not know of
        self.written: int | None = None  # the number of its other versions at the last gather
        _owners[self.invalid] = param

    def refresh(self, unsharded: Tensor) -> None:
        """Start to track the versions of `unsharded` and the tensors in it."""
        known = {id(tensor): version for tensor, version in zip(self.tensors, self.valid, strict=True)}
        self.tensors = _with_inner(unsharded)
        self.valid = [known.get(id(tensor), tensor._version) for tensor in self.tensors]

    def renew(self) -> None:
        """Invalidate all tensors saved so far, because the parameter gets different memory or has lost a write."""
        self.valid = [_RENEWED + next(_renewals) * _STEP % _RENEWED] * len(self.tensors)


class Validity:
    """The validity of a parameter group's unsharded parameters.

    Args:
        params: the `ShardedParam`s of the group.
        keeping_writes: The parameters whose in-place writes persist, because the optimizer updates the unsharded
            tensors.
    """

    def __init__(self, params: Sequence[Any], keeping_writes: Sequence[Any] = ()) -> None:
        self._params = params
        self._keeping = {id(param) for param in keeping_writes}
        self.is_valid = False
        self._gathered: tuple[int, ...] | None = None  # versions of the sharded parameters
        self.refresh()

    def refresh(self) -> None:
        """Look up the tensors again, after unsharded parameters were replaced or moved."""
        for param in self._params:
            param.counters.refresh(param.unsharded)
        self._collect()
        set_versions(self._tensors, self._valid if self.is_valid else self._invalid)

    def _collect(self) -> None:
        each = [param.counters for param in self._params]
        self._tensors = tuple(tensor for counters in each for tensor in counters.tensors)
        self._valid = tuple(version for counters in each for version in counters.valid)
        self._invalid = tuple(counters.invalid for counters in each for _ in counters.tensors)

    def validate(self, gathered: tuple[int, ...] | None) -> None:
        """Record that all values are valid. `gathered` are the versions of the shards from which they were gathered.

        Tensors that autograd has saved become invalid if the shard was written to since the last gather.
        """
        if gathered is not None and gathered != self._gathered:
            version, valid = _RENEWED + next(_renewals) * _STEP % _RENEWED, list[int]()
            for i, (param, now) in enumerate(zip(self._params, gathered, strict=True)):
                counters = param.counters
                written, counters.written = counters.written, now - counters.ignored
                if written is not None and written != counters.written:
                    counters.valid = [version + i % _STEP] * len(counters.tensors)
                valid += counters.valid
            self._gathered, self._valid = gathered, tuple(valid)
        self.is_valid = True
        set_versions(self._tensors, self._valid)

    def invalidate(self) -> None:
        """Record that values are not valid. Call it before the memory is freed or refilled."""
        if self.is_valid:
            if tuple(map(_VERSION, self._tensors)) != self._valid:
                self._note_writes()
            self.is_valid = False
            set_versions(self._tensors, self._invalid)

    def _note_writes(self) -> None:
        for param in self._params:
            counters = param.counters
            now = [tensor._version for tensor in counters.tensors]
            if now == counters.valid:
                continue
            if id(param) in self._keeping:
                counters.valid = now
                continue
            counters.renew()
            if not counters.was_written:
                counters.was_written = True
                _log.warning(_LOST_WRITE, param.fqn)
        self._collect()


_LOST_WRITE = (
    "%s was modified in place while it was unsharded. The change is lost: resharding frees the unsharded parameter, "
    "and the next all-gather restores the values of the shards. Other ranks on the host may have computed with the "
    "modified values if they share this memory. To change a parameter, write to the sharded one between steps (under "
    "torch.no_grad()), or within summon_full_params. To compute with changed values, use a new tensor instead of an "
    "in-place operation. This is logged once per parameter."
)


def _with_inner(tensor: Tensor) -> list[Tensor]:
    """Return `tensor` and, for a wrapper such as a `DTensor`, its inner tensors, which have separate counters."""
    if not holds_tensors(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in inner_names(tensor)]
    return [tensor, *(item for each in inner if isinstance(each, Tensor) for item in _with_inner(each))]
