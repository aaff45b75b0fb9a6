"""Step times and memory that torchtitan published of Llama 3.1 8B on H100s: eager, compiled, and with float8.

Nothing is fitted to these rows. `benchmarks/data/README.md` has the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import MixedPrecisionPolicy, dry, fully_shard
from fullshard.plan.hardware import hardware
from fullshard.plan.prediction import read_off
from fullshard.tape.tape import Tape

WIDTH, HEADS, KV_HEADS, MLP, VOCABULARY, BLOCKS = 4096, 32, 8, 14336, 128256, 32
HEAD = WIDTH // HEADS
SEQ, BATCH = 8192, 2  # of a rank


class Norm(nn.Module):
    """RMSNorm of several kernels in float32, as torch computed it in 2024."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (normed * self.weight).type_as(x)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        self.query, self.output = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key, self.value = linear(WIDTH, KV_HEADS * HEAD), linear(WIDTH, KV_HEADS * HEAD)
        self.gate, self.up, self.down = linear(WIDTH, MLP), linear(WIDTH, MLP), linear(MLP, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Keep attention and every second product for backward: torchtitan's selective option `op`."""
        counts = {False: 0, True: 0}  # by whether it computes again

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = "attention" in str(operation)
            if operation is torch.ops.aten.mm.default:
                counts[context.is_recompute] += 1
                kept = counts[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.run, x, angles, use_reentrant=False, context_fn=contexts)

    def run(self, x: Tensor, angles: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (layer(normed).view(BATCH, SEQ, -1, HEAD) for layer in (self.query, self.key, self.value))
        query, key = rotated(query, angles), rotated(key, angles)
        shape = BATCH, SEQ, KV_HEADS, HEADS // KV_HEADS, HEAD
        key, value = (item[:, :, :, None].expand(shape).reshape(query.shape) for item in (key, value))
        heads = F.scaled_dot_product_attention(*(item.transpose(1, 2) for item in (query, key, value)), is_causal=True)
        x = x + self.output(heads.transpose(1, 2).reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.zeros(1, SEQ, 1, HEAD // 2, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


def sharded_llama(float8: bool) -> nn.Module:
    model = Llama()
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn != "head")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=block is not model.blocks[-1])
    return fully_shard(model, mp_policy=policy, reshard_after_forward=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


@cache
def tape_of(world: int, float8: bool) -> Tape:
    return dry.run(
        partial(sharded_llama, float8),
        lambda: torch.zeros(BATCH, SEQ, dtype=torch.long),
        loss=loss_of,
        world=world,
        steps=2,
        max_norm=1.0,
        make_optimizer=partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    )


@dataclass(frozen=True)
class Row:
    """A published row: tokens per second of a GPU, and the GiB that the caching allocator reserved."""

    world: int
    tokens_per_s: float
    reserved_gib: float
    compiled: bool = False
    float8: bool = False

    @property
    def name(self) -> str:
        how = "compiled, float8" if self.float8 else "compiled" if self.compiled else "eager"
        return f"Llama 3.1 8B, {self.world} GPUs, {how}"


ROWS = (
    Row(8, 5762, 82.4),
    Row(8, 6667, 77.0, compiled=True),
    Row(8, 8532, 76.8, compiled=True, float8=True),
    Row(128, 5605, 67.0),
    Row(128, 6514, 62.0, compiled=True),
    Row(128, 8380, 61.8, compiled=True, float8=True),
)


def torchtitan() -> list[dict[str, Any]]:
    """Return predicted and published tokens per second, and memory of eager rows; that of others is not predicted."""
    found = []
    for row in ROWS:
        tape, machine = tape_of(row.world, row.float8), hardware("h100hbm2e-96")
        prediction = read_off(tape, machine, row.world, compile_blocks=row.compiled)
        rate, gib = BATCH * SEQ / prediction.step_s, prediction.reserved_bytes / 2**30
        of_rate, of_memory = rate / row.tokens_per_s - 1, gib / row.reserved_gib - 1
        print(f"{row.name}: {rate:.0f} tokens/s a GPU, published {row.tokens_per_s:.0f}: {of_rate:+.1%}", end="")
        print("" if row.compiled else f"; {gib:.1f} GiB, published {row.reserved_gib}: {of_memory:+.1%}", flush=True)
        found.append(
            {
                "run": row.name,
                "published": row.tokens_per_s,
                "predicted": round(rate),
                "error": round(of_rate, 4),
                **({} if row.compiled else {"published_gib": row.reserved_gib, "predicted_gib": round(gib, 1)}),
            }
        )
    return found
