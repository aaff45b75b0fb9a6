"""Do all ranks start the same collective? What they tell one another about it, and the error where they differ.

Ranks that take different branches of a model, or end a step after different numbers of microbatches, wait for messages
that nobody sends. So with every collective each rank sends a *claim*: 192 bytes that say what it has started. Claims
are numbered in the order of the collectives and not by what they are about, so they arrive whatever the others do.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from fullshard.errors import RankMismatchError, named_ranks
from fullshard.tape.recorder import Origin

__all__ = ["CLAIM_NBYTES", "claim", "compare_ranks", "compares_ranks", "mismatch"]

CLAIM_NBYTES = 192
_HEAD = struct.Struct("<IIQ4I")  # microbatch, tensors, their bytes, lengths of the four texts that follow
_NOTE_NBYTES = 64

_compares = True


def compare_ranks(enabled: bool) -> None:
    """Whether ranks compare what they do, collective by collective (they do).

    Concerns collectives over gloo that start after this call; all ranks must agree on it. Without it, ranks that run
    their units in different orders wait for one another until the process group's time-out.
    """
    global _compares
    _compares = enabled


def compares_ranks() -> bool:
    """Whether ranks compare what they do."""
    return _compares


@lru_cache(maxsize=4096)
def claim(collective: str, origin: Origin, tensors: int, nbytes: int) -> bytes:
    """That `collective` of so many tensors and bytes was started on behalf of `origin`."""
    texts = [collective.encode(), origin.phase.value.encode(), origin.note.encode()[:_NOTE_NBYTES]]
    room = CLAIM_NBYTES - _HEAD.size - sum(map(len, texts))
    texts.append(origin.unit.encode()[-room:])  # the end of a long name tells more than its beginning
    head = _HEAD.pack(origin.microbatch, tensors, nbytes, *map(len, texts))
    return (head + b"".join(texts)).ljust(CLAIM_NBYTES, b"\0")


def mismatch(claims: Sequence[bytes], ranks: Sequence[int]) -> RankMismatchError | None:
    """The error that every rank raises if `claims`, one for each of `ranks`, are not all alike."""
    if claims.count(claims[0]) == len(claims):
        return None
    sides: dict[str, list[int]] = {}
    for rank, told in zip(ranks, claims, strict=True):
        sides.setdefault(_read(told), []).append(rank)
    said = "; ".join(f"{named_ranks(who)} started {what}" for what, who in sides.items())
    return RankMismatchError(
        f"ranks do not do the same: {said}. Every rank must call the same modules in the same order, in as many "
        "microbatches of a step, and get gradients for the same parameters. If only some ranks use some parameters, "
        "call set_reduce_scatter_unused_params(True) on the model. The process group cannot be used any more: end the "
        "processes and start again."
    )


def _read(told: bytes) -> str:
    microbatch, tensors, nbytes, *lengths = _HEAD.unpack_from(told)
    texts, start = [], _HEAD.size
    for length in lengths:
        texts.append(told[start : start + length].decode(errors="replace"))
        start += length
    collective, phase, note, unit = texts
    details = [f"{tensors} tensor{'s' if tensors > 1 else ''}", f"{nbytes} bytes", *([note] if note else [])]
    return f"{collective} of {unit or 'the root'} ({', '.join(details)}) in {phase} of microbatch {microbatch}"
