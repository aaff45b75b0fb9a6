"""One section's gradients on their way from whole, on every rank, to what the optimizer sees."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fullshard._compat import grad_hooks, shares_memory
from fullshard.comm.collectives import Pending
from fullshard.comm.encoded import TermName
from fullshard.engine.param_group import Section
from fullshard.engine.sharded_param import ShardedParam
from fullshard.tape.recorder import Origin

__all__ = ["Reduction", "start_reduction"]


def start_reduction(
    section: Section, grads: dict[int, Tensor], *, divisor: float, finishes: bool, origin: Origin
) -> Reduction:
    """Begin to sum `grads`, the whole gradients of `section` by index of the parameter. See `Reduction`."""
    kind = GroupedReduction if section.groups_gradients else Reduction
    return kind(section, grads, divisor=divisor, finishes=finishes, origin=origin)


class Reduction:
    """Sums over the shard axis, and then over the replicate axis if there is one.

    Args:
        section: whose gradients.
        grads: the whole gradients by index of the parameter, in the reduce dtype and contiguous.
        divisor: what the sum over all ranks is divided by.
        finishes: whether to take the second sum too, where there is one, or to keep the first for a later reduction.
        origin: for the record.
    """

    def __init__(
        self, section: Section, grads: dict[int, Tensor], *, divisor: float, finishes: bool, origin: Origin
    ) -> None:
        self._section = section
        self._grads = grads
        self._divisor = divisor
        note = section.missing(grads)
        self._origin = replace(origin, note=note) if note else origin
        self._tag = section.reduce_tag(note)
        self._finishes = finishes or not self._has_second_level
        self._scratch: list[Tensor] = []
        if self._finishes:
            for i in section.partial.keys() - grads.keys():
                shape = section.layout.places[i].cut.shape
                grads[i] = torch.zeros(shape, dtype=section.contract.reduce, device=section.device)
        self._summed = list(grads)
        self._in_place = [i for i in grads if section.layout.places[i].in_place]
        self._packs = section.layout.pack_numel > 0 and len(self._in_place) < len(grads)
        self._pending = self._start_scatter() if section.cuts_optimizer else self._start_all_reduce()

    @property
    def _has_second_level(self) -> bool:
        return self._section.wires.replicate is not None

    @property
    def has_come(self) -> bool:
        """Whether `complete()` is sure not to wait for other ranks."""
        return not self._has_second_level and self._pending.has_come()

    def complete(self) -> None:
        """Wait for the first sums, and take the second ones. Where work is queued, it is queued then, and not done."""
        self._pending.wait()
        if self._has_second_level and self._finishes:
            self._add_partial()
            self._finish_sums()

    def drop_wholes(self) -> None:
        """Forget whole gradients of which only a part is needed. Call when the sums are there."""
        if self._section.cuts_optimizer:
            self._grads.clear()

    def _finish_sums(self) -> None:
        section, replicas = self._section, self._section.wires.replicate
        assert replicas is not None
        cuts = section.cuts_optimizer
        over = section.sums_over(replicas, (lambda: [("shards", *sorted(self._summed))]) if cuts else self._whole_names)
        sums = [self._shards] if cuts else self._wholes
        over.all_reduce(sums, self._divisor, tag=section.replicate_tag, origin=self._origin).wait()

    def deliver(self) -> None:
        """Let the sharded parameters have their gradients, added to what they have already."""
        section = self._section
        if not self._finishes:
            self._keep_partial()
            return
        section.expect_step()
        if section.cuts_optimizer:
            self._deliver_shards()
        else:
            for i, grad in self._grads.items():
                param = section.params[i]
                _add_grad(param, grad.view(param.place.cut.shape).to(section.contract.stored))
        for scratch in self._scratch:
            section.wires.scratch.give(scratch)

    def tell(self) -> None:
        """Call what users have registered to be called when a gradient is complete, such as an optimizer's step."""
        section = self._section
        hooked = False
        for i in self._summed if self._finishes else ():
            param = section.params[i].sharded
            for hook in grad_hooks(param):
                hook(param)
                hooked = True
        if hooked and not any(param.has_grad for param in section.params):
            section.drop_grad_shards()  # they have been used, and those of other units are to have that memory

    # -- optimizer sharded: reduce-scatter ----------------------------------------------------------------------------

    def _start_scatter(self) -> Pending:
        section, layout = self._section, self._section.layout
        accumulates = any(section.params[i].has_grad for i in self._grads)
        direct = (
            section.contract.reduce == section.contract.stored
            and section.home.device == section.device
            and self._finishes
            and not accumulates
        )
        self._shards = section.new_grad_shards() if direct else self._take(layout.shard_numel)
        if len(self._grads) < len(section.params):
            self._shards.zero_()
        return self._scatter()

    def _scatter(self) -> Pending:
        section = self._section
        divisor = 1 if self._has_second_level else self._divisor
        wholes, part_numels = self._terms()
        return section.sums_over(section.wires.shard, self._term_names).reduce_scatter(
            self._sums(), wholes, part_numels, divisor, tag=self._tag, origin=self._origin
        )

    def _terms(self) -> tuple[list[Tensor], list[int]]:
        """What is sent, gradients in place and the pack, and how many elements of each are one rank's."""
        layout = self._section.layout
        wholes = [self._grads[i].view(-1) for i in self._in_place]
        part_numels = [layout.places[i].cut.part_numel for i in self._in_place]
        if self._packs:
            wholes.append(self._packed_by_rank())
            part_numels.append(layout.pack_numel)
        return wholes, part_numels

    def _term_names(self) -> list[TermName]:
        """What each of the terms is of."""
        pack = ("pack", *(i for i in self._section.layout.packed if i in self._summed))
        return [*((i,) for i in self._in_place), *([pack] if self._packs else [])]

    def _sums(self) -> list[Tensor]:
        """Where this rank's sums go, of each of the terms."""
        section, layout = self._section, self._section.layout
        sums = [section.shard_view(i, self._shards) for i in self._in_place]
        return [*sums, self._shards[layout.pack]] if self._packs else sums

    def _packed_by_rank(self) -> Tensor:
        """The gradients of packed parameters, each rank's parts side by side: the one copy, of little."""
        section, layout = self._section, self._section.layout
        wire = self._take(layout.world * layout.pack_numel)
        section.pack(wire.view(layout.world, layout.pack_numel), self._grads)
        return wire

    def _deliver_shards(self) -> None:
        section = self._section
        shards, fresh = self._shards, {i for i in self._summed if not section.params[i].has_grad}
        if shards is not section.grads and len(fresh) == len(self._summed):
            shards = section.new_grad_shards()
            shards.copy_(self._shards, non_blocking=True)
        if shards is section.grads and len(fresh) == len(self._summed):
            for i in self._summed:
                section.give_grad(i)
            return
        is_scratch = shards is self._shards and shards is not section.grads  # must not outlive this call
        for i in self._summed:
            param, shard = section.params[i], section.shard_like(i, shards)
            if is_scratch:
                shard = shard.to(section.home.device, section.contract.stored, copy=i in fresh)
            if i in fresh:
                param.grad = shard
            else:
                _add_grad(param, shard)

    def _take(self, numel: int) -> Tensor:
        scratch = self._section.wires.scratch.take(numel, self._section.contract.reduce)
        self._scratch.append(scratch)
        return scratch

    # -- optimizer whole: all-reduce ----------------------------------------------------------------------------------

    def _start_all_reduce(self) -> Pending:
        section, layout = self._section, self._section.layout
        packed = self._packed = [i for i in self._grads if not layout.places[i].in_place]
        if packed:  # one message for the small ones; they stay where they travelled
            flat = torch.cat([self._grads[i].view(-1) for i in packed])
            parts = flat.split([self._grads[i].numel() for i in packed])
            self._grads = {**self._grads, **dict(zip(packed, parts, strict=True))}
        for i in self._grads.keys() - set(packed):
            if shares_memory(self._grads[i]):  # autograd may hand it on, and sums are written to it meanwhile
                self._grads[i] = self._grads[i].clone()
        self._wholes = [grad.view(-1) for i, grad in self._grads.items() if i not in packed]
        self._wholes += [flat] if packed else []
        divisor = 1 if self._has_second_level else self._divisor
        over = section.sums_over(section.wires.shard, self._whole_names)
        return over.all_reduce(self._wholes, divisor, tag=self._tag, origin=self._origin)

    def _whole_names(self) -> list[TermName]:
        """What each of the whole tensors is of."""
        names: list[TermName] = [(i,) for i in self._grads if i not in self._packed]
        return [*names, ("pack", *self._packed)] if self._packed else names

    # -- sums that still miss the second level ------------------------------------------------------------------------

    def _first_sum(self, i: int) -> Tensor:
        """The first sum of parameter `i`: a view."""
        if self._section.cuts_optimizer:
            return self._section.shard_view(i, self._shards)
        return self._grads[i].view(-1)

    def _keep_partial(self) -> None:
        section = self._section
        for i in self._summed:
            term, kept = self._first_sum(i), section.partial.get(i)
            section.partial[i] = term.clone() if kept is None else kept.add_(term)
        for scratch in self._scratch:
            section.wires.scratch.give(scratch)

    def _add_partial(self) -> None:
        for i, kept in self._section.partial.items():
            self._first_sum(i).add_(kept)
        self._section.partial.clear()


