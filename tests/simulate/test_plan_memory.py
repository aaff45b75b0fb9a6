"""Memory over time, computed from a trace: the total peak, and the peak of each state, which equals its formula."""

from functools import partial
from typing import Any

import pytest
import torch
from small_models import ONE_AXIS, chain, inputs
from torch import nn

from fullshard import CPUOffloadPolicy, dry, fully_shard
from fullshard.plan.ledger import predict_ledger
from fullshard.plan.memory import MemoryPeak, State, memory_curve, memory_peak
from fullshard.tape.recorder import Phase


def taped(strategy: str, **options: Any) -> tuple[dry.Tape, Any]:
    """Return the trace of three steps on rank 0 of 8, and the ledger predicted by the formulas."""
    ledgers = []

    def make() -> nn.Module:
        model = chain(partial(fully_shard, strategy=strategy, **options))
        ledgers.append(predict_ledger(model))
        return model

    return dry.run(make, inputs, world=8, steps=3, max_norm=1.0), ledgers[0]


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_memory_states_sum_to_allocated_bytes(strategy):
    tape, ledger = taped(strategy)
    peak = memory_peak(tape)
    assert peak.nbytes == sum(peak.by_state.values()) == tape.peak_bytes()
    assert all(nbytes >= 0 for _, held in memory_curve(tape) for nbytes in held.values())
    assert f"{peak.nbytes:,} bytes in {peak.origin.phase.value} of " in str(peak)
    assert peak.largest == tuple(sorted(peak.largest, key=lambda item: -item[0]))
    assert sum(nbytes for nbytes, _ in peak.largest) <= peak.nbytes
    most = {state: max(held.get(state, 0) for _, held in memory_curve(tape)) for state in State}
    assert most[State.OPTIMIZER] == ledger.optimizer_state
    assert 0 < most[State.ACTIVATIONS]
    if strategy != "ddp":  # ddp keeps gradients in the tensors that autograd allocates
        assert most[State.SHARDED_GRADIENTS] == ledger.gradients
    kept = {"ddp": most[State.UNSHARDED], "zero1": most[State.UNSHARDED]}.get(strategy, 0)
    assert most[State.PARAMETERS] + kept == ledger.parameters
    if strategy in ("zero2", "zero3"):
        assert most[State.UNSHARDED] == ledger.gathered_peak


def test_offloaded_states_count_as_host_memory():
    tape, ledger = taped("zero3", offload_policy=CPUOffloadPolicy())
    _, kept = taped("zero3")
    here, host = memory_peak(tape), memory_peak(tape, of_host=True)
    assert (here.by_state[State.PARAMETERS], here.by_state[State.OPTIMIZER]) == (0, 0)
    assert (ledger.parameters, ledger.gradients, ledger.optimizer_state) == (0, 0, 0)
    assert host.by_state[State.PARAMETERS] == kept.parameters
    assert host.by_state[State.OPTIMIZER] == kept.optimizer_state
    assert host.by_state[State.SHARDED_GRADIENTS] == kept.gradients


def test_memory_peak_names_unit_and_phase():
    """The largest memory consumer is found in the unit and the phase that allocates it."""

    class Wide(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).repeat(1000, 1, 1).mean(0)

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(48, 48), Wide(48, 48), nn.Linear(48, 48))
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    peak = memory_peak(dry.run(make, lambda: torch.randn(64, 48), world=2, steps=2))
    assert (peak.origin.unit, peak.origin.phase) in (("1", Phase.FORWARD), ("1", Phase.BACKWARD))


def test_memory_peak_of_empty_trace_is_zero():
    peak = memory_peak(dry.Tape())
    assert peak == MemoryPeak(0, dict.fromkeys(State, 0), peak.origin, 0, ())
