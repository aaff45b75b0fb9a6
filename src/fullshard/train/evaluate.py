"""Evaluation of the model: bits per byte on validation text, and generated samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.train.model import byte_losses
from fullshard.train.parallelism import rows_of
from fullshard.train.ranks import Rank, gather_in_rank_order
from fullshard.train.settings import TrainSettings
from fullshard.train.text import Text, validation_batches


def validation_loss(model: nn.Module, text: Text, settings: TrainSettings, rank: Rank) -> float:
    """Return the mean loss on the validation windows, in nats per byte. The windows are the same at every world size.

    The losses of single windows are gathered and averaged in float64 in the order of the windows, so that the mean does
    not depend on the assignment of windows to ranks. This is a collective: every rank must call it.
    """
    windows, seq = max(1, settings.run.validate_bytes // settings.text.seq), settings.text.seq
    rows = rows_of(settings.optimization, rank.world)
    losses = []
    with evaluating(model):
        for batch in validation_batches(text, windows=windows, rows=rows, seq=seq, rank=rank.index, world=rank.world):
            scores = model(batch.inputs.to(rank.device))
            losses.append(byte_losses(scores, batch.targets.to(rank.device)))
    by_rank = gather_in_rank_order(torch.stack(losses)[None].double(), rank)  # (world, batches, rows per rank)
    return float(by_rank.transpose(0, 1).flatten()[:windows].cpu().mean())


def sample(model: nn.Module, settings: TrainSettings, device: torch.device, seed: int) -> bytes:
    """Return `sample_bytes` bytes with which the model continues the prompt.

    Every rank must call it. All ranks draw the same bytes, because they have the same scores and seed. The number of
    forwards is fixed, so ranks stay synchronized even if their arithmetic differs.

    Raises:
        ConfigError: The model returned a value that is not finite.
    """
    random = torch.Generator().manual_seed(seed)
    text = torch.tensor([list((settings.run.prompt or "\n").encode())], dtype=torch.int64)
    first = text.shape[1]
    with evaluating(model):
        for _ in range(settings.run.sample_bytes):
            scores = model(text[:, -settings.text.seq :].to(device))[0, -1]
            if not scores.isfinite().all():
                raise ConfigError(
                    "sampling: the model returned NaN or infinity, so training has diverged. Use a smaller --lr, or "
                    "resume from an earlier checkpoint."
                )
            text = torch.cat((text, _draw(scores, settings.run.temperature, random)[None]), dim=1)
    return bytes(text[0, first:].tolist())


def bits(nats: float) -> float:
    """Convert a loss from nats to bits."""
    return nats / math.log(2)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager that sets evaluation mode without gradients, and training mode afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def _draw(scores: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    scores = scores.double().cpu()
    chances = torch.softmax((scores - scores.max()) / temperature, dim=0)  # finite at any temperature
    return torch.multinomial(chances, 1, generator=random)
