"""Handwritten digits, a small CNN, and three ways to train it on several ranks: DDP, one unit, units by size.

    torchrun --nproc-per-node 2 examples/4_digits.py
    torchrun --nproc-per-node 2 examples/4_digits.py --data ~/mnist --epochs 2

Without `--data`, the digits are the 1797 that come with scikit-learn, 8 x 8 pixels each. With it, they are MNIST's,
from a folder that has its four IDX files (`train-images-idx3-ubyte` and so on, as they are or gzipped).

The size-based policy makes a unit of every module with enough parameters; what is smaller stays with the unit around
it. All three trainings end with the same test accuracy, since sharding changes where numbers live and not what they
are.
"""

import argparse
import gzip
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel
from fullshard.wrap import size_based_auto_wrap_policy

BATCH = 32


@dataclass(frozen=True)
class Digits:
    images: Tensor  # (N, 1, side, side), from 0 to 1
    labels: Tensor  # (N,)

    def part(self, rank: int, world: int, device: torch.device) -> "Digits":
        """Every world-th digit, the same number of them on every rank."""
        full = len(self.labels) // world * world
        return Digits(self.images[rank:full:world].to(device), self.labels[rank:full:world].to(device))


class Net(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * ((side - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def scikit_digits() -> tuple[Digits, Digits]:
    """Training and test digits, the last 360 for the test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target, dtype=torch.long)
    return Digits(images[:-360], labels[:-360]), Digits(images[-360:], labels[-360:])


def mnist(folder: Path) -> tuple[Digits, Digits]:
    """Training and test digits from the IDX files in `folder`."""
    return tuple(
        Digits(
            idx(folder, f"{split}-images-idx3-ubyte").float().unsqueeze(1) / 255,
            idx(folder, f"{split}-labels-idx1-ubyte").long(),
        )
        for split in ("train", "t10k")
    )


def idx(folder: Path, name: str) -> Tensor:
    """The array in an IDX file: two zero bytes, dtype, number of dims, their sizes (big-endian), the data."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise SystemExit(f"--data {folder}: there is neither {name} nor {name}.gz in it. Name the folder that has one.")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dims = data[3]
    shape = np.frombuffer(data, ">i4", dims, offset=4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def train(model: nn.Module, digits: Digits, epochs: int) -> None:
    """Adadelta, with a learning rate that falls to seven tenths after each epoch."""
    optimizer = torch.optim.Adadelta(model.parameters(), lr=2.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    torch.manual_seed(dist.get_rank())  # dropout: another on each rank, the same in each training
    per_rank = BATCH // dist.get_world_size()
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(per_rank):
            optimizer.zero_grad()
            F.cross_entropy(model(digits.images[chosen]), digits.labels[chosen]).backward()
            optimizer.step()
        scheduler.step()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of all ranks' digits that the model tells right."""
    model.eval()
    guesses = torch.cat([model(images).argmax(1) for images in digits.images.split(500)])
    right = (guesses == digits.labels).sum()
    dist.all_reduce(right)
    return right.item() / (len(digits.labels) * dist.get_world_size())


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits under DDP and under fullshard.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--data", type=Path, help="folder with MNIST's IDX files, instead of scikit-learn's digits")
    options = parser.parse_args()
    training, test = mnist(options.data) if options.data else scikit_digits()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    training, test = training.part(rank, world, device), test.part(rank, world, device)

    by_size = partial(size_based_auto_wrap_policy, min_num_params=10_000)
    ways = {
        "DDP": DistributedDataParallel,
        "one unit": FullyShardedDataParallel,
        "units by size": partial(FullyShardedDataParallel, auto_wrap_policy=by_size),
    }
    for name, wrapped in ways.items():
        torch.manual_seed(0)
        model = wrapped(Net(training.images.shape[-1]).to(device))
        train(model, training, options.epochs)
        result = accuracy(model, test)
        if rank == 0:
            print(f"{name}: test accuracy {result:.2%}")
            if isinstance(model, FullyShardedDataParallel):
                print(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
