"""`explain` describes the engine's state, and nothing else."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks, run_ranks
from small_models import Chain, chain, initialize, inputs
from torch import nn

from fullshard import ConfigError, MixedPrecisionPolicy, Offload, explain, fully_shard, recording
from fullshard.amounts import in_bytes
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import predict_ledger


def explain_run(strategy: str, steps: int) -> tuple[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Chain()
    initialize(model)
    model.layers[0].norm.requires_grad_(False)
    model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy), model)
    for _ in range(steps):
        model(inputs()).sum().backward()
    with recording() as record:
        text = explain(model)
    assert not record.events
    return text, predict_ledger(model)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_explain_lists_shape_dtypes_and_placement_of_parameters(strategy):
    text, ledger = run_ranks(3, explain_run, strategy, 0)[1]
    for name in ("norm.weight", "up.weight", "down.bias"):
        assert len(re.findall(rf"^    {re.escape(name)} \(", text, re.MULTILINE)) == 4
    assert "head.weight (5, 48): " in text
    assert "stored float32, computed and gathered bfloat16, reduced float32; frozen" in text
    assert "this is shard 1 of 3" in text
    assert ("Replicate()" in text or "R;" in text) == (strategy == "ddp")
    assert "order: unknown before the first forward" in text
    assert "layers.3: FSDPLayer, 18,768 parameters" in text
    for nbytes in (ledger.parameters, ledger.gradients, ledger.total):
        assert in_bytes(nbytes) in text


def test_explain_lists_units_in_execution_order():
    text, _ = run_ranks(2, explain_run, "zero3", 2)[0]
    assert "order of forward: the root > layers.0 > layers.1 > layers.2 > layers.3" in text
    assert "order of backward: the root > layers.3 > layers.2 > layers.1 > layers.0" in text


@on_ranks(3)
def test_explain_reports_the_padding_of_the_layout():
    model = nn.Sequential(nn.Linear(48, 1001, bias=False))  # 334 rows per rank, for 1001 in total
    fully_shard(model)
    [param_group] = units_in(model)[0].param_groups
    share = 1 - 1001 * 48 / (3 * param_group.plan.layout.shard_numel)
    assert f"{share:.1%} padding" in explain(model)
    assert share > 0


def test_explain_raises_for_model_without_units():
    with pytest.raises(ConfigError, match="Linear has no units"):
        explain(nn.Linear(2, 2))


def advice(width: int, layers: int) -> bool:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    return "units have less than 1 MB" in explain(fully_shard(model))


def test_explain_reports_small_units():
    """A single small unit is not reported. On one rank, no unit is reported."""
    cases = [((16, 3), True), ((16, 1), False), ((520, 3), False)]
    for case, reported in cases:
        assert run_ranks(2, advice, *case) == [reported, reported]
    assert run_ranks(1, advice, 16, 3) == [False]


def offloaded(folder: str) -> str:
    policy = Offload(activations={"disk": 0.25, "cpu": 0.5}, folder=folder)
    return explain(chain(partial(fully_shard, offload_policy=policy)))


def test_explain_reports_the_placement_of_activations(tmp_path):
    text = run_ranks(1, offloaded, str(tmp_path))[0]
    assert f"saved activations of 25% of all units are in {tmp_path} until backward\n" in text
    assert "of 50% of all units are in the host's memory, where the CPU computes, until backward\n" in text
