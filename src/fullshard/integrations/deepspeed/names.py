"""Classes that DeepSpeed scripts use in addition to `initialize`: `DeepSpeedConfig` and `OnDevice`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.configuration import read


class DeepSpeedConfig:
    """A parsed DeepSpeed configuration, with the attributes of DeepSpeed's class.

    Args:
        config: The path of a JSON file, or a dict.
        mpu: Must be None: model parallelism is not supported.
        mesh_device: Must be None: all ranks are data parallel.

    Raises:
        ConfigError: An argument or a key of the configuration is not supported. The message names it.
    """

    def __init__(
        self, config: str | PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        for name, value in (("mpu", mpu), ("mesh_device", mesh_device)):
            if value is not None:
                raise ConfigError(
                    f"DeepSpeedConfig({name}={value!r}) is not supported: all ranks are data parallel. Leave it out."
                )
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        found = read(config, self.world_size)
        self.train_batch_size = found.sizes.step
        self.train_micro_batch_size_per_gpu = found.sizes.microbatch
        self.gradient_accumulation_steps = found.sizes.microbatches
        self.zero_optimization_stage = found.stage
        self.zero_enabled = found.stage > 0
        self.float16_enabled = self.fp16_enabled = found.dtype is torch.float16
        self.bfloat16_enabled = found.dtype is torch.bfloat16
        self.gradient_clipping = found.clips_to
        self.steps_per_print = found.steps_per_print
        self.optimizer_name = None if found.optimizer is None else found.optimizer.type.lower()
        self.optimizer_params = None if found.optimizer is None else dict(found.optimizer.params)
        self.scheduler_name = None if found.scheduler is None else found.scheduler.type
        self.scheduler_params = None if found.scheduler is None else dict(found.scheduler.params)


class OnDevice:
    """Context manager within which modules are created on `device`, with floating-point parameters of `dtype`.

    Args:
        dtype: The dtype of floating-point parameters.
        device: A device or its name. `initialize` calls `reset_parameters` of modules on "meta".
        enabled: If False, the context has no effect.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"OnDevice(dtype={dtype!r}): expected a floating-point dtype, such as torch.bfloat16.")
        try:
            self._device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"OnDevice(device={device!r}) is not a device. Pass a torch.device or its name."
            ) from error
        self._dtype, self._enabled = dtype, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._stack.enter_context(self._device)

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
