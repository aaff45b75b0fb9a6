"""A check that DDP does not wrap a sharded module. DDP would average shards, which differ between ranks."""

from __future__ import annotations

from functools import cache

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fullshard.engine.managed import managed_by
from fullshard.errors import StateError


@cache
def watch_wrappers() -> None:
    """Make DDP raise around a module with sharded parameters, unless the module tells DDP to ignore them."""
    register_module_module_registration_hook(_check)


def _check(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(parent, DistributedDataParallel):
        return
    left_alone = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for fqn, param in module.named_parameters():
        if fqn not in left_alone and managed_by(param) is not None:
            raise StateError(
                f"{type(parent).__name__} around {type(module).__name__}, whose {fqn} is sharded: its gradients are "
                "already averaged over the ranks. Remove the wrapper and call fully_shard on the outermost module. "
                "For replicas of shards pass strategy='hsdp'. To use DDP for the other parameters, list the names of "
                "the sharded ones in module._ddp_params_and_buffers_to_ignore."
            )
