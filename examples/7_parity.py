"""Does it train sharded as it trains plain? Two functions, a command, and an answer for every strategy.

    fullshard parity --model examples/7_parity.py:make_model --batch examples/7_parity.py:make_batch --wrap Block
    fullshard parity --model examples/7_parity.py:make_careless_model --batch examples/7_parity.py:make_batch

The first agrees bit for bit. The second draws noise that cannot be reproduced; it differs, and the parameter is named.
In a test the same is one line, which this file runs as a script: python examples/7_parity.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.testing import check_parity
from fullshard.wrap import ModuleWrapPolicy

LETTERS, WIDTH, CONTEXT = 64, 48, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 192), nn.GELU(), nn.Linear(192, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.mlp(x))


class CarelessBlock(Block):
    """Noise from a generator that is seeded by the clock: other numbers in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3 * torch.randn(WIDTH, generator=self.generator)


class Letters(nn.Module):
    """Which letter comes next? The embedding and the head share their weight. It returns its own loss."""

    def __init__(self, careless: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(CarelessBlock() if careless and i == 1 else Block() for i in range(3))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embedding(letters[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), letters[:, 1:].flatten())


def make_model() -> nn.Module:
    return Letters()


def make_careless_model() -> nn.Module:
    return Letters(careless=True)


def make_batch(rows: int) -> Tensor:
    """One microbatch; the usual generators are seeded for each."""
    return torch.randint(LETTERS, (rows, CONTEXT + 1))


def main() -> None:
    policy = ModuleWrapPolicy({Block})
    report = check_parity(make_model, make_batch, ranks=2, strategies=["zero3"], auto_wrap_policy=policy)
    report.raise_if_different()
    print(report)


if __name__ == "__main__":
    main()
