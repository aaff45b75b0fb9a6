"""Which of the tiers are to be used, and how far: the least that fits.

What is cheapest goes first, and goes in full before the next one is touched:

    optimizer     a step reads and writes it once, and nothing else waits for it: on the CPU beside an accelerator, to
                  step behind the next forward, as far as the host has room; beyond that, or where the CPU computes,
                  on a disk
    activations   they are written and read in every microbatch
    parameters    with gradients, on a disk: read for each gather, written in each reduction and each step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Tier", "least_that_fits"]


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One kind of bytes and a place where they can be.

    Args:
        what: the argument of `Offload`.
        where: "cpu" or "disk".
        steps: the fractions that can be there, from the smallest on, each with the bytes of memory that it frees.
    """

    what: str
    where: str
    steps: Sequence[tuple[float, int]]


def least_that_fits(needed: int, budget: int, tiers: Sequence[Tier]) -> tuple[list[tuple[Tier, float]], int]:
    """The tiers that are used, with their fractions, and the bytes that are needed then: more than `budget` if even
    all tiers free too little.

    Args:
        needed: bytes, if nothing is away.
        budget: bytes that there are.
        tiers: the cheapest first.
    """
    chosen: list[tuple[Tier, float]] = []
    for tier in tiers:
        if needed <= budget:
            break
        most = max((freed for _, freed in tier.steps), default=0)
        enough = min(most, needed - budget)
        fraction, freed = next(((share, freed) for share, freed in tier.steps if freed >= enough), (0.0, 0))
        if freed > 0:
            chosen.append((tier, fraction))
            needed -= freed
    return chosen, needed
