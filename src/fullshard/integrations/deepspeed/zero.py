"""`deepspeed.zero`: contexts in which models are built, and in which their sharded parameters are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from fullshard._compat import make_dtensor
from fullshard.comm.routes import collectives_for
from fullshard.engine.comparison import meet
from fullshard.engine.hooks import check_idle
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.registry import process_groups_along
from fullshard.engine.sharded_param import full_copy
from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.refused import missing
from fullshard.tape.recorder import Origin, Phase

__all__ = ["GatheredParameters", "Init"]


def Init(*args: Any, enabled: bool = True, **options: Any) -> nullcontext[None]:  # noqa: N802  # DeepSpeed's name
    """A context in which a model is built, whole, in the memory that it asks for: `initialize` shards it.

    DeepSpeed shards modules as they are built. Here a model that no host can hold is built on the meta device, or by
    `fullshard.integrations.transformers.from_pretrained`; all arguments are DeepSpeed's, and mean nothing more.
    """
    return nullcontext()


@contextmanager
def GatheredParameters(  # noqa: N802  # DeepSpeed's name
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """A context in which `params` are whole: modules have plain parameters, and the given objects are `DTensor`s that
    are replicated over the ranks, in the same memory. Every rank must enter.

    Args:
        params: some of a sharded model's; others among them are left alone.
        modifier_rank: the rank, of those that the model is sharded over, whose changes all ranks keep. If None, changes
            are lost.
        fwd_module: must be None: forwards gather by themselves.
        enabled: nothing happens if False.

    Raises:
        ConfigError: `fwd_module` was given.
        StateError: a parameter is in forward or backward.
    """
    if fwd_module is not None:
        raise ConfigError("GatheredParameters(fwd_module=...): forwards gather by themselves here. Leave it out.")
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    found = {id(it): it for it in map(managed_by, given) if it is not None} if enabled else {}
    gathered = list(found.values())
    units = list(dict.fromkeys(it.unit for it in gathered))
    for unit in units:
        check_idle(unit, "to be gathered")
        unit.check_materialized()
    meet(units, "GatheredParameters")
    wholes = [_show_whole(it) for it in gathered]
    for unit in units:
        unit.state.is_summoned = True
    try:
        yield
    finally:
        for unit in units:
            unit.state.is_summoned = False
        for it, (_, shard) in zip(gathered, wholes, strict=True):
            torch.utils.swap_tensors(it.param.sharded, shard)
            it.param.show(it.param.sharded)
        if modifier_rank is not None:
            for it, (whole, _) in zip(gathered, wholes, strict=True):
                _write(it, whole.detach(), modifier_rank)


def _show_whole(it: Managed) -> tuple[nn.Parameter, nn.Parameter]:
    """The whole parameter, which the modules have now, and what the user's object was: that is whole, too."""
    it.unit.reshard()
    param, trained = it.param, it.param.sharded.requires_grad
    whole = nn.Parameter(full_copy(param.dtensor), requires_grad=trained)
    mesh = param.dtensor.device_mesh
    replicated = make_dtensor(whole.detach(), mesh, (Replicate(),) * mesh.ndim, tuple(whole.shape))
    content = nn.Parameter(replicated, requires_grad=trained)
    vars(content).update(vars(param.sharded))  # marks that users left
    torch.utils.swap_tensors(param.sharded, content)
    param.show(whole)
    return whole, content


@torch.no_grad()
def _write(it: Managed, whole: Tensor, source: int) -> None:
    """Keep the values that rank `source` has in `whole`."""
    for group in process_groups_along([it.unit]):
        ranks = dist.get_process_group_ranks(group)
        first = ranks.index(source) if source in ranks else 0
        collectives_for(group, whole.device).broadcast([whole], first, origin=Origin("", Phase.IDLE))
    it.param.write(whole)


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.zero", name)
