"""`deepspeed.ops`: DeepSpeed's optimizers, implemented by those of torch."""

from typing import Any

from fullshard.integrations.deepspeed.ops import adam
from fullshard.integrations.deepspeed.refused import missing

__all__ = ["adam"]


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.ops", name)
