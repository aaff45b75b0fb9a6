"""Do all ranks have the same model, with the same values?"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from fullshard.comm.routes import collectives_for
from fullshard.engine.sharded_param import digest
from fullshard.engine.unit import Unit
from fullshard.errors import RankMismatchError
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase

__all__ = ["are_alike", "check_ranks_agree", "meet"]

_log = logging.getLogger(__name__)

Digests = Sequence[Sequence[int | None]]
"""By unit and parameter, of the values that each was made of; None where they are not known."""


def check_ranks_agree(units: Sequence[Unit]) -> None:
    """Raise on every rank alike if they do not have the same units with the same parameters.

    They are told, too, if they built the model with different values, as without a common seed: by an error where ranks
    would keep their own for ever, else by a warning, once.
    """
    axes = units[0].axes
    mine = [unit.description for unit in units]
    values = [unit.digests if unit.axes == axes else () for unit in units]
    for group in _groups(units[0]):
        theirs = collectives_for(group, units[0].device).gather_objects(
            (mine, values), origin=Origin("", Phase.FORWARD), name="comparison of models"
        )
        descriptions = [description for description, _ in theirs]
        odd = next((rank for rank, other in enumerate(descriptions) if other != descriptions[0]), None)
        if odd is not None:
            first, second = dist.get_global_rank(group, 0), dist.get_global_rank(group, odd)
            raise RankMismatchError(_difference(first, descriptions[0], second, descriptions[odd]))
        _compare_values(units, group, [digests for _, digests in theirs])


def meet(units: Sequence[Unit], name: str) -> None:
    """Return once every rank that `units` are sharded over has come to `name`, by which they gather what is whole.

    Raises:
        RankMismatchError: some rank has come to something else: it does not take part (where ranks can compare that).
    """
    sharded = [unit for unit in units if unit.options.placements.optimizer is Placement.SHARDED]
    groups = [unit.axes.shard_group for unit in sharded]  # replicas gather by themselves
    groups += [group for unit in sharded for param in unit.params for group in param.view.process_groups]
    for group in dict.fromkeys(groups):
        if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
            collectives_for(group, units[0].device).meet(name, origin=Origin("", Phase.IDLE))


def _groups(unit: Unit) -> list[dist.ProcessGroup]:
    """The groups of other ranks that have the same parameters as this one."""
    groups = (unit.axes.shard_group, unit.axes.replicate_group)
    return [it for it in groups if it is not None and dist.get_world_size(it) > 1 and dist.get_backend(it) != "fake"]


def _difference(first: int, mine: Sequence[str], second: int, theirs: Sequence[str]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    of_first = mine[at] if at < len(mine) else "no further unit"
    of_second = theirs[at] if at < len(theirs) else "no further unit"
    return (
        f"ranks do not have the same model. Unit {at} is on rank {first}: {of_first}; on rank {second}: {of_second}. "
        "Build and shard the same modules in the same order on every rank."
    )


def _compare_values(units: Sequence[Unit], group: dist.ProcessGroup, theirs: Sequence[Digests]) -> None:
    odd = [
        (unit, param, found)
        for i, unit in enumerate(units)
        for j, param in enumerate(unit.params)
        if None not in (found := [digests[i][j] if digests[i] else None for digests in theirs]) and len(set(found)) > 1
    ]
    if not odd:
        return
    unit, param, found = odd[0]
    other = next(rank for rank, value in enumerate(found) if value != found[0])
    ranks = f"rank {dist.get_global_rank(group, 0)} and rank {dist.get_global_rank(group, other)}"
    name = f"{unit.name}.{param.fqn}" if unit.name else param.fqn
    said = f"ranks built the model with different values: {len(odd)} parameters, such as {name} on {ranks}"
    remedy = (
        "Call torch.manual_seed with the same number on every rank before building the model, or pass "
        "sync_module_states=True to FullyShardedDataParallel, or load one state dict on all ranks"
    )
    if group is unit.axes.replicate_group or unit.options.placements.optimizer is Placement.WHOLE:
        raise RankMismatchError(f"{said}. Each would go on from its own, with gradients of all. {remedy}.")
    if dist.get_rank(group) == 0:
        _log.warning("%s. What is trained is a mixture, one rank's part beside another's. %s.", said, remedy)


def are_alike(params: Sequence[nn.Parameter], unit: Unit) -> bool:
    """True if `params`, which no unit has, have the same values on all ranks that `unit` is sharded over."""
    mine = [digest(param) for param in params]
    return all(
        other == mine
        for group in _groups(unit)
        for other in collectives_for(group, unit.device).gather_objects(
            mine, origin=Origin("", Phase.FORWARD), name="comparison of parameters in no unit"
        )
    )
