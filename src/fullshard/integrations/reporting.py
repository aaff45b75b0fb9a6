"""Conversion of the values that trainers log to the names used in reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_NAMES = {"grad_norm": "gradient_norm", "lr": "learning_rate", "train_loss": "loss"}


def numbers_of(logged: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """Return the numbers and single-element tensors in `logged`, by name, without "step". No tensor is read."""
    return {
        _NAMES.get(name, name.replace("/", "_")): value
        for name, value in logged.items()
        if name != "step" and (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float))
    }
