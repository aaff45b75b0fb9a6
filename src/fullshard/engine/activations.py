"""Offloading of activations between forward and backward: which tensors are offloaded, and where to.

[Note: which tensors are offloaded]
A unit sets a pair of saved-tensor hooks around its forward. Autograd passes every tensor that it saves to them. The
whole storage of a tensor is offloaded once, even if several nodes save the tensor or views of it. Otherwise no memory
would be freed. These tensors are not offloaded: parameters, because their storage is reused; buffers of modules, which
are never freed; tensors on other devices; tensor subclasses such as `DTensor`; storages smaller than SMALLEST_BYTES.
Backward checks their versions, as autograd does.

Tensors with one storage may have several version counters: the outputs of `torch.unsafe_chunk` do, which recurrent
layers write to in place one after the other. So a storage is offloaded again for each counter and each version.

[Note: activation checkpoints]
A checkpoint within a unit has its own hooks. The hooks of the unit receive the inputs of the checkpoint's region, which
the checkpoint saves. A unit within a checkpoint sets no hooks, neither in forward nor in recomputation: the hooks of
the enclosing unit receive the inputs. The same applies to all other hooks that a user sets.

[Note: versions of tensors that hooks return]
Autograd does not compare versions of tensors that a hook returns. So within hooks of other code, such as those of a
checkpoint around units, a unit wraps these hooks. In backward the wrappers refuse views of unsharded parameters that
have no valid values, see `validity.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fullshard._compat import (
    FakeTensor,
    in_backward,
    saved_tensor_hooks,
    shares_version_counter,
    version_counter_of,
    weak_storage,
)
from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.engine.findings import DiskFailures
from fullshard.engine.registry import buffers_of
from fullshard.engine.sharded_use import check_saved
from fullshard.engine.unit import Unit
from fullshard.policy.offload import Offload

if TYPE_CHECKING:
    from fullshard.engine.offloaded import Offloaded, Store

SMALLEST_BYTES = 64 << 10
"""Size of the smallest storage that is offloaded. A smaller one is not worth a copy."""


@dataclass(frozen=True, slots=True)
class _Resident:
    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            check_saved(self.tensor)
            from fullshard.engine.offloaded import written_to

            raise written_to(self.tensor.nbytes)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _KnownStorage:
    """A storage that this forward has offloaded."""

    storage: Any  # a weak reference
    counter: Tensor  # an empty tensor with the version counter of the tensor that was saved
    version: int
    offloaded: weakref.ref[Offloaded]

    def has(self, tensor: Tensor) -> bool:
        """Return True if `tensor`, which shares this storage, has not been modified since it was offloaded."""
        return self.version == tensor._version and shares_version_counter(self.counter, tensor)


@dataclass(frozen=True, slots=True)
class _OffloadedView:
    """A view of an offloaded storage that autograd keeps in place of the saved tensor."""

    offloaded: Offloaded
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> Tensor:
        flat = self.offloaded.store.get(self.offloaded)
        start = flat.storage_offset() // self.dtype.itemsize
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=flat.device)
            return empty.set_(flat.untyped_storage(), start + self.offset, self.shape, self.stride)


def _unpack(saved: _Resident | _OffloadedView) -> Tensor:
    return saved.unpack()


def _unpack_checked(unpack: Callable[[Any], Any], saved: Any) -> Any:
    """Return the result of the hook `unpack` of other code. Raise if it views a parameter that has no valid values."""
    found = unpack(saved)
    return check_saved(found) if isinstance(found, Tensor) else found


def _checks(unpack: Callable[[Any], Any]) -> bool:
    return isinstance(unpack, partial) and unpack.func is _unpack_checked


def tiers_of(units: Sequence[Unit]) -> dict[Unit, str]:
    """Return the tier of each unit's activations, "cpu" or "disk". Units without offloaded activations are left out.

    Among units with the same policy, the first ones in order use the disk, and the next ones host memory: activations
    that are offloaded the longest have the most time for their transfers. The root is last, since its backward is
    first.
    """
    ordered = sorted(units, key=lambda unit: unit.is_root)
    tiers: dict[Unit, str] = {}
    for fractions in dict.fromkeys(tuple(sorted(unit.options.activations.items())) for unit in units):
        identical = [unit for unit in ordered if tuple(sorted(unit.options.activations.items())) == fractions]
        share = dict(fractions)
        for number, unit in enumerate(identical):
            middle = (number + 0.5) / len(identical)
            if middle < share.get("disk", 0.0):
                tiers[unit] = "disk"
            elif middle < share.get("disk", 0.0) + share.get("cpu", 0.0):
                tiers[unit] = "cpu"
    return tiers


class Activations:
    """The activation hooks around forwards of one root, and its stores."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._tiers = tiers_of(units)
        self._device = units[0].device
        self._stores: dict[str, Store] = {}
        self._failures = DiskFailures()
        self._entered: list[tuple[Unit, saved_tensors_hooks | None]] = []
        self._resident: set[int] = set()  # storages that are never offloaded
        self._known: dict[int, list[_KnownStorage]] = {}  # by storage
        self._order: list[weakref.ref[Offloaded]] = []  # storages that this forward has offloaded
        self._counted: dict[int, Any] = {}  # storages of this forward, if a budget needs them
        self._kept = dict.fromkeys(units, 0)  # bytes of these storages, by unit
        self.most_kept = dict.fromkeys(units, 0)  # `_kept` of the forward with the largest sum
        self.backwards = 0  # completed backwards
        self._put_before: dict[str, int] = {}  # bytes by tier, when this forward began
        self._most_put: dict[str, int] = {}
        self.held_whole = False  # a backward has ended without a reduction of its gradients

    @property
    def stores(self) -> Sequence[Store]:
        """The stores in use, for statistics."""
        return tuple(self._stores.values())

    @property
    def most_offloaded(self) -> Mapping[str, int]:
        """The most bytes that one forward has offloaded, by tier: "cpu" or "disk"."""
        put = {tier: store.put_bytes - self._put_before.get(tier, 0) for tier, store in self._stores.items()}
        return {tier: max(nbytes, self._most_put.get(tier, 0)) for tier, nbytes in put.items()}

    def begin_forward(self) -> None:
        """Record that a new forward of the root begins, whose saved tensors share no storage with earlier ones."""
        if not self._tiers:
            return
        self._device = self._units[0].device
        self._most_put = dict(self.most_offloaded)
        self._put_before = {tier: store.put_bytes for tier, store in self._stores.items()}
        self._known.clear()
        self._order = []
        self._counted.clear()
        self._kept = dict.fromkeys(self._units, 0)
        self._resident = {
            buffer.untyped_storage()._cdata for unit in self._units for buffer in buffers_of(unit.modules)
        }

    def enter(self, unit: Unit) -> None:
        """Set the hooks for `unit`. If hooks of other code are set, wrap these instead."""
        hooks = None
        if self._tiers:
            for needed in (unit, *unit.borrowed):
                self._resident.add(needed.slot.storage._cdata)
            hooks = self._hooks_for(unit)
        top = saved_tensor_hooks() if hooks is None and torch.is_grad_enabled() else None
        if top is not None and not (in_backward() or top[1] is _unpack or _checks(top[1])):
            hooks = saved_tensors_hooks(top[0], partial(_unpack_checked, top[1]))
        self._entered.append((unit, hooks))
        if hooks is not None:
            hooks.__enter__()

    def leave(self, unit: Unit) -> None:
        """Remove the hooks set by `enter(unit)`, and those of inner units that were entered but not left."""
        while self._entered and (self._entered[-1][0] is unit or any(entered is unit for entered, _ in self._entered)):
            entered, hooks = self._entered.pop()
            if hooks is not None:
                top = saved_tensor_hooks()
                if top is not None and (top[1] is _unpack or _checks(top[1])):
                    hooks.__exit__()
            if entered is unit:
                return

    def choose_again(self) -> None:
        """Apply the current policies of the units, starting with the next forward."""
        self._tiers = tiers_of(self._units)
        self._stores.clear()
        self._put_before, self._most_put = {}, {}

    @property
    def disk_failures(self) -> DiskFailures | None:
        """Failures of the disk with activations; None if no activations are on a disk."""
        return self._failures if "disk" in self._tiers.values() else None

    def end_backward(self) -> None:
        """Record that a backward has ended without an error."""
        self.backwards += 1
        self.held_whole = self.held_whole or not all(unit.settings.syncs_gradients for unit in self._units)
        self._look_at_disks()

    def _look_at_disks(self) -> None:
        """Log if a disk has become slow. If states are on it too, their optimizer steps check this instead."""
        policies = [unit.options.offload for unit, tier in self._tiers.items() if tier == "disk"]
        for folder in {
            policy.disk_folder for policy in policies if isinstance(policy, Offload) and not policy.disk_fraction
        }:
            from fullshard.disk.pace import pace_of  # imported here, because few programs need it

            pace_of(folder).check()

    def recover(self) -> None:
        """Remove all hooks after an exception."""
        while self._entered:
            self.leave(self._entered[-1][0])

    def _hooks_for(self, unit: Unit) -> saved_tensors_hooks | None:
        if not torch.is_grad_enabled() or in_backward() or is_capturing(self._device):
            return None
        top = saved_tensor_hooks()
        if top is not None and top[1] is not _unpack:
            return None
        store = self._store(self._tiers.get(unit))
        if store is None and top is None and not self._counts(unit):
            return None
        pack: Callable[[Tensor], _Resident | _OffloadedView] = _keep if store is None else partial(self._pack, store)
        return saved_tensors_hooks(partial(self._count, unit, pack) if self._counts(unit) else pack, _unpack)

    def _store(self, tier: str | None) -> Store | None:
        """Return the store of a tier; None without offloading, as for host memory when computing on a CPU."""
        if tier is None or (tier == "cpu" and not accelerator_for(self._device).has_streams):
            return None
        if tier not in self._stores:
            from fullshard.disk.space import Scratch  # imported here, because few programs need it
            from fullshard.engine.offloaded import WINDOW_BYTES, Store

            policy = next(unit for unit in self._tiers if self._tiers[unit] == tier).options.offload
            assert isinstance(policy, Offload), "it names the tier"
            name = f"activations-of-rank-{dist.get_rank()}"
            scratch = Scratch(policy.disk_folder, name, WINDOW_BYTES) if tier == "disk" else None
            self._stores[tier] = Store(self._device, scratch, WINDOW_BYTES, self._failures)
        return self._stores[tier]

    @staticmethod
    def _counts(unit: Unit) -> bool:
        """Return True if a budget needs to know the bytes that forward saves in `unit`."""
        return isinstance(unit.options.offload, Offload) and unit.options.offload.budget is not None

    def _count(
        self, unit: Unit, pack: Callable[[Tensor], _Resident | _OffloadedView], tensor: Tensor
    ) -> _Resident | _OffloadedView:
        """Count the storage of `tensor` once, and pack it."""
        storage = tensor.untyped_storage()
        if self._is_offloadable(tensor) and storage._cdata not in self._counted:
            self._counted[storage._cdata] = weak_storage(storage)
            self._kept[unit] += storage.nbytes()
            if sum(self._kept.values()) > sum(self.most_kept.values()):
                self.most_kept = dict(self._kept)
        return pack(tensor)

    def _pack(self, store: Store, tensor: Tensor) -> _Resident | _OffloadedView:
        if not self._is_offloadable(tensor):
            return _keep(tensor)
        storage = tensor.untyped_storage()
        known = self._known.setdefault(storage._cdata, [])
        alive = ((item, item.offloaded()) for item in known)
        offloaded = next((found for item, found in alive if found is not None and item.has(tensor)), None)
        if offloaded is None:
            offloaded = store.put(tensor, self._order)
            counter = version_counter_of(tensor)
            known.append(_KnownStorage(weak_storage(storage), counter, tensor._version, self._order[-1]))
        offloaded.uses += 1
        return _OffloadedView(offloaded, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _is_offloadable(self, tensor: Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALLEST_BYTES and storage._cdata not in self._resident


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


def _keep(tensor: Tensor) -> _Resident:
    """Save `tensor` itself, without its autograd node, to avoid a reference cycle between node and tensor."""
    return _Resident(tensor.detach(), tensor._version)
