"""A section: the parameters of a unit that share a dtype, and the buffers that their values travel through.

At rest a parameter's values have a *home*. Which one follows from the placements and the dtypes:

    parameters sharded, or cast for compute    the shard buffer, one stretch of memory for the section
    whole between steps, optimizer sharded     this rank's rows of the whole buffer itself; packed ones as above
    optimizer whole                            the whole buffer, or a whole master copy if compute is cast

A gather reads homes and fills the whole buffer; a reduction reads gradients where autograd left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard._compat import dtensor_like, holders, storage_holders
from fullshard.comm.codec import codec_named
from fullshard.comm.collectives import Collectives, Pending, collectives_for
from fullshard.comm.encoded import EncodedGather, EncodedSums, Residuals, TermName
from fullshard.comm.mesh import Axes, own_part, subgroup
from fullshard.comm.two_level import TwoLevel
from fullshard.device.lanes import is_capturing
from fullshard.device.memory import Pool, typed_view
from fullshard.engine.sharded_param import ShardedParam, Source
from fullshard.layout.group_layout import Place, SectionLayout, lay_out
from fullshard.layout.offsets import contiguous_strides
from fullshard.layout.shard_spec import Cut
from fullshard.policy.precision import DtypeContract
from fullshard.policy.strategy import Placement, Placements
from fullshard.tape.recorder import Origin

__all__ = ["Home", "Section", "Wires"]

_TAG_SETS = 1024  # so many ways to lack gradients are told apart


@dataclass(frozen=True)
class Wires:
    """The collectives of one unit's axes, and the scratch memory they may use."""

    shard: Collectives
    replicate: Collectives | None
    two_level: TwoLevel | None  # the shard axis once more, where states are grouped
    scratch: Pool

    @classmethod
    def along(cls, axes: Axes, device: torch.device, scratch: Pool) -> Wires:
        """The wires along `axes` for tensors on `device`."""
        replicas = axes.replicate_group
        two_level = None
        if axes.group_size is not None:
            two_level = TwoLevel(*(collectives_for(subgroup(ranks), device) for ranks in axes.group_ranks))
        return cls(
            collectives_for(axes.shard_group, device),
            None if replicas is None else collectives_for(replicas, device),
            two_level,
            scratch,
        )


@dataclass(frozen=True)
class Home:
    """Where the shards of a unit live: the device, and whether it is page-locked memory."""

    device: torch.device
    pinned: bool = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D buffer. Zeros, so that padding is never noise."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)


