"""Do all ranks have the same model?"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fullshard.comm.routes import collectives_for
from fullshard.engine.unit import Unit
from fullshard.errors import RankMismatchError
from fullshard.tape.recorder import Origin, Phase

__all__ = ["check_ranks_agree"]


def check_ranks_agree(units: Sequence[Unit]) -> None:
    """Raise on every rank alike if they do not have the same units with the same parameters."""
    axes = units[0].axes
    mine = [unit.description for unit in units]
    for group in (axes.shard_group, axes.replicate_group):
        if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
            continue
        theirs = collectives_for(group, units[0].device).gather_objects(
            mine, origin=Origin("", Phase.FORWARD), name="comparison of models"
        )
        odd = next((rank for rank, other in enumerate(theirs) if other != theirs[0]), None)
        if odd is not None:
            first, second = dist.get_global_rank(group, 0), dist.get_global_rank(group, odd)
            raise RankMismatchError(_difference(first, theirs[0], second, theirs[odd]))


def _difference(first: int, mine: Sequence[str], second: int, theirs: Sequence[str]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    of_first = mine[at] if at < len(mine) else "no further unit"
    of_second = theirs[at] if at < len(theirs) else "no further unit"
    return (
        f"ranks do not have the same model. Unit {at} is on rank {first}: {of_first}; on rank {second}: {of_second}. "
        "Build and shard the same modules in the same order on every rank."
    )