class GroupedReduction(Reduction):
    """Sums within the group of neighbouring ranks, and then across groups."""

    @property
    def _has_second_level(self) -> bool:
        return True

    def _scatter(self) -> Pending:
        section = self._section
        two_level = section.wires.two_level
        assert two_level is not None
        self._group = self._take(two_level.groups * section.layout.shard_numel)
        if len(self._grads) < len(section.params):
            self._group.zero_()
        wholes, part_numels = self._terms()
        return two_level.reduce_within(
            self._group_sums(), wholes, part_numels, tags=section.group_reduce_tags, origin=self._origin
        )

    def _finish_sums(self) -> None:
        section, layout = self._section, self._section.layout
        two_level = section.wires.two_level
        assert two_level is not None
        owned = [sum(layout.places[i].cut.shard_numel(rank) for rank in section.place_ranks) for i in self._in_place]
        part_numels = [layout.places[i].cut.part_numel for i in self._in_place]
        if self._packs:
            owned.append(two_level.groups * layout.pack_numel)
            part_numels.append(layout.pack_numel)
        sums = [group_sum[:numel] for group_sum, numel in zip(self._group_sums(), owned, strict=True)]
        over = section.sums_over(two_level.across, self._term_names)
        over.reduce_scatter(
            self._sums(), sums, part_numels, self._divisor, tag=section.group_reduce_tags[0], origin=self._origin
        ).wait()

    def _group_sums(self) -> list[Tensor]:
        """Where the sums within the group go, of each of the terms: as group parts lie."""
        section = self._section
        sums = [section.group_part(section.layout.places[i].part, self._group) for i in self._in_place]
        return [*sums, section.group_part(section.layout.pack, self._group)] if self._packs else sums

    def _first_sum(self, i: int) -> Tensor:
        section, place = self._section, self._section.layout.places[i]
        if place.in_place:
            return section.group_part(place.part, self._group)
        rows = section.group_part(section.layout.pack, self._group).view(-1, section.layout.pack_numel)
        start = place.shard_offset - section.layout.pack_offset
        return rows[:, start : start + place.part.stop - place.part.start]


def _add_grad(param: ShardedParam, shard: Tensor) -> None:
    if param.grad is None:
        param.grad = shard
    else:
        param.grad.add_(shard)
