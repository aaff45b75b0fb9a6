"""How long is a training step here, and with torch's DDP, FSDP1 and FSDP2, on the same GPT in the same run?

    torchrun --nproc-per-node 2 benchmarks/step_time.py --rounds 8

Every system has its own copy of the model and is started once; then they take turns, one step each a round. Quoted are
medians over the rounds, and medians of the ratios within a round, since a machine's speed drifts. FSDP1 runs on a CPU
only where torch lets it; a peer that cannot be built is left out, and said. The last line is JSON.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard

System = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A transformer block with attention and an MLP."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A GPT of the given size."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, ratio: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads, ratio) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ours(strategy: str | fullshard.Placements) -> System:
    """This library under `strategy`, each block a unit."""

    def build(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fullshard.fully_shard(block, strategy=strategy)
        return fullshard.fully_shard(model, strategy=strategy)

    return build


def fsdp2(model: nn.Module) -> nn.Module:
    """torch's `fully_shard`, each block a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module) -> nn.Module:
    """torch's `FullyShardedDataParallel`, each block a unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


SYSTEMS: dict[str, System] = {
    "fullshard zero3": ours("zero3"),
    "fullshard zero2": ours("zero2"),
    "fullshard zero1": ours("zero1"),
    "fullshard ddp": ours("ddp"),
    "torch DDP": nn.parallel.DistributedDataParallel,
    "torch FSDP2": fsdp2,
    "torch FSDP1": fsdp1,
}


class Contender:
    """One system's model and optimizer, and how long its steps took."""

    def __init__(self, options: argparse.Namespace, build: System) -> None:
        torch.manual_seed(0)
        model = Model(options.vocab, options.width, options.layers, options.heads, options.ratio, options.seq)
        self.model = build(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: Tensor) -> None:
        """Train on `tokens`, shape (batch, seq + 1), and note the time between two barriers."""
        dist.barrier()
        start = time.perf_counter()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main() -> None:
    """Run all systems in turn and print the table."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders, left_out = {}, {}
    for name in options.systems:
        try:
            contenders[name] = Contender(options, SYSTEMS[name])
        except Exception as error:  # a peer that cannot run here says so in its own way
            left_out[name] = str(error).splitlines()[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.warmup + options.rounds):
        tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1), generator=generator)
        for contender in contenders.values():
            contender.step(tokens)
    if dist.get_rank() == 0:
        show(options, contenders, left_out)
    dist.barrier()
    dist.destroy_process_group()


def show(options: argparse.Namespace, contenders: dict[str, Contender], left_out: dict[str, str]) -> None:
    """The table, and everything in it as JSON."""
    first = next(iter(contenders.values()))
    rows = {}
    print(f"{'':18}{'median ms':>10}{'min':>8}{'max':>8}{'over first':>12}{'loss differs':>14}")
    for name, contender in contenders.items():
        seconds = contender.seconds[options.warmup :]
        ratio = statistics.median(a / b for a, b in zip(seconds, first.seconds[options.warmup :], strict=True))
        differs = max(abs(a - b) for a, b in zip(contender.losses, first.losses, strict=True))
        rows[name] = {"median_ms": statistics.median(seconds) * 1e3, "over_first": ratio, "loss_differs": differs}
        print(
            f"{name:18}{statistics.median(seconds) * 1e3:10.0f}{min(seconds) * 1e3:8.0f}{max(seconds) * 1e3:8.0f}"
            f"{ratio:12.2f}{differs:14.1e}"
        )
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}")
    about = {"torch": torch.__version__, "machine": platform.machine(), "ranks": dist.get_world_size()}
    print(json.dumps({**about, "options": vars(options), "systems": rows, "left_out": left_out}))


def arguments() -> argparse.Namespace:
    """The size of the model and of the measurement; the default is a GPT of 34M parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"vocab": 8192, "width": 512, "layers": 8, "heads": 8, "ratio": 4, "batch": 1, "seq": 128}
    for name, value in {**sizes, "rounds": 10, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    main()
