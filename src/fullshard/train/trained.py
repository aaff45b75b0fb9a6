"""A finished run, read back."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from fullshard.train.model import GPT, shape_of
from fullshard.train.options import parse_settings
from fullshard.train.run_folder import SETTINGS, WEIGHTS
from fullshard.train.settings import TrainSettings

__all__ = ["trained_gpt", "trained_settings"]


def trained_settings(folder: Path) -> TrainSettings:
    """The settings that the run in `folder` had."""
    return parse_settings(["--config", str(folder / SETTINGS)])


def trained_gpt(folder: Path) -> GPT:
    """The model that the run in `folder` trained: plain PyTorch on the CPU, not sharded, in evaluation mode."""
    model = GPT(shape_of(trained_settings(folder).model))
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()
