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

from fullshard.buffers import Pool
from fullshard.collectives import Collectives, Pending
from fullshard.record import Origin
from fullshard.wire_codec import Codec

__all__ = ["EncodedGather"]


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
