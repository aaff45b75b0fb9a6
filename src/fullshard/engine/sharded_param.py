"""One parameter and its two forms: a sharded `DTensor` between uses, an unsharded tensor in compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard._compat import (
    TENSOR_HOOKS,
    at_start,
    dtensor_like,
    has_memory,
    has_values,
    holds_tensors,
    inner_names,
    inner_tensors,
    keep_weights_in_place,
    make_dtensor,
    marks_of,
    plain_values,
    set_local_tensor,
    share_grad_hooks,
)
from fullshard.comm.mesh import Axes, local_shard
from fullshard.device.awaited import settled
from fullshard.disk.interface import TensorOnDisk
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.param_view import ParamView, sends_payloads
from fullshard.engine.validity import Counters
from fullshard.errors import StateError
from fullshard.layout.group_layout import ParamLayout
from fullshard.layout.offsets import contiguous_strides

_SAMPLES = 16  # the maximum number of values that a digest uses


@dataclass(frozen=True)
class Owner:
    """A module that has a parameter, and the parameter's name in it."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class Source:
    """A parameter as created by the user, with its owners and its FQN relative to the unit's module."""

    param: nn.Parameter
    owners: list[Owner]  # several where weights are tied
    fqn: str
    axes: Axes  # to shard and replicate it over
    dim: int | None  # the dim to shard, if the user has chosen one
    view: ParamView
    keeps_dtype: bool  # in compute, although other parameters are cast

    @property
    def local(self) -> Tensor:
        """The values on this rank, before sharding."""
        return self.param._local_tensor if isinstance(self.param, DTensor) else self.param.detach()

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that the user requested for its gradients; None if it is not set, or is the parameter's dtype."""
        requested = self.param.grad_dtype if self.param.is_leaf and self.param.requires_grad else None
        return None if requested == self.param.dtype else requested

    @property
    def sends_payloads(self) -> bool:
        """True if its class defines how it is gathered, see `payload.py`."""
        return sends_payloads(self.local)


