"""State dicts of sharded modules: sharded or full, always with the FQNs of the user's own module.

Modules with units load both forms. A plain tensor is the full parameter: each rank copies its shard from it, without
communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._compat import dtensor_like, own_hook
from fullshard.comm.mesh import check_local_shard
from fullshard.device.memory import in_separate_storage
from fullshard.engine.comparison import barrier
from fullshard.engine.hooks import is_in_use
from fullshard.engine.late_params import LateParams
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.registry import clean_fqn, failing_together, process_groups_along, units_in
from fullshard.engine.residency import UnitState
from fullshard.engine.sharded_param import ShardedParam, full_copy
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError, StateError
from fullshard.policy.arguments import check_type


class StateDictType(Enum):
    """The kinds of state dicts of a `FullyShardedDataParallel` module."""

    FULL_STATE_DICT = "full"  # full tensors
    LOCAL_STATE_DICT = "local"  # not supported: it would hold flattened shards, which do not exist here
    SHARDED_STATE_DICT = "sharded"  # DTensors


@dataclass
class StateDictConfig:
    """Options of a state dict.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
        rank0_only: Whether only the first rank gets the tensors. The others get an empty state dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict. Its tensors are always `DTensor`s.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """

    _use_dtensor: bool = True


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict, which is not supported.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dict.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of a full state dict of an optimizer.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
        rank0_only: Whether only the first rank gets the tensors. The others get an empty state dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of a sharded state dict of an optimizer.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """

    _use_dtensor: bool = True


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of a local state dict of an optimizer, which is not supported.

    Args:
        offload_to_cpu: Whether tensors of the state dict are moved to the CPU.
    """

    offload_to_cpu: bool = False


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state dict: FQNs, or the numbers that the optimizer gives its parameters."""

    PARAM_NAME = "name"
    PARAM_ID = "id"


@dataclass
class StateDictSettings:
    """The kind of state dicts that a module returns, and their options.

    Args:
        state_dict_type: The kind: full or sharded.
        state_dict_config: The options of model state dicts. Their class must match the kind.
        optim_state_dict_config: The options of optimizer state dicts. Their class must match the kind.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_settings: WeakKeyDictionary[nn.Module, StateDictSettings] = WeakKeyDictionary()


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the kind of state dicts of `module`; by default, full state dicts on every rank.

    Args:
        module: A module that contains sharded modules.
    """
    return _settings.get(module) or StateDictSettings()


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the kind of state dicts of `module` and every module below. Return the previous settings of `module`.

    Args:
        module: The module whose state dicts change, with all modules below.
        state_dict_type: The kind: full or sharded.
        state_dict_config: The options of model state dicts; None for the defaults of the kind.
        optim_state_dict_config: The options of optimizer state dicts; None for the defaults of the kind.

    Raises:
        ConfigError: The kind is not supported, or a config belongs to a different kind.
    """
    check_type("module", module, nn.Module, "an nn.Module")
    check_type("state_dict_type", state_dict_type, StateDictType, "a fullshard.StateDictType")
    if state_dict_type not in _CONFIGS:
        raise ConfigError(
            f"state_dict_type={state_dict_type}: choose StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT. Local "
            "state dicts hold flattened parameters, which do not exist here."
        )
    kind, optim_kind = _CONFIGS[state_dict_type]
    for config, wanted in ((state_dict_config, kind), (optim_state_dict_config, optim_kind)):
        if config is not None and not isinstance(config, wanted):
            raise ConfigError(
                f"{type(config).__name__} does not match {state_dict_type}. Pass a {wanted.__name__}, or leave it out."
            )
    before = get_state_dict_type(module)
    settings = StateDictSettings(state_dict_type, state_dict_config or kind(), optim_state_dict_config or optim_kind())
    for child in module.modules():
        _settings[child] = dataclasses.replace(settings)
    return before


def copy_settings(copies: Mapping[nn.Module, nn.Module]) -> None:
    """Copy the settings of modules, the keys of `copies`, to their copies."""
    for module, copied in copies.items():
        if module in _settings:
            _settings[copied] = dataclasses.replace(_settings[module])


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Context manager that sets the kind of state dicts of `module` and of every module below.

    Args:
        module: The module whose state dicts change, with all modules below.
        state_dict_type: The kind: full or sharded.
        state_dict_config: The options of model state dicts; None for the defaults of the kind.
        optim_state_dict_config: The options of optimizer state dicts; None for the defaults of the kind.
    """
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


def as_configured(module: nn.Module, state: MutableMapping[str, Any], prefix: str, settings: StateDictSettings) -> None:
    """Convert the entries of `state` under `prefix` to the form in `settings`. This is a collective for full tensors.

    A full state dict is a copy, including buffers and parameters outside of units.
    """
    full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    config = settings.state_dict_config
    drops = full and getattr(config, "rank0_only", False) and not is_first_rank(module)
    units = units_in(module) if full else []
    if full:
        barrier(units, "state_dict() of full tensors")
    live = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())} if full else set()
    with failing_together(units):
        for key in [key for key in state if key.startswith(prefix)]:
            value = state[key]
            if full and isinstance(value, DTensor):
                value = full_copy(value)
            if drops:
                del state[key]
            elif isinstance(value, Tensor):
                value = value.cpu() if config.offload_to_cpu else value
                state[key] = value.clone() if _memory(value) in live else value


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a plain tensor's storage."""
    return None if isinstance(tensor, DTensor) else tensor.untyped_storage()._cdata


def is_first_rank(module: nn.Module) -> bool:
    """Return True on the first of the ranks that `module` is sharded over, to which `rank0_only` refers."""
    return all(dist.get_rank(group) == 0 for group in groups_of(module))


