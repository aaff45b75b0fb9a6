"""Models whose weights or modules are exchanged, tied or replaced after sharding match plain PyTorch or raise."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shared_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import StateError, fully_shard
from fullshard.testing import assert_same

LAYERS = 3


def exchange(first: nn.Module, second: nn.Module, name: str) -> None:
    one, other = getattr(first, name), getattr(second, name)
    setattr(first, name, other)
    setattr(second, name, one)


def exchange_modules(model: Any, i: int, j: int) -> None:
    model[i], model[j] = model[j], model[i]


def freeze_new(model: Any, i: int) -> None:
    model[i] = nn.Linear(3, 3).requires_grad_(False)
    with torch.no_grad():
        model[i].weight.fill_(0.5)
        model[i].bias.fill_(0.25)


CHANGES: dict[str, Callable[[Any, int, int], object]] = {
    "exchange weights": lambda model, i, j: exchange(model[i], model[j], "weight"),
    "exchange biases": lambda model, i, j: exchange(model[i], model[j], "bias"),
    "tie weights": lambda model, i, j: setattr(model[i], "weight", model[j].weight),
    "exchange modules": exchange_modules,
    "replace by a frozen module": lambda model, i, _: freeze_new(model, i),
    "replace by another module": lambda model, i, j: model.__setitem__(i, model[j]),
}
ORDINALS = st.integers(0, LAYERS - 1)


def network(shard: Callable[[nn.Module], Any] | None, wrap: Sequence[int]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(LAYERS)])
    if shard is not None:
        for i in wrap:
            shard(model[i])
        shard(model)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: Any, changes: Sequence[tuple[str, int, int]], *, between: bool) -> list[Any]:
    """Apply `changes`, with a step after each if `between`. Return losses, the state dict, names and the output."""
    found: list[Any] = []
    x = torch.arange(6.0).view(2, 3) / 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for change, i, j in changes:
        CHANGES[change](model, i, j)
        if between:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    found.append({name: whole(value) for name, value in model.state_dict().items()})
    found.append([name for name, _ in model.named_parameters()])
    found.append(model(x).detach())
    return found


REFUSED = "was replaced by another parameter|use parameters of each other|also has parameters of .* outside this module"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_models_modified_after_sharding_match_plain_pytorch_or_raise(strategy):
    @given(
        st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), ORDINALS, ORDINALS), min_size=1, max_size=4),
        st.just(range(LAYERS)) | st.lists(ORDINALS, unique=True),
        st.booleans(),
    )
    @settings(max_examples=40, deadline=None, database=None, derandomize=True, phases=(Phase.generate,))
    def check(changes: Sequence[tuple[str, int, int]], wrap: Sequence[int], between: bool) -> None:
        plain, model = network(None, ()), network(lambda module: fully_shard(module, strategy=strategy), wrap)
        expected = train(plain, changes, between=between)
        try:
            assert_same(train(model, changes, between=between), expected, name=f"{changes}, {wrap}, {between}")
            copied = copy.deepcopy(model)
        except StateError as error:
            assert re.search(REFUSED, str(error)), error
            return
        assert_same(copied(torch.ones(1, 3)), plain(torch.ones(1, 3)), name=f"copy after {changes}, {wrap}")

    check()
