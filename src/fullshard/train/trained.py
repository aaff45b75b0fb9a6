"""Loading of a finished run."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from fullshard.train.model import GPT, shape_of
from fullshard.train.options import parse_settings
from fullshard.train.run_folder import SETTINGS, WEIGHTS
from fullshard.train.settings import TrainSettings

__all__ = ["trained_gpt", "trained_settings"]


def trained_settings(folder: Path) -> TrainSettings:
    """Return the settings of the run in `folder`."""
    return parse_settings(["--config", str(folder / SETTINGS)])


def trained_gpt(folder: Path) -> GPT:
    """Return the trained model of the run in `folder`: plain PyTorch on the CPU, unsharded, in evaluation mode."""
    model = GPT(shape_of(trained_settings(folder).model))
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()
