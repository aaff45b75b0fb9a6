"""Do all ranks start the same collective? What they tell one another about it, and the error where they differ.

Ranks that take different branches of a model, or end a step after different numbers of microbatches, wait for messages
that nobody sends. So with every collective each rank sends a *claim*: 128 bytes that say what it has started. Claims
are numbered in the order of the collectives and not by what they are about, so they arrive whatever the others do.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fullshard.errors import RankMismatchError
from fullshard.record import Origin

__all__ = ["CLAIM_NBYTES", "claim", "compare_ranks", "compares_ranks", "mismatch"]

CLAIM_NBYTES = 128
_HEAD = struct.Struct("<IIII")  # microbatch, lengths of the three names that follow

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
def claim(collective: str, origin: Origin) -> Tensor:
    """That `collective` was started on behalf of `origin`: `CLAIM_NBYTES` bytes. Not to be written to."""
    names = [collective.encode(), origin.phase.value.encode(), origin.unit.encode()]
    room = CLAIM_NBYTES - _HEAD.size - len(names[0]) - len(names[1])
    names[2] = names[2][-room:]  # the end of a long name tells more than its beginning
    head = _HEAD.pack(origin.microbatch, *(len(name) for name in names))
    return torch.frombuffer(bytearray((head + b"".join(names)).ljust(CLAIM_NBYTES, b"\0")), dtype=torch.uint8)


def mismatch(claims: Sequence[Tensor], ranks: Sequence[int]) -> RankMismatchError | None:
    """The error that every rank raises if `claims`, one for each of `ranks`, are not all alike."""
    if all(torch.equal(other, claims[0]) for other in claims[1:]):
        return None
    sides: dict[str, list[int]] = {}
    for rank, told in zip(ranks, claims, strict=True):
        sides.setdefault(_read(told), []).append(rank)
    said = "; ".join(f"{_named(who)} started {what}" for what, who in sides.items())
    return RankMismatchError(
        f"ranks do not do the same: {said}. Every rank must call the same modules in the same order, as many "
        "microbatches in a step as the others, and get gradients for the same units. The process group cannot be used "
        "any more: end the processes and start again."
    )


def _read(told: Tensor) -> str:
    data = bytes(told.tolist())
    microbatch, *lengths = _HEAD.unpack_from(data)
    names, start = [], _HEAD.size
    for length in lengths:
        names.append(data[start : start + length].decode(errors="replace"))
        start += length
    collective, phase, unit = names
    return f"{collective} of {unit or 'the root'} in {phase} of microbatch {microbatch}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
