"""Gathers and sums with encoded messages, which send fewer bytes over any transport.

    gather      encode this rank's parts; all-gather bytes; decode all parts in place, including this rank's own
    sum         encode every other rank's parts; all-to-all bytes; decode and sum in rank order (own part: exact)
    sum, whole  the same, and then a gather of the sums

So all ranks have bitwise identical full parameters and full sums: the decoded values.

[Note: error feedback]
Quantization errors of gradients are similar in every step. For gradients that are much smaller than the largest one of
their block, they also have the same sign. So a sender keeps the quantization error of a message and adds it to its next
message (Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847). The total of all received values then differs
from the total of all exact values by one error, instead of the sum of all errors. In an all-reduce, the rank that sends
a part of the sum to the others also keeps the error of this message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.comm.codec import Codec
from fullshard.comm.collectives import divide
from fullshard.comm.transport import Gathers, PartSums, Pending, Sums, TermName, Transport, then
from fullshard.device.memory import Pool
from fullshard.layout.shard_spec import owned
from fullshard.tape.recorder import Origin

_DECODED_AT_ONCE = 1 << 20  # numbers decoded in one operation, which limits host overhead when parts are small


class EncodedGathers(Gathers):
    """All-gathers over `transport`. All ranks get the parts encoded and decoded by `codec`."""

    def __init__(self, transport: Gathers, codec: Codec, scratch: Pool) -> None:
        self._transport = transport
        self.world, self.rank, self.is_queued = transport.world, transport.rank, transport.is_queued
        self._codec = codec
        self._scratch = scratch

    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, into_shared: bool = False
    ) -> Pending:
        """See `Gathers.all_gather`. The send buffers may have a different dtype, and are read immediately."""
        transport, codec = self._transport, self._codec
        sizes = [transport.world * codec.nbytes(part.numel()) for part in send]
        flat = self._scratch.take(sum(sizes), torch.uint8)
        messages = [message.view(transport.world, -1) for message in flat.split(sizes)]
        for part, message in zip(send, messages, strict=True):
            codec.encode(part.view(1, -1), message[transport.rank : transport.rank + 1], self._scratch)
        arrived = transport.all_gather(
            [message.view(-1) for message in messages], [message[transport.rank] for message in messages], origin=origin
        )

        def decode() -> None:
            for whole, part, message in zip(receive, send, messages, strict=True):
                codec.decode(message, part.numel(), whole.view(transport.world, -1), self._scratch)
            self._scratch.give(flat)

        return then(transport, arrived, decode)


class EncodedSums(Sums):
    """Sums in float32 over `transport`. Their terms are encoded by `codec`.

    The error of a term is added to the next term of the same name. It is dropped if a term of the same kind with
    another name is sent first, which limits memory at the cost of the error of one message.

    Args:
        transport: The transport between the ranks to sum over.
        codec: The codec of the terms.
        scratch: The pool for temporary memory.
    """

    names_terms = True

    def __init__(self, transport: Transport, codec: Codec, scratch: Pool) -> None:
        self.world, self.rank, self.is_queued = transport.world, transport.rank, transport.is_queued
        self._transport = transport
        self._codec = codec
        self._scratch = scratch
        self._errors: dict[object, tuple[TermName, Tensor]] = {}  # errors of the last message, by kind of the term

    @property
    def error_nbytes(self) -> int:
        """Bytes that error feedback keeps."""
        return sum(kept.nbytes for _, kept in self._errors.values())

    def forget_errors(self) -> None:
        """Reset the errors of earlier messages."""
        self._errors.clear()

    def reduce_scatter(self, of: PartSums, *, origin: Origin) -> Pending:
        """See `Sums.reduce_scatter`. This sends one message to each other rank."""
        transport, codec = self._transport, self._codec
        sizes = [codec.nbytes(n) for n in of.part_numels]
        others = transport.world - 1
        flat = self._scratch.take(2 * others * sum(sizes), torch.uint8)
        sent, received = flat.view(2, others, -1)
        for name, whole, n, message in zip(of.names, of.wholes, of.part_numels, sent.split(sizes, 1), strict=True):
            self._encode(name, self._parts_of_others(whole, n), others, n, message)
        arrived = transport.all_to_all(
            self._by_rank(received), self._by_rank(sent), common_nbytes=transport.world * sum(sizes), origin=origin
        )

        def add() -> None:
            for out, whole, n, message in zip(
                of.sums, of.wholes, of.part_numels, received.split(sizes, 1), strict=True
            ):
                self._add(out, message[: transport.rank], n, adds=False)
                _add(out, whole[transport.rank * n : (transport.rank + 1) * n], adds=transport.rank > 0)
                self._add(out, message[transport.rank :], n, adds=True)
            divide(of.sums, of.divisor)
            self._scratch.give(flat)

        return then(transport, arrived, add)

    def all_reduce(
        self, tensors: Sequence[Tensor], divisor: float, *, origin: Origin, names: Sequence[TermName] = ()
    ) -> Pending:
        """See `Sums.all_reduce`. This sends two messages to each other rank: terms, and then sums."""
        transport = self._transport
        part_numels = [len(owned(tensor.numel(), transport.world, 0)) for tensor in tensors]
        local = [len(owned(tensor.numel(), transport.world, transport.rank)) for tensor in tensors]
        sums = [self._scratch.take(numel, torch.float32) for numel in local]
        added = self.reduce_scatter(PartSums(sums, tensors, part_numels, divisor, names), origin=origin)

        def gather() -> None:
            self._gather_sums(tensors, sums, part_numels, origin, names)
            for total in sums:
                self._scratch.give(total)

        return then(transport, added, gather)

    def _gather_sums(
        self,
        tensors: Sequence[Tensor],
        sums: Sequence[Tensor],
        part_numels: Sequence[int],
        origin: Origin,
        names: Sequence[TermName],
    ) -> None:
        """Gather the sums of all ranks to `tensors`. This rank's sums are also encoded and decoded."""
        transport, codec = self._transport, self._codec
        sizes = [codec.nbytes(n) for n in part_numels]
        flat = self._scratch.take(transport.world * sum(sizes), torch.uint8)
        messages = flat.view(transport.world, -1)
        for name, total, n, message in zip(
            names, sums, part_numels, messages[transport.rank : transport.rank + 1].split(sizes, 1), strict=True
        ):
            self._encode(("sum", *name), [(0, total)], 1, n, message)
        transport.all_gather([flat], [messages[transport.rank]], origin=origin).wait()
        for tensor, n, message in zip(tensors, part_numels, messages.split(sizes, 1), strict=True):
            full = tensor.numel() // n if n else 0
            codec.decode(message[:full], n, tensor[: full * n].view(full, n), self._scratch)
            if full * n < tensor.numel():
                codec.decode(message[full : full + 1], n, tensor[full * n :].view(1, -1), self._scratch)
        self._scratch.give(flat)

    def _add(self, out: Tensor, message: Tensor, n: int, *, adds: bool) -> None:
        """Decode the rows of `message` and add them to `out`, in order. Unless `adds`, the first row replaces `out`."""
        several = max(1, _DECODED_AT_ONCE // max(1, n))
        for start in range(0, len(message), several):
            rows = message[start : start + several]
            if len(rows) == 1:
                self._codec.decode(rows, n, out.view(1, -1), self._scratch, adds=adds or start > 0)
                continue
            flat = self._scratch.take(len(rows) * out.numel(), torch.float32)
            terms = flat.view(len(rows), out.numel())
            self._codec.decode(rows, n, terms, self._scratch)
            for i, term in enumerate(terms):
                _add(out, term, adds=adds or start + i > 0)
            self._scratch.give(flat)

    def _parts_of_others(self, whole: Tensor, n: int) -> list[tuple[int, Tensor]]:
        """Return the parts of `whole` for the ranks before and after this one, each with its offset."""
        start, end = self._transport.rank * n, (self._transport.rank + 1) * n
        return [(0, whole[:start]), (start, whole[end:])]

    def _encode(self, name: TermName, parts: Sequence[tuple[int, Tensor]], rows: int, n: int, message: Tensor) -> None:
        """Encode `parts` with error feedback to `message`, see [Note: error feedback].

        Args:
            name: The name of the term.
            parts: Pairs of an offset in the (rows, n) numbers, and the values at this offset.
            rows: The number of rows.
            n: The numbers per row.
            message: The buffer for the encoding.
        """
        codec = self._codec
        if codec.keeps_error:
            terms = self._error_of(name, rows * n, message.device)
        else:
            terms = self._scratch.take(rows * n, torch.float32).zero_()
        for start, part in parts:
            terms[start : start + part.numel()].add_(part)
        codec.encode(terms.view(rows, n), message, self._scratch, keep_error=codec.keeps_error)
        if not codec.keeps_error:
            self._scratch.give(terms)

    def _error_of(self, name: TermName, numel: int, device: torch.device) -> Tensor:
        """Return the buffer with the error of the last message of `name`, or zeros."""
        kind = name[:2] if name[0] == "sum" else name[0]
        known = self._errors.get(kind)
        if known is None or known[0] != name:
            known = self._errors[kind] = name, torch.zeros(numel, dtype=torch.float32, device=device)
        return known[1]

    def _by_rank(self, rows: Tensor) -> list[Tensor]:
        """Return a row for every other rank, and an empty tensor for this one."""
        local = self._transport.rank
        return [*rows[:local], rows.new_empty(0), *rows[local:]]


def error_feedback_numel(part_numels: Sequence[int], world: int, *, whole: bool) -> int:
    """Return the number of elements that error feedback keeps on a rank.

    Args:
        part_numels: The elements of the largest part of each term.
        world: The number of ranks to sum over.
        whole: Whether all ranks get the full sums, which requires each rank to send its sums to the others.
    """
    return sum(part_numels) * (world if whole else world - 1)


def _add(out: Tensor, term: Tensor, *, adds: bool) -> None:
    if adds:
        out.add_(term)
    else:
        out.copy_(term)
