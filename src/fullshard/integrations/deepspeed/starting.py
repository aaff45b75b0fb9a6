"""`initialize`, and the functions that a DeepSpeed script calls before it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fullshard.device.current import current_device, usual_device_type
from fullshard.engine.registry import units_in
from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.building import MakeOptimizer, ModelParameters, make_optimizer, make_scheduler
from fullshard.integrations.deepspeed.configuration import Configuration, read
from fullshard.integrations.deepspeed.engine import Engine
from fullshard.integrations.placing import shard_model
from fullshard.policy.precision import is_castable
from fullshard.wrap import AutoWrapPolicy

Config = str | PathLike[str] | Mapping[str, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    *,
    auto_wrap_policy: AutoWrapPolicy | None = None,
) -> tuple[Engine, Optimizer | None, DataLoader[Any] | None, Any]:
    """Create an engine, optimizer, loader and scheduler that train `model` according to a DeepSpeed configuration.

    The model is sharded in place according to the ZeRO stage. Every rank receives the first rank's values.

    Args:
        args: It may have `deepspeed_config`, the path of the configuration.
        model: A plain module. Modules on the meta device are initialized by `reset_parameters`.
        optimizer: An optimizer, or a function that creates one from parameters, instead of the configuration's.
        model_parameters: The parameters, or groups of them, to optimize. If None, all trained parameters.
        training_data: A dataset to create a loader for.
        lr_scheduler: A scheduler, or a function that creates one from an optimizer, instead of the configuration's.
        distributed_port: Must be None: the launcher chooses it.
        mpu: Must be None: model parallelism is not supported.
        dist_init_required: Has no effect: the process group is created unless there is one.
        collate_fn: Merges samples into a batch.
        config: A path or a dict.
        mesh_param: Must be None: all ranks are data parallel.
        config_params: An older name of `config`.
        auto_wrap_policy: Selects the units. If None, the model's layers. DeepSpeed has no such argument.

    Raises:
        ConfigError: A key of the configuration, or an argument, is not supported. The message names it.
    """
    for name, value in (("distributed_port", distributed_port), ("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(
                f"initialize({name}=...) is not supported: all ranks are data parallel. Leave it out. For tensor "
                "parallelism, use fullshard.fully_shard with a mesh."
            )
    if model is None:
        raise ConfigError("initialize needs a model. Pass model=.")
    if dist_init_required or not dist.is_initialized():
        init_distributed()
    found = _config(args, config, config_params)
    settings = read(found, dist.get_world_size())
    device = current_device(usual_device_type())
    _shard(model, settings, device, auto_wrap_policy)
    made = make_optimizer(model, model_parameters, optimizer, settings.optimizer)
    engine = Engine(
        model,
        settings,
        found,
        device,
        optimizer=made,
        lr_scheduler=make_scheduler(made, lr_scheduler, settings.scheduler),
        training_data=training_data,
        collate_fn=collate_fn,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config(args: Any, config: Config | None, config_params: Config | None) -> Config:
    given = [item for item in (config, config_params, getattr(args, "deepspeed_config", None)) if item is not None]
    if len(given) != 1:
        raise ConfigError(
            f"initialize got {len(given)} configurations. Pass one: config=, or args with deepspeed_config."
        )
    return given[0]


def _shard(model: nn.Module, settings: Configuration, device: torch.device, policy: AutoWrapPolicy | None) -> None:
    if units_in(model):
        raise ConfigError(
            "the model passed to initialize is already sharded, at least in part. Pass a plain model: the ZeRO stage "
            "of the configuration defines how it is sharded, and auto_wrap_policy= chooses the units."
        )
    if settings.low_precision:  # the optimizer updates float32 values, whatever the dtype of the model
        for param in model.parameters():
            if is_castable(param.dtype):
                param.data = param.data.float()
    shard_model(
        model,
        device=device,
        auto_wrap_policy=policy,
        root={"mp_policy": settings.policy(root=True)},
        mp_policy=settings.policy(root=False),
        strategy=settings.strategy,
        reshard_after_forward=settings.together,
        offload_policy=settings.offload,
    )
    if not settings.averages:
        for unit in units_in(model):
            unit.settings.gradient_divisor = 1.0


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Create the default process group, unless there is one, with NCCL if there is a GPU, otherwise with gloo.

    Args:
        dist_backend: Another backend.
        options: Options of DeepSpeed's function of this name. Only `timeout` is supported.

    Raises:
        ConfigError: An option other than `timeout` is given.
    """
    timeout = options.pop("timeout", None)
    if options:
        raise ConfigError(f"init_distributed({', '.join(options)}): only dist_backend and timeout are supported.")
    if dist.is_initialized():
        return
    device = current_device(usual_device_type())
    backend = dist_backend or dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, **({} if timeout is None else {"timeout": timeout}))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of DeepSpeed's launcher and scripts to `parser`, and return it.

    Args:
        parser: The parser of the script.
    """
    group = parser.add_argument_group("DeepSpeed", "use the configuration file, as in DeepSpeed's scripts")
    group.add_argument("--deepspeed", action="store_true", help="accepted; initialize decides")
    group.add_argument("--deepspeed_config", default=None, type=str, help="JSON file of the configuration")
    return parser
