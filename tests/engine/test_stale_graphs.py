"""Writes to parameters between forward and backward raise if plain PyTorch raises, and match it otherwise."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shared_ranks import on_ranks
from small_models import wholes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import StateError, fully_shard, summon_full_params
from fullshard.testing import assert_same


class Parts(nn.Sequential):
    """Layers, of which a forward may use some."""

    def forward(self, x: Tensor, parts: str) -> Tensor:
        if parts != "last":
            x = self[1](self[0](x))
        return x if parts == "first" else self[2](x.detach() if parts == "last, detached" else x)


FORWARDS = ("all", "first", "last", "last, detached")
WRITES: dict[str, Callable[[nn.Module, list[torch.optim.Optimizer]], object]] = {
    "step of the first": lambda _, optimizers: optimizers[0].step(),
    "step of the last": lambda _, optimizers: optimizers[1].step(),
    "step with foreach": lambda _, optimizers: optimizers[2].step(),
    "write to one": lambda model, _: model[2].weight.mul_(2),
    "foreach write": lambda model, _: torch._foreach_mul_(list(model[0].parameters()), 2.0),
    "write to data": lambda model, _: model[1][0].weight.data.mul_(2),
    "zero_grad": lambda model, _: model.zero_grad(),
}
BACKWARD = st.tuples(st.just("backward"), st.integers(0, 2))
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(FORWARDS), min_size=1, max_size=2),
        st.lists(st.sampled_from(["summon", *WRITES]), max_size=2),
        st.lists(BACKWARD, min_size=1, max_size=2),
    ),
    min_size=2,
    max_size=4,
)


def network(shard: Callable[[nn.Module], Any] | None, *, wrap: Sequence[int]) -> Any:
    torch.manual_seed(0)
    model = Parts(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 4))
    if shard is not None:
        for i in wrap:
            shard(model[i])
        shard(model)
    return model


def run(model: nn.Module, actions: Sequence[Any]) -> tuple[list[Any], int | None]:
    """Return what the actions computed, and the index of the backward that was refused, which is the last one run."""
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.5),
        torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    ]
    pending, found = list[Tensor](), list[Any]()
    for i, action in enumerate(actions):
        if action in FORWARDS:
            pending.append(model(torch.arange(8.0).view(2, 4) / 8 + len(found), action).square().mean())
            found.append(pending[-1].detach())
        elif action in WRITES:
            with torch.no_grad():
                WRITES[action](model, optimizers)
        elif action == "summon":
            if type(model) is not Parts:
                with summon_full_params(model):
                    pass
        elif pending:
            loss = pending.pop(-1 - action[1] % len(pending))
            try:
                loss.backward()
            except (RuntimeError, StateError) as error:
                assert "modified by an inplace" in str(error) or "optimizer stepped between" in str(error), error
                return found, i
            found.append(grads(model))
    return [*found, wholes(model)], None


def grads(model: nn.Module) -> list[Any]:
    each = [param.grad for param in model.parameters()]
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in each]
    return [None if grad is None else grad.clone() for grad in full]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_backward_after_in_place_writes_raises_exactly_as_in_plain_pytorch(strategy):
    outcomes = Counter[bool]()

    @given(ROUNDS, st.lists(st.integers(0, 2), unique=True))
    @settings(max_examples=100, deadline=None, database=None, derandomize=True, phases=(Phase.generate,))
    def check(rounds: Sequence[Sequence[Any]], wrap: Sequence[int]) -> None:
        actions = [action for each in rounds for part in each for action in part]
        expected, refused = run(network(None, wrap=()), actions)
        found, found_refused = run(network(lambda module: fully_shard(module, strategy=strategy), wrap=wrap), actions)
        assert (found_refused, len(found)) == (refused, len(expected)), actions
        assert_same(found, expected, name=f"{actions}, {wrap}")
        outcomes[refused is None] += 1

    check()
    assert min(outcomes[False], outcomes[True]) >= 20, outcomes
