"""Strategies are values that state the placement of each state."""

from itertools import product

import pytest

from fullshard import ConfigError, Placement, Placements, ShardingStrategy
from fullshard.policy.strategy import resolve_placements

W, S = Placement.WHOLE, Placement.SHARDED


@pytest.mark.parametrize(
    ("short", "name", "parameters", "in_step", "gradients", "optimizer", "replicated"),
    [
        ("ddp", "NO_SHARD", W, W, W, W, False),
        ("zero1", "SHARD_OPTIMIZER", W, W, W, S, False),
        ("zero2", "SHARD_GRAD_OP", S, W, S, S, False),
        ("zero3", "FULL_SHARD", S, S, S, S, False),
        ("hsdp", "HYBRID_SHARD", S, S, S, S, True),
        ("hsdp_zero2", "_HYBRID_SHARD_ZERO2", S, W, S, S, True),
    ],
)
def test_strategy_name_resolves_to_its_placements(short, name, parameters, in_step, gradients, optimizer, replicated):
    expected = Placements(
        parameters=parameters,
        parameters_in_step=in_step,
        gradients=gradients,
        optimizer=optimizer,
        replicated=replicated,
    )
    assert resolve_placements(short) == expected
    assert resolve_placements(ShardingStrategy[name]) == expected
    assert ShardingStrategy(short) is ShardingStrategy[name]


def test_sharding_strategy_has_only_documented_names():
    assert [s.value for s in ShardingStrategy] == ["ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"]


def test_placements_resolve_to_themselves():
    local = Placements(parameters=W, parameters_in_step=W, gradients=S, optimizer=S)
    assert resolve_placements(local) is local


@pytest.mark.parametrize("wrong", ["zero4", "ZERO3", "FULL_SHARD", "", None, 3, ("zero3",)])
def test_unknown_strategy_raises_with_list_of_strategies(wrong):
    with pytest.raises(ConfigError, match=r"is not a strategy. Choose one of ddp, zero1, zero2, zero3, hsdp"):
        resolve_placements(wrong)


@pytest.mark.parametrize("states", list(product([W, S], repeat=4)))
def test_inconsistent_placements_raise(states):
    """A rank can only step parameters that it holds, and parameters kept between steps are not freed within a step."""
    parameters, in_step, gradients, optimizer = states
    possible = not (parameters is W and in_step is S) and not (optimizer is W and S in (parameters, gradients))
    options = {"parameters": parameters, "parameters_in_step": in_step, "gradients": gradients, "optimizer": optimizer}
    if possible:
        Placements(**options)
    else:
        with pytest.raises(ConfigError, match=r"Also set (parameters|optimizer) to sharded"):
            Placements(**options)
