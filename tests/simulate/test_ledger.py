"""The ledger's prediction equals the engine's memory, to the byte."""

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import ONE_AXIS, adamw, batch, loss_of, my_part, shard, small_gpt
from torch import Tensor

from fullshard import ConfigError
from fullshard.plan.ledger import (
    Ledger,
    measure_ledger,
    predict_activations,
    predict_ledger,
)
from fullshard.testing import run_ranks


def tokens() -> Tensor:
    """Return this rank's part of a batch, newly allocated, so that both forwards count it equally."""
    rows = len(my_part(batch(0)))
    return torch.zeros(rows, 8, dtype=torch.long)


def two_ledgers(strategy: str) -> tuple[Ledger, Ledger]:
    model = shard(small_gpt(), strategy=strategy)
    optimizer = adamw(model)
    for step in range(3):
        loss_of(model, my_part(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted = predict_ledger(model, activations=predict_activations(small_gpt, lambda m: loss_of(m, tokens())))
    return measure_ledger(model, optimizer, lambda: loss_of(model, tokens())), predicted


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(item, marks=pytest.mark.slow) for item in (1, 3))])
@on_new_ranks("world")
def test_measured_ledger_matches_the_predicted_ledger(world):
    """Compare each state, on every rank, under every strategy."""
    ledgers = [two_ledgers(strategy) for strategy in ONE_AXIS]
    for strategy, (measured, predicted) in zip(ONE_AXIS, ledgers, strict=True):
        assert measured == predicted, strategy


def another_strategy_predicted() -> bool:
    sharded = shard(small_gpt(), strategy="zero3")
    whole = shard(small_gpt(), strategy="ddp")
    return predict_ledger(sharded, strategy="ddp") == predict_ledger(whole)


def test_ledger_of_another_strategy_is_predicted_exactly():
    """The formula for `ddp` is the same for a model sharded by any strategy."""
    assert all(run_ranks(2, another_strategy_predicted))


def test_predict_ledger_raises_for_model_without_units():
    with pytest.raises(ConfigError, match="fully_shard"):
        predict_ledger(torch.nn.Linear(2, 2))


def parameters_of_all_ranks() -> int:
    ledger = predict_ledger(shard(small_gpt(), strategy="zero3"))
    return ledger.parameters * dist.get_world_size()


def test_sharded_parameter_bytes_scale_inversely_with_world_size():
    """A rank holds 1/N of the parameters, plus padding."""
    alone = run_ranks(1, parameters_of_all_ranks)[0]
    for world in (2, 4):
        assert alone <= run_ranks(world, parameters_of_all_ranks)[0] <= 1.05 * alone
