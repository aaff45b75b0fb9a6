"""Llama as torchtitan and IBM trained it, for `published.py`. `benchmarks/data/README.md` has the sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import MixedPrecisionPolicy, dry, fully_shard
from fullshard.tape.tape import Tape


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama and the microbatch of one rank.

    Args:
        checkpoints: "op" to keep attention and every second product for backward, as torchtitan's option; a number n to
            compute every n-th block again; None to keep everything.
        is_of_torchtitan: Whether norms, rotations and the loss are those of torchtitan; else those of IBM's fms.
    """

    blocks: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    seq: int
    batch: int
    checkpoints: str | int | None = None
    is_of_torchtitan: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Norm(nn.Module):
    """RMSNorm of several kernels in float32."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width))
        self._scales_in_float32 = shape.is_of_torchtitan

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normed * self.weight).type_as(x) if self._scales_in_float32 else normed.type_as(x) * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate as torchtitan does, with complex numbers; or as fms does, with 2 x 2 matrices and a sum."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    if angles.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * angles).flatten(3).type_as(x)
    return angles.mul(pairs.unsqueeze(-2)).sum(-1).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.shape, linear = shape, partial(nn.Linear, bias=False)
        self.is_recomputed = isinstance(shape.checkpoints, int) and (number + 1) % shape.checkpoints == 0
        width, kv_width, mlp = shape.width, shape.kv_heads * shape.head_width, shape.mlp
        self.attention_norm, self.mlp_norm = Norm(shape), Norm(shape)
        self.query, self.output = linear(width, width), linear(width, width)
        self.key, self.value = linear(width, kv_width), linear(width, kv_width)
        self.gate, self.up, self.down = linear(width, mlp), linear(width, mlp), linear(mlp, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.shape.checkpoints == "op":
            contexts = partial(create_selective_checkpoint_contexts, every_second_product())
            return checkpoint(self.run, x, angles, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.run, x, angles, use_reentrant=False) if self.is_recomputed else self.run(x, angles)

    def run(self, x: Tensor, angles: Tensor) -> Tensor:
        shape, normed = self.shape, self.attention_norm(x)
        query, key, value = (
            layer(normed).view(shape.batch, shape.seq, -1, shape.head_width)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, angles), rotated(key, angles)
        if shape.kv_heads != shape.heads:
            parts = *key.shape[:3], shape.heads // shape.kv_heads, shape.head_width
            key, value = (item[:, :, :, None].expand(parts).reshape(query.shape) for item in (key, value))
        heads = F.scaled_dot_product_attention(*(item.transpose(1, 2) for item in (query, key, value)), is_causal=True)
        x = x + self.output(heads.transpose(1, 2).reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def every_second_product() -> Callable[..., CheckpointPolicy]:
    counts = {False: 0, True: 0}  # by whether it computes again

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "attention" in str(operation)
        if operation is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(shape.vocabulary, shape.width), Norm(shape)
        self.blocks = nn.ModuleList(Block(shape, number) for number in range(shape.blocks))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        angles = shape.seq, 1, shape.head_width // 2
        matrices = torch.zeros(*angles, dtype=torch.complex64) if shape.is_of_torchtitan else torch.zeros(*angles, 2, 2)
        self.register_buffer("angles", matrices)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


def loss_of(shape: LlamaShape, model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits.float() if shape.is_of_torchtitan else logits, tokens.flatten())


def sharded_llama(shape: LlamaShape, strategy: str, reduce_dtype: torch.dtype, float8: bool) -> nn.Module:
    model = Llama(shape)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn != "head")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        keeps_last = shape.is_of_torchtitan and block is model.blocks[-1]
        fully_shard(block, mp_policy=policy, strategy="zero2" if keeps_last else strategy)
    return fully_shard(model, mp_policy=policy, strategy=strategy)


@cache
def llama_tape(
    shape: LlamaShape,
    world: int,
    *,
    strategy: str = "zero3",
    reduce_dtype: torch.dtype = torch.float32,
    float8: bool = False,
) -> Tape:
    """Return the trace of two steps of a rank, on hosts of 8."""
    return dry.run(
        partial(sharded_llama, shape, strategy, reduce_dtype, float8),
        lambda: torch.zeros(shape.batch, shape.seq, dtype=torch.long),
        loss=partial(loss_of, shape),
        world=world,
        steps=2,
        max_norm=1.0,
        make_optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    )
