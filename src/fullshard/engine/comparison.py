"""Comparison of the models of all ranks: the same units, with the same values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from fullshard.comm.mesh import Axes
from fullshard.comm.routes import collectives_for
from fullshard.engine.sharded_param import ShardedParam, digest
from fullshard.engine.unit import Unit
from fullshard.errors import RankMismatchError
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase

_log = logging.getLogger(__name__)

Digests = Sequence[Sequence[int | None]]
"""Digests of the initial values, by unit and parameter; None where they are unknown."""

_Groups = Sequence[dist.ProcessGroup]
T = TypeVar("T")


def check_ranks_agree(units: Sequence[Unit]) -> None:
    """Raise on every rank if the ranks do not have the same units with the same parameters.

    Ranks that built the model with different values, for example without a common seed, are also reported: with an
    error if ranks would keep different values forever, else with one warning. Some ranks may not know their values.
    """
    unit, groups = units[0], _groups_of(units[0])
    digests: Digests = [_digests(each_unit, unit.axes) for each_unit in units]
    local = _hash((digests, [_description(each_unit) for each_unit in units]))
    if len(set(_of_all_ranks(local, groups, unit, "comparison of models").values())) == 1:
        return
    _check_same_units(units, groups, "comparison of models")
    of_values = _of_all_ranks(_hash(digests), groups, unit, "comparison of values")
    speakers = _first_of_each(of_values)
    own = digests if dist.get_rank() in speakers.values() else []
    known = _of_all_ranks(own, groups, unit, "comparison of values")
    _compare_values(units, of_values, {digest: known[speaker] for digest, speaker in speakers.items()})


def _check_same_units(units: Sequence[Unit], groups: _Groups, name: str) -> None:
    """Raise on every rank of `groups` if the ranks have different `units`. `name` is the operation for messages."""
    found = _first_difference([_description(unit) for unit in units], groups, units[0], name)
    if found is not None:
        remedy = "Build and shard the same modules in the same order on every rank."
        raise RankMismatchError(f"ranks have different models. Unit {found}. {remedy}")


def _first_difference(items: Sequence[str], groups: _Groups, unit: Unit, name: str) -> str | None:
    """Return the number and the text of the first of `items` that differs between two ranks; None if none does.

    Ranks exchange hashes of a few bytes each. If hashes differ, one rank per hash sends its items.
    """
    first, *odd = _first_of_each(_of_all_ranks(_hash(items), groups, unit, name)).values()
    if not odd:
        return None
    peer = _of_all_ranks(items if dist.get_rank() in (first, odd[0]) else [], groups, unit, name)
    pairs = enumerate(zip_longest(peer[first], peer[odd[0]], fillvalue="no further one"))
    number, one, other = next((number, one, other) for number, (one, other) in pairs if one != other)
    return f"{number} is {one} on rank {first}, but {other} on rank {odd[0]}"


def _description(unit: Unit) -> str:
    """Return the unit's name, and the FQN, shape, placement and dtypes of each parameter, as a text for comparison."""
    params = (
        f"{param.fqn} {tuple(param.sharded.shape)} {param_group.plan.contract}"
        + ("" if param.sharded.requires_grad else ", frozen")
        + f", placed {param.dtensor.placements}"
        for param_group in unit.param_groups
        for param in param_group.params
    )
    where, divisor = ", on a disk" if unit.shards.is_on_disk else "", unit.settings.gradient_divisor
    divided = "" if divisor is None else f", gradients divided by {divisor:g}"
    return f"{unit.name or 'the root'}{where}{divided} ({'; '.join(params)})"


def _digests(unit: Unit, axes: Axes) -> list[int | None]:
    """Return digests of the initial local values, one per parameter.

    A digest is None if the values are unknown or were modified since, or if ranks along `axes` may have different
    values.
    """
    return [
        param.initial_digest if param_group.plan.axes == axes else None
        for param_group in unit.param_groups
        for param in param_group.params
    ]


def are_identical(params: Sequence[nn.Parameter], unit: Unit) -> bool:
    """Return True on all ranks of `unit` if `params`, which are not in a unit, have the same values on each of them."""
    local = _hash([digest(param) for param in params])
    return len(set(_of_all_ranks(local, _groups_of(unit), unit, "comparison of parameters in no unit").values())) == 1


