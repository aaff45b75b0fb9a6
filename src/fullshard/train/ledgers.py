"""The memory of a rank in a run, measured and by formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullshard.plan.ledger import measure_ledger, predict_activations, predict_ledger
from fullshard.plan.stored import offloaded_activations
from fullshard.train.bytes_table import RunLedgers
from fullshard.train.model import GPT, byte_losses, shape_of
from fullshard.train.parallelism import rows_of
from fullshard.train.ranks import Rank
from fullshard.train.settings import TrainSettings
from fullshard.train.sharding import ShardedGPT, dtype_of


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager that creates parameters with `dtype`. (A module on fake tensors cannot be cast later.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ledgers_of_run(
    model: ShardedGPT, optimizer: torch.optim.Optimizer, settings: TrainSettings, rank: Rank
) -> RunLedgers:
    """Return the ledgers of this rank after a first step. Every rank must call it: it runs one microbatch of zeros."""
    shape = (rows_of(settings.optimization, rank.world) // rank.world, settings.text.seq)

    def loss_of(gpt: nn.Module) -> Tensor:
        batch = torch.zeros(shape, dtype=torch.int64, device=rank.device)
        return byte_losses(gpt(batch), batch).mean()

    def plain_gpt() -> nn.Module:
        with rank.device, default_dtype(dtype_of(settings.memory, rank.device)):
            return GPT(shape_of(settings.model), checkpoint_blocks=settings.memory.activation_checkpointing)

    activations = predict_activations(plain_gpt, loss_of)
    measured = measure_ledger(model, optimizer, lambda: loss_of(model))
    offloaded = sum(offloaded_activations(model).values())
    return RunLedgers(
        measured=measured,
        formula=predict_ledger(model, activations=max(0, activations - offloaded)),
        ddp=predict_ledger(model, strategy="ddp", activations=activations),
    )
