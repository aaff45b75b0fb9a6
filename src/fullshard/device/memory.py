"""Storages that are allocated and freed but never replaced, and memory that is reused.

[Note: storage is freed and allocated, never replaced]
Autograd saves views of an unsharded parameter in forward and reads them in backward. In between, a unit may free the
memory. Before backward the *same* storage is allocated and filled by an all-gather, so the saved views are valid again.
With values in another storage, those views would read stale memory, and no error would be raised.

[Note: units share slots]
On an accelerator the caching allocator makes freeing and allocating cheap. On a CPU, memory that was returned to the
system is mapped again page by page, at several times the cost of a copy. There, once the order of units is known, units
that are never unsharded at the same time share long-lived storages, called slots. A unit moves to a slot only while
nothing else refers to its storage, according to the reference count of the storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fullshard._compat import storage_references
from fullshard.device.accelerator import Accelerator, accelerator_for
from fullshard.device.streams import Stream
from fullshard.layout.offsets import contiguous_strides


def typed_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    byte_offset: int,
    shape: tuple[int, ...],
    device: torch.device | None = None,
) -> Tensor:
    """Return a contiguous tensor of `shape` over a slice of `storage`, with a separate version counter.

    `device` defaults to that of the storage, and must be given for the storage of a fake tensor.

    Writes through other views do not change its version. It may be written to at any time, even if it was created in
    inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(0, dtype=dtype, device=device or storage.device)
        return view.set_(storage, byte_offset // dtype.itemsize, shape, contiguous_strides(shape))


def in_separate_storage(tensor: Tensor) -> Tensor:
    """Return a view of `tensor`, which must be contiguous, with a separate storage object for its memory.

    `torch.save` rejects a storage that has views of several dtypes.
    """
    nbytes, start = tensor.numel() * tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    view = torch.from_dlpack(typed_view(tensor.untyped_storage(), torch.uint8, start, (nbytes,)))
    return typed_view(view.untyped_storage(), tensor.dtype, 0, tuple(tensor.shape))


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a new storage on `device`. It is taken from a new tensor, because only tensors can be fake."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


@dataclass(frozen=True)
class MemoryKind:
    """The memory of a device. If `offloaded`, the host memory of an accelerator, page-locked if `pinned`.

    If `copied`, the accelerator keeps a copy of the shards for gathers. With a `folder`, long-lived data is stored in
    a file in this folder, and is loaded into memory of this kind.
    """

    device: torch.device
    offloaded: bool = False
    pinned: bool = False
    copied: bool = False
    folder: Path | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new 1-D buffer of zeros, so that padding is defined."""
        if self.offloaded:
            return accelerator_for(self.device).host_zeros(numel, dtype, pinned=self.pinned)
        return torch.zeros(numel, dtype=dtype, device=self.device)


class Slot:
    """One storage that holds the unsharded parameters of one unit at a time.

    Args:
        device: The device of the storage.
        shared: Whether several units share the slot. Its memory is then kept when the slot is freed.
        rank_shared: Memory that the ranks of a group share, large enough for every unit that uses the slot.
    """

    def __init__(
        self, device: torch.device, *, shared: bool = False, rank_shared: torch.UntypedStorage | None = None
    ) -> None:
        self.device = device
        self._accelerator = accelerator_for(device)
        self.storage = new_storage(0, device) if rank_shared is None else rank_shared
        self.shared = shared
        self.is_rank_shared = rank_shared is not None
        self.occupant: object | None = None
        self._own_references = 0

    def allocate(self, occupant: object, nbytes: int, stream: Stream) -> None:
        """Allocate `nbytes` with undefined contents for `occupant`. No other unit may occupy the slot."""
        assert self.occupant in (None, occupant), "two units in one slot"
        self.occupant = occupant
        if self.storage.nbytes() < nbytes:
            with stream.queueing():
                self._accelerator.resize(self.storage, nbytes)

    def free(self) -> None:
        """Free the slot for later gathers, which wait for compute. A shared slot keeps its memory."""
        self.occupant = None
        accelerator = self._accelerator
        if accelerator.has_streams:
            accelerator.streams.gather.wait(accelerator.streams.compute.mark())
        if not self.shared:
            accelerator.resize(self.storage, 0)

    def count_references(self, others: int = 0) -> None:
        """Record that the current references except for `others` are those of the units."""
        self._own_references = storage_references(self.storage) - others

    @contextmanager
    def dropping_views(self) -> Iterator[None]:
        """Context manager within which views of a unit are dropped. They no longer count as references of the units."""
        before = storage_references(self.storage)
        yield
        self._own_references -= before - storage_references(self.storage)

    @property
    def others(self) -> int:
        """The number of references not held by units, such as those of a graph that waits for its backward."""
        return storage_references(self.storage) - self._own_references

    @property
    def is_referenced(self) -> bool:
        """True if anything except the units has a view of it."""
        return self.others > 0


class Pool:
    """Scratch memory that is reused, so that steps after the first cause no page faults.

    An accelerator's allocator already does this. So on an accelerator the pool returns new tensors and keeps none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeps = not accelerator_for(device).has_streams
        self._free: list[tuple[int, Tensor]] = []  # bytes of a storage, and the only view of it

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of `numel` elements, with undefined contents."""
        if not self._keeps:
            return torch.empty(numel, dtype=dtype, device=self._device)
        nbytes = numel * dtype.itemsize
        best = -1
        for i, (capacity, _) in enumerate(self._free):
            if capacity >= nbytes and (best < 0 or capacity < self._free[best][0]):
                best = i
        if best < 0:
            if self._free:  # replace memory that is too small
                del self._free[min(range(len(self._free)), key=lambda i: self._free[i][0])]
            return typed_view(new_storage(nbytes, self._device), dtype, 0, (numel,), self._device)
        found = self._free[best][1]
        del self._free[best]
        if found.dtype is dtype and found.shape[0] == numel:
            return found
        return typed_view(found.untyped_storage(), dtype, 0, (numel,), self._device)

    def give(self, tensor: Tensor) -> None:
        """Return the memory of `tensor` to the pool. The caller must not use it again."""
        if self._keeps:
            self._free.append((tensor.untyped_storage().nbytes(), tensor))


_scratch: WeakKeyDictionary[Accelerator, dict[torch.device, Pool]] = WeakKeyDictionary()


def scratch_of(device: torch.device) -> Pool:
    """Return the scratch memory of `device`, which all units of the process share."""
    pools = _scratch.setdefault(accelerator_for(device), {})
    if device not in pools:
        pools[device] = Pool(device)
    return pools[device]
