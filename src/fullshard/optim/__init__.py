"""Optimizers for sharded parameters, gradient clipping and loss scaling."""

from typing import TYPE_CHECKING

from fullshard._lazy import lazy_names

if TYPE_CHECKING:
    from fullshard.optim.local_steps import step_shards
    from fullshard.optim.muon import Muon
else:
    __getattr__, __dir__ = lazy_names(
        __name__, {"fullshard.optim.local_steps": ["step_shards"], "fullshard.optim.muon": ["Muon"]}
    )

__all__ = ["Muon", "step_shards"]