class Section:
    """The parameters of one dtype in a unit, and their buffers.

    Args:
        sources: the parameters as the user made them; each becomes a `ShardedParam`.
        axes: the mesh axes to cut and replicate over.
        placements: what is whole and what is sharded.
        contract: the dtypes.
        wires: the collectives.
        device: where compute runs.
        home: where shards live.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        axes: Axes,
        placements: Placements,
        contract: DtypeContract,
        wires: Wires,
        device: torch.device,
        home: Home,
    ) -> None:
        self.contract = contract
        self.rank = axes.shard_rank
        self._settle(
            lay_out([s.moved.shape for s in sources], axes.shard_world, contract.itemsize, [s.dim for s in sources])
        )
        self.device = device
        self.home = home
        self.cuts_optimizer = placements.optimizer is Placement.SHARDED
        self.keeps_whole = placements.parameters is Placement.WHOLE
        self.keeps_group = placements.parameters is Placement.GROUPED
        self.groups_gradients = placements.gradients is Placement.GROUPED
        self._gathers_by_groups = self.keeps_group or placements.parameters_in_step is Placement.GROUPED
        self.axes = axes
        self.wires = wires
        messages = len(self.layout.in_place) + 1
        self._gather_tag = wires.shard.reserve_tags(messages)
        self._reduce_tag = wires.shard.reserve_tags(2 * messages * _TAG_SETS)
        self._messages = messages
        self.replicate_tag = wires.replicate.reserve_tags(2 * messages) if wires.replicate else 0
        no_tags = (0, 0)
        self._group_gather_tags = wires.two_level.reserve_tags(messages) if wires.two_level else no_tags
        self.group_reduce_tags = wires.two_level.reserve_tags(messages) if wires.two_level else no_tags
        self.params: list[ShardedParam] = []
        self._wholes: list[Tensor] = []  # where each whole parameter lies, once there is memory for them
        self._masters = torch.empty(0)
        self._homes: list[int] = []  # where each shard was put
        self._sent: Tensor | None = None  # shards in the compute dtype and on the compute device, while they travel
        self._gathered_version = -1
        self._group: Tensor | None = None  # the group parts, one after another as the shards are
        self._group_version = -1
        self._may_have_stepped = False
        self._written_by_graphs: list[Tensor | None] = []
        self._is_replayed = False  # a CUDA graph has gradients of it: steps are taken that nothing here hears of
        self.grads: Tensor | None = None  # the optimizer's gradients, one after another as the shards are
        self._grad_shards: list[DTensor] = []  # as it sees them, one a parameter
        self._grad_holders: list[Any] = []  # what `holders` says of each while nobody else has it
        self._grads_own_holders: Any = None  # what `storage_holders` says of `grads` then
        self._held: dict[int, Tensor] = {}  # whole gradients of microbatches that were not reduced, in the reduce dtype
        self.partial: dict[int, Tensor] = {}  # sums over the shard axis, or the group, that miss the other level
        self._residuals: dict[Collectives, Residuals] = {}  # what encoded gradients have lacked, by the wire
        self._sources = list(sources)

    def _settle(self, layout: SectionLayout) -> None:
        """Lie so from now on. What every step needs of it is computed once."""
        self.layout = layout
        # Bytes of the whole buffer, and of the pack's place beside it.
        self.whole_nbytes = (layout.whole_numel + layout.world * layout.pack_numel) * self.contract.compute.itemsize
        shapes = [place.cut.shard_shape(self.rank) for place in layout.places]
        starts = [place.shard_offset for place in layout.places]
        self._own_slices = [slice(start, start + prod(shape)) for start, shape in zip(starts, shapes, strict=True)]
        self._own_strides = [
            (shape, contiguous_strides(shape), start) for shape, start in zip(shapes, starts, strict=True)
        ]
        self._gaps: dict[int, Tensor] = {}  # columns of zeros for the pack, by their number
        self._columns_to_pack = list(_columns_to_pack(layout))

    # -- buffers ------------------------------------------------------------------------------------------------------

    @property
    def casts(self) -> bool:
        """Whether compute sees other numbers than rest: of another dtype, or as they come from the wire."""
        return self.contract.stored != self.contract.compute or self.encodes_gathers

    @property
    def encodes_gathers(self) -> bool:
        """Whether whole parameters are what comes of encoded ones, this rank's own among them."""
        return self.contract.gather_wire is not None and self.cuts_optimizer and self.layout.world > 1

    @property
    def lives_in_whole(self) -> bool:
        """Whether the whole buffer itself is where parameters rest."""
        return self.keeps_whole and not self.casts and self.home.device == self.device

    @property
    def is_at_home(self) -> bool:
        """Whether every sharded parameter still holds its shard where it was put."""
        return [param.local.data_ptr() for param in self.params] == self._homes

    @property
    def rest_nbytes(self) -> int:
        """Bytes of the master buffer: what this rank keeps of the section beyond the whole buffer."""
        return self._masters.nbytes

    def bind(self, storage: torch.UntypedStorage, byte_offset: int) -> None:
        """Use the stretch of `storage` from `byte_offset` on as the whole buffer."""
        layout, dtype = self.layout, self.contract.compute
        self.whole = typed_view(storage, dtype, byte_offset, (layout.whole_numel,))
        pack_offset = byte_offset + layout.whole_numel * dtype.itemsize
        self._pack_wire = typed_view(storage, dtype, pack_offset, (layout.world * layout.pack_numel,))
        self._gather_places = [self.whole[place.region] for place in layout.in_place]
        if layout.pack_numel:
            self._gather_places.append(self._pack_wire)
        shapes = [place.cut.shape for place in layout.places]
        offsets = [byte_offset + place.whole_offset * dtype.itemsize for place in layout.places]
        self._wholes = wholes = [typed_view(storage, dtype, o, s) for o, s in zip(offsets, shapes, strict=True)]
        for param, whole in zip(self.params, wholes, strict=bool(self.params)):
            param.lie_in(whole)
        wire = self._pack_wire.view(layout.world, layout.pack_numel)
        unpacked = [
            pair
            for place, whole in zip(layout.places, wholes, strict=True)
            if not place.in_place
            for pair in self._row_pairs(place.cut, whole, self._columns(place, wire))
        ]
        self._unpacked = [to for to, _ in unpacked], [sent for _, sent in unpacked]

    def unbind(self) -> None:
        """Drop all views of the storage."""
        nothing = torch.empty(0, dtype=self.contract.compute, device=self.device)
        self.whole = self._pack_wire = nothing
        self._gather_places, self._wholes, self._unpacked = [], [], ([], [])
        for param in self.params:
            param.lie_in(nothing)

    def make_params(self) -> None:
        """Cut the sources: fill their homes with this rank's values and make both forms.

        Call after `bind` if parameters live in the whole buffer.
        """
        self._masters = self.home.zeros(self._masters_numel(), self.contract.stored)
        for source, place in zip(self._sources, self.layout.places, strict=True):
            local = self._home_view(place)
            param = ShardedParam(
                source,
                place,
                local,
                axes=self.axes,
                sharded=self.cuts_optimizer,
                compute=self.contract.compute,
                device=self.device,
            )
            if not source.param.is_meta:
                placements = self.axes.tensor_placements(place.cut, sharded=self.cuts_optimizer)
                local.copy_(own_part(source.moved, self.axes.mesh, placements))
            self.params.append(param)
        for param, whole in zip(self.params, self._wholes, strict=bool(self._wholes)):
            param.lie_in(whole)
        self._homes = [param.local.data_ptr() for param in self.params]
        self._sources = []

    def change(self, contract: DtypeContract, home: Home, device: torch.device) -> list[Tensor]:
        """Prepare for other dtypes or devices, after `Module.to` and its like. What `rehome` needs, once bound anew."""
        shards = [param.local for param in self.params]
        if (contract.compute, device) != (self.contract.compute, self.device):
            for param in self.params:
                param.renew_unsharded(contract.compute, device)
        self.contract, self.home, self.device = contract, home, device
        cuts = [param.place.cut for param in self.params]
        dims = [cut.dim for cut in cuts]
        self._settle(lay_out([cut.shape for cut in cuts], self.layout.world, contract.itemsize, dims))
        for param, place in zip(self.params, self.layout.places, strict=True):
            param.place = place
        self.drop_grad_shards()
        self._residuals.clear()
        self.forget()
        self.release_group()
        return shards

    def rehome(self, shards: Sequence[Tensor]) -> None:
        """Move `shards`, one a parameter, into new homes, and let the sharded parameters hold them there."""
        self._masters = self.home.zeros(self._masters_numel(), self.contract.stored)
        for param, shard in zip(self.params, shards, strict=True):
            view = self._home_view(param.place)
            view.copy_(shard)
            param.local = view
        self._homes = [param.local.data_ptr() for param in self.params]

    def _masters_numel(self) -> int:
        if not self.cuts_optimizer:
            return 0 if self.lives_in_whole else self.layout.whole_numel
        return self.layout.pack_numel if self.lives_in_whole else self.layout.shard_numel

    def _home_view(self, place: Place) -> Tensor:
        """The place where this rank's values of one parameter rest, in their shape."""
        cut = place.cut
        if not self.cuts_optimizer:
            buffer = self.whole if self.lives_in_whole else self._masters
            return buffer[place.whole_offset : place.whole_offset + cut.numel].view(cut.shape)
        shape = cut.shard_shape(self.rank)
        if not self.lives_in_whole:
            start = place.shard_offset
            return self._masters[start : start + prod(shape)].view(shape)
        if not place.in_place:
            start = place.shard_offset - self.layout.pack_offset
            return self._masters[start : start + prod(shape)].view(shape)
        start = place.whole_offset + self.rank * cut.part_numel
        return self.whole[start : start + prod(shape)].view(shape)

    def _columns(self, place: Place, wire: Tensor) -> Tensor:
        """The columns of the pack, which has a row a rank, that hold one parameter."""
        start = place.shard_offset - self.layout.pack_offset
        return wire[:, start : start + place.cut.part_numel]

    def _row_pairs(self, cut: Cut, whole: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (stretch of the parameter, stretch of `rows`) that hold the same values; `rows` has one a rank."""
        if cut.dim is None:
            yield whole.view(1, -1), rows[self.rank : self.rank + 1]
        elif cut.part_numel:
            size, part = cut.shape[cut.dim], len(cut.span(0))
            before, after = prod(cut.shape[: cut.dim]), prod(cut.shape[cut.dim + 1 :])
            spread = whole.view(before, size, after)
            full = size // part  # so many ranks have a part of the same size; one may have the rest
            equal = spread[:, : full * part].unflatten(1, (full, part)).transpose(0, 1)
            yield equal, rows[:full].unflatten(1, (before, part, after))
            rest = spread[:, full * part :]
            if rest.numel():
                yield rest, rows[full, : rest.numel()].view(rest.shape)

    # -- gather -------------------------------------------------------------------------------------------------------

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffer, having been kept, still has every rank's present values."""
        return self._gathered_version >= 0 and self._gathered_version == self._version()

    def _version(self) -> int:
        return sum([param.sharded._version for param in self.params])

    def forget(self) -> None:
        """Gather anew when whole parameters are needed next."""
        self._gathered_version = -1

    def notice_step(self) -> bool:
        """Gather anew if an optimizer may have stepped: there were gradients. Fused ones leave versions as they are.

        Returns:
            Whether there are gradients still.
        """
        if self._may_have_stepped or self._is_replayed or is_capturing(self.device):
            self._may_have_stepped = any(param.has_grad for param in self.params)
            self.forget()
            self._group_version = -1
        return self._may_have_stepped or self.is_partial

    @property
    def gathers_from_all(self) -> bool:
        """Whether a gather fills the whole buffer with every rank's part in one go, and as it is."""
        return self.cuts_optimizer and not (self._gathers_by_groups or self.encodes_gathers)

    def start_gather(self, origin: Origin, *, in_common: bool) -> Pending:
        """Begin to fill the whole buffer from every rank's home. The sections of a unit gather side by side.

        Args:
            origin: for the record.
            in_common: the whole buffer is one that all ranks of the shard axis fill and read.
        """
        if not self.cuts_optimizer:
            if not self.lives_in_whole:
                self.whole.copy_(self._masters, non_blocking=True)
            return Pending()
        if self._gathers_by_groups:
            return self._start_gather_by_groups(origin)
        parts = self._parts_to_send()
        if self.encodes_gathers:
            gather = self._encoded_over(self.wires.shard)
            return gather.all_gather(self._gather_places, parts, tag=self._gather_tag, origin=origin)
        return self.wires.shard.all_gather(
            self._gather_places, parts, tag=self._gather_tag, origin=origin, in_common=in_common
        )

    def _start_gather_by_groups(self, origin: Origin) -> Pending:
        two_level = self.wires.two_level
        assert two_level is not None
        is_true = self._group is not None and self._group_version == self._version()
        if self._group is None:
            self._group = self.wires.scratch.take(two_level.groups * self.layout.shard_numel, self.contract.compute)
        group_parts = self._group_parts(self._group)
        options: Any = {"tags": self._group_gather_tags, "origin": origin}
        if is_true:
            return two_level.gather_within(self._gather_places, group_parts, **options)
        self._group_version = self._version()
        across = self._encoded_over(two_level.across) if self.encodes_gathers else two_level.across
        return two_level.all_gather(self._gather_places, group_parts, self._parts_to_send(), across=across, **options)

    def _encoded_over(self, wire: Collectives) -> EncodedGather:
        assert self.contract.gather_wire is not None
        return EncodedGather(wire, codec_named(self.contract.gather_wire), self.wires.scratch)

    def _group_parts(self, group: Tensor) -> list[Tensor]:
        slices = [place.part for place in self.layout.in_place] + ([self.layout.pack] if self.layout.pack_numel else [])
        return [self.group_part(part, group) for part in slices]

    def group_part(self, part: slice, group: Tensor) -> Tensor:
        """The group part in `group` of what lies in `part` of a shard buffer, each group's end to end."""
        groups = group.numel() // self.layout.shard_numel
        return group[groups * part.start : groups * part.stop]

    @property
    def place_ranks(self) -> range:
        """The ranks of the shard axis that have this one's place in their groups."""
        size = self.axes.group_size
        assert size is not None
        return range(self.rank % size, self.layout.world, size)

    @property
    def group_nbytes(self) -> int:
        """Bytes of the group parts that are in memory."""
        return 0 if self._group is None else self._group.nbytes

    def release_group(self) -> None:
        """Give the group parts' memory back."""
        if self._group is not None:
            self.wires.scratch.give(self._group)
            self._group = None

    def finish_gather(self) -> None:
        """Put what came in the pack where it belongs. Call when the gather has ended."""
        if self._sent is not None:
            self.wires.scratch.give(self._sent)
            self._sent = None
        wholes, sent = self._unpacked
        if self.cuts_optimizer and wholes:
            with torch.no_grad():
                torch._foreach_copy_(wholes, sent)
        self._gathered_version = self._version()

    def _parts_to_send(self) -> list[Tensor]:
        layout = self.layout
        if self.lives_in_whole:
            parts = [place.view(layout.world, -1)[self.rank] for place in self._gather_places[: len(layout.in_place)]]
            return [*parts, self._masters] if layout.pack_numel else parts
        shards = self._masters
        sent = self.contract.stored if self.encodes_gathers else self.contract.compute  # encoding casts, too
        if sent != self.contract.stored or self.home.device != self.device:
            shards = self._sent = self.wires.scratch.take(layout.shard_numel, sent)
            shards.copy_(self._masters, non_blocking=True)
        parts = [shards[place.part] for place in layout.in_place]
        return [*parts, shards[layout.pack]] if layout.pack_numel else parts

    # -- gradients ----------------------------------------------------------------------------------------------------

    def pack(self, wire: Tensor, grads: Mapping[int, Tensor]) -> None:
        """Write the gradients of packed parameters to `wire`, each rank's parts side by side: the one copy, of little.

        Args:
            wire: a row a rank. Padding becomes zeros.
            grads: whole gradients by index of the parameter; what is missing becomes zeros.
        """
        columns, odd = [], []
        for i, width in self._columns_to_pack:
            grad = grads.get(i)
            if grad is None:
                columns.append(self._gap(width, wire) if i < 0 else wire.new_zeros(wire.shape[0], width))
                continue
            cut = self.layout.places[i].cut
            if cut.dim == 0:
                columns.append(grad)
            elif cut.dim is None:
                columns.append(grad.view(1, -1).expand(self.layout.world, -1).contiguous())
            else:
                columns.append(wire.new_zeros(wire.shape[0], width))
                odd.append(i)
        torch._chunk_cat(columns, 0, self.layout.world, out=wire)
        for i in odd:
            place = self.layout.places[i]
            for part, row in self._row_pairs(place.cut, grads[i], self._columns(place, wire)):
                row.copy_(part)

    def _gap(self, width: int, wire: Tensor) -> Tensor:
        """So many columns of zeros, for `wire`. Not expanded: a GPU has one kernel for columns that are contiguous."""
        if width not in self._gaps:
            self._gaps[width] = wire.new_zeros(wire.shape[0], width)
        return self._gaps[width]

    def hold_grads(self) -> None:
        """Keep the whole gradients of this microbatch for a later reduction, in the dtype they will be summed in."""
        if self.contract.reduce == self.contract.compute:
            return  # autograd goes on adding to them where they are
        for i, grad in self.take_grads().items():
            self._held[i] = grad

    def take_grads(self) -> dict[int, Tensor]:
        """The whole gradients, by index of the parameter, that this microbatch and those held back have left."""
        grads, reduce = {}, self.contract.reduce
        for i, param in enumerate(self.params):
            grad = param.take_grad()
            held = self._held.pop(i, None)
            if grad is not None:
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                if grad.dtype is not reduce:
                    grad = grad.to(reduce)
                if not grad.is_contiguous():
                    grad = grad.contiguous()
            if held is not None:
                grad = held if grad is None else held.add_(grad)
            if grad is not None:
                grads[i] = grad
        return grads

    def reduce_tag(self, note: str) -> int:
        """The first tag of a reduction. Others are used by one from which gradients are missing, as `note` says.

        Ranks with gradients of different parameters send messages of different sizes, and gloo ends a process that is
        sent more than it expects.
        """
        tag_set = 1 + crc32(note.encode()) % (_TAG_SETS - 1) if note else 0
        return self._reduce_tag + tag_set * 2 * self._messages

    def missing(self, grads: dict[int, Tensor]) -> str:
        """Which parameters that are trained have no gradient in `grads`: nothing, if all have."""
        if len(grads) == len(self.params):
            return ""
        names = [p.fqn for i, p in enumerate(self.params) if p.unsharded.requires_grad and i not in grads]
        return f"without {', '.join(names)}" if names else ""

    def fill_missing(self, grads: dict[int, Tensor]) -> None:
        """Add zeros for every parameter that is trained but has no gradient in `grads`."""
        for i, param in enumerate(self.params):
            if param.unsharded.requires_grad and i not in grads:
                grads[i] = torch.zeros(param.place.cut.shape, dtype=self.contract.reduce, device=self.device)

    def sums_over(self, wire: Collectives, names: Callable[[], Sequence[TermName]]) -> Collectives | EncodedSums:
        """What adds up gradients over `wire`: it itself, or what encodes them.

        Args:
            wire: the ranks that add up.
            names: what tells encoded ones apart, see `EncodedSums`.
        """
        if self.contract.reduce_wire is None or wire.world == 1:
            return wire
        residuals = self._residuals.setdefault(wire, {})
        return EncodedSums(wire, codec_named(self.contract.reduce_wire), residuals, names(), self.wires.scratch)

    @property
    def residual_nbytes(self) -> int:
        """Bytes that are kept of what encoded gradients have lacked."""
        return sum(kept.nbytes for of_wire in self._residuals.values() for _, kept in of_wire.values())

    def drop_grads(self) -> None:
        """Forget the whole gradients that no reduction has taken."""
        self._held.clear()
        for param in self.params:
            param.unsharded.grad = None

    @property
    def holds_grads(self) -> bool:
        """Whether whole gradients are kept here for a later reduction."""
        return bool(self._held)

    @property
    def is_partial(self) -> bool:
        """Whether sums over the shard axis wait for the replicate axis."""
        return bool(self.partial)

    def expect_step(self) -> None:
        """Note that the optimizer has gradients to step with."""
        self._may_have_stepped = True
        if is_capturing(self.device):
            self._is_replayed = True
            self._written_by_graphs.append(self.grads)  # whenever they are replayed, so that nobody else may have it

    def new_grad_shards(self) -> Tensor:
        """A buffer for the gradient shards, in the stored dtype: last step's, unless somebody still refers to it."""
        grads = self.grads
        if grads is None or self._others_have_grads(grads):
            grads = self.grads = self.home.zeros(self.layout.shard_numel, self.contract.stored)
            shards = [self.shard_like(i, grads) for i in range(len(self.params))]
            self._grad_shards = [dtensor_like(s, p.dtensor) for s, p in zip(shards, self.params, strict=True)]
            del shards
            self._grad_holders = [holders(shard) for shard in self._grad_shards]
            self._grads_own_holders = storage_holders(grads)
        return grads

    def _others_have_grads(self, grads: Tensor) -> bool:
        return (
            storage_holders(grads) != self._grads_own_holders
            or [holders(shard) for shard in self._grad_shards] != self._grad_holders
        )

    def give_grad(self, i: int) -> None:
        """Let the optimizer see what lies in `grads` as the gradient of parameter `i`."""
        self.params[i].sharded.grad = self._grad_shards[i]

    def drop_grad_shards(self) -> None:
        """Have no buffer for the gradient shards any more."""
        self.grads = None
        self._grad_shards, self._grad_holders = [], []

    def shard_view(self, i: int, buffer: Tensor) -> Tensor:
        """This rank's stretch of a shard buffer for parameter `i`, 1-D, without padding."""
        return buffer[self._own_slices[i]]

    def shard_like(self, i: int, buffer: Tensor) -> Tensor:
        """This rank's stretch of a shard buffer for parameter `i`, in its shape. The buffer starts its storage."""
        return buffer.as_strided(*self._own_strides[i])


def _columns_to_pack(layout: SectionLayout) -> Iterator[tuple[int, int]]:
    """Index of the parameter, -1 for padding, and width of each stretch of columns in the pack, from left to right."""
    end = layout.pack_offset
    for i in layout.packed:
        place = layout.places[i]
        if place.shard_offset > end:
            yield -1, place.shard_offset - end
        if place.cut.part_numel:
            yield i, place.cut.part_numel
        end = place.part.stop
    if layout.shard_numel > end:
        yield -1, layout.shard_numel - end
