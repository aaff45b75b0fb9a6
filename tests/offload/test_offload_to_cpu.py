"""States and parameters on the CPU with a simulated accelerator: bitwise equal results, and the order of transfers."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Chain, Layer, chain, covering_pairs, inputs, small_gpt
from test_offload_to_disk import LOOPS, adamw, few_bytes_per_chunk, learn, momentum
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fullshard import CPUOffloadPolicy, Offload, OffloadPolicy, dry, fully_shard
from fullshard._compat import make_dtensor, set_local_tensor
from fullshard.engine.placements import fractions_of, placements_of
from fullshard.engine.registry import units_in
from fullshard.optim import local_steps
from fullshard.plan.explain import explain
from fullshard.plan.ledger import predict_ledger, predict_tiers
from fullshard.plan.memory import State, memory_peak
from fullshard.policy.offload import StatePlacement
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import HOST, Operation
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

# -- bitwise equality with no offload ---------------------------------------------------------------------------------

SOME = Offload(optimizer={"cpu": 0.6}, parameters={"cpu": 0.3})
POLICIES = (Offload(optimizer={"cpu": 0.4}), SOME, Offload(optimizer={"cpu": 1.0}), CPUOffloadPolicy())
FEW = [
    ("zero3", 0, adamw, SOME),
    ("zero3", 2, adamw, POLICIES[0]),
    ("ddp", 1, adamw, SOME),
    ("zero2", 1, momentum, SOME),
]
Case = tuple[str, int, Any, OffloadPolicy]


def trained_under(strategy: str, loop: dict[str, Any], make: Any, policy: OffloadPolicy | None) -> list[Any]:
    model, options = small_gpt(), {"strategy": strategy, "offload_policy": policy}
    for block in model.blocks:
        fully_shard(block, mp_policy=loop.get("mp_policy"), **options)
    fully_shard(model, **options)
    return learn(model, make(model), **{name: value for name, value in loop.items() if name != "mp_policy"})


def compare(cases: Sequence[Case]) -> None:
    expected: dict[Any, list[Any]] = {}
    for strategy, number, make, policy in cases:
        key = number, make.__name__
        if key not in expected:
            expected[key] = trained_under("zero3", LOOPS[number], make, None)
        with dry.taped(values=True) as tape:
            found = trained_under(strategy, LOOPS[number], make, policy)
        assert_same(found, expected[key], name=f"{strategy}, {key}, {policy}")
        assert not dry.races(tape)
        assert any(
            operation.stream == HOST and operation.origin.phase is Phase.STEP for operation in tape.of(Operation)
        )


@pytest.mark.slow
def test_cpu_offload_fractions_match_no_offload_bitwise():
    run_ranks(2, compare, FEW)


MAKERS = [adamw, momentum]  # streams are not simulated for Muon


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda maker: maker.__name__)
def test_cpu_offload_fractions_match_no_offload_in_every_case(make):
    """All combinations of any two among strategy, loop, optimizer and fractions are covered."""
    cases = [case for case in covering_pairs(ONE_AXIS, range(3), MAKERS, POLICIES) if case[2] is make]
    run_ranks(2, compare, cases, timeout=500)


def test_units_on_disk_and_units_on_cpu_are_disjoint(tmp_path):
    with dry.world(2), dry.taped():
        model = chain(
            partial(fully_shard, offload_policy=Offload(parameters={"cpu": 0.3, "disk": 0.3}, folder=tmp_path))
        )
        units = units_in(model)
        placements = placements_of(units)
    where = {
        destination: sum(unit.whole_nbytes for unit in units if placements[unit] is destination)
        for destination in StatePlacement
    }
    assert where[StatePlacement.DISK] > 0 < where[StatePlacement.CPU]
    assert {unit for unit in units if placements[unit] is StatePlacement.DISK} == {
        unit for unit in units if unit.shards.is_on_disk
    }
    assert (
        where[StatePlacement.CPU]
        >= 0.3 * sum(where.values())
        > where[StatePlacement.CPU] - max(unit.whole_nbytes for unit in units)
    )


@pytest.mark.slow
@on_ranks(2)
def test_offload_to_cpu_and_disk_matches_no_offload_bitwise(tmp_path):
    expected = trained_under("zero3", LOOPS[1], adamw, None)
    states = Offload(optimizer={"cpu": 0.3, "disk": 0.5}, folder=tmp_path)
    shards = Offload(parameters={"cpu": 0.3, "disk": 0.3}, folder=tmp_path)
    with few_bytes_per_chunk():
        for policy in (states, shards):
            assert_same(trained_under("zero3", LOOPS[1], adamw, policy), expected)  # the CPU computes
            with dry.taped(values=True):
                assert_same(trained_under("zero3", LOOPS[1], adamw, policy), expected)


# -- transfers and their order ----------------------------------------------------------------------------------------

STEPS, LAYERS = 3, 4


def tape_of(policy: OffloadPolicy | None, **loop: Any) -> dry.Tape:
    return dry.run(partial(chain, partial(fully_shard, offload_policy=policy)), inputs, world=2, steps=STEPS, **loop)


def crossings(tape: dry.Tape, stream: str) -> list[Operation]:
    """Return the copies between the host and the device on a stream."""
    return [operation for operation in tape.of(Operation) if operation.crosses and operation.stream == stream]


def names(operations: Sequence[Operation]) -> list[str]:
    return [operation.origin.unit for operation in operations]


def shard_nbytes() -> int:
    """Return the shard bytes of a layer on one of two ranks, with padding."""
    with dry.world(2), dry.taped():
        unit = units_in(fully_shard(Layer()))[0]
        return sum(group.plan.stored_nbytes for group in unit.param_groups)


@pytest.mark.slow
def test_shards_are_copied_to_device_per_step_or_per_all_gather():
    last = ["layers.2", "layers.3"]
    tape = tape_of(Offload(optimizer={"cpu": 0.45}), microbatches=2)
    assert names(crossings(tape, "gather")) == last * STEPS
    assert {crossing.nbytes for crossing in crossings(tape, "gather")} == {2 * shard_nbytes()}  # read and written
    tape = tape_of(Offload(optimizer={"cpu": 0.45}, parameters={"cpu": 0.2}), microbatches=2)
    up = names(crossings(tape, "gather"))
    assert up.count("layers.2") == STEPS
    assert up.count("layers.3") == 2 * 2 * STEPS
    assert not crossings(tape_of(None), "gather")


def test_gradients_are_offloaded_per_unit_during_backward():
    tape = tape_of(Offload(optimizer={"cpu": 0.45}))
    down = crossings(tape, "offload")
    assert names(down) == ["layers.3", "layers.2"] * STEPS
    entries = [
        operation
        for operation in tape.of(Operation)
        if operation.stream == "compute" and operation.origin.phase is Phase.BACKWARD
    ]
    order = {id(entry): number for number, entry in enumerate(tape.entries)}
    first = min(order[id(item)] for item in down)
    assert (
        sum(order[id(entry)] > first for entry in entries if entry.flops) > len(entries) / 10
    )  # products of earlier layers


def test_cpu_steps_offloaded_states_and_device_steps_the_rest():
    tape = tape_of(Offload(optimizer={"cpu": 0.45}), max_norm=1.0)
    steps = [operation for operation in tape.of(Operation) if operation.name == "aten._fused_adamw_"]
    nbytes = shard_nbytes()
    of_stream = {stream: [step for step in steps if step.stream == stream] for stream in ("compute", HOST)}
    assert len(of_stream["compute"]) == STEPS
    assert len(of_stream[HOST]) == 2 * (STEPS - 1)  # unit by unit; the last step is still deferred
    assert all(
        2 * 3.5 * nbytes <= item.nbytes <= 2 * 4.5 * nbytes for item in of_stream[HOST]
    )  # values, gradients, states


def test_cpu_steps_a_unit_while_device_computes_earlier_units():
    tape = tape_of(Offload(optimizer={"cpu": 0.45}), max_norm=1.0)
    reported = []
    for operation in tape.of(Operation):
        unit, phase = operation.origin.unit, operation.origin.phase
        if operation.name == "aten._fused_adamw_":
            reported.append(f"{operation.stream} steps")
        elif operation.crosses and operation.stream == "gather":
            reported.append(f"{unit} comes up")
        elif operation.flops and phase is Phase.FORWARD and f"{unit} computes" not in reported[-1:]:
            reported.append(f"{unit} computes")
    layer = "layers.{} computes".format
    last = [
        layer(0),
        "host steps",
        "layers.2 comes up",
        layer(1),
        "host steps",
        "layers.3 comes up",
        layer(2),
        layer(3),
    ]
    assert reported[-len(last) - 2 :] == [*last, " computes", "compute steps"]


# -- indistinguishable from no offload --------------------------------------------------------------------------------


def look_at_params(model: Any, optimizer: Any, left: list[Any]) -> None:
    left += [param.to_local().clone() for param in model.parameters()]


def look_without_gradients(model: Any, optimizer: Any, left: list[Any]) -> None:
    with torch.no_grad():
        left += [param.to_local().sum() for param in model.parameters()]


def look_at_states(model: Any, optimizer: Any, left: list[Any]) -> None:
    states = [state for param in reversed(list(model.parameters())) for state in optimizer.state[param].values()]
    left += [(state.to_local() if isinstance(state, DTensor) else state).clone() for state in states]


def save(model: Any, optimizer: Any, left: list[Any]) -> None:
    left += [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])]


def write_to_params(model: Any, optimizer: Any, left: list[Any]) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def write_to_gradients(model: Any, optimizer: Any, left: list[Any]) -> None:
    optimizer.zero_grad(set_to_none=False)


def write_to_states(model: Any, optimizer: Any, left: list[Any]) -> None:
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].zero_()


def change_the_rate(model: Any, optimizer: Any, left: list[Any]) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.3


def load_states(model: Any, optimizer: Any, left: list[Any]) -> None:
    state = optimizer.state_dict()
    state["state"] = {number: {**its, "exp_avg": its["exp_avg"] * 2} for number, its in state["state"].items()}
    optimizer.load_state_dict(state)


def step_again(model: Any, optimizer: Any, left: list[Any]) -> None:
    optimizer.step()


def do_nothing(model: Any, optimizer: Any, left: list[Any]) -> None:
    """Do nothing. The next forward or the next step runs the deferred step."""


ACTS = [look_at_params, look_without_gradients, look_at_states, save, write_to_params, write_to_gradients]
ACTS += [write_to_states, change_the_rate, load_states, step_again, do_nothing]


def acted_between(act: Any, policy: OffloadPolicy | None) -> list[Any]:
    model = chain(partial(fully_shard, offload_policy=policy))
    with torch.no_grad():
        model(inputs())  # fractions are known from here on
    held = [param.to_local() for param in model.layers[3].parameters()]  # of one layer, whose step is not deferred
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    left: list[Any] = []
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        act(model, optimizer, left)
        left.append([local.clone() for local in held])
        optimizer.zero_grad()
    left.append([param.full_tensor() for param in model.parameters()])
    return left


@pytest.mark.slow
@on_ranks(1)
def test_a_deferred_step_is_not_observable():
    defer = mock.Mock(side_effect=local_steps.defer)
    for act in ACTS:
        expected = acted_between(act, None)
        with dry.taped(values=True) as tape, mock.patch.object(local_steps, "defer", defer):
            assert_same(acted_between(act, Offload(optimizer={"cpu": 0.45})), expected, name=act.__name__)
            assert defer.call_count > 0
            assert all(call.args[1].name != "layers.3" for call in defer.call_args_list)
        assert not dry.races(tape), act.__name__
        defer.reset_mock()


def test_device_memory_shrinks_by_the_predicted_bytes():
    plain, tape = tape_of(None), tape_of(Offload(optimizer={"cpu": 0.45}))
    before, after = (memory_peak(item).by_state for item in (plain, tape))
    offloaded = 2 * shard_nbytes()
    assert before[State.PARAMETERS] == after[State.PARAMETERS]  # a copy is as large as the shards
    assert abs(before[State.OPTIMIZER] - after[State.OPTIMIZER] - 2 * offloaded) < 100  # step counters, and no padding
    assert after[State.SHARDED_GRADIENTS] < 1000  # gradients in transfer count as messages
    assert tape.peak_bytes() < plain.peak_bytes()
    assert 4 * offloaded <= tape.peak_bytes(of_host=True) <= 4.2 * offloaded


def test_ledger_and_explain_report_bytes_on_cpu():
    with dry.world(2), dry.taped():
        policy = Offload(optimizer={"cpu": 0.45}, parameters={"cpu": 0.2})
        model = chain(partial(fully_shard, offload_policy=policy))
        predicted, on_cpu, text = predict_ledger(model), predict_tiers(model)["cpu"].total, explain(model)
        model(inputs())
        assert predict_ledger(model) == predicted
        assert predict_tiers(model)["cpu"].total == on_cpu
        plain = predict_ledger(chain(fully_shard))
    nbytes = shard_nbytes()
    assert plain.parameters - predicted.parameters == nbytes
    assert 4 * 2 * nbytes <= on_cpu <= 4.2 * 2 * nbytes
    assert plain.total - predicted.total + nbytes == on_cpu
    assert "45% of the optimizer's state is on the CPU\n20% of the parameters is on the CPU\n" in text
    assert text.count("optimizer's state are on the CPU, with a copy of the shards on the device\n") == 1


# -- selection of units -----------------------------------------------------------------------------------------------


def placements(policy: Any, **options: Any) -> list[StatePlacement]:
    with dry.world(2), dry.taped():
        model = chain(lambda module: module if isinstance(module, Layer) else None) or Chain()
        fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), offload_policy=policy, **options)
        return list(placements_of(units_in(model)).values())


def test_cpu_fraction_selects_the_last_units():
    device, stepped, on_cpu = StatePlacement.DEVICE, StatePlacement.STEPPED_ON_CPU, StatePlacement.CPU
    assert placements(Offload(optimizer={"cpu": 0.3})) == [device] * 3 + [stepped] * 2
    assert placements(Offload(optimizer={"cpu": 0.5}, parameters={"cpu": 0.1})) == [device] * 2 + [stepped] * 2 + [
        on_cpu
    ]
    assert placements(Offload(parameters={"cpu": 1})) == placements(CPUOffloadPolicy()) == [on_cpu] * 5
    assert placements(Offload(optimizer={"cpu": 1})) == [stepped] * 5


def test_each_fraction_offloads_one_more_unit_to_cpu():
    with dry.world(2), dry.taped():
        units = units_in(chain(fully_shard))
        fractions = fractions_of(units)
    assert fractions == sorted(fractions) and len(fractions) == len(units) and fractions[-1] == 1
    for count, fraction in enumerate(fractions, 1):
        assert placements(Offload(optimizer={"cpu": fraction})).count(StatePlacement.STEPPED_ON_CPU) == count


def test_fqn_patterns_select_offload_policies():
    device, stepped, on_cpu = StatePlacement.DEVICE, StatePlacement.STEPPED_ON_CPU, StatePlacement.CPU
    chosen = {"layers.3.*": CPUOffloadPolicy(), "layers.*": Offload(optimizer={"cpu": 0.3}), "": OffloadPolicy()}
    assert placements(chosen) == [device, device, device, stepped, on_cpu]
    assert placements({"layers.1": Offload(optimizer={"cpu": 1})}) == [device, device, stepped, device, device]


def test_dtensor_reports_the_device_of_its_local_tensor():
    """The device need not exist on this machine."""

    class Elsewhere(Tensor):
        @staticmethod
        def __new__(cls, device: str) -> "Elsewhere":
            return Tensor._make_wrapper_subclass(cls, (4, 4), dtype=torch.float32, device=device)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is torch.ops.aten.detach.default
            return cls(str(args[0].device))

    with dry.world(2):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        param = nn.Parameter(make_dtensor(Elsewhere("cuda:0"), mesh, (Shard(0),), (8, 4)))
        assert param.device.type == "cuda"
        local = torch.zeros(4, 4)
        set_local_tensor(param, local)
        assert isinstance(param, DTensor)
        assert param.device.type == "cpu"
        assert param.to_local().data_ptr() == local.data_ptr()
        param.grad = make_dtensor(torch.ones(4, 4), mesh, (Shard(0),), (8, 4))  # torch would reject this assignment
        assert (param.requires_grad, param.is_leaf) == (True, True)
