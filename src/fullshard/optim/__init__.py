"""Optimizers for sharded parameters; clipping and loss scaling between backward and a step."""

from fullshard.optim.local_steps import step_shards
from fullshard.optim.muon import Muon

__all__ = ["Muon", "step_shards"]
