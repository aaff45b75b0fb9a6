"""Whole training steps as CUDA graphs, emulated on the CPU: a replay repeats operations, not Python code."""

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from captured_programs import Program, random_program, run
from logged import Logged
from replayed_graph import ReplayedGraph
from shared_ranks import on_new_ranks
from small_models import ONE_AXIS, chain, inputs
from torch import Tensor, nn

from fullshard import (
    ConfigError,
    Offload,
    StateError,
    capture,
    check_finite_gradients,
    fully_shard,
    recording,
)
from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import register_backend
from fullshard.device.cuda_graph import CudaGraph
from fullshard.graphs import CapturedStep, _line_of
from fullshard.testing import assert_same, run_ranks

CPU = torch.device("cpu")
WARMUP = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def captured(step: Any, examples: Any, graphs: list[ReplayedGraph] | None = None) -> CapturedStep[Any]:
    """Capture `step` in a graph that is replayed on the CPU."""
    graph = ReplayedGraph()
    if graphs is not None:
        graphs.append(graph)
    return CapturedStep(step, examples, WARMUP, graph)


def agree(programs: Sequence[Program]) -> list[tuple[int, list[str]]]:
    """Compare each program with and without capture. Return the numbers of replays and the logged reasons."""
    register_backend("gloo", NativeCollectives)  # its collectives are recorded as operations
    found = []
    for program in programs:
        graphs: list[ReplayedGraph] = []
        logger, logged = logging.getLogger("fullshard.graphs"), Logged()
        logger.addHandler(logged)
        logger.propagate = False
        try:
            assert_same(run(program, partial(captured, graphs=graphs), CPU), run(program, None, CPU), name=f"{program}")
        finally:
            logger.removeHandler(logged)
        found.append((graphs[0].replays, logged.messages))
    return found


# Chosen so that their programs contain all actions, all values of options and all pairs of those values.
SEEDS = (57, 120, 167, 165, 124, 270, 313, 28)
MORE_SEEDS = (98, 51, 191, 3, 76, 14, 84, 89)


@pytest.mark.slow
def test_captured_random_programs_match_eager_steps_bitwise():
    programs = [random_program(seed) for seed in SEEDS]
    for result in run_ranks(2, agree, programs):
        assert sum(replays for replays, _ in result) > 5 * len(programs)


@pytest.mark.slow
def test_many_captured_random_programs_match_eager_steps_bitwise():
    run_ranks(2, agree, [random_program(seed) for seed in MORE_SEEDS])


STEADY = Program(strategy="zero3", actions=("nothing",) * 16)
REASONS = {
    "batch": "tensor 0 has a different shape or dtype than the example. (1, 4, 48)",
    "decay": "hyperparameters",
    "load states": "the state of an optimizer was replaced",
    "freeze": "parameters or buffers were replaced, moved, frozen",
    "mode": "switched between training and evaluation",
    "settings": "settings of units",
    "buffer": "parameters or buffers were replaced",
    "hook": "or have other hooks",
    "backward hook": "or have other hooks",
    "gradient hook": "optimizers, parameters or all modules have other hooks",
    "step hook": "optimizers, parameters or all modules have other hooks",
    "hook of all modules": "optimizers, parameters or all modules have other hooks",
    "hook of all optimizers": "optimizers, parameters or all modules have other hooks",
    "unshard": "layers.0 is unsharded by unshard(). Call reshard() before the step.",
    "divide": "settings of units",
    "backward": "other parameters have gradients",
    "autocast": "autocast",
}


@pytest.mark.slow
def test_change_unsupported_by_graph_runs_eagerly_and_logs_reason():
    quiet, others = ("nothing",) * 5, ("rate", "scheduler", "evaluate", "load", "write", "zero")
    programs = [
        replace(STEADY, actions=("save", action, *quiet, *(others[i % 6], others[(i + 1) % 6])))
        for i, action in enumerate(REASONS)
    ]
    for result in run_ranks(2, agree, programs):
        for reason, (replays, messages) in zip(REASONS.values(), result, strict=True):
            warnings = [message for message in messages if "runs eagerly" in message]
            assert len(warnings) == 1 and reason in warnings[0]
            print("REPLAYS", replays)
            assert replays >= 5  # the step is captured again, and other actions need no eager call


