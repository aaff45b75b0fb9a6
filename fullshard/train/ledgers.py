"""The memory of a rank in a run: measured where the engine runs, and by formula."""

from __future__ import annotations

import torch

from fullshard.train.bytes_table import RunLedgers
from fullshard.train.model import GPT
from fullshard.train.ranks import Rank
from fullshard.train.settings import TrainSettings


def ledgers_of_run(
    model: GPT, optimizer: torch.optim.Optimizer, settings: TrainSettings, rank: Rank
) -> RunLedgers | None:
    """Ledgers of this rank once a first step is done; None as long as the engine cannot tell."""
    return None