def check_same_names(names: Sequence[str], unit: Unit, optimizer: str, *, reason: str, instead: str) -> None:
    """Raise on every rank of `unit` if the parameters of `optimizer` do not have the same `names` on all of them.

    Args:
        reason: a sentence of the error message that states why the order matters.
        instead: a sentence of the error message that states an alternative to using the same order.

    Raises:
        RankMismatchError: the names or their order differ.
    """
    found = _first_difference(names, _groups_of(unit), unit, "comparison of optimizers")
    if found is not None:
        raise RankMismatchError(
            f"{optimizer} has its parameters in different orders: parameter {found}. {reason} Build its groups from "
            f"lists in the order of model.named_parameters(), not from a set. {instead}"
        )


def barrier(units: Sequence[Unit], name: str) -> None:
    """Wait until all ranks that `units` are sharded over have reached the operation `name`, which gathers values.

    Raises:
        RankMismatchError: A rank has reached another operation, or ranks have different units that have not run yet.
    """
    sharded = [unit for unit in units if unit.options.placements.optimizer is Placement.SHARDED]
    groups = [(axes.shard_group, unit) for unit in sharded for axes in unit.collectives]  # replicas gather alone
    groups += [(group, unit) for unit in sharded for param in unit.params for group in param.view.process_groups]
    for group in _communicating(group for group, _ in groups):
        new = dict.fromkeys(unit for member_of, unit in groups if member_of is group and unit.runtime is None)
        if new:
            _check_same_units(list(new), [group], name)
        else:
            collectives_for(group, units[0].device).barrier(name, origin=Origin("", Phase.IDLE))


def _hash(of: object) -> bytes:
    return sha256(repr(of).encode()).digest()


def _of_all_ranks(own: T, groups: _Groups, unit: Unit, name: str) -> dict[int, T]:
    """Gather `own` along `groups`, one after the other. Return it by global rank, ascending, identical on all ranks."""
    known = {dist.get_rank(): own}
    for group in groups:
        for others in collectives_for(group, unit.device).gather_objects(
            dict(known), origin=Origin("", Phase.FORWARD), name=name
        ):
            known.update(others)
    return dict(sorted(known.items()))


def _first_of_each(hashes: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the first rank that has each hash, in rank order."""
    firsts: dict[bytes, int] = {}
    for rank, of_rank in hashes.items():
        firsts.setdefault(of_rank, rank)
    return firsts


def _groups_of(unit: Unit) -> _Groups:
    """Return the process groups of ranks that have the same parameters as this one."""
    return _communicating((unit.axes.shard_group, unit.axes.replicate_group))


def _communicating(groups: Iterable[dist.ProcessGroup | None]) -> _Groups:
    several = (group for group in dict.fromkeys(groups) if group is not None and dist.get_world_size(group) > 1)
    return [group for group in several if dist.get_backend(group) != "fake"]


def _compare_values(units: Sequence[Unit], hashes: Mapping[int, bytes], digests: Mapping[bytes, Digests]) -> None:
    """Raise on all ranks, or warn, if ranks along an axis have different values, as far as these are known."""
    axes = units[0].axes
    ranks = axes.mesh.mesh.reshape(-1, axes.shard_world)
    remedy = (
        "Call torch.manual_seed with the same number on every rank before building the model, or pass "
        "sync_module_states=True to FullyShardedDataParallel, or load one state dict on all ranks"
    )
    for group, are_replicas in [(item, True) for item in ranks.T.tolist()] + [(item, False) for item in ranks.tolist()]:
        firsts = _first_of_each({rank: hashes[rank] for rank in sorted(group)})
        odd = _different_values(units, [digests[hashed] for hashed in firsts])
        if not odd:
            continue
        unit, param, found = odd[0]
        first = min(group)
        other = next(rank for rank, item in zip(firsts.values(), found, strict=True) if item != found[0])
        name = f"{unit.name}.{param.fqn}" if unit.name else param.fqn
        where = f"{len(odd)} parameters, such as {name} on rank {first} and rank {other}"
        stated = f"ranks initialized the model with different values: {where}"
        if are_replicas or unit.options.placements.optimizer is Placement.WHOLE:
            raise RankMismatchError(
                f"{stated}. Each rank would train its own values with the gradients of all ranks. {remedy}."
            )
        if dist.get_rank() == first:
            _log.warning(
                "%s. The trained model would be a mixture of shards from different initializations. %s.",
                *(stated, remedy),
            )


def _different_values(
    units: Sequence[Unit], each: Sequence[Digests]
) -> list[tuple[Unit, ShardedParam, list[int | None]]]:
    """Return the parameters whose digests differ within `each`, with their digests."""
    return [
        (unit, param, found)
        for i, unit in enumerate(units)
        for j, param in enumerate(unit.params)
        if None not in (found := [digests[i][j] for digests in each]) and len(set(found)) > 1
    ]
