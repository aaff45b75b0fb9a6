"""A byte-level GPT in plain PyTorch: the trainer's model, and an example of a model that shards well.

It is designed to train in a few minutes on a CPU. Queries and keys are normalized (Henry et al., 2020,
arXiv:2010.04245), and positions are rotary (Su et al., 2021, arXiv:2104.09864). The embedding also looks up hashes of
the last bytes, which gives the first block this context at almost no cost (Pagnoni et al., 2024, arXiv:2412.09871).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard.errors import ConfigError
from fullshard.train.settings import ModelSettings

VOCABULARY = 256
_MOST, MOST_LAYERS = 1_000_000, 10_000  # so that numbers of parameters and bytes fit an int64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a GPT, and a suitable peak learning rate."""

    layers: int
    heads: int
    width: int
    mlp_ratio: int = 4
    table_rows: int = 4096  # rows of each table of hashed last bytes
    lr: float

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


SIZES = {
    "nano": Shape(layers=2, heads=2, width=32, table_rows=256, lr=6e-3),
    "small": Shape(layers=4, heads=2, width=128, lr=5e-3),
    "medium": Shape(layers=6, heads=4, width=256, lr=2e-3),
    "large": Shape(layers=12, heads=12, width=768, lr=6e-4),
    "xl": Shape(layers=24, heads=16, width=1024, lr=3e-4),
}


def shape_of(settings: ModelSettings) -> Shape:
    """Return the dimensions of the named size. Explicitly given dimensions take precedence."""
    if settings.size not in SIZES:
        raise ConfigError(f"--size {settings.size}: unknown. Choose one of {', '.join(SIZES)}.")
    given = {name: getattr(settings, name) for name in ("layers", "heads", "width", "mlp_ratio")}
    for name, value in given.items():
        most = MOST_LAYERS if name == "layers" else _MOST
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1 and at most {most}.")
    shape = replace(SIZES[settings.size], **{name: value for name, value in given.items() if value is not None})
    if shape.width % (2 * shape.heads):
        fitting = [width for width in range(shape.width, 0, -1) if width % (2 * shape.heads) == 0]
        remedy = f"Take --width {max(fitting, default=2 * shape.heads)}, or another --heads."
        raise ConfigError(
            f"--width {shape.width}: {shape.heads} heads cannot share it equally with an even size per head. {remedy}"
        )
    return shape


class GPT(nn.Module):
    """A GPT that maps bytes to scores of the next byte."""

    def __init__(self, shape: Shape, *, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpoint_blocks = checkpoint_blocks
        self.embedding = ByteEmbedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores of shape (rows, seq, 256) for the byte after each of `inputs`, int64 of shape (rows, seq)."""
        x = self.embedding(inputs)
        turn = rotation(inputs.shape[1], self.shape.head_width, x)
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x = checkpoint(block, x, turn, use_reentrant=False, preserve_rng_state=False)  # blocks have no dropout
            else:
                x = block(x, turn)
        scores: Tensor = self.head(self.norm(x))
        return scores


class ByteEmbedding(nn.Module):
    """Embedding of a byte: the sum of a vector for the byte and vectors for hashes of the last two and three bytes."""

    LOOK_BACK = (1, 2)  # bytes before the byte itself

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table_rows = shape.table_rows
        self.byte = nn.Embedding(VOCABULARY, shape.width)
        self.tables = nn.ModuleList(nn.Embedding(shape.table_rows, shape.width) for _ in self.LOOK_BACK)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (rows, seq, width). Bytes before the first count as 0."""
        x: Tensor = self.byte(inputs)
        key = inputs
        for back, table in zip(self.LOOK_BACK, self.tables, strict=True):
            earlier = F.pad(inputs, (back, 0))[:, : inputs.shape[1]]
            key = key * VOCABULARY + earlier
            x = x + table((key * 2654435761 >> 11) % self.table_rows)  # multiplicative hashing
        return x


class Block(nn.Module):
    """A transformer block: attention, then an MLP, each with a residual connection. It is one FSDP unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Map shape (rows, seq, width) to the same shape. `turn` is the result of `rotation`."""
        x = x + self.attention(self.attention_norm(x), turn)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal multi-head attention with normalized queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inward = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.outward = nn.Linear(shape.width, shape.width, bias=False)
        self.query_norm = nn.LayerNorm(shape.head_width, bias=False)
        self.key_norm = nn.LayerNorm(shape.head_width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Map shape (rows, seq, width) to the same shape."""
        rows, seq, width = x.shape
        query, key, value = self.inward(x).view(rows, seq, 3, self.heads, width // self.heads).unbind(2)
        query, key = rotate(self.query_norm(query), turn), rotate(self.key_norm(key), turn)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        out: Tensor = self.outward(mixed.transpose(1, 2).reshape(rows, seq, width))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU in between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inward = nn.Linear(shape.width, shape.mlp_ratio * shape.width, bias=False)
        self.outward = nn.Linear(shape.mlp_ratio * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (..., width) to the same shape."""
        out: Tensor = self.outward(F.gelu(self.inward(x)))
        return out


def rotation(seq: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for positions 0 to seq - 1, shape (seq, 1, head_width / 2), with the dtype of `like`."""
    half = head_width // 2
    speeds = 10000.0 ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
    angles = torch.arange(seq, device=like.device, dtype=torch.float32)[:, None, None] * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair of numbers of `x`, shape (rows, seq, heads, head_width), by the angle of its position."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def byte_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each row in nats per byte: float32 of shape (rows,). Divide by ln 2 for bits per byte."""
    losses = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


@torch.no_grad()
def initialize(model: GPT, seed: int) -> GPT:
    """Return the model with its initial weights, which depend only on the seed and the shape.

    Matrices that write into the residual stream start at zero, so that each block starts as the identity.
    """
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "outward" in name:
            parameter.zero_()
        elif "embedding" in name:
            parameter.normal_(std=0.5, generator=random)
        else:
            parameter.normal_(std=1 / math.sqrt(parameter.shape[1]), generator=random)
    model.head.weight.mul_(0.2)
    return model
