"""`deepspeed.utils`: logging, and the full values of single parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.engine.sharded_param import full_copy
from fullshard.integrations.deepspeed.refused import missing

__all__ = ["log_dist", "logger", "safe_get_full_fp32_param", "safe_get_full_grad"]

logger = logging.getLogger("fullshard.integrations.deepspeed")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; on all ranks if `ranks` is None or contains -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = {-1} if ranks is None else set(ranks)
    if wanted & {-1, rank}:
        logger.log(level, "[rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the unsharded values of `param` in float32, in new memory. Every rank must call it."""
    return full_copy(param).float() if isinstance(param, DTensor) else param.detach().float().clone()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the unsharded gradient of `param` as the optimizer will see it, or None. Every rank must call it."""
    grad = param.grad
    return full_copy(grad) if isinstance(grad, DTensor) else None if grad is None else grad.clone()


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.utils", name)
