"""`ShardingPlugin`: the sharding settings of transformers and accelerate, and their meaning in fullshard.

Both libraries have one set of keys in three forms: `fsdp_config` of the Trainer and of `accelerate config`, the
environment variables of `accelerate launch`, and the arguments of accelerate's `FullyShardedDataParallelPlugin`. All of
them are converted here. A key is either supported or raises an error; none is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import ConfigError
from fullshard.policy.offload import CPUOffloadPolicy, Offload, OffloadPolicy
from fullshard.policy.strategy import Placements, ShardingStrategy, resolve_placements
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, is_too_long, read_text
from fullshard.wrap import AutoWrapPolicy

TRANSFORMER, SIZE, NONE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


@dataclass(frozen=True, kw_only=True)
class ShardingPlugin:
    """The options of sharding a prepared model: `Accelerator(fsdp_plugin=ShardingPlugin(strategy="zero2"))`.

    Args:
        strategy: `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"`, `"hsdp"`, `"hsdp_zero2"`, a `ShardingStrategy` or
            `Placements`.
        reshard_after_forward: A number is the size of groups of adjacent ranks, which keep secondary shards from
            forward to backward. True and False have the same meaning as in `fully_shard`.
        device_mesh: The ranks to shard over. If None, all ranks, or with `hsdp` those of a host.
        auto_wrap_policy: Selects the modules that become units: `"TRANSFORMER_BASED_WRAP"`, `"SIZE_BASED_WRAP"`,
            `"NO_WRAP"` or a policy of `fullshard.wrap`.
        transformer_layer_cls_to_wrap: Names of the classes whose instances become units under
            `"TRANSFORMER_BASED_WRAP"`. If empty, the classes that the model names itself (`_no_split_modules`), or else
            the modules in its lists.
        min_num_params: The minimum size of a unit under `"SIZE_BASED_WRAP"`, in elements.
        ignored_modules: Modules to leave unchanged, or a regular expression that matches their full names.
        cpu_offload: Whether shards, their gradients and the optimizer step stay on the CPU.
        offload_optimizer: The fraction of the optimizer state on disk, from 0 to 1, as in `Offload`.
        offload_parameters: The fraction of the parameters on disk, with gradients and the optimizer state.
        offload_optimizer_cpu: The fraction of the optimizer state that is on the CPU and updated there, from 0 to 1.
        offload_parameters_cpu: The fraction of the parameters on the CPU, from 0 to 1.
        offload_activations: The fraction of activations on disk between forward and backward, from 0 to 1.
        offload_activations_cpu: The fraction of activations in CPU memory.
        offload_budget: The memory that a rank's tensors may take, such as "20GB", instead of these fractions.
        offload_folder: The folder on the disk.
        forward_prefetch: Whether the next unit's all-gather starts before this unit's forward.
        backward_prefetch: `"BACKWARD_PRE"`, `"BACKWARD_POST"` or `"NO_PREFETCH"`.
        limit_all_gathers: Whether to prefetch at most one unit; if False, two.
        param_dtype: The dtype of unsharded parameters, and so of the all-gather. If None, the dtype of mixed precision,
            if enabled; `torch.float32` then gives results bitwise equal to DDP under autocast, except with reentrant
            checkpoints.
        reduce_dtype: The dtype of the gradient reduction. If None, `torch.float32` under mixed precision.
        output_dtype: The dtype that floating-point outputs of a unit are cast to.
        activation_checkpointing: Whether to recompute units in backward, so that their activations are not kept.
        activation_checkpointing_offload: Whether to move the inputs that are kept for recomputation to host memory.
        state_dict_type: `"FULL_STATE_DICT"` saves full weights next to a checkpoint's shards, for other tools;
            `"SHARDED_STATE_DICT"` does not.
        sync_module_states: Whether every rank starts from the values of rank 0.
        cpu_ram_efficient_loading: Whether `from_pretrained` reads weights on rank 0 only.

    Raises:
        ConfigError: A value is not supported, or values contradict each other.
    """

    strategy: str | ShardingStrategy | Placements = "zero3"
    reshard_after_forward: bool | int | None = None
    device_mesh: DeviceMesh | None = None
    auto_wrap_policy: str | AutoWrapPolicy = TRANSFORMER
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    min_num_params: int = 0
    ignored_modules: str | tuple[nn.Module, ...] | None = None
    cpu_offload: bool = False
    offload_optimizer: float = 0.0
    offload_parameters: float = 0.0
    offload_optimizer_cpu: float = 0.0
    offload_parameters_cpu: float = 0.0
    offload_activations: float = 0.0
    offload_activations_cpu: float = 0.0
    offload_budget: int | str | None = None
    offload_folder: str | None = None
    forward_prefetch: bool | None = None
    backward_prefetch: str | None = None
    limit_all_gathers: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    state_dict_type: str = SHARDED
    sync_module_states: bool = True
    cpu_ram_efficient_loading: bool = False

    def __post_init__(self) -> None:
        resolve_placements(self.strategy)
        policy = self.auto_wrap_policy
        _check_choice("auto_wrap_policy", policy if isinstance(policy, str) else TRANSFORMER, (TRANSFORMER, SIZE, NONE))
        _check_choice("state_dict_type", self.state_dict_type, (FULL, SHARDED))
        if self.backward_prefetch is not None:
            _check_choice("backward_prefetch", self.backward_prefetch, tuple(PREFETCHES))
        if policy == SIZE and self.min_num_params < 1:
            raise ConfigError(
                f"auto_wrap_policy={SIZE} with min_num_params={self.min_num_params}: set it to "
                "the minimum number of elements of a unit."
            )
        if policy != SIZE and self.min_num_params:
            raise ConfigError(
                f"min_num_params={self.min_num_params} requires auto_wrap_policy={SIZE}, but it is {policy!r}. Change "
                "auto_wrap_policy, or leave the option out."
            )
        if policy != TRANSFORMER and self.transformer_layer_cls_to_wrap:
            raise ConfigError(
                f"transformer_layer_cls_to_wrap requires auto_wrap_policy={TRANSFORMER}, but it is {policy!r}. Change "
                "auto_wrap_policy, or leave the option out."
            )
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise ConfigError(
                "cpu_ram_efficient_loading loads weights on rank 0 only, so the other ranks must receive them. Set "
                "sync_module_states."
            )
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing_offload needs activation_checkpointing. Set both.")
        if self.cpu_offload and (any(self._fractions.values()) or self.offload_budget is not None):
            stated = ", ".join(f"{name}={fraction:g}" for name, fraction in self._fractions.items() if fraction)
            stated = stated or f"offload_budget={self.offload_budget}"
            raise ConfigError(
                f"cpu_offload with {stated}: cpu_offload means offload_parameters_cpu=1. Leave out one of them."
            )
        on_disk = self.offload_optimizer or self.offload_parameters or self.offload_activations
        if self.offload_folder is not None and not on_disk and self.offload_budget is None:
            raise ConfigError(
                f"offload_folder={self.offload_folder!r} is not used. Set offload_optimizer, offload_parameters, "
                "offload_activations or offload_budget, or leave it out."
            )
        self.offload_policy  # noqa: B018  # checks fractions and folder

    @property
    def offload_policy(self) -> OffloadPolicy:
        """The offload policy of all units."""
        if self.cpu_offload:
            return CPUOffloadPolicy()
        if not any(self._fractions.values()) and self.offload_budget is None:
            return OffloadPolicy()
        return Offload(
            budget=self.offload_budget,
            optimizer={"cpu": self.offload_optimizer_cpu, "disk": self.offload_optimizer},
            parameters={"cpu": self.offload_parameters_cpu, "disk": self.offload_parameters},
            activations={"cpu": self.offload_activations_cpu, "disk": self.offload_activations},
            folder=self.offload_folder,
        )

    @property
    def _fractions(self) -> dict[str, float]:
        names = (
            *("offload_optimizer", "offload_parameters", "offload_activations"),
            *("offload_optimizer_cpu", "offload_parameters_cpu", "offload_activations_cpu"),
        )
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **defaults: Any) -> ShardingPlugin:
        """Return the plugin for an `fsdp_config` section of the Trainer or of `accelerate config`.

        Names may begin with `fsdp_`. Values may be strings, as in YAML and in environment variables.

        Args:
            config: The values by key.
            defaults: The values of this class's fields that `config` does not contain.

        Raises:
            ConfigError: A key or a value is not supported. The message names it and gives the reason.
        """
        stated = {_plain_name(key): value for key, value in config.items()}
        for key, value in stated.items():
            if key in REFUSED and value not in (None, False, "", {}) and str(value).lower() not in ("false", "none"):
                raise ConfigError(f"fsdp_config: {key}={value!r} is not supported: {REFUSED[key]}")
            if key not in REFUSED and key not in SUPPORTED:
                raise ConfigError(
                    f"fsdp_config: unknown key {key}. Supported: {', '.join(sorted(SUPPORTED))}. See "
                    "docs/transformers.md."
                )
        given = {**defaults}
        for key, value in stated.items():
            if key in SUPPORTED and value is not None:
                given |= SUPPORTED[key](key, value)
        if "strategy" in stated:
            spoken = [key for key in ("sharding_strategy", "reshard_after_forward") if _names_strategy(stated.get(key))]
            if spoken:
                raise ConfigError(
                    f"fsdp_config: strategy={stated['strategy']!r} and {spoken[0]}={stated[spoken[0]]!r} both define "
                    "the sharding. Leave one of them out. fsdp='full_shard' and 'shard_grad_op' set the latter."
                )
            given["strategy"] = stated["strategy"]
        return cls(**given)

    @classmethod
    def of(cls, plugin: Any) -> ShardingPlugin:
        """Return `plugin` itself, or the equivalent of accelerate's `FullyShardedDataParallelPlugin`.

        Args:
            plugin: A `ShardingPlugin`, or the plugin of accelerate.

        Raises:
            ConfigError: A value is not supported.
        """
        if isinstance(plugin, cls):
            return plugin
        config = {key: value for key, read in _PLUGIN.items() if (value := read(plugin)) is not None}
        policy = plugin.auto_wrap_policy
        if policy is not None and "auto_wrap_policy" not in config:
            config["auto_wrap_policy"] = policy
        elif policy is None:
            config["auto_wrap_policy"] = NONE
        return cls.from_config(config, **_dtypes_of(plugin.mixed_precision_policy))


PREFETCHES = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": ""}
_STRATEGIES = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp_zero2",
    "_HYBRID_SHARD_ZERO2": "hsdp_zero2",
}
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def plugin_from_environment() -> ShardingPlugin | None:
    """Return the plugin for the options or the configuration file of `accelerate launch`; None without sharding."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in ("true", "1"):
        return None
    stated = {key.removeprefix("FSDP_").lower(): value for key, value in os.environ.items() if key.startswith("FSDP_")}
    policy = stated.setdefault("auto_wrap_policy", NONE).upper()
    # The launcher sets every variable, with a default if the user has not set it.
    if policy != SIZE:
        stated.pop("min_num_params", None)
    if policy != TRANSFORMER:
        stated.pop("transformer_cls_to_wrap", None)
    if stated.get("version", "1") == "1" and "sharding_strategy" in stated:
        stated.pop("reshard_after_forward", None)
    else:
        stated.pop("sharding_strategy", None)
    if "strategy" in stated:
        stated.pop("sharding_strategy", None)
        stated.pop("reshard_after_forward", None)
    for key, unsaid in (("forward_prefetch", "false"), ("use_orig_params", "false")):
        if stated.get(key, "").lower() == unsaid:
            del stated[key]
    return ShardingPlugin.from_config({key: value for key, value in stated.items() if value not in ("", "None")})


