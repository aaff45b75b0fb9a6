"""`deepspeed.checkpointing`: DeepSpeed's interface to activation checkpointing, using `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fullshard.errors import ConfigError
from fullshard.integrations.deepspeed.refused import missing

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`. Backward recomputes it instead of keeping its activations."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept the settings that do not change activations, and raise for others.

    Args:
        mpu_: Must be None: model parallelism is not supported.
        deepspeed_config: Ignored, because `initialize` reads the configuration.
        partition_activations, contiguous_checkpointing, checkpoint_in_cpu, profile: Must be False.
        num_checkpoints, synchronize: Ignored.

    Raises:
        ConfigError: a setting is not supported.
    """
    global _configured
    refused = {
        "mpu_": mpu_,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "profile": profile,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(
                f"checkpointing.configure({name}={value!r}) is not supported: torch.utils.checkpoint recomputes "
                "activations on each rank. Leave it out. Offload(activations={'cpu': 1}) of fully_shard moves "
                "activations to the CPU."
            )
    _configured = True


def is_configured() -> bool:
    """Return True if `configure` was called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.checkpointing", name)
