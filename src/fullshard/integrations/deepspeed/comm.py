"""`deepspeed.comm`: the functions of `torch.distributed`, and `init_distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fullshard.integrations.deepspeed.refused import missing
from fullshard.integrations.deepspeed.starting import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    """Return the attribute of `torch.distributed` with that name."""
    if name.startswith("__") or not hasattr(dist, name):
        raise missing("deepspeed.comm", name)
    return getattr(dist, name)
