"""Fingerprints of collectives, to detect ranks that start different collectives.

Ranks wait for messages that are never sent if they take different branches of a model, end a step after different
numbers of microbatches, or if only one of them saves. So each rank sends a *fingerprint* with every collective: 192
bytes that describe it. Fingerprints are numbered in the order of the collectives, independent of their kind, so they
arrive even if the other ranks start different collectives.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from fullshard.errors import RankMismatchError, named_ranks, same_calls
from fullshard.tape.recorder import Origin

FINGERPRINT_NBYTES = 192
_HEAD = struct.Struct("<IIIQ4I")  # checksum of the whole texts, microbatch, tensors, their bytes, lengths of the texts
_NAME_NBYTES, _NOTE_NBYTES = 72, 64


@lru_cache(maxsize=4096)
def fingerprint(collective: str, origin: Origin, tensors: int, nbytes: int) -> bytes:
    """Return the fingerprint of a `collective` of `origin` with its tensors and bytes, both 0 for objects."""
    checksum = crc32("\0".join((collective, origin.note, origin.unit)).encode())  # the texts may be cut below
    texts = [collective.encode()[:_NAME_NBYTES], origin.phase.value.encode(), origin.note.encode()[:_NOTE_NBYTES]]
    remaining = FINGERPRINT_NBYTES - _HEAD.size - sum(map(len, texts))
    texts.append(origin.unit.encode()[-remaining:])  # the end of a long name is more specific than its beginning
    head = _HEAD.pack(checksum, origin.microbatch, tensors, nbytes, *map(len, texts))
    return (head + b"".join(texts)).ljust(FINGERPRINT_NBYTES, b"\0")


def mismatch(fingerprints: Sequence[bytes], ranks: Sequence[int]) -> RankMismatchError | None:
    """Return the error to raise if `fingerprints`, one for each of `ranks`, differ; None if they are identical."""
    if fingerprints.count(fingerprints[0]) == len(fingerprints):
        return None
    sides: dict[bytes, list[int]] = {}
    for rank, one in zip(ranks, fingerprints, strict=True):
        sides.setdefault(one, []).append(rank)
    stated = "; ".join(f"{named_ranks(who)} started {_read(one)}" for one, who in sides.items())
    return RankMismatchError(f"ranks issued different collectives: {stated}. {same_calls()}")


def _read(one: bytes) -> str:
    _, microbatch, tensors, nbytes, *lengths = _HEAD.unpack_from(one)
    texts, start = [], _HEAD.size
    for length in lengths:
        texts.append(one[start : start + length].decode(errors="replace"))
        start += length
    collective, phase, note, unit = texts
    if not tensors:
        return collective
    details = [f"{tensors} tensor{'s' if tensors > 1 else ''}", f"{nbytes} bytes", *([note] if note else [])]
    return f"{collective} of {unit or 'the root'} ({', '.join(details)}) in {phase} of microbatch {microbatch}"
