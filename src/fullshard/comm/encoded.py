"""Gathers and sums whose messages are encoded: the same calls as those of `Collectives`, with fewer bytes on the wire.

    gather      encode this rank's parts; all-gather bytes; decode everybody's, one's own too, into place
    sum         encode every other rank's parts; all-to-all bytes; decode, and add up in rank order, one's own as it is
    sum, whole  the same, and then a gather of the sums

So all ranks have the same whole parameters and the same whole sums, bit for bit: those that the bytes stand for.

[Note: what a message lacks]
Rounded gradients are wrong by as much in every step, and in the same direction where they are small beside the largest
of their block. So a sender keeps what a message lacks of what it should have said, its *residual*, and adds that to
what it says next (Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847). All that was ever received then
differs from all that was meant by one residual, and not by the sum of them. In a sum that all ranks have whole, the
rank that tells the others of a part of it keeps a residual of that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.comm.codec import Codec
from fullshard.comm.collectives import Collectives, Pending
from fullshard.device.memory import Pool
from fullshard.layout.shard_spec import owned
from fullshard.tape.recorder import Origin

__all__ = ["EncodedGather", "EncodedSums", "Residuals", "TermName", "residual_numel"]

_DECODED_AT_ONCE = 1 << 20  # numbers: in large worlds parts are small, and operations on one at a time cost the host

TermName = tuple[object, ...]  # what a term is of, and then all that it consists of
Residuals = dict[object, tuple[TermName, Tensor]]
"""What messages over one wire have lacked, by what they were of."""


class EncodedGather:
    """All-gathers over `wire` of which every rank has what comes out of `codec`."""

    def __init__(self, wire: Collectives, codec: Codec, scratch: Pool) -> None:
        self._wire = wire
        self._codec = codec
        self._scratch = scratch

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], *, tag: int, origin: Origin) -> Pending:
        """See `Collectives.all_gather`. The parts, which may be of another dtype than the wholes, are read at once."""
        wire, codec = self._wire, self._codec
        sizes = [wire.world * codec.nbytes(part.numel()) for part in parts]
        room = self._scratch.take(sum(sizes), torch.uint8)
        messages = [message.view(wire.world, -1) for message in room.split(sizes)]
        for part, message in zip(parts, messages, strict=True):
            codec.encode(part.view(1, -1), message[wire.rank : wire.rank + 1], self._scratch)
        arrived = wire.all_gather(
            [message.view(-1) for message in messages],
            [message[wire.rank] for message in messages],
            tag=tag,
            origin=origin,
        )

        def decode() -> None:
            for whole, part, message in zip(wholes, parts, messages, strict=True):
                codec.decode(message, part.numel(), whole.view(wire.world, -1), self._scratch)
            self._scratch.give(room)

        return _then(wire, arrived, decode)


class EncodedSums:
    """Sums over `wire` whose terms `codec` encodes, in float32.

    Args:
        wire: the ranks that add up.
        codec: of the terms.
        residuals: what earlier messages lacked: kept by the caller, and kept up to date here.
        names: what each of the tensors of a call is of. What is left over of it is added the next time that there is a
            tensor of the same name, and is dropped if there is one before whose name only begins with the same word.
        scratch: memory to work in.
    """

    def __init__(
        self, wire: Collectives, codec: Codec, residuals: Residuals, names: Sequence[TermName], scratch: Pool
    ) -> None:
        self._wire = wire
        self._codec = codec
        self._residuals = residuals
        self._names = names
        self._scratch = scratch

    def reduce_scatter(
        self,
        sums: Sequence[Tensor],
        wholes: Sequence[Tensor],
        part_numels: Sequence[int],
        divisor: float,
        *,
        tag: int,
        origin: Origin,
    ) -> Pending:
        """See `Collectives.reduce_scatter`. One message to each other rank."""
        wire, codec = self._wire, self._codec
        sizes = [codec.nbytes(n) for n in part_numels]
        others = wire.world - 1
        room = self._scratch.take(2 * others * sum(sizes), torch.uint8)
        sent, received = room.view(2, others, -1)
        for name, whole, n, message in zip(self._names, wholes, part_numels, sent.split(sizes, 1), strict=True):
            self._encode(name, self._parts_of_others(whole, n), others, n, message)
        arrived = wire.all_to_all(
            self._by_rank(received), self._by_rank(sent), common_nbytes=wire.world * sum(sizes), tag=tag, origin=origin
        )

        def add() -> None:
            for out, whole, n, message in zip(sums, wholes, part_numels, received.split(sizes, 1), strict=True):
                self._add(out, message[: wire.rank], n, adds=False)
                _add(out, whole[wire.rank * n : (wire.rank + 1) * n], adds=wire.rank > 0)
                self._add(out, message[wire.rank :], n, adds=True)
            if divisor != 1:
                torch._foreach_div_(list(sums), divisor)
            self._scratch.give(room)

        return _then(wire, arrived, add)

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, *, tag: int, origin: Origin) -> Pending:
        """See `Collectives.all_reduce`. Two messages to each other rank: terms, and then sums."""
        wire = self._wire
        part_numels = [len(owned(tensor.numel(), wire.world, 0)) for tensor in tensors]
        mine = [len(owned(tensor.numel(), wire.world, wire.rank)) for tensor in tensors]
        sums = [self._scratch.take(numel, torch.float32) for numel in mine]
        added = self.reduce_scatter(sums, tensors, part_numels, divisor, tag=tag, origin=origin)

        def tell() -> None:
            self._gather_sums(tensors, sums, part_numels, tag + 1, origin)
            for total in sums:
                self._scratch.give(total)

        return _then(wire, added, tell)

    def _gather_sums(
        self, tensors: Sequence[Tensor], sums: Sequence[Tensor], part_numels: Sequence[int], tag: int, origin: Origin
    ) -> None:
        """Every rank's sums in their places in `tensors`: this rank's, too, as the others have them."""
        wire, codec = self._wire, self._codec
        sizes = [codec.nbytes(n) for n in part_numels]
        room = self._scratch.take(wire.world * sum(sizes), torch.uint8)
        messages = room.view(wire.world, -1)
        for name, total, n, message in zip(
            self._names, sums, part_numels, messages[wire.rank : wire.rank + 1].split(sizes, 1), strict=True
        ):
            self._encode(("sum", *name), [(0, total)], 1, n, message)
        wire.all_gather([room], [messages[wire.rank]], tag=tag, origin=origin).wait()
        for tensor, n, message in zip(tensors, part_numels, messages.split(sizes, 1), strict=True):
            full = tensor.numel() // n if n else 0
            codec.decode(message[:full], n, tensor[: full * n].view(full, n), self._scratch)
            if full * n < tensor.numel():
                codec.decode(message[full : full + 1], n, tensor[full * n :].view(1, -1), self._scratch)
        self._scratch.give(room)

    def _add(self, out: Tensor, message: Tensor, n: int, *, adds: bool) -> None:
        """Add what each row of `message` says to `out`, one after the other; without `adds`, the first replaces it."""
        several = max(1, _DECODED_AT_ONCE // max(1, n))
        for start in range(0, len(message), several):
            rows = message[start : start + several]
            if len(rows) == 1:
                self._codec.decode(rows, n, out.view(1, -1), self._scratch, adds=adds or start > 0)
                continue
            room = self._scratch.take(len(rows) * out.numel(), torch.float32)
            terms = room.view(len(rows), out.numel())
            self._codec.decode(rows, n, terms, self._scratch)
            for i, term in enumerate(terms):
                _add(out, term, adds=adds or start + i > 0)
            self._scratch.give(room)

    def _parts_of_others(self, whole: Tensor, n: int) -> list[tuple[int, Tensor]]:
        """What of `whole` is for ranks before this one, and for those after it, and where it starts beside the rest."""
        start, end = self._wire.rank * n, (self._wire.rank + 1) * n
        return [(0, whole[:start]), (start, whole[end:])]

    def _encode(self, name: TermName, parts: Sequence[tuple[int, Tensor]], rows: int, n: int, message: Tensor) -> None:
        """Write `parts`, which start where they say in (rows, n) numbers, to `message`; with what earlier ones lacked.

        See [Note: what a message lacks].
        """
        codec = self._codec
        if codec.keeps_error:
            terms = self._residual(name, rows * n, message.device)
        else:
            terms = self._scratch.take(rows * n, torch.float32).zero_()
        for start, part in parts:
            terms[start : start + part.numel()].add_(part)
        codec.encode(terms.view(rows, n), message, self._scratch, keep_error=codec.keeps_error)
        if not codec.keeps_error:
            self._scratch.give(terms)

    def _residual(self, name: TermName, numel: int, device: torch.device) -> Tensor:
        """What the last message of `name` lacked: zeros if there was none."""
        kind = name[:2] if name[0] == "sum" else name[0]
        known = self._residuals.get(kind)
        if known is None or known[0] != name:
            known = self._residuals[kind] = name, torch.zeros(numel, dtype=torch.float32, device=device)
        return known[1]

    def _by_rank(self, rows: Tensor) -> list[Tensor]:
        """A row for every other rank, and nothing for this one."""
        mine = self._wire.rank
        return [*rows[:mine], rows.new_empty(0), *rows[mine:]]


def residual_numel(part_numels: Sequence[int], world: int, *, whole: bool) -> int:
    """Numbers that a rank keeps of what its messages lack, where a part of each term has as many of `part_numels`.

    Args:
        part_numels: of each term, the largest part.
        world: ranks that add up.
        whole: whether all have the whole sums, so that each tells the others of its own.
    """
    return sum(part_numels) * (world if whole else world - 1)


def _add(out: Tensor, term: Tensor, *, adds: bool) -> None:
    if adds:
        out.add_(term)
    else:
        out.copy_(term)


def _then(wire: Collectives, first: Pending, finish: Callable[[], None]) -> Pending:
    """Both, one after the other: queued at once where the wire is a queue."""

    @torch.no_grad()
    def both() -> None:
        first.wait()
        finish()

    if not wire.is_queued:
        return Pending(both)
    both()
    return Pending()
