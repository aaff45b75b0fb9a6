"""A byte-level model trained as DeepSpeed's own documentation shows it; started again, it goes on where it was saved.

On two ranks: `torchrun --nproc-per-node 2 SCRIPT --deepspeed_config ds_config.json --save_dir runs/deepspeed`.
"""

import argparse
import inspect
from pathlib import Path

from fullshard.integrations import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CONTEXT, WIDTH = 16, 128


class Text(Dataset):
    """Each sample is some bytes of Python's own sources, and the byte that follows."""

    def __init__(self, samples: int) -> None:
        self.text = torch.frombuffer(bytearray(Path(inspect.__file__).read_bytes()), dtype=torch.uint8).long()
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = 22 * index
        return self.text[start : start + CONTEXT], self.text[start + CONTEXT]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, context: Tensor, target: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help="steps of the optimizer, of all runs together")
    parser.add_argument("--save_dir", default=None)
    parser.add_argument("--save_interval", type=int, default=5)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = NextByte()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Text(5000)
    )
    done = 0
    if args.save_dir:
        path, client_state = engine.load_checkpoint(args.save_dir)
        if path is not None:
            done = client_state["microbatches"]

    for index, (context, target) in enumerate(loader):
        if index < done:  # these were learnt before
            continue
        if engine.global_steps == args.steps:
            break
        loss = engine(context.to(engine.device), target.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"microbatch {index}: loss {loss.item():.4f}", flush=True)
        if args.save_dir and engine.was_step_applied() and engine.global_steps % args.save_interval == 0:
            engine.save_checkpoint(args.save_dir, client_state={"microbatches": index + 1})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
