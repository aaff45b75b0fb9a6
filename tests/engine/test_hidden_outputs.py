"""Unit outputs that hooks may not find: gradients are correct, or an error names the parameter."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import hidden_programs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hidden_programs import Program, batch, run_program, run_programs
from shared_ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.engine.nested import tensors_in
from fullshard.errors import StateError
from fullshard.testing import assert_same

STRATEGIES = ("zero3", "zero3", "zero3", "zero2", "zero1", "ddp")


@pytest.mark.slow
def test_hidden_outputs_have_correct_backward_or_raise_on_every_rank() -> None:
    seeds = list(range(16))
    by_rank = run_ranks(2, run_programs, seeds, STRATEGIES)
    assert by_rank[0] == by_rank[1]
    for seed, outcomes in zip(seeds, by_rank[0], strict=True):
        program = Program.random(seed, STRATEGIES)
        for outcome in outcomes:
            assert outcome == "same" or outcome.startswith("refused: backward reads "), (outcome, program)
        assert len(outcomes) == program.steps
        if program.is_supported or program.strategy != "zero3":
            assert outcomes == ["same"] * program.steps, (outcomes, program)
    flat = [outcome for outcomes in by_rank[0] for outcome in outcomes]
    assert len(flat) / 2 < flat.count("same") < len(flat)


def collect_garbage_on_the_first_rank(seed: int) -> list[str]:
    """Like `run_program`, but only rank 0 collects the garbage of a step by the end of its backward."""

    def collecting(program: Program, step: int, microbatch: int, rank: int) -> Tensor:
        x = batch(program, step, microbatch, rank).requires_grad_()
        if dist.get_rank() == 0:
            x.register_hook(lambda _: gc.collect() and None)
        return x

    gc.disable()
    try:
        with mock.patch.object(hidden_programs, "batch", collecting):
            return run_program(Program.random(seed, STRATEGIES))
    finally:
        gc.enable()


def test_garbage_with_parameter_views_does_not_change_collective_order() -> None:
    outcomes = run_ranks(2, collect_garbage_on_the_first_rank, 4)
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0]) == {"same"}


class Writing(nn.Module):
    """A module whose forward modifies its weight in place, before a use that autograd saves or does not save."""

    def __init__(self, *, saves: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.saves = saves

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return F.linear(x, self.weight) if self.saves else x + self.weight.sum(0)


def write_in_forward(strategy: str, *, saves: bool) -> tuple[list[str], list[str]]:
    """Return the result of each step compared with plain PyTorch, and the logged messages."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Writing(saves=saves), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    fully_shard(model[1], strategy=strategy)
    fully_shard(model, strategy=strategy)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    outcomes = []
    for step in range(5):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        try:
            model(x).square().mean().backward()
        except StateError as error:
            outcomes.append(str(error))
            continue
        plain(x).square().mean().backward()
        same = all(
            torch.equal(own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad, other.grad)
            for own, other in zip(model.parameters(), plain.parameters(), strict=True)
        )
        outcomes.append("same" if same else "wrong")
        model.zero_grad()
        plain.zero_grad()
    logging.getLogger("fullshard").removeHandler(handler)
    return outcomes, [text for text in logged if "modified in place" in text]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("saves", [False, True])
@on_ranks(2)
def test_inplace_weight_update_in_forward_is_logged_and_kept_or_raises(strategy, saves):
    outcomes, logged = write_in_forward(strategy, saves=saves)
    if strategy == "zero3" and saves:
        assert all("weight of 1 with its values from forward, but they are lost" in outcome for outcome in outcomes)
    else:
        assert outcomes == ["same"] * 5
    assert len(logged) == (strategy != "ddp")
    assert all(item.startswith("weight was modified in place") for item in logged)


class Positions(nn.Module):
    """Returns its parameter or a part of it, like a learned position embedding."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.returns = nn.Parameter(torch.randn(6, 4)), returns

    def forward(self) -> Any:
        return self.returns(self.weight)


class WithPositions(nn.Module):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions, self.first, self.second = Positions(returns), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        given = self.positions()
        (found,) = tensors_in(given)
        y = self.second(torch.tanh(self.first(x)) + found.flatten(0, -2).sum(0))
        return y.square().sum() + found.square().sum(), given


def losses_with_positions(returns: Callable[[Tensor], Any], strategy: str | None) -> list[Tensor]:
    model = WithPositions(returns)
    if strategy is not None:
        for unit in (model.positions, model.first, model.second):
            fully_shard(unit, strategy=strategy)
        fully_shard(model, strategy=strategy)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(4):
        loss = model(torch.full((2, 4), 1.0 + step))[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(torch.ones(2, 4))[0]]
    return losses


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda weight: weight,
    "a slice": lambda weight: weight[1:3],
    "in a list": lambda weight: [weight],
    "expanded": lambda weight: {"found": weight[None].expand(2, -1, -1)},
    "transposed": lambda weight: weight.t()[:4, :4],
    "detached": lambda weight: (weight.detach(),),
}


@pytest.mark.slow
@on_ranks(2)
def test_a_unit_may_return_its_parameters() -> None:
    for name, returns in RETURNED.items():
        expected = losses_with_positions(returns, None)
        for strategy in ("zero3", "zero2", "zero1", "ddp"):
            assert_same(losses_with_positions(returns, strategy), expected, name=f"{name}, {strategy}")


@on_ranks(2)
def test_unit_returning_parameters_in_uncopyable_object_raises() -> None:
    for strategy in ("zero3", "zero2"):
        model = WithPositions(lambda weight: hidden_programs.Slotted(weight))
        for unit in (model.positions, model.first, model.second):
            fully_shard(unit, strategy=strategy)
        fully_shard(model, strategy=strategy)
        refused = pytest.raises(StateError, match=r" returns a .*Slotted .* its parameters")
        with torch.set_grad_enabled(strategy == "zero3"), refused:  # zero2 frees parameters only after an evaluation
            model(torch.ones(2, 4))
        model.positions.returns = lambda weight: weight[:1]
        model(torch.ones(2, 4))[0].backward()


@on_ranks(2)
def test_returned_parameter_does_not_accumulate_hooks() -> None:
    for strategy in ("zero3", "zero1", "ddp"):
        model = fully_shard(Positions(lambda weight: weight), strategy=strategy)
        found = []
        for _ in range(3):
            model().sum().backward()
            with torch.no_grad():
                model()
            model.unshard()
            found.append(len(model.weight._backward_hooks or ()))
            model.reshard()
        assert found[0] == found[-1], (strategy, found)