def plugin_from_config_file(path: str | os.PathLike[str]) -> ShardingPlugin:
    """Return the plugin for the `fsdp_config` section in a file of `accelerate config`.

    `accelerate launch` only passes on the keys that it knows. This function also reads the keys of fullshard.

    Args:
        path: A file that `accelerate config` has written.

    Raises:
        ConfigError: There is no such section, or a value is not supported.
    """
    file = Path(path)
    try:
        content = yaml.safe_load(read_text(file, limit=CONFIG_BYTES)) or {}
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}). Pass a file written by accelerate config."
        ) from error
    except (yaml.YAMLError, *UNPARSED) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("fsdp_config"), dict):
        raise ConfigError(
            f"{file} has no section fsdp_config. Let accelerate config write one, or pass a ShardingPlugin."
        )
    for key, value in content["fsdp_config"].items():
        if is_too_long(value):
            raise ConfigError(f"{file}: {key} must be less than 2**63.")
    return ShardingPlugin.from_config(content["fsdp_config"], auto_wrap_policy=NONE)


# ---------------------------------------------------------------------------------------------------- keys and values


def _plain_name(key: str) -> str:
    key = key.removeprefix("fsdp_")
    return _ALIASES.get(key, key)


_ALIASES = {
    "fsdp_version": "version",
    "offload_params": "cpu_offload",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}


