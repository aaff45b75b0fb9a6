"""`FusedAdam` and `DeepSpeedCPUAdam`: torch's Adam and AdamW, whose fused kernels update shards on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fullshard.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def FusedAdam(  # noqa: N802  # DeepSpeed's name
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Adam:
    """Return torch's fused AdamW, or its fused Adam if `adam_w_mode` is False.

    Args: Those of DeepSpeed's class. `set_grad_none` has no effect, because `zero_grad` sets gradients to None by
    default.

    Raises:
        ConfigError: `bias_correction` is False, which torch's optimizers do not support.
    """
    if not bias_correction:
        raise ConfigError(
            "bias_correction=False is not supported: torch's Adam always corrects the bias. Leave it out."
        )
    made: Any = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer: torch.optim.Adam = made(
        params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True
    )
    return optimizer


def DeepSpeedCPUAdam(  # noqa: N802  # DeepSpeed's name
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adam:
    """Return the same as `FusedAdam`. States have the dtype of the shards: float32, even if compute uses 16 bits."""
    if not fp32_optimizer_states:
        raise ConfigError(
            "fp32_optimizer_states=False is not supported: states have the dtype of the shards. Leave it out."
        )
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