class ShardedParam:
    """One parameter of a unit in its two forms, which are separate objects. Modules have one of them at a time.

    Optimizers, checkpoints and users see `sharded` between steps: an `nn.Parameter` around a `DTensor` whose local
    tensor is this rank's shard. Compute uses `unsharded`: an `nn.Parameter` of the full shape in the compute dtype,
    over storage that is freed and refilled. With tensor parallelism it is also a `DTensor`.
    """

    def __init__(
        self,
        source: Source,
        param_layout: ParamLayout,
        local: Tensor,
        plan: GroupPlan,
    ) -> None:
        self.fqn = source.fqn
        self.owners = list(source.owners)
        for owner in self.owners:
            keep_weights_in_place(owner.module)
        self.layout = param_layout
        self.axes = plan.axes
        self.number = -1  # set by the first forward of a root, equal on all ranks, see `number_parameters`
        self.view = source.view
        whole = source.local
        names = inner_names(whole) if holds_tensors(whole) else []
        self.inner_shapes = {name: tuple(getattr(whole, name).shape) for name in names}  # of the wrapped tensors
        requires_grad = source.param.requires_grad
        dtensor = self.view.make_sharded(at_start(local), plan.axes, param_layout.spec, sharded=plan.shards_optimizer)
        self.sharded = nn.Parameter(dtensor, requires_grad=requires_grad)
        self.local = local
        self.grad_dtype = plan.contract.grad
        self._set_grad_dtype(self.sharded)
        nothing = torch.empty(0, dtype=plan.contract.compute, device=plan.device)
        self.unsharded = self.view.make_param(nothing, requires_grad=requires_grad)
        self._set_grad_dtype(self.unsharded)
        self.is_unsharded_trained = requires_grad  # as set by the engine; a user may have changed it since
        self.counters = Counters(self)
        self.on_grad: Callable[[ShardedParam], None] | None = None  # see `watch`; replaced by the driver of a root
        self.is_watched = False  # the unsharded form has the hook that calls `on_grad`
        self._initial_digests: tuple[int | None, int | None] = None, None
        for attribute, value in marks_of(source.param).items():  # attributes set by users
            setattr(self.sharded, attribute, value)
            setattr(self.unsharded, attribute, value)
        share_grad_hooks(source.param, self.sharded)

    def _set_grad_dtype(self, form: nn.Parameter) -> None:
        """Set the requested dtype of gradients, for autograd and the optimizer."""
        if self.grad_dtype is not None:
            form.grad_dtype = self.grad_dtype

    @property
    def dtensor(self) -> DTensor:
        """The sharded parameter, typed as a `DTensor`."""
        return _dtensor(self.sharded)

    @property
    def local(self) -> Tensor:
        """The shard of this rank that the sharded parameter currently holds."""
        local: Tensor = settled(self.dtensor._local_tensor)
        return local

    @local.setter
    def local(self, shard: Tensor) -> None:
        set_local_tensor(self.dtensor, shard)

    def note_initial_values(self, whole: Tensor, own: Tensor | None = None) -> None:
        """Record that this rank's shard, with the current values `own`, was taken from `whole`."""
        self._initial_digests = digest(whole), digest(self.local if own is None else own)

    @property
    def initial_digest(self) -> int | None:
        """A digest of the full initial values on this rank; None if they are unknown or were modified since."""
        whole, shard = self._initial_digests
        return whole if shard is not None and digest(self.local) == shard else None

    @property
    def is_encoded(self) -> bool:
        """True if its class encodes the values, so that full values cannot be split into shards."""
        return holds_tensors(self.local) and plain_values(self.local) is None

    def write(self, whole: Tensor) -> None:
        """Write this rank's shard of `whole` to the parameter."""
        self.local.copy_(self.take_shard(whole))
        torch.autograd.graph.increment_version(self.sharded)

    def note_ignored_write(self) -> None:
        """Record a write to the shard that the next gather reads, but that autograd does not check."""
        torch.autograd.graph.increment_version(self.sharded)
        self.counters.ignored += 1

    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the gradient that the optimizer will see."""
        return None if self.sharded.grad is None else settled(_dtensor(self.sharded.grad)._local_tensor)

    @grad.setter
    def grad(self, shard: Tensor) -> None:
        self.sharded.grad = self.placed(shard)

    def placed(self, shard: Tensor) -> DTensor:
        """Return `shard`, such as a gradient shard, as a `DTensor` with the placement of the sharded parameter."""
        if shard.dtype == self.sharded.dtype:
            return dtensor_like(shard, self.dtensor)
        placed = self.dtensor
        return make_dtensor(shard, placed.device_mesh, tuple(placed.placements), tuple(placed.shape))

    @property
    def has_grad(self) -> bool:
        """True if the optimizer will see a gradient."""
        return self.sharded.grad is not None

    def take_shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor, as a view."""
        return local_shard(whole, self.dtensor.device_mesh, self.dtensor.placements)

    def point_to(self, whole: Tensor) -> None:
        """Make the unsharded parameter use the memory of `whole`."""
        self.view.point_to(self.unsharded, whole)

    def show(self, form: nn.Parameter) -> None:
        """Set the given form of this parameter in every module that has it."""
        for owner in self.owners:
            owner.module._parameters[owner.name] = form

    @property
    def shown(self) -> nn.Parameter:
        """The form that the modules currently have; the sharded form if no module has any (see `Unit._adopt_tie`).

        If modules have different forms, it is the first other than the sharded form: modules may have left the model.
        """
        forms = [owner.module._parameters.get(owner.name) for owner in self.owners]
        return next((form for form in forms if form is not None and form is not self.sharded), self.sharded)

    def refuse_replacement(self, owner: Owner) -> NoReturn:
        """Raise an error, because `owner` has something other than the sharded parameter."""
        found = owner.module._parameters.get(owner.name)
        raise StateError(
            f"{owner.name} of {type(owner.module).__name__} ({self.fqn}) was replaced by "
            f"{'nothing' if found is None else f'another parameter, {tuple(found.shape)}'} after it was sharded. The "
            "replacement would be ignored. Replace, tie or reparametrize it before sharding. To change its values, "
            "use load_state_dict or summon_full_params. torch's replicate and fully_shard also replace parameters: "
            "shard a model with one library only. For replicas of shards, pass strategy='hsdp'."
        )

    def adopt(self) -> bool:
        """Adopt the module's current parameter, which may have been replaced by `Module.to` or similar functions.

        Returns:
            True if it is a different object than before.
        """
        current = self.shown
        changed = current is not self.sharded
        self.sharded = current
        self._set_grad_dtype(current)
        vars(current).update(marks_of(self.unsharded))  # attributes set by users, which torch does not copy
        return changed

    def watch(self, on_grad: Callable[[ShardedParam], None]) -> None:
        """Call `on_grad(self)` whenever autograd has accumulated the unsharded gradient."""
        self.on_grad = on_grad
        self.is_watched = False
        self.follow_requires_grad()

    def follow_requires_grad(self) -> bool:
        """Set `requires_grad` of the unsharded form to that of the sharded one, and return it."""
        trained = self.sharded.requires_grad and bool(self.owners)
        if self.unsharded.requires_grad is not trained:
            self.unsharded.requires_grad = trained  # `requires_grad_()` is rejected within transforms of `torch.func`
        self.is_unsharded_trained = trained
        if trained and self.on_grad is not None and not self.is_watched:
            myself = weakref.ref(self)  # the garbage collector does not see through a tensor's hooks

            def note(_: Tensor) -> None:
                param = myself()
                if param is not None and param.on_grad is not None:
                    param.on_grad(param)

            self.unsharded.register_post_accumulate_grad_hook(note)
            self.is_watched = True
        return trained

    def keep_requires_grad(self) -> None:
        """Set `requires_grad` of the sharded form to the value that the user has set on the unsharded one."""
        self.is_unsharded_trained = self.unsharded.requires_grad
        self.sharded.requires_grad = self.is_unsharded_trained

    def renew_unsharded(self, compute: torch.dtype, device: torch.device) -> None:
        """Replace the unsharded parameter by an empty one with this dtype and device."""
        self.replace_unsharded(torch.empty(0, dtype=compute, device=device))

    def replace_unsharded(self, whole: Tensor) -> None:
        """Replace the unsharded parameter by a new one with the data of `whole`."""
        self.is_unsharded_trained = self.sharded.requires_grad
        self.unsharded = self.view.make_param(whole, requires_grad=self.is_unsharded_trained)
        self._set_grad_dtype(self.unsharded)
        vars(self.unsharded).update(marks_of(self.sharded))
        if self.on_grad is not None:
            self.watch(self.on_grad)


