"""`check_parity` on meshes of several axes: stages, parts of the sequence, experts and matrices plus sharding.

More of them, under every strategy, in `test_composition.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import experts
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fullshard.testing import Parallelism, ParityReport, check_parity
from fullshard.testing.parity import stages
from fullshard.wrap import ModuleWrapPolicy

WIDTH, LENGTH, LETTERS = experts.WIDTH, 8, 11


class Block(nn.Module):
    """Attention, a perceptron with a frozen bias, and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.down.bias.requires_grad_(False)
        self.mixture = experts.MoE()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (item.unflatten(-1, (4, -1)).transpose(1, 2) for item in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return (self.mixture(x.flatten(0, 1)).unflatten(0, x.shape[:2]),)


class Letters(nn.Module):
    """A layer between an embedding and a head, which stages have. Positions are given by the batch, or counted."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)
        self.norm.bias.requires_grad_(False)

    def forward(self, letters: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(letters) + self.place(torch.arange(letters.shape[1]) if positions is None else positions)
        for block in self.inner.layers:
            (x,) = block(x)
        return self.head(self.norm(x))


def make_batch(number: int) -> dict[str, Tensor]:
    letters = torch.randint(LETTERS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return {"x": letters[:, :-1], "at": torch.arange(LENGTH).expand(2, -1), "y": letters[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["at"]).flatten(0, 1), batch["y"].flatten())


def careless_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Let the model count positions from 0, for any part of the sequence."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def place(model: Letters, mesh: DeviceMesh) -> None:
    for block in model.inner.layers:
        for name, weight in list(block.mixture.experts.named_parameters()):
            placed = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            setattr(block.mixture.experts, name, nn.Parameter(placed))
        block.mixture.group = mesh.get_group()


def plan(model: nn.Module) -> dict[str, Any]:
    return {"inner.layers.*.up": ColwiseParallel(), "inner.layers.*.down": RowwiseParallel()}


def compared(
    ranks: int, strategies: list[str], loss: Any = loss, *, blocks: int = 4, **parallelism: Any
) -> ParityReport:
    return check_parity(
        partial(Letters, blocks),
        make_batch,
        loss,
        ranks=ranks,
        strategies=strategies,
        parallelism=Parallelism(blocks="inner.layers", experts=place, tp_plan=plan, **parallelism),
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}),
        steps=2,
    )


def test_pipeline_matches_plain_training_bitwise():
    """For any stages in any order, because the order of sums does not change."""
    report = compared(1, ["zero3"], pp=2, schedule="Interleaved1F1B")
    assert [str(row) for row in report.rows] == ["zero3, 1 rank, with pp2: the same bits"]


@pytest.mark.slow
def test_pp_cp_ep_with_sharding_matches_same_ranks_unsharded_bitwise():
    """These have the plain process's numbers within rounding."""
    report = compared(1, ["zero3"], pp=2, cp=2, ep=2)
    assert report.is_equal, str(report)
    assert [(row.strategy, row.is_bit_for_bit) for row in report.rows] == [("none", False), ("zero3", True)]


@pytest.mark.slow
def test_report_detects_positions_restarted_on_each_sequence_chunk():
    """By the first row, and by the parameter. Sharding adds no difference."""
    report = compared(1, ["zero3"], careless_loss, cp=2)
    assert [(row.strategy, row.is_equal) for row in report.rows] == [("none", False), ("zero3", True)]
    first = report.rows[0].first
    assert first is not None
    assert first.name == "embed.weight"


def test_parameter_without_gradient_is_in_the_stage_of_its_named_block():
    model = nn.ModuleDict({"blocks": nn.Sequential(OrderedDict((name, nn.Linear(1, 1)) for name in "abc"))})
    names = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert [stages._stage_by_name(name, model, "blocks", [0, 2]) for name in names] == [0, 0, 1]
