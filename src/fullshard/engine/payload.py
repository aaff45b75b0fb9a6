"""Tensor subclasses that define how their shards are gathered and used. The gathered tensors are their payloads.

The protocol is torch's. A class of low-precision weights has two methods:

    fsdp_pre_all_gather(mesh, ...)             the tensors to send of this rank's shard, and metadata that is not sent
    fsdp_post_all_gather(gathered, metadata,   the tensor for modules, made of those tensors gathered along their first
        param_dtype, *, out)                   dims; and the tensors that own its memory

So float8 weights are cast before they are sent, and are operands of a matrix product after the all-gather. Weights
stored in 4 bits are sent in 4 bits. A shard is a tensor of the same class, split by the operations of the class.

[Note: equal rows]
All ranks send the same number of bytes. So `fsdp_pre_all_gather` is called on a shard with as many rows as the first
rank's. A shorter shard is padded with rows of zeros. Padding rows are removed before `fsdp_post_all_gather`. Memory for
all rows is kept, and the shard consists of its first rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard._compat import holds_tensors, keeping_versions, plain_values
from fullshard.comm.mesh import Axes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import Pool, Slot, typed_view
from fullshard.engine.group_buffers import ShardStorage, UnshardedBuffer
from fullshard.engine.group_plan import GroupPlan, PayloadPlan, message_rule
from fullshard.engine.pack import Pack
from fullshard.engine.sharded_param import ShardedParam, Source
from fullshard.errors import ConfigError, StateError
from fullshard.layout.group_layout import ParamLayout, lay_out, region_numel
from fullshard.layout.offsets import contiguous_strides
from fullshard.layout.shard_spec import ShardSpec
from fullshard.policy.precision import DtypeContract

_BYTES = DtypeContract(stored=torch.uint8, compute=torch.uint8, reduce=torch.uint8)


class PayloadParam(ShardedParam):
    """A parameter whose class defines how it is gathered. Before its first use, the unsharded form is a placeholder."""

    def __init__(self, source: Source, param_layout: ParamLayout, plan: GroupPlan) -> None:
        self._spec = param_layout.spec
        self._mesh = _shard_mesh(plan.axes)
        self._policy = plan.options.precision
        self._param_dtype = plan.contract.compute
        padded = _padded_part(source.fqn, source.local, self._spec, plan.rank, plan.memory.device)
        super().__init__(source, param_layout, self._hold(padded, plan.rank), plan)
        self._metadata: Any = None
        self._inner: Sequence[Tensor] = ()
        self._has_form = False
        if not source.param.is_meta:
            self.note_initial_values(source.local)

    def _hold(self, padded: Tensor, rank: int) -> Tensor:
        """Store `padded`, which has the same number of rows on every rank, and return the shard in it."""
        self._padded = padded
        self._own = {name for name, value in vars(padded).items() if isinstance(value, Tensor)}
        rows = len(self._spec.span(rank))
        self._shard = padded if rows == len(padded) else padded.narrow(0, 0, rows)
        return self._shard

    @property
    def holds_its_shard(self) -> bool:
        """True if the sharded parameter still has its original shard."""
        return self.local is self._shard

    def renew(self, plan: GroupPlan) -> None:
        """Adopt the shard that the sharded parameter holds now, and reset the unsharded form."""
        local = self.local
        rows = self._spec.shard_shape(0)[0]
        if local.device != plan.memory.device:
            local = local.to(plan.memory.device)
        if len(local) != rows:
            padded = local.new_zeros((rows, *local.shape[1:]))
            padded.narrow(0, 0, len(local)).copy_(local)
            local = padded
        self.local = self._hold(local, plan.rank)
        self._param_dtype = plan.contract.compute
        self._inner, self._has_form = (), False
        self.renew_unsharded(plan.contract.compute, plan.device)

    def write(self, whole: Tensor) -> None:
        values = plain_values(self.local)
        wholes = plain_values(whole) if holds_tensors(whole) else whole
        assert values is not None, "checked by the caller"
        assert wholes is not None, "of one class"
        values.copy_(self.take_shard(wholes))
        torch.autograd.graph.increment_version(self.sharded)

    # -- the protocol -------------------------------------------------------------------------------------------------

    def payloads(self, device: torch.device) -> list[Tensor]:
        """Return the tensors that this rank sends, of the same size on all ranks. The class may run a collective."""
        if self._padded is not self._shard:  # copy attributes that the class has set on the shard, such as a scale
            kept = {name: value for name, value in vars(self._shard).items() if name not in self._own}
            vars(self._padded).update(kept)
        shard = self._padded if self._padded.device == device else self._padded.to(device, non_blocking=True)
        hook: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        shape = self._spec.shape
        more = (torch.Size(shape), contiguous_strides(shape), self.owners[0].module, self._policy)
        payloads, self._metadata = hook(self._mesh, *(more if len(signature(hook).parameters) == 5 else ()))
        payloads = list(payloads)
        uneven = [p for p in payloads if self._spec.padding and (not p.ndim or len(p) != len(shard))]
        if uneven:
            raise ConfigError(
                f"{self.fqn} is a {type(shard).__name__} of {shape[0]} rows, which {self._spec.world} ranks cannot "
                f"share evenly, and its all-gather input has shape {tuple(uneven[0].shape)} for {len(shard)} rows, so "
                "padding cannot be removed. Choose a number of ranks that divides the rows, or list it in "
                "ignored_params."
            )
        return payloads

    @torch.no_grad()
    def receive(self, gathered: Sequence[Tensor]) -> bool:
        """Create the unsharded form from the gathered tensors. Return True if it is a new object."""
        rows = self._spec.shape[0]
        whole = tuple(item[:rows] if self._spec.padding else item for item in gathered)
        hook: Any = self._padded.fsdp_post_all_gather  # type: ignore[attr-defined]
        metadata, self._metadata = self._metadata, None
        if self._has_form:
            for tensor in self._inner:
                accelerator_for(tensor.device).resize(tensor.untyped_storage(), _nbytes(tensor))
            with keeping_versions([*self._inner, self.unsharded]):
                hook(whole, metadata, self._param_dtype, out=self.unsharded)
            return False
        form, inner = hook(whole, metadata, self._param_dtype)
        if tuple(form.shape) != self._spec.shape:
            raise ConfigError(
                f"{self.fqn}: fsdp_post_all_gather of {type(self._padded).__name__} returned a {type(form).__name__} "
                f"of shape {tuple(form.shape)}, but the parameter has shape {self._spec.shape}. It must build the "
                "full parameter from the gathered tensors."
            )
        given = {tensor.untyped_storage()._cdata for tensor in gathered}
        self._inner = [item for item in inner if item.untyped_storage()._cdata not in given]
        self._has_form = True
        self.replace_unsharded(form)
        return True

    def release(self) -> None:
        """Free the memory that the class has allocated for the unsharded form."""
        for tensor in self._inner:
            accelerator_for(tensor.device).resize(tensor.untyped_storage(), 0)

    @property
    def inner_nbytes(self) -> int:
        """The bytes that the class has allocated for the unsharded form."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._inner)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of the storage of a contiguous tensor, up to the end of the tensor."""
    return int(tensor.storage_offset() + tensor.numel()) * tensor.itemsize


