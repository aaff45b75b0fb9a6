"""Checks that need a GPU, over NCCL with one rank: bitwise results, no host synchronization, constant memory."""

import copy
import tempfile
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from captured_programs import random_program, run
from shared_ranks import on_new_ranks
from small_models import ONE_AXIS, chain, inputs, leave, wholes
from torch import nn

from fullshard import ConfigError, MixedPrecisionPolicy, Offload, capture, fully_shard, share_memory_between_units
from fullshard.device.accelerator import accelerator_for
from fullshard.testing import assert_same, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Recurrent(nn.Module):
    """A recurrent layer that calls `flatten_parameters()` to move its weights to a cuDNN buffer, like many models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.flatten_parameters()
        return x + self.layer(x)[0]


def made(shard: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = chain(shard).cuda() if shard is leave else chain(shard)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learn(shard: Any) -> list[Any]:
    model, optimizer = made(shard)
    return [torch.stack([step(model, optimizer, inputs(n).cuda()) for n in range(5)]).cpu(), wholes(model)]


def agree_on_a_gpu() -> None:
    expected = learn(leave)
    for strategy in ONE_AXIS:
        shard = partial(fully_shard, strategy=strategy)
        assert_same(learn(shard), expected, name=strategy)
        with torch.autograd.set_multithreading_enabled(False):
            assert_same(learn(shard), expected, name=f"{strategy}, backward on the calling thread")


def test_nccl_training_on_one_rank_matches_plain_pytorch_bitwise():
    run_ranks(1, agree_on_a_gpu, backend="nccl")


def agree_with_recurrent_layers() -> None:
    def learned(shard: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Recurrent() for _ in range(3)]).cuda()
        for module in (model[0], model):
            shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return [torch.stack([step(model, optimizer, inputs(n).cuda()) for n in range(5)]).cpu(), wholes(model)]

    expected = learned(leave)
    for strategy in ONE_AXIS:
        assert_same(learned(partial(fully_shard, strategy=strategy)), expected, name=strategy)


@pytest.mark.filterwarnings("default:RNN module weights")  # cuDNN warns that it copies weights
def test_recurrent_layers_match_plain_pytorch_bitwise():
    run_ranks(1, agree_with_recurrent_layers, backend="nccl")


def copy_offloaded() -> None:
    """Train two copies of a model with offloaded states: one made before the first step, one made after two steps."""
    x = inputs().cuda()
    for offload in (
        Offload(optimizer={"cpu": 0.5}),
        Offload(optimizer={"cpu": 1.0}),
        Offload(parameters={"disk": 0.5}, folder=tempfile.mkdtemp()),
        Offload(optimizer={"cpu": 0.5, "disk": 0.5}, folder=tempfile.mkdtemp()),
    ):
        pair: Any = made(partial(fully_shard, offload_policy=offload))
        expected, first = [], copy.deepcopy(pair)
        for _ in range(2):
            expected.append(step(*pair, x).cpu())
        second = copy.deepcopy(pair)
        expected += [step(*pair, x).cpu() for _ in range(2)]
        # Copies may have other units on the CPU, whose kernels round differently.
        torch.testing.assert_close([step(*first, x).cpu() for _ in range(4)], expected)
        torch.testing.assert_close([step(*second, x).cpu() for _ in range(2)], expected[2:])


def test_deepcopies_of_offloaded_models_train_like_original():
    run_ranks(1, copy_offloaded, backend="nccl")


def steps_without_waiting(strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = made(partial(fully_shard, strategy=strategy, mp_policy=policy))
    x = inputs().cuda()
    for _ in range(3):
        step(model, optimizer, x)
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_training_step_does_not_synchronize_host_with_gpu(strategy):
    run_ranks(1, steps_without_waiting, strategy, backend="nccl")


def memory_from_step_to_step() -> list[tuple[int, int]]:
    model, optimizer = made(fully_shard)
    found = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, inputs().cuda())
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
    return found


def replay(strategy: str) -> list[Any]:
    """Train three eager steps and four replays, each followed by an eager evaluation. Return losses and weights."""
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    x = inputs().cuda()
    losses = []
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            losses.append(step(model, optimizer, x))
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    evaluated = []
    for _ in range(4):
        graph.replay()
        losses.append(loss.detach().clone())
        with torch.no_grad():
            evaluated.append(model(x).float().square().mean())
    return [torch.stack(losses).cpu(), torch.stack(evaluated).cpu(), wholes(model)]


def do_without() -> list[Any]:
    model = chain(leave).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    x = inputs().cuda()
    losses, evaluated = [], []
    for _ in range(7):
        losses.append(step(model, optimizer, x))
        with torch.no_grad():
            evaluated.append(model(x).float().square().mean())
    return [torch.stack(losses).cpu(), torch.stack(evaluated[3:]).cpu(), wholes(model)]


def agree_in_a_graph(strategy: str) -> None:
    assert_same(replay(strategy), do_without(), name=strategy)


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_cuda_graph_of_whole_step_matches_eager_step_bitwise(strategy):
    run_ranks(1, agree_in_a_graph, strategy, backend="nccl")


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)], ids=str)
@on_new_ranks(1, backend="nccl")
def test_captured_random_programs_match_eager_steps_on_gpu_bitwise(seeds):
    """Compare programs whose step is captured by `capture` with the same programs without capture."""
    device, graphs = torch.device("cuda", 0), []

    def take(step: Any, examples: Any) -> Any:
        graphs.append(capture(step, examples))
        return graphs[-1]

    learn(fully_shard)  # on the default stream, which a graph must not depend on
    for seed in seeds:
        program = random_program(seed)
        assert_same(run(program, take, device), run(program, None, device), name=f"{program}")
    assert sum(graph.is_captured for graph in graphs) > len(graphs) / 2


def refuse_to_capture() -> list[str]:
    """Return the messages of steps that cannot be captured, and train in between."""
    model, optimizer = made(fully_shard)
    x, messages = inputs().cuda(), []

    def reads(x: torch.Tensor) -> torch.Tensor:
        loss = step(model, optimizer, x)
        return loss * float(loss.item() > 0)

    def makes_a_constant(x: torch.Tensor) -> torch.Tensor:
        return step(model, optimizer, x) * torch.tensor(2.0, device="cuda")

    calls = []

    def waits_later(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return reads(x) if len(calls) > 3 else step(model, optimizer, x)

    for wrong in (reads, makes_a_constant, waits_later):
        take = capture(wrong, (x,))
        for _ in range(3):
            take(x)
        with pytest.raises(ConfigError) as error:
            take(x)
        messages.append(str(error.value))
        assert torch.isfinite(step(model, optimizer, x))
    right = capture(lambda x: step(model, optimizer, x), (x,))
    losses = torch.stack([right(x) for _ in range(8)])
    assert right.is_captured and bool(losses.isfinite().all()) and losses[-1] < losses[0]
    return messages


def test_capture_rejects_step_that_synchronizes_and_names_its_line():
    [[reads, constant, later]] = run_ranks(1, refuse_to_capture, backend="nccl")
    assert "waits for the device at" in reads and "loss.item()" in reads
    assert "torch.tensor(2.0" in constant
    assert "cannot be captured in a CUDA graph" in later and "loss.item()" in later


def addresses_by_step() -> list[list[int]]:
    share_memory_between_units(True)
    model, optimizer = made(fully_shard)
    found: list[list[int]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, *_: found[-1].extend(p.data_ptr() for p in layer.parameters()))
    for _ in range(5):
        found.append([])
        step(model, optimizer, inputs().cuda())
    return found


def test_units_sharing_memory_keep_parameter_addresses_across_steps():
    [found] = run_ranks(1, addresses_by_step, backend="nccl")
    assert all(len(one) == len(found[0]) > 0 for one in found)
    assert found[1:] == [found[1]] * 4


def compiled(shard: Any, mode: str | None) -> list[Any]:
    torch._dynamo.reset()  # earlier compilations of the same code would change this one
    share_memory_between_units(True)
    model, optimizer = made(shard)
    for layer in model.layers:
        layer.compile(mode=mode)
    return [torch.stack([step(model, optimizer, inputs(n).cuda()) for n in range(6)]).cpu(), wholes(model)]


@pytest.mark.filterwarnings("default")  # the compiler warns that TF32 is off, and about its imports
@on_new_ranks(1, backend="nccl")
def test_compiled_blocks_with_cuda_graphs_match_plain_pytorch_bitwise():
    for shard in (leave, fully_shard):  # the compiler measures kernel variants once and keeps the fastest
        compiled(shard, None)
    expected = compiled(leave, None)
    for mode in (None, "reduce-overhead"):
        assert_same(compiled(fully_shard, mode), expected, name=str(mode))


def test_peak_memory_is_constant_across_steps():
    [found] = run_ranks(1, memory_from_step_to_step, backend="nccl")
    assert len(set(found[3:])) == 1


def test_threads_can_queue_work_on_same_stream_concurrently():
    stream = accelerator_for(torch.device("cuda", 0)).streams.gather
    inside, found = threading.Barrier(2), list[bool]()

    def queue() -> None:
        before = torch.accelerator.current_stream()
        with stream.queueing(), stream.queueing():
            inside.wait(10)
            within = torch.accelerator.current_stream()
            inside.wait(10)
        found.append(within != before and torch.accelerator.current_stream() == before)

    threads = [threading.Thread(target=queue) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]
