"""Sharding of a model in place according to a `ShardingPlugin`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.comm.routes import collectives_of
from fullshard.engine.materialize import allocate
from fullshard.engine.registry import is_unit
from fullshard.errors import ConfigError
from fullshard.fsdp_module import register_fsdp_forward_method, shard_in_place
from fullshard.integrations.placing import repeated_layers, take_from_first
from fullshard.integrations.plugin import NONE, PREFETCHES, SIZE, ShardingPlugin
from fullshard.integrations.waiting_weights import read_waiting
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import MixedPrecisionPolicy, is_castable
from fullshard.tape.recorder import Origin, Phase
from fullshard.wrap import AutoWrapPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy, wrapped_modules

logger = logging.getLogger(__name__)


def shard(
    model: nn.Module, plugin: ShardingPlugin, *, computes_in: torch.dtype | None, broadcast_buffers: bool = True
) -> None:
    """Shard `model` in place: make units of it and of modules in it. A model that is sharded already is not changed.

    Args:
        model: The model, identical on every rank; on the CPU, a GPU or the meta device.
        plugin: The sharding options.
        computes_in: The dtype of mixed precision, if enabled. Trained parameters are then kept in float32.
        broadcast_buffers: Whether the first forward after a step broadcasts the buffers of rank 0, as under DDP. Models
            whose buffers are not saved, such as the frequencies of rotary embeddings, do not need it.

    Raises:
        ConfigError: `plugin` names classes or modules that the model does not have.
        CheckpointError: The files of the model's deferred weights are missing or damaged, or do not match.
    """
    if is_unit(model):
        read_waiting(model)
        return
    ignored = _ignored(model, plugin)
    units = _units(model, plugin, ignored)
    if computes_in is not None:
        _keep_in_float32(model)
    if plugin.activation_checkpointing:
        _checkpoint_activations(model, units, plugin.activation_checkpointing_offload)
    options = replace(
        ShardOptions.of(
            plugin.strategy,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=_precision(plugin, computes_in),
            offload_policy=plugin.offload_policy,
            broadcast_buffers=broadcast_buffers and _saves_buffers(model),
        ),
        prefetches_forward=plugin.forward_prefetch is not False,
        backward_prefetch=PREFETCHES[plugin.backward_prefetch or "BACKWARD_PRE"],
        prefetch_depth=1 if plugin.limit_all_gathers else 2,
    )
    ignored_params = [param for module in ignored for param in module.parameters()]
    first_has_values = plugin.sync_module_states and _has_values_on_first_rank(model)
    for unit in (*units, model):
        if first_has_values:
            allocate(unit, torch.device("cpu"))
            take_from_first(unit)
        shard_in_place((unit,), options, mesh=plugin.device_mesh, ignored_params=ignored_params)
    read_waiting(model)
    if callable(getattr(model, "generate", None)):
        register_fsdp_forward_method(model, "generate")


# -------------------------------------------------------------------------------------------------------------- units


def _units(model: nn.Module, plugin: ShardingPlugin, ignored: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules below `model` that become units, inner ones first."""
    policy = _policy(model, plugin)
    return [] if policy is None else list(wrapped_modules(model, policy, ignored_modules=ignored))


def _policy(model: nn.Module, plugin: ShardingPlugin) -> AutoWrapPolicy | None:
    requested = plugin.auto_wrap_policy
    if not isinstance(requested, str):
        return requested
    if requested == NONE:
        return None
    if requested == SIZE:
        return partial(size_based_auto_wrap_policy, min_num_params=plugin.min_num_params)
    if not plugin.transformer_layer_cls_to_wrap:
        return repeated_layers(model)
    there = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in plugin.transformer_layer_cls_to_wrap if name not in there]
    if missing:
        raise ConfigError(
            f"transformer_layer_cls_to_wrap names {missing[0]}, but no module of {type(model).__name__} has that "
            f"class. Its classes: {', '.join(sorted(there))}."
        )
    return ModuleWrapPolicy({there[name] for name in plugin.transformer_layer_cls_to_wrap})


def _ignored(model: nn.Module, plugin: ShardingPlugin) -> list[nn.Module]:
    requested = plugin.ignored_modules
    if not isinstance(requested, str):
        return list(requested or ())
    found = [module for name, module in model.named_modules() if re.fullmatch(requested, name)]
    if not found:
        raise ConfigError(
            f"ignored_modules={requested!r} does not match the name of any module of {type(model).__name__}."
        )
    return found


# ------------------------------------------------------------------------------------------- dtypes and activations


def _precision(plugin: ShardingPlugin, computes_in: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy. With mixed precision, the default is its dtype for all-gathers and float32 for reductions."""
    param = plugin.param_dtype or computes_in
    reduce = plugin.reduce_dtype or (torch.float32 if computes_in is not None else None)
    return MixedPrecisionPolicy(param, reduce, plugin.output_dtype, cast_forward_inputs=param != torch.float32)


def _keep_in_float32(model: nn.Module) -> None:
    """Keep trained parameters in float32, because optimizer updates are too small for lower precision."""
    raised = [
        param for param in model.parameters() if param.requires_grad and is_castable(param.dtype) and param.itemsize < 4
    ]
    for param in raised:
        param.data = param.data.float()
    if raised:
        logger.info("%d trained parameters are kept in float32, because mixed precision is enabled", len(raised))


def _checkpoint_activations(model: Any, units: Iterable[nn.Module], offload: bool) -> None:
    """Enable recomputation of each unit in backward, with the model's own method if it has one."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(offload=offload)
        return
    if offload:
        raise ConfigError(
            f"activation_checkpointing_offload: {type(model).__name__} has no method activation_checkpointing_enable. "
            "Use torch.autograd.graph.save_on_cpu around its forward."
        )
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


# ---------------------------------------------------------------------------------------------------- starting values


def _saves_buffers(model: nn.Module) -> bool:
    return any(module._buffers.keys() - module._non_persistent_buffers_set for module in model.modules())


def _has_values_on_first_rank(model: nn.Module) -> bool:
    has_values = not any(param.is_meta for param in model.parameters())
    transport = collectives_of(dist.distributed_c10d._get_default_group())
    return bool(transport.broadcast_object(has_values, 0, origin=Origin("", Phase.IDLE)))
