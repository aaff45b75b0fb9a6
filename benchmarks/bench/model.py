"""The GPT that every system trains, and its named sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SIZES", "Block", "Model", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a model, and of the batch that one rank trains it on in a step."""

    vocab: int
    width: int
    layers: int
    heads: int
    mlp_ratio: int = 4
    batch: int = 1  # sequences of one rank
    seq: int


SIZES = {
    "tiny": Shape(vocab=64, width=32, layers=2, heads=2, batch=2, seq=8),
    "34m": Shape(vocab=8192, width=512, layers=8, heads=8, seq=128),
    "wide86m": Shape(vocab=1024, width=1024, layers=4, heads=8, mlp_ratio=8, seq=16),
    "124m": Shape(vocab=25088, width=768, layers=12, heads=12, batch=4, seq=256),
}


class Block(nn.Module):
    """One transformer block: attention, then an MLP, each added to its input. One unit of sharding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.mlp_ratio * shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (batch, seq, width) to the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """A GPT that maps tokens to scores of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.vocab, shape.width), nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of shape (batch, seq, vocab) for tokens of shape (batch, seq)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores
