"""The choice of offload tiers and fractions: the smallest offload that fits.

The cheapest tier comes first and is used completely before the next one:

    optimizer     a step reads and writes it once, and nothing else waits for it: on the CPU alongside an accelerator,
                  so that the step overlaps with the next forward, as far as host memory allows; beyond that, or when
                  computing on the CPU, on disk
    activations   every microbatch writes and reads them
    parameters    with gradients, on disk: read for each all-gather, written in each reduction and each step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A kind of state and the tier that it can be offloaded to."""

    what: str  # the argument of `Offload`
    where: str  # "cpu" or "disk"
    # The possible fractions in ascending order, each with the bytes of memory that it frees.
    steps: Sequence[tuple[float, int]]


def least_that_fits(needed: int, budget: int, tiers: Sequence[Tier]) -> tuple[list[tuple[Tier, float]], int]:
    """Return the tiers to use with their fractions, and the bytes needed with them.

    The bytes exceed `budget` if all tiers together free too little.
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