def rates_reported_after_other_numbers_of_eager_steps() -> list[str]:
    """Run some steps eagerly on rank 1 only, then change the learning rate before each step. Return the warnings."""
    register_backend("gloo", NativeCollectives)
    model = chain(partial(fully_shard, strategy="zero3"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    take = captured(step, (inputs(),))
    with Logged() as messages:
        for number in range(30):
            if number >= 10:
                optimizer.param_groups[0]["lr"] = 0.1 / number
            take(inputs()[: 4 if 5 <= number < 8 and dist.get_rank() == 1 else 6])
    return [message for message in messages if "hyperparameters: lr" in message]


def test_learning_rate_change_is_not_logged_if_ranks_replay_differently():
    assert run_ranks(2, rates_reported_after_other_numbers_of_eager_steps) == [[], []]


@pytest.mark.slow
def test_gradients_set_between_replays_match_eager_steps():
    """A step that zeroes gradients at its start leaves gradients at its end. A graph writes those to its own memory."""
    first = replace(STEADY, zeroes_first=True, actions=("nothing", "backward", "zero", *("nothing",) * 6))
    programs = [replace(first, strategy=name, to_none=to_none) for name in ONE_AXIS for to_none in (True, False)]
    run_ranks(2, agree, programs)


@on_new_ranks(2)
def test_replay_rejects_parameters_that_eager_step_rejects():
    register_backend("gloo", NativeCollectives)
    changes: dict[str, Callable[[Any], Any]] = {
        "data of head.weight was assigned": lambda weight: setattr(weight, "data", weight.data.clone()),
        "head.weight has a hook of register_hook": lambda weight: weight.register_hook(lambda grad: grad * 2),
    }
    for message, change in changes.items():
        model = chain(fully_shard)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        take = captured(step, (inputs(),))
        for number in range(WARMUP + 2):
            take(inputs(number))
        assert take.is_captured
        change(model.head.weight)
        with pytest.raises(StateError, match=message):
            take(inputs())


# -- queued collectives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ONE_AXIS)
@on_new_ranks(2)
def test_eager_step_issues_same_collectives_as_replay(strategy):
    """Otherwise, a rank whose batch has a different shape would make all other ranks hang."""
    register_backend("gloo", NativeCollectives)
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    take, found = captured(step, (inputs(),)), []
    for number in range(WARMUP + 4):
        with recording() as record:
            take(inputs(number)[: 4 if number > WARMUP + 1 else 6])
        found.append([(event.name, event.origin.unit) for event in record.collectives()])
    assert take.is_captured
    assert found[WARMUP]
    assert found[-2:] == [found[WARMUP]] * 2


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in Python."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1


def build(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    register_backend("gloo", NativeCollectives)
    model = chain(partial(fully_shard, **options))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def training(model: Any, optimizer: Any, result: Callable[[Tensor], Any] = Tensor.detach) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        return result(loss)

    return step


def reads_a_value(_: Any) -> Any:
    model, optimizer = build()
    return training(model, optimizer, lambda loss: torch.as_tensor(loss.item()))


def counts_in_python(_: Any) -> Any:
    model, _optimizer = build()
    return training(model, Counting(model.parameters(), lr=0.1))


def counts_on_the_host(_: Any) -> Any:
    model, optimizer = build()

    def step(x: Tensor) -> Any:
        result = training(model, optimizer)(x)
        for state in optimizer.state.values():
            state.setdefault("seen", torch.zeros(1)).add_(1)
        return result

    return step


def returns_a_number(_: Any) -> Any:
    model, optimizer = build()
    return training(model, optimizer, lambda loss: (loss, 3))


def has_no_unit(_: Any) -> Any:
    model = nn.Linear(48, 5)
    return training(model, torch.optim.SGD(model.parameters(), lr=0.1))


def has_no_optimizer(_: Any) -> Any:
    return training(build()[0], None)


def offloads(folder: str) -> Any:
    return training(*build(offload_policy=Offload(optimizer={"disk": 1}, folder=folder)))


def checks_gradients(_: Any) -> Any:
    check_finite_gradients(True)
    return training(*build())


def raises_in_a_capture(_: Any) -> Any:
    model, optimizer = build()
    calls = []

    def step(x: Tensor) -> Any:
        calls.append(1)
        if len(calls) > WARMUP:
            raise KeyError("from the step")
        return training(model, optimizer)(x)

    return step


def steps_every_fourth_time(_: Any) -> Any:
    model, optimizer = build()
    calls = []

    def step(x: Tensor) -> Any:
        calls.append(1)
        loss = model(x).square().mean()
        loss.backward()
        if len(calls) % (WARMUP + 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for _ in range(WARMUP):
        step(inputs())  # the first captured call steps the optimizer, and later the call that captures
    return step


def schedules_within_the_step(_: Any) -> Any:
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inner = training(model, optimizer)

    def step(x: Tensor) -> Any:
        result = inner(x)
        scheduler.step()
        return result

    return step


MISTAKES: dict[Callable[[Any], Any], tuple[type[Exception], str]] = {
    reads_a_value: (ConfigError, r"waits for the device at .*test_graphs.py:\d+ \(.*loss.item\(\).*\)"),
    counts_in_python: (ConfigError, r"Counting's state 'count' of parameter 0 is changed by each step on the host"),
    counts_on_the_host: (ConfigError, r"AdamW's state 'seen' of parameter 0 is changed by each step"),
    steps_every_fourth_time: (ConfigError, r"other modules or optimizers than .* all microbatches in one step"),
    schedules_within_the_step: (
        ConfigError,
        r"AdamW's hyperparameter 'lr' of group 0 .* Call learning rate schedulers between",
    ),
    returns_a_number: (ConfigError, r"returned 3, which a replay would not update. Return tensors on cpu"),
    has_no_unit: (ConfigError, r"did not call a sharded module.*make_graphed_callables"),
    has_no_optimizer: (ConfigError, r"did not call an optimizer.*within the step"),
    offloads: (ConfigError, r"has the offload policy .*Shard it without offload"),
    checks_gradients: (ConfigError, r"check_finite_gradients\(False\) first"),
    raises_in_a_capture: (ConfigError, r"cannot be captured in a CUDA graph: KeyError at .*test_graphs.py:\d+ \(raise"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@on_new_ranks(2)
def test_step_that_cannot_be_captured_is_rejected_on_every_rank(mistake, tmp_path):
    take, messages = captured(mistake(tmp_path), (inputs(),)), []
    for number in range(WARMUP + 3):
        try:
            take(inputs(number))
        except MISTAKES[mistake][0] as error:
            messages.append(str(error))
            if len(messages) == 2:
                break
    assert messages, "nothing was refused"
    for message in messages:
        assert re.search(MISTAKES[mistake][1], message), message


@on_new_ranks(2)
def test_capture_rejects_collectives_of_unsupported_backend():
    model, optimizer = build()
    graph = ReplayedGraph()
    graph.backends = frozenset({"nccl"})
    take = CapturedStep(training(model, optimizer), (inputs(),), WARMUP, graph)
    with pytest.raises(ConfigError) as error:
        for number in range(WARMUP + 1):
            take(inputs(number))
    dist.barrier()
    message = str(error.value)
    assert "gloo cannot be captured in a CUDA graph" in message and "nccl" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, (torch.ones(1),)), "step=None cannot be called"),
        ((print, torch.ones(1)), "example_inputs=.* is a Tensor. Pass a tuple"),
        ((print, (torch.ones(1),), 1), r"warmup=1\): expected a number of eager calls, 2 or more"),
        ((print, ({"a": object()},)), "a object may contain tensors"),
        ((print, (torch.ones(1, requires_grad=True),)), r"shape \(1,\) requires a gradient"),
    ],
)
def test_capture_rejects_invalid_arguments(arguments, message):
    warmup = arguments[2] if len(arguments) > 2 else WARMUP
    with pytest.raises(ConfigError, match=message):
        CapturedStep(*arguments[:2], warmup, ReplayedGraph())


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_capture_without_gpu_raises():
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        capture(print, (torch.ones(1),))


def test_device_synchronization_is_detected_by_cuda_warnings(monkeypatch):
    """In sync debug mode CUDA emits the warning that this test emits. Other warnings are shown as before."""
    modes = ["error"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with CudaGraph().noting_waits(lambda frame: lines.append(_line_of(frame))):
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert modes == ["error", "warn", "error"]
    assert len(lines) == 2
    assert all(re.search(r"test_graphs.py:\d+ \(warnings.warn\(.called", line) for line in lines)
    assert [str(warning.message) for warning in shown] == ["another"]


@on_new_ranks(1)
def test_non_tensor_arguments_of_captured_step_are_constants():
    inner = training(*build())
    take = captured(lambda x, scale, names: inner(x * scale), (inputs(), 2.0, {"a": None}))
    logger, logged = logging.getLogger("fullshard.graphs"), Logged()
    logger.addHandler(logged)
    for number in range(WARMUP + 2):
        take(inputs(number), 2.0, {"a": None})
    take(inputs(), 3.0, {"a": None})
    take(inputs(), 2.0, {"b": None})
    messages = logged.messages
    assert any("argument 1 has a different value than the example. 3.0 is not 2.0" in message for message in messages)
    assert any("nested in another way" in message for message in messages)


@on_new_ranks(1)
def test_step_changed_before_every_call_is_logged_once():
    model, optimizer = build()
    logger, logged = logging.getLogger("fullshard.graphs"), Logged()
    logger.addHandler(logged)
    take = captured(training(model, optimizer), (inputs(),))
    for number in range(3 * WARMUP):
        optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * number, 0.99)
        take(inputs(number))
    assert not take.is_captured
    messages = logged.messages
    assert len(messages) == 1 and "hyperparameters of an optimizer have changed" in messages[0]


@on_new_ranks(1)
def test_memory_of_reset_graphs_is_released():
    model, optimizer = build()
    take, found = captured(training(model, optimizer), (inputs(),)), []
    for _ in range(3):
        for number in range(WARMUP + 2):
            take(inputs(number))
        assert take.is_captured
        found.append(sum(len(kept) for kept in take._parts.written_by_graphs()))
        take.reset()
        assert not take.is_captured
    [first, *others, last] = [*found, sum(len(kept) for kept in take._parts.written_by_graphs())]
    assert first > 0 and others == [first] * 2 and last == 0