class Assignments:
    """Detects `param.data = values` and `param.register_hook`, which torch ignores for a sharded parameter.

    Args:
        params: the parameters to watch, in their current sharded form.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self._sharded = [param.sharded for param in params]
        self._locals = [id(param.dtensor._local_tensor) for param in params]  # a reference would keep the memory
        self._storages = [*map(Tensor.untyped_storage, self._sharded)]  # without memory; an assignment replaces them

    def refuse(self) -> None:
        """Raise an error if `data` of a parameter was assigned, or it has a hook that would never be called.

        Raises:
            StateError: `data` was assigned, or `register_hook` was called.
        """
        if any(map(TENSOR_HOOKS, self._sharded)):
            for param in self._params:
                refuse_tensor_hooks(param.fqn, param.sharded)
        storages = [*map(Tensor.untyped_storage, self._sharded)]
        if storages == self._storages:
            return
        for param, form, local, now, known in zip(
            self._params, self._sharded, self._locals, storages, self._storages, strict=True
        ):
            is_exchanged = id(_dtensor(form)._local_tensor) != local  # as by `Module.to`
            if now is not known and (has_memory(now) or not is_exchanged):
                raise StateError(
                    f"the data of {param.fqn} was assigned (param.data = ...) after it was sharded. torch ignores this "
                    "for a DTensor, so the parameter still has its old values. Write them in place instead: "
                    "param.copy_(values) under torch.no_grad() with a DTensor of the same placement, "
                    "load_state_dict, or summon_full_params. torch's vector_to_parameters also assigns data."
                )


def refuse_tensor_hooks(fqn: str, param: nn.Parameter) -> None:
    """Raise an error if `param`, before or after sharding, has a hook that would never be called.

    Raises:
        StateError: `param.register_hook` was called.
    """
    if TENSOR_HOOKS(param):
        raise StateError(
            f"{fqn} has a hook of register_hook, which is never called on a sharded parameter, because autograd sees "
            "the unsharded one. Call register_post_accumulate_grad_hook instead, whose hooks get the sharded parameter "
            "with its reduced gradient in param.grad; or change param.grad before the optimizer steps."
        )


def _dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


@torch.no_grad()
def digest(tensor: Tensor) -> int | None:
    """Return a hash of some evenly spaced values of `tensor`; None if it has no memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    local = local.fetch() if isinstance(local, TensorOnDisk) else local
    if not has_values(local):
        return None
    if holds_tensors(local):
        return crc32(repr([digest(inner) for inner in inner_tensors(local)]).encode())
    local = local.view(torch.uint8) if local.dtype.itemsize == 1 else local
    offsets = range(0, local.numel(), max(-(-local.numel() // _SAMPLES), 1))
    if local.is_contiguous():  # one strided view, which is empty if there are no values
        sample = local.view(-1)[:: offsets.step].contiguous()
    else:
        sizes = list(zip(contiguous_strides(local.shape), local.shape, strict=True))
        sample = torch.stack([local[tuple(at // stride % size for stride, size in sizes)] for at in offsets])
    return crc32(bytes(sample.view(torch.uint8).tolist()))


@torch.no_grad()
def full_copy(tensor: DTensor) -> Tensor:
    """Return the full values of `tensor`, in new memory. This is a collective if the tensor is sharded.

    For a tensor subclass that only wraps its values, return the values. For a class that encodes values, return the
    result of `full_tensor()`.
    """
    if holds_tensors(tensor._local_tensor):
        values = plain_values(tensor._local_tensor)
        return tensor.full_tensor() if values is None else full_copy(dtensor_like(values, tensor))
    gathered, placements = tensor, list(tensor.placements)
    if tensor.dtype.itemsize == 1:  # gloo does not support 8-bit floats
        local = tensor._local_tensor.view(torch.uint8)
        gathered = make_dtensor(local, tensor.device_mesh, tensor.placements, tuple(tensor.shape))
    for axis in range(1, len(placements))[::-1]:  # one after the other, or torch warns that it cannot do all at once
        placements[axis] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    whole = gathered.full_tensor().view(tensor.dtype)
    own = whole.untyped_storage()._cdata != tensor._local_tensor.untyped_storage()._cdata
    return whole if own else whole.clone()