def groups_of(module: nn.Module) -> list[dist.ProcessGroup | None]:
    """Return the process groups that, one after the other, connect the first rank to all ranks of `module`."""
    return [*process_groups_along(units_in(module))] or [None]


def device_of(module: nn.Module) -> torch.device:
    """Return the device that `module` computes on."""
    units = units_in(module)
    return units[0].device if units else torch.device("cpu")


# -- loading ----------------------------------------------------------------------------------------------------------


class _Hooks:
    """The state dict hooks of one unit, for the whole unit or for a single module in it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._late_params = LateParams([unit])
        self._outermost: nn.Module | None = None  # the outermost module that is being loaded
        self._assigned: dict[tuple[int, str], Managed] = {}  # parameters assigned in this load, by module and name

    def before(self, module: nn.Module) -> None:
        """Show the sharded parameters to the modules."""
        if is_in_use(self._unit):
            raise StateError(
                f"state dict within a forward or backward of {self._unit.name or 'the root'}: its parameters are "
                "in use. Save and load between steps."
            )
        self._unit.residency.hand_over_shards()
        is_summoned = self._unit.residency.state is UnitState.SUMMONED
        if self._outermost is None and not is_summoned:  # loading may replace parameters itself
            self._unit.check_replacements()

    def after(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        """Make `torch.save` and `copy.deepcopy` work for the values of a state dict. See `at_start` in `_compat.py`."""
        in_one_storage = [group.plan for group in self._unit.param_groups if group.plan.lives_in_unsharded]
        separates = len({plan.contract.stored for plan in in_one_storage}) > 1
        for name in module._parameters:
            value = state.get(prefix + name)
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                local = value._local_tensor
                if separates and type(local) is Tensor and not local.is_meta:
                    state[prefix + name] = dtensor_like(in_separate_storage(local), value)
                elif value.storage_offset():
                    state[prefix + name] = dtensor_like(local, value)

    @own_hook
    def before_save(self, module: nn.Module, *_: Any) -> None:
        """Show the sharded parameters to the modules, and raise if parameters were added after sharding."""
        self.before(module)
        self._late_params.check(again=module is self._unit.module)

    @own_hook
    def before_load(
        self,
        module: nn.Module,
        state: MutableMapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Replace full tensors in the state dict by this rank's shards."""
        self.before(module)
        if self._outermost is None or self._outermost is module:  # it is set after a load that failed
            self._assigned.clear()  # left by a load that failed
            known = next((unit.params[0].dtensor.device_mesh for unit in units_in(module) if unit.params), None)
            for key, value in state.items():  # check all values before any is loaded
                if isinstance(value, DTensor):
                    check_local_shard(clean_fqn(key), value, known)
            self._outermost = module
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            # A module in two places of the model is loaded twice. The first time may have replaced its parameters.
            place = id(module), name
            managed = None if param is None else managed_by(param) or self._assigned.get(place)
            if managed is not None and isinstance(value, Tensor):
                self._assigned[place] = managed
                sharded = managed.param
                if value.numel() == sharded.layout.spec.numel == 1 and not sharded.sharded.ndim:
                    value = value.reshape(())  # old versions of torch saved scalars as 1-D tensors
                if value.shape != sharded.sharded.shape:
                    errors.append(
                        f"{clean_fqn(prefix + name)} is of shape {tuple(sharded.sharded.shape)} in the model, but of "
                        f"{tuple(value.shape)} in the state dict. Build the model as it was when it was saved."
                    )
                    value = sharded.sharded.detach()
                elif sharded.is_encoded and not isinstance(value, DTensor):
                    errors.append(
                        f"{clean_fqn(prefix + name)} is a {type(sharded.local).__name__} with encoded values in the "
                        "model, but a plain tensor in the state dict. A rank cannot encode its shard separately. "
                        "Load before fully_shard, or load a state dict of DTensors of the same mesh."
                    )
                    value = sharded.sharded.detach()
                state[prefix + name] = shard_of(value, managed.unit, managed.param)

    @own_hook
    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        """Make the unit adopt assigned tensors, and report incompatible keys with the user's names."""
        for keys in incompatible:
            keys[:] = [clean_fqn(key) for key in keys]
        if module is self._outermost:
            self._outermost = None
            self._assigned.clear()
            if self._unit.residency.state is not UnitState.SUMMONED:
                self._unit.shards.adopt()


def register_hooks(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Make `state_dict()` of the `modules` of `unit` always return shards, and loading accept full tensors."""
    hooks = _Hooks(unit)
    for module in set(modules):
        module.register_state_dict_pre_hook(hooks.before_save)
        handle = module.register_state_dict_post_hook(own_hook(partial(hooks.after)))  # torch sets an attribute on it
        in_order: Any = module._state_dict_hooks
        in_order.move_to_end(handle.id, last=False)  # before hooks of the user, which may rename keys
        module.register_load_state_dict_pre_hook(hooks.before_load)
        module.register_load_state_dict_post_hook(hooks.after_load)


def shard_of(value: Tensor, unit: Unit, sharded: ShardedParam) -> Tensor:
    """Return this rank's shard of `value`, a full parameter or a `DTensor`, on the device of the shard in `sharded`."""
    target = sharded.dtensor
    device = unit.shards.device if sharded.local.is_meta else sharded.local.device
    if isinstance(value, DTensor):
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value if value._local_tensor.device == device else dtensor_like(value.to_local().to(device), target)
        value = full_copy(value)
    return dtensor_like(sharded.take_shard(value.detach()).to(device), target)