def _shard_mesh(axes: Axes) -> DeviceMesh:
    """Return the 1-D mesh of the shard axis, which the subclasses expect."""
    if axes.mesh.ndim == 1:
        return axes.mesh
    names = axes.mesh.mesh_dim_names
    if names is None:
        return DeviceMesh.from_group(axes.shard_group, axes.mesh.device_type)
    return axes.mesh[names[-1]]


@torch.no_grad()
def _padded_part(fqn: str, whole: Tensor, spec: ShardSpec, rank: int, device: torch.device) -> Tensor:
    """Return this rank's rows of `whole` in its class, padded with zeros to the rows of the first rank."""
    try:
        parts = torch.chunk(whole, spec.world)
        found = [len(part) for part in parts]
        wanted = [len(spec.span(index)) for index in range(spec.world) if len(spec.span(index))]
        if found != wanted:
            raise ValueError(f"shards have {found} rows instead of {wanted}")
        shape = spec.shard_shape(0)
        padded = (parts[0] if whole.device == device else parts[0].to(device)).new_zeros(shape)
        if rank < len(parts):
            part = parts[rank].to(device) if parts[rank].device != device else parts[rank]
            (padded if part.shape == padded.shape else padded.narrow(0, 0, len(part))).copy_(part)
    except Exception as error:
        kind = type(whole).__name__
        raise ConfigError(
            f"{fqn} is a {kind} of shape {tuple(whole.shape)}, which cannot be sharded by rows over {spec.world} "
            f"ranks: {str(error) or type(error).__name__}. Choose a number of ranks that fits its blocks, or list it "
            "in ignored_params, or shard the model before converting its parameters."
        ) from error
    return padded


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The shape and the dtype of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, payload: Tensor) -> _Form:
        return cls(tuple(payload.shape), payload.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the payload on one rank."""
        return int(prod(self.shape)) * self.dtype.itemsize

    def of_all(self, world: int) -> tuple[int, ...]:
        """Return the shape of the payloads of `world` ranks, concatenated along the first dim."""
        return (world * self.shape[0], *self.shape[1:]) if self.shape else (world,)


class PayloadStorage(ShardStorage):
    """The shards of tensor subclasses. Each class allocates its memory."""

    def __init__(self, plan: PayloadPlan, params: Sequence[PayloadParam]) -> None:
        super().__init__(plan)
        self.shards = [param.local for param in params]
        self._params = params
        self._payloads: list[Tensor] = []
        self.buffer: PayloadBuffer | None = None

    def prepare(self) -> PayloadBuffer:
        """Get the payloads of all parameters, and return the allocated buffer to receive them in.

        Raises:
            ConfigError: a payload cannot be sent.
            StateError: payloads have other shapes or dtypes than before.
        """
        sent = [param.payloads(self.plan.device) for param in self._params]
        forms = [[_Form.of(payload) for payload in payloads] for payloads in sent]
        if self.buffer is None:
            assert isinstance(self.plan, PayloadPlan)
            self.buffer = PayloadBuffer(self.plan, forms)
        odd = [i for i, form in enumerate(forms) if form != self.buffer.forms[i]]
        if odd:
            param = self._params[odd[0]]
            raise StateError(
                f"{param.fqn}: fsdp_pre_all_gather of {type(param.local).__name__} returned {forms[odd[0]]}, but "
                f"{self.buffer.forms[odd[0]]} before. The all-gather inputs of a class must keep their shapes and "
                "dtypes."
            )
        self._payloads = [
            payload.detach().contiguous().view(-1).view(torch.uint8) for payloads in sent for payload in payloads
        ]
        self.buffer.allocate()
        return self.buffer

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`. Payloads are sent from their own memory, and small ones in the pack."""
        assert self.buffer is not None, "prepared before it is sent"
        payloads, layout, taken = self._payloads, self.buffer.layout, None
        self._payloads = []
        parts = [payload for payload, param in zip(payloads, layout.params, strict=True) if param.in_place]
        if layout.pack_numel:
            taken = scratch.take(layout.pack_numel, torch.uint8)
            for i in layout.packed:
                part = layout.params[i].part
                taken[part.start - layout.pack_offset : part.stop - layout.pack_offset].copy_(payloads[i])
            parts.append(taken)
        return parts, taken


class _SeparateBuffer(UnshardedBuffer):
    """Like `UnshardedBuffer`, but with a storage for each payload, and one for the message of the pack.

    A class may require that the tensors that it combines start at the same offset in their storages.
    """

    def __init__(self, plan: GroupPlan, pack: Pack, storages: Sequence[torch.UntypedStorage]) -> None:
        layout, device = plan.layout, plan.device
        *own, last = (partial(typed_view, storage, torch.uint8, 0, device=device) for storage in storages)
        self.params = [view(param.spec.shape) for view, param in zip(own, layout.params, strict=True)]
        placed = (pair for pair in zip(own, layout.params, strict=True) if pair[1].in_place)
        self.receive = [view((region_numel(param.spec, True),)) for view, param in placed]
        message = last((layout.world * layout.pack_numel,))
        if layout.pack_numel:
            self.receive.append(message)
        self.unpack = pack.unpacking(self.params, message.view(layout.world, layout.pack_numel)).copy


class PayloadBuffer:
    """Memory for the payloads of all ranks, separate from that of the unit.

    Args:
        plan: The plan of the parameters.
        forms: The forms of the payloads of each parameter.
    """

    def __init__(self, plan: PayloadPlan, forms: Sequence[Sequence[_Form]]) -> None:
        self.forms = forms
        flat = [form for of_param in forms for form in of_param]
        world = plan.axes.shard_world
        shapes = [(world * form.nbytes,) for form in flat]
        self.layout = lay_out(shapes, world, 1, [0] * len(shapes), message_rule(plan.axes))
        self._plan = GroupPlan(self.layout, _BYTES, plan.options, plan.axes, plan.device, plan.memory)
        sizes = [region_numel(param.spec, param.in_place) for param in self.layout.params]
        self._nbytes = [*sizes, world * self.layout.pack_numel]
        self._slots = [Slot(plan.device) for _ in self._nbytes]
        self._world = world
        self._unsharded: UnshardedBuffer | None = None
        self.gathered: list[list[Tensor]] = []

    def allocate(self) -> None:
        """Allocate the memory. The tensors stay the same objects."""
        stream = accelerator_for(self._plan.device).streams.gather
        for slot, nbytes in zip(self._slots, self._nbytes, strict=True):
            slot.allocate(self, nbytes, stream)
        if self._unsharded is None:
            storages = [slot.storage for slot in self._slots]
            self._unsharded = _SeparateBuffer(self._plan, Pack(self.layout, self._plan.rank), storages)
            remaining = iter(storages)
            self.gathered = [[self._view(form, next(remaining)) for form in of_param] for of_param in self.forms]

    def _view(self, form: _Form, storage: torch.UntypedStorage) -> Tensor:
        return typed_view(storage, form.dtype, 0, form.of_all(self._world), self._plan.device)

    def free(self) -> None:
        """Free the memory."""
        for slot in self._slots:
            if slot.occupant is self:
                slot.free()

    @property
    def unsharded(self) -> UnshardedBuffer:
        """The buffer that gathers use, with dtype uint8."""
        assert self._unsharded is not None, "allocated before it is used"
        return self._unsharded

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer when it is allocated."""
        return sum(self._nbytes)

    @property
    def present_nbytes(self) -> int:
        """The bytes of the buffer that are allocated now."""
        return self.nbytes if self._slots[0].occupant is self else 0
