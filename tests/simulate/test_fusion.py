"""Compiled blocks: the same products, collectives and memory, and less traffic between them."""

from collections.abc import Callable
from functools import partial
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard import ConfigError, MixedPrecisionPolicy, dry, fully_shard
from fullshard.plan.costs import costs_of
from fullshard.plan.fusion import FUSED, fused
from fullshard.plan.hardware import hardware
from fullshard.plan.prediction import read_off
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Collective, Free, Operation

WIDTH, ROWS = 16, 8
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, WIDTH, WIDTH),
    "gelu": nn.GELU,
    "silu": partial(nn.SiLU, inplace=False),
    "norm": partial(nn.LayerNorm, WIDTH),
    "rms": partial(nn.RMSNorm, WIDTH),
    "dropout": nn.Dropout,
    "softmax": partial(nn.Softmax, -1),
    "relu": nn.ReLU,
}


def step_of(names: list[str], strategy: str = "zero3") -> list[object]:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(*(LAYERS[name]() for name in names)) for _ in range(2)))
        for block in model:
            fully_shard(block, strategy=strategy)
        return fully_shard(model, strategy=strategy)

    return dry.run(make, lambda: torch.randn(ROWS, WIDTH), world=2, steps=2).entries


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=7).map(lambda names: ["linear", *names]),
    st.sampled_from(("zero1", "zero3")),
)
def test_fusion_preserves_matmuls_collectives_and_allocations(names, strategy):
    entries = step_of(names, strategy)
    found = list(fused(entries))
    for kind in (Allocation, Free, Collective):
        assert [item for item in found if isinstance(item, kind)] == [
            item for item in entries if isinstance(item, kind)
        ]
    before, after = ([item for item in those if isinstance(item, Operation)] for those in (entries, found))
    assert [item for item in after if item.flops] == [item for item in before if item.flops]
    assert sum(item.nbytes for item in after) <= sum(item.nbytes for item in before)
    of_root = [item for item in before if not item.origin.unit]
    assert [item for item in after if not item.origin.unit] == of_root, "the root is not compiled"
    alive = set[int]()
    for item in found:
        if isinstance(item, Allocation):
            alive.add(item.storage)
        elif isinstance(item, Free):
            alive.discard(item.storage)
        elif isinstance(item, Operation) and item.name == FUSED:
            local = {access.storage for access in (*item.reads, *item.writes)}
            assert not local & {entry.storage for entry in entries if isinstance(entry, Allocation)} - alive


def test_pointwise_chain_is_fused_into_one_kernel():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():  # so that nothing is saved for backward
                one, other = self.one(x), self.other(x)
                return F.silu(one).mul(other).add(1.0).exp()

    def make() -> nn.Module:
        return fully_shard(nn.Sequential(fully_shard(Gated()), nn.Linear(WIDTH, WIDTH)))

    tape = dry.run(make, lambda: torch.randn(ROWS, WIDTH), world=2, steps=1)
    kernels = [item for item in fused(tape.entries) if isinstance(item, Operation) and item.name == FUSED]
    (kernel,) = (item for item in kernels if item.origin.phase is Phase.FORWARD)
    nbytes = ROWS * WIDTH * 4
    assert sum(item.nbytes for item in kernel.reads) == 2 * nbytes  # the two products
    assert sum(item.nbytes for item in kernel.writes) == nbytes


def test_float8_matmuls_use_the_float8_rate():
    torchao = pytest.importorskip("torchao.float8")

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))
        torchao.convert_to_float8_training(model)
        for block in model:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return fully_shard(model)

    tape, machine = dry.run(make, lambda: torch.randn(4096, 4096), world=2, steps=2), hardware("h100-80")
    assert "aten.is_pinned" not in {item.name for item in tape.of(Operation)}, "a query"
    products = [item for item in tape.of(Operation) if item.flops]
    assert {item.name for item in products} == {"aten._scaled_mm"}
    rate = machine.fitted.matmul_share * machine.flops_per_s["float8"]
    for item in products:
        tiles = 4096 / 256 * 4096 / 128  # of a product, which the multiprocessors compute in whole waves
        waves = ceil(tiles / machine.multiprocessors) * machine.multiprocessors / tiles
        assert costs_of(machine)._flops_s(item) == pytest.approx(waves * item.flops / rate, rel=0.05)
    eager, compiled = (read_off(tape, machine, 2, compile_blocks=item) for item in (False, True))
    assert compiled.step_s < eager.step_s and compiled.dtype == "float8"
    with pytest.raises(ConfigError, match="a100-80 has no rate for matrix products in float8"):
        read_off(tape, hardware("a100-80"), 2)
