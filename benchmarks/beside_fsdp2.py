"""A training step of this library and one of torch's FSDP2, counted side by side: the same model, world and batch.

    python benchmarks/beside_fsdp2.py --models llama,gpt2 --worlds 8,64 --json beside.json

No GPU is needed. Both run dry: their own code, on tensors without memory, on the streams of a simulated GPU, as rank 0
of a world that is pretended too. All operations are recorded on a tape and counted there, so the numbers are exact
and reproducible. Times alone depend on assumed speeds (`fullshard.plan.costs.Costs`: H100s, 8 a host).

Each transformer block is a unit, and the root has all other parameters. Parameters are stored in fp32 (the frozen ones
of `lora` in bf16), computed in bf16 and summed in fp32. AdamW is fused. Each rank has one sequence of 4096 tokens
(GPT-2: of 1024); nothing is recomputed. `llama-hsdp` has replicas of 8 ranks.
What is counted is the second step: see `benchmarks.bench.comparison.Counts`.

Bytes copied are those that copies (casts, clones, concatenations, copies in and out of messages) write in the step. Off
come those of the same step of the plain model in bf16, and those that must be: a cast of this rank's shards for every
gather and one of every gradient, where dtypes differ. An operation counts as one launch, whatever kernels it is made
of, and so does a collective of several tensors.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks.bench`

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench.comparison import SYSTEMS, Counts, StepTape, Task, cast, plain_step, sharded_step

RANK = 16  # of adapters
FULLSHARD, PEER = "fullshard", "fsdp2"


class Attention(nn.Module):
    """Causal attention with rotated queries and keys. There may be fewer keys than queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        repeats = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (rotated(k, turn), v))
        return self.out(
            F.scaled_dot_product_attention(rotated(q, turn), k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """`x` of shape (..., seq, head) times cosines, and its halves exchanged times sines, both in `turn`."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


class RMSNorm(nn.Module):
    """RMSNorm as `layer_norm`: one kernel forward and one backward, as on a GPU. On a CPU RMSNorm takes a dozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each expert takes the tokens that want it most, as many as if each token had `top` of them: static shapes."""

    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))
        self.top = top

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share = tokens.shape[0] * self.top // len(self.experts)
        weights, chosen = self.router(tokens).softmax(-1).t().topk(share)
        out = torch.zeros_like(tokens)
        for expert, weight, rows in zip(self.experts, weights.unbind(), chosen.unbind(), strict=True):
            out = out.index_add(0, rows, expert(tokens[rows]) * weight.unsqueeze(-1))
        return out.view_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, kv_heads), mlp
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens in, the loss of predicting each from those before it out."""

    def __init__(self, vocabulary: int, width: int, head: int, seq: int, blocks: Sequence[LlamaBlock]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("turn", torch.zeros(2, seq, head, dtype=torch.bfloat16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        return loss_of(self.head(self.norm(x)), tokens)


def loss_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy in float32 of scores of shape (batch, seq, vocabulary)."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, seq: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), tokens)


class Adapted(nn.Module):
    """A matrix, frozen in bf16, plus a trained product of two small ones in fp32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def llama(layers: int, seq: int = 4096) -> Llama:
    """Return the shape of Llama 3 8B, at 32 layers."""
    blocks = [LlamaBlock(4096, 32, 8, GatedMLP(4096, 14336)) for _ in range(layers)]
    return Llama(128256, 4096, 128, seq, blocks)


def llama70b(layers: int) -> Llama:
    """Return the shape of Llama 3 70B, at 80 layers."""
    blocks = [LlamaBlock(8192, 64, 8, GatedMLP(8192, 28672)) for _ in range(layers)]
    return Llama(128256, 8192, 128, 4096, blocks)


def lora(layers: int) -> Llama:
    """Return the same, frozen, with adapters of the attention's projections."""
    model = cast(llama(layers), torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "k", "v", "out"):
            setattr(block.attention, name, Adapted(getattr(block.attention, name)))
    return model


def moe(layers: int) -> Llama:
    """Return the shape of OLMoE 1B-7B, which has 16 layers and 64 experts, with 8 experts per token."""
    blocks = [LlamaBlock(2048, 16, 16, Experts(2048, 1024, 64, 8)) for _ in range(layers)]
    return Llama(50304, 2048, 128, 4096, blocks)


def gpt2(layers: int) -> GPT2:
    """Return the shape of GPT-2 XL, at 48 layers."""
    return GPT2(50257, 1600, 25, layers, 1024)


MODELS: dict[str, tuple[Callable[[int], nn.Module], int, int]] = {  # with layers and tokens
    "llama": (llama, 32, 4096),
    "llama-2k": (partial(llama, seq=2048), 32, 2048),
    "llama-32k": (partial(llama, seq=32768), 32, 32768),
    "llama-hsdp": (llama, 32, 4096),
    "llama70b": (llama70b, 80, 4096),
    "gpt2": (gpt2, 48, 1024),
    "lora": (lora, 32, 4096),
    "moe": (moe, 8, 4096),  # half of the layers: all are identical, with many operations
}


def task_of(name: str, layers: int | None) -> Task:
    make, usual, tokens = MODELS[name]
    ranks_per_replica = 8 if name.endswith("hsdp") else None
    return Task(
        make_model=lambda: make(layers or usual),
        units=lambda model: list(model.blocks),
        make_batch=lambda: torch.zeros(1, tokens, dtype=torch.long),
        ranks_per_replica=ranks_per_replica,
    )


COLUMNS: dict[str, Callable[[Counts], float]] = {
    "launches": lambda item: item.launches,
    "launches beyond plain": lambda item: item.launches_beyond_plain,
    "copied beyond need, MB": lambda item: item.copied_bytes / 1e6,
    "collectives": lambda item: item.collectives,
    "tensors in them": lambda item: item.messages,
    "given to them, MB": lambda item: item.sent_bytes / 1e6,
    "of less than 1 MB": lambda item: item.small_messages,
    "host operations": lambda item: item.host_operations,
    "peak, MB": lambda item: item.peak_bytes / 1e6,
    "exposed, ms": lambda item: item.exposed_s * 1e3,
    "step, ms": lambda item: item.step_s * 1e3,
    "races": lambda item: item.races,
}


def table(found: dict[tuple[str, int], dict[str, Counts]]) -> str:
    """Ours / theirs = ratio, a line for each model and world."""
    lines = ["| model, ranks | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for (model, world), counts in found.items():
        cells = [cell(column(counts[FULLSHARD]), column(counts[PEER])) for column in COLUMNS.values()]
        lines.append(f"| {model}, {world} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(fully_sharded: float, peer: float) -> str:
    ratio = f" = {fully_sharded / peer:.3f}" if peer else ""
    return f"{shown(fully_sharded)} / {shown(peer)}{ratio}"


def shown(number: float) -> str:
    return f"{number:.0f}" if isinstance(number, int) or number >= 1000 else f"{number:.1f}"


def explain(tapes: dict[str, StepTape]) -> None:
    """Print what each system launches and copies most, and what holds its compute up."""
    for name, tape in tapes.items():
        print(f"\n{name}:")
        for title, counter in (("bytes copied", tape.copies_by_name()), ("launches", tape.launches_by_name())):
            print(f"  {title}:", *(f"    {number:>15,} {what}" for what, number in counter.most_common(30)), sep="\n")
        stalls = list(tape.timeline().exposed_by("compute").items())[:8]
        print("  exposed, ms:", *(f"    {seconds * 1e3:>15.3f} {what}" for what, seconds in stalls), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--worlds", default="8,64,512", help="numbers of ranks")
    parser.add_argument("--layers", type=int, help="fewer or more blocks than the model has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--explain", action="store_true", help="name the operations")
    args = parser.parse_args()
    unknown = set(args.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"--models {args.models}: there is no {', '.join(sorted(unknown))}; choose of {', '.join(MODELS)}")
    found: dict[tuple[str, int], dict[str, Counts]] = {}
    for model in args.models.split(","):
        task = task_of(model, args.layers)
        plain = plain_step(task)
        for world in map(int, args.worlds.split(",")):
            begun = time.perf_counter()
            tapes = {system: sharded_step(system, task, world) for system in SYSTEMS}
            found[model, world] = {system: tape.counts(plain) for system, tape in tapes.items()}
            print(f"{model}, {world} ranks: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
            if args.explain:
                explain({"plain": plain, **tapes})
    print(table(found))
    if args.json is not None:
        runs = [
            {"model": model, "ranks": world, **{system: asdict(counts) for system, counts in item.items()}}
            for (model, world), item in found.items()
        ]
        args.json.write_text(json.dumps({"torch": torch.__version__, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
