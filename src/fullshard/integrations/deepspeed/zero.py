"""`deepspeed.zero`: contexts for creating models, and for access to unsharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from fullshard._compat import dtensor_like, make_dtensor, marks_of
from fullshard.comm.routes import collectives_for
from fullshard.engine.comparison import barrier
from fullshard.engine.hooks import check_idle
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.residency import UnitState
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.refused import missing
from fullshard.tape.recorder import Origin, Phase

__all__ = ["GatheredParameters", "Init"]


def Init(*args: Any, enabled: bool = True, **options: Any) -> nullcontext[None]:  # noqa: N802  # DeepSpeed's name
    """Return a context for creating an unsharded model in normal memory. `initialize` shards it.

    DeepSpeed shards modules when they are created. Here, create a model that does not fit on a host on the meta device,
    or with `fullshard.integrations.transformers.from_pretrained`. All arguments are DeepSpeed's and have no effect.
    """
    return nullcontext()


@contextmanager
def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Context manager within which `params` are unsharded. Every rank must enter it.

    Modules have plain parameters, and the given objects are `DTensor`s that are replicated over the ranks, in the same
    memory.

    Args:
        params: Parameters of a sharded model. Those that are not sharded are ignored.
        modifier_rank: The rank, among those that the model is sharded over, whose changes all ranks keep. If None,
            changes are lost.
        fwd_module: Must be None: forwards gather parameters themselves.
        enabled: If False, nothing happens.

    Raises:
        ConfigError: `fwd_module` was given.
        StateError: A unit of these parameters is in forward or backward.
    """
    if fwd_module is not None:
        raise ConfigError(
            "GatheredParameters(fwd_module=...) is not supported: forward gathers parameters automatically. Leave it "
            "out."
        )
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    found = {id(item): item for item in map(managed_by, given) if item is not None} if enabled else {}
    gathered = [item for item in found.values() if item.param.shown is item.param.sharded]  # others are unsharded
    if modifier_rank is not None:
        for item in gathered:
            _coordinates(item, modifier_rank)
    units = list(dict.fromkeys(item.unit for item in gathered))
    outermost = [unit for unit in units if unit.residency.state is not UnitState.SUMMONED]
    for unit in outermost:
        check_idle(unit, "to be gathered")
        unit.check_materialized()
    barrier(units, "GatheredParameters")
    wholes = [_show_whole(item) for item in gathered]
    for unit in outermost:
        unit.residency.summon()
    try:
        yield
    finally:
        for unit in outermost:
            unit.residency.end_summon()
        for element, (_, shard) in zip(gathered, wholes, strict=True):
            torch.utils.swap_tensors(element.param.sharded, shard)
            element.param.show(element.param.sharded)
        if modifier_rank is not None:
            for entry, (whole, _) in zip(gathered, wholes, strict=True):
                _write(entry, whole.detach(), modifier_rank)


def _show_whole(item: Managed) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the parameter in the modules, and the previous content of the user's object, which is now unsharded."""
    item.unit.residency.reshard()
    param, trained = item.param, item.param.sharded.requires_grad
    shard = dtensor_like(param.local.to(item.unit.device), param.dtensor)  # shards may be offloaded
    whole = nn.Parameter(full_copy(shard), requires_grad=trained)
    mesh = param.dtensor.device_mesh
    replicated = make_dtensor(whole.detach(), mesh, (Replicate(),) * mesh.ndim, tuple(whole.shape))
    content = nn.Parameter(replicated, requires_grad=trained)
    vars(content).update(marks_of(param.sharded))  # attributes that users have set
    torch.utils.swap_tensors(param.sharded, content)
    param.show(whole)
    return whole, content


@torch.no_grad()
def _write(item: Managed, whole: Tensor, source: int) -> None:
    """Broadcast the values of rank `source` in `whole` along one mesh axis after another, and write the shards."""
    mesh = item.param.dtensor.device_mesh
    for axis, place in enumerate(_coordinates(item, source)):
        transport = collectives_for(mesh.get_group(axis), whole.device)
        transport.broadcast([whole], place, origin=Origin("", Phase.IDLE))
    item.param.write(whole)


def _coordinates(item: Managed, source: int) -> list[int]:
    """Return the coordinate of rank `source` on each axis of the mesh that the parameter is sharded over."""
    found = (item.param.dtensor.device_mesh.mesh == source).nonzero().tolist()
    if not found:
        raise ConfigError(
            f"GatheredParameters(modifier_rank={source}): {item.param.fqn} is on ranks "
            f"{sorted(item.param.dtensor.device_mesh.mesh.flatten().tolist())}. Choose one of them."
        )
    coordinates: list[int] = found[0]
    return coordinates


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.zero", name)
