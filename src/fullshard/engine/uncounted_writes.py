"""In-place writes to shards for which torch counts no version: those of foreach operations, and those to `param.data`.

Unsharded parameters that are kept are gathered again if the version of a sharded parameter has changed. So these writes
are counted here. A `DTensor` that is not a parameter, such as `param.data`, is recognized by its storage at the
beginning of the next forward or backward. Writes to the result of `to_local()` are not detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fullshard._compat import FakeTensor, after_dtensor_writes, inner_tensors
from fullshard.engine.managed import managed_by
from fullshard.engine.unit import Unit
from fullshard.errors import StateError

_FORGETS_AFTER = 1 << 10  # writes

_numbers = count(1)
_written: dict[StorageWeakRef, int] = {}
"""The storages of `DTensor`s other than parameters that were written, with the number of their last write."""


@cache
def watch_writes() -> None:
    """Count the writes of all in-place operations on `DTensor`s."""
    after_dtensor_writes(_note, _refuse_whole)


def _refuse_whole(out: Any, has_sizes: bool) -> None:
    """Raise an error on every rank if an operation, such as that of `nn.init.eye_`, has written more than a shard."""
    managed = managed_by(out)
    if managed is None or out is not managed.param.sharded:
        return
    plan = next(group.plan for group in managed.unit.param_groups if managed.param in group.params)
    spec = managed.param.layout.spec
    shard = tuple(spec.shard_shape(plan.rank))
    if tuple(managed.param.local.shape) != shard or (has_sizes and plan.shards_optimizer and spec.world > 1):
        raise StateError(
            f"an operation with out={managed.param.fqn}, a sharded parameter, has written all values of shape "
            f"{tuple(spec.shape)} to the shard of each rank, which has shape {shard} on this rank. That also "
            "overwrote other parameters. torch.nn.init.eye_ calls such an operation. Create the value separately, and "
            "write it within summon_full_params; or initialize the module before fully_shard. This model is not usable "
            "any more."
        )


def _note(written: Sequence[Tensor]) -> None:
    for tensor in written:
        managed = managed_by(tensor)
        if managed is None:
            for storage in _storages(tensor._local_tensor):  # type: ignore[attr-defined]
                number = _written[storage] = next(_numbers)
                if number % _FORGETS_AFTER == 0:  # there may be no forward of a sharded model
                    _forget_freed()
        else:
            torch.autograd.graph.increment_version(tensor)


def _storages(local: Tensor) -> list[StorageWeakRef]:
    """Return weak references to the storages of plain tensors in `local`, which keep addresses from being reused."""
    inner = [local] if type(local) is Tensor else inner_tensors(local)
    plain = [item for item in inner if type(item) in (Tensor, FakeTensor) and item.layout == torch.strided]
    return [StorageWeakRef(item.untyped_storage()) for item in plain]


def count_writes(units: Sequence[Unit], since: int) -> int:
    """Count the writes to shards of `units` that are newer than the number `since`. Return the newest number."""
    written = list(_written.items())  # a copy, because other threads may write
    recent = {storage for storage, number in written if number > since}
    if not recent:
        return since
    for param in (param for unit in units for param in unit.params):
        if not recent.isdisjoint(_storages(param.local)):
            param.note_ignored_write()
    _forget_freed()
    return max(number for _, number in written)


def _forget_freed() -> None:
    for storage in list(_written):
        if storage.expired():
            _written.pop(storage, None)
