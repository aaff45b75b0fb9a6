"""Optimizers for sharded parameters, and what is done between backward and a step."""

from fullshard.optim.muon import Muon

__all__ = ["Muon"]