def _names_strategy(value: Any) -> bool:
    """Return True if `value` is the name of a strategy. A number is the size of groups that keep parameters."""
    return value is not None and not (isinstance(value, int) and not isinstance(value, bool))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r}: choose one of {', '.join(choices)}.")


def _truth(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "1", "yes"):
        return True
    if str(value).lower() in ("false", "0", "no"):
        return False
    raise ConfigError(f"fsdp_config: {key}={value!r}: expected true or false.")


def _flag(key: str, value: Any) -> dict[str, Any]:
    return {key: _truth(key, value)}


def _choice(key: str, value: Any) -> dict[str, Any]:
    return {key: value.upper() if isinstance(value, str) else value}


def _dtype(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.dtype):
        return {key: value}
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"fsdp_config: {key}={value!r}: choose one of {', '.join(_DTYPES)}.")
    return {key: _DTYPES[name]}


def _version(key: str, value: Any) -> dict[str, Any]:
    if str(value) not in ("1", "2"):
        raise ConfigError(f"fsdp_config: version={value!r}: expected 1 or 2, which use the same engine.")
    return {}


def _strategy(key: str, value: Any) -> dict[str, Any]:
    name = getattr(value, "name", str(value)).upper()
    if name.isdigit() and 1 <= int(name) <= 5:
        name = list(_STRATEGIES)[int(name) - 1]
    if name not in _STRATEGIES:
        raise ConfigError(f"fsdp_config: {key}={value!r}: choose one of {', '.join(list(_STRATEGIES)[:5])}.")
    return {"strategy": _STRATEGIES[name]}


