"""The learning rate of each step."""

from __future__ import annotations

import math

from fullshard.train.model import shape_of
from fullshard.train.settings import OptimizationSettings, TrainSettings


def learning_rate(settings: OptimizationSettings, peak: float, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warm-up to `peak`, then cosine decay.

    The learning rate of the last step is `min_lr * peak`. If the warm-up is as long as the run, there is no decay.
    """
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, settings.steps - warmup)
    return peak * (settings.min_lr + (1 - settings.min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def peak_lr(settings: TrainSettings) -> float:
    """Return the peak learning rate: as set, or the default of the size."""
    requested = settings.optimization.lr
    return shape_of(settings.model).lr if requested is None else requested
