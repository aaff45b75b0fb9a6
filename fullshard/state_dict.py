"""State dicts of sharded modules: sharded or full, always with the FQNs of the user's own module.

Loading takes either form, for every module that has units: a plain tensor is the whole parameter, from which each rank
takes its own part, without communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import dtensor_like
from fullshard.errors import ConfigError
from fullshard.runtime import Turn, clean_fqn, is_unit
from fullshard.sharded_param import ShardedParam
from fullshard.unit import managed_by

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "as_configured",
    "get_state_dict_type",
    "register_load_hooks",
    "set_state_dict_type",
    "state_dict_type",
]


class StateDictType(Enum):
    """What `state_dict()` of a `FullyShardedDataParallel` module holds."""

    FULL_STATE_DICT = "full"  # whole tensors
    LOCAL_STATE_DICT = "local"  # not supported: it would hold flattened shards, which do not exist here
    SHARDED_STATE_DICT = "sharded"  # DTensors


@dataclass
class StateDictConfig:
    """Options of a state dict. `offload_to_cpu`: whether its tensors are moved to the CPU."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict. `rank0_only`: other ranks get an empty one, and need no memory for it."""

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict. Its tensors are always `DTensor`s."""

    _use_dtensor: bool = True


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict, which is not supported."""


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dict. `offload_to_cpu`: whether its tensors are moved to the CPU."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of a full one. `rank0_only`: other ranks get an empty one."""

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of a sharded one."""

    _use_dtensor: bool = True


@dataclass
class StateDictSettings:
    """The kind of state dicts that a module gives, and their options."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_settings: WeakKeyDictionary[nn.Module, StateDictSettings] = WeakKeyDictionary()


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of `module`: what was set, or full state dicts on every rank."""
    return _settings.get(module) or StateDictSettings()


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the kind of state dicts of `module` and of every module below; the settings that `module` had.

    Raises:
        ConfigError: the kind is not supported, or a config belongs to another kind.
    """
    if state_dict_type not in _CONFIGS:
        raise ConfigError(
            f"state_dict_type={state_dict_type}: choose StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT; there are "
            "no flattened shards for a local state dict to hold."
        )
    kind, optim_kind = _CONFIGS[state_dict_type]
    for config, wanted in ((state_dict_config, kind), (optim_state_dict_config, optim_kind)):
        if config is not None and not isinstance(config, wanted):
            raise ConfigError(
                f"{type(config).__name__} does not go with {state_dict_type}. Pass a {wanted.__name__}, or none."
            )
    before = get_state_dict_type(module)
    settings = StateDictSettings(state_dict_type, state_dict_config or kind(), optim_state_dict_config or optim_kind())
    for child in module.modules():
        _settings[child] = dataclasses.replace(settings)
    return before


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """A context in which `module` and every module below give state dicts of this kind."""
    before = {child: _settings.get(child) for child in module.modules()}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for child, settings in before.items():
            if settings is None:
                _settings.pop(child, None)
            else:
                _settings[child] = settings


def as_configured(state: MutableMapping[str, Any], prefix: str, settings: StateDictSettings) -> None:
    """Turn the entries of `state` under `prefix` into what `settings` ask for: a collective, if full tensors."""
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    config = settings.state_dict_config
    only_first = full and getattr(config, "rank0_only", False) and dist.get_rank() != 0
    for key in [key for key in state if key.startswith(prefix)]:
        value = state[key]
        if full and isinstance(value, DTensor):
            value = value.full_tensor()
        if only_first:
            del state[key]
        elif isinstance(value, Tensor):
            state[key] = value.cpu() if config.offload_to_cpu else value


def register_load_hooks(module: nn.Module, turn: Turn) -> None:
    """Let `module.state_dict()` see shards at any moment, and `module.load_state_dict` take whole tensors too."""

    def reshard(module: nn.Module, *_: Any) -> None:
        if turn.holds == 0:
            turn.unit.reshard()

    def cut(module: nn.Module, state: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
        reshard(module)
        for name, sharded in _sharded_params(module):
            key = prefix + name
            value = state.get(key)
            if isinstance(value, Tensor) and tuple(value.shape) == sharded.place.cut.shape:
                state[key] = _shard_of(value, sharded)

    def adopt(module: nn.Module, _: Any) -> None:
        turn.unit.adopt()

    module.register_state_dict_pre_hook(reshard)
    module.register_load_state_dict_pre_hook(cut)
    module.register_load_state_dict_post_hook(adopt)


def _sharded_params(module: nn.Module) -> Iterator[tuple[str, ShardedParam]]:
    """The sharded parameters that `module` and the modules below have, by name; units below come by themselves."""

    def visit(prefix: str, module: nn.Module) -> Iterator[tuple[str, ShardedParam]]:
        for name, param in module._parameters.items():
            managed = None if param is None else managed_by(param)
            if managed is not None:
                yield clean_fqn(prefix + name), managed[1]
        for name, child in module.named_children():
            if not is_unit(child):
                yield from visit(f"{prefix}{name}.", child)

    return visit("", module)


def _shard_of(value: Tensor, sharded: ShardedParam) -> Tensor:
    """`value`, a whole parameter or a `DTensor`, as this rank's shard of it."""
    target = sharded.dtensor
    if isinstance(value, DTensor):
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value
        value = value.full_tensor()
    return dtensor_like(sharded.take_own(value.detach()).to(sharded.local.device), target)