def _reshard(key: str, value: Any) -> dict[str, Any]:
    """Return the options for a value of this key.

    True and False select one of two strategies. In version 1, the value names a strategy. A number is the size of a
    rank group.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return {key: value}
    if getattr(value, "name", str(value)).upper() in _STRATEGIES:
        return _strategy(key, value)
    return {"strategy": "zero3" if _truth(key, value) else "zero2"}


def _names(key: str, value: Any) -> dict[str, Any]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, Collection) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"fsdp_config: {key}={value!r}: expected names of classes.")
    return {key: tuple(name.strip() for name in listed if name.strip())}


def _number(key: str, value: Any) -> dict[str, Any]:
    try:
        return {key: int(value)}
    except (TypeError, ValueError):
        raise ConfigError(f"fsdp_config: {key}={value!r}: expected an integer.") from None


def _fraction(key: str, value: Any) -> dict[str, Any]:
    try:
        return {key: float(value)}
    except (TypeError, ValueError):
        raise ConfigError(f"fsdp_config: {key}={value!r}: expected a number from 0 to 1.") from None


def _modules(key: str, value: Any) -> dict[str, Any]:
    return {key: value if isinstance(value, str) else tuple(value)}


def _orig_params(key: str, value: Any) -> dict[str, Any]:
    if not _truth(key, value):
        raise ConfigError(
            "fsdp_config: use_orig_params=False is not supported: parameters are never flattened. Leave it out."
        )
    return {}


def _state_dict_type(key: str, value: Any) -> dict[str, Any]:
    name = getattr(value, "name", str(value)).upper()
    if name == "LOCAL_STATE_DICT":
        raise ConfigError(
            f"fsdp_config: state_dict_type={name} is not supported, since parameters are not flattened. Set {SHARDED} "
            f"or {FULL}."
        )
    return {key: name}


def _as_is(key: str, value: Any) -> dict[str, Any]:
    return {key: value}


SUPPORTED: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "activation_checkpointing": _flag,
    "activation_checkpointing_offload": _flag,
    "auto_wrap_policy": _choice,
    "backward_prefetch": _choice,
    "cpu_offload": _flag,
    "cpu_ram_efficient_loading": _flag,
    "forward_prefetch": _flag,
    "ignored_modules": _modules,
    "limit_all_gathers": _flag,
    "min_num_params": _number,
    "offload_activations": _fraction,
    "offload_activations_cpu": _fraction,
    "offload_budget": _as_is,
    "offload_folder": _as_is,
    "offload_optimizer": _fraction,
    "offload_optimizer_cpu": _fraction,
    "offload_parameters": _fraction,
    "offload_parameters_cpu": _fraction,
    "output_dtype": _dtype,
    "param_dtype": _dtype,
    "reduce_dtype": _dtype,
    "reshard_after_forward": _reshard,
    "sharding_strategy": _strategy,
    "state_dict_type": _state_dict_type,
    "strategy": _as_is,
    "sync_module_states": _flag,
    "transformer_layer_cls_to_wrap": _names,
    "use_orig_params": _orig_params,
    "version": _version,
}
_ON_TPU = "fullshard does not support PyTorch/XLA. Leave it out."
REFUSED = {
    "param_init_fn": (
        "weights of a model on the meta device are loaded, or initialized by reset_parameters(). Leave it out."
    ),
    "xla": _ON_TPU,
    "xla_fsdp_grad_ckpt": _ON_TPU,
    "xla_fsdp_settings": _ON_TPU,
    "xla_fsdp_v2": _ON_TPU,
}


# ------------------------------------------------------------------------------------------- accelerate's own plugin


def _wrap_name(plugin: Any) -> str | None:
    """Return the name of one of accelerate's policies, which it has converted to a function."""
    policy = plugin.auto_wrap_policy
    named = {"transformer_auto_wrap_policy": TRANSFORMER, "size_based_auto_wrap_policy": SIZE}
    return named.get(getattr(policy, "__name__", ""))


def _init_function(plugin: Any) -> Any:
    """Return the user's `param_init_fn`, or None for the one that accelerate sets."""
    function = plugin.param_init_fn
    return None if "FullyShardedDataParallelPlugin" in getattr(function, "__qualname__", "") else function


def _offloads(plugin: Any) -> bool:
    offload = plugin.cpu_offload
    return bool(getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy"))


# For each key, a function that reads the field from accelerate's plugin and returns None if it is not set.
_PLUGIN: dict[str, Callable[[Any], Any]] = {
    "version": lambda item: item.fsdp_version,
    "sharding_strategy": lambda item: item.sharding_strategy,
    "reshard_after_forward": lambda item: item.reshard_after_forward if item.sharding_strategy is None else None,
    "backward_prefetch": lambda item: getattr(item.backward_prefetch, "name", None),
    "forward_prefetch": lambda item: item.forward_prefetch or None,
    "auto_wrap_policy": _wrap_name,
    "transformer_layer_cls_to_wrap": lambda item: (
        item.transformer_cls_names_to_wrap if _wrap_name(item) == TRANSFORMER else None
    ),
    "min_num_params": lambda item: item.min_num_params if _wrap_name(item) == SIZE else None,
    "cpu_offload": _offloads,
    "ignored_modules": lambda item: item.ignored_modules,
    "state_dict_type": lambda item: item.state_dict_type,
    "limit_all_gathers": lambda item: item.limit_all_gathers,
    "param_init_fn": _init_function,
    "sync_module_states": lambda item: item.sync_module_states or None,
    "activation_checkpointing": lambda item: item.activation_checkpointing,
    "activation_checkpointing_offload": lambda item: item.activation_checkpointing_offload,
    "cpu_ram_efficient_loading": lambda item: item.cpu_ram_efficient_loading,
}


def _dtypes_of(policy: Any) -> dict[str, torch.dtype]:
    """Return the dtypes that a mixed-precision policy of torch sets."""
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    found = {name: getattr(policy, name, None) for name in names}
    return {name: dtype for name, dtype in found.items() if dtype is not None}
