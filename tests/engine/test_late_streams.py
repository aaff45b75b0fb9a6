"""Validation of the race checker on concurrent streams: results are bitwise equal whichever stream is delayed.

Without a GPU, work runs in one order only. There, these tests only show that delays change nothing else.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import Chain, chain, leave
from test_races import COMMON, GROUPED, LOOPS, OPTIONS, of_strategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.late_streams import QUEUES, late, some_late
from fullshard import dry, fully_shard
from fullshard.device.accelerator import Accelerator, StreamAccelerator, pretending
from fullshard.dry.streams import DryAccelerator
from fullshard.testing import assert_same, run_ranks

Sleeping = Callable[[float], None]
Scenario = tuple[str, str, str]

GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IN_THREADS = ("zero3", "hsdp", "hpZ", "hfsdp")
ON_ONE_RANK = ("ddp", "zero1", "zero2", "zero3", "hsdp")
ALONE = range(len(QUEUES))  # one stream is delayed
TOGETHER = range(len(QUEUES), len(QUEUES) + 2)


def gpu(function: Any) -> Any:
    for mark in GPU:
        function = mark(function)
    return function


def sleep_on_gpu(ms: float) -> None:
    torch.cuda._sleep(int(ms * 1.5e6))  # cycles


def mesh_for(strategy: str, device_type: str) -> DeviceMesh:
    world = dist.get_world_size()
    if "hsdp" not in strategy:
        return init_device_mesh(device_type, (world,))
    replicas = 2 if world > 1 else 1
    return init_device_mesh(device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def learn(scenario: Scenario, mesh: DeviceMesh, lock: threading.Lock) -> list[Tensor]:
    """Return this rank's parameters at the end of a scenario."""
    strategy, loop, option = scenario
    run, layer = LOOPS[loop]
    options = {"strategy": GROUPED.get(strategy, strategy), **OPTIONS[option]}
    with lock:
        model = chain(leave, Chain([layer(48) for _ in range(3)]))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    run(model)
    params = (param.to_local() if isinstance(param, DTensor) else param for param in model.parameters())
    return [param.detach().cpu().clone() for param in params]


def new_accelerator(device_type: str) -> Accelerator:
    accelerator = StreamAccelerator(torch.device("cuda", 0)) if device_type == "cuda" else Accelerator()
    assert accelerator.streams  # created before threads use them
    return accelerator


def differing_when_late(of: list[Scenario], device_type: str, sleep: Sleeping) -> list[str]:
    """Return the scenarios and delayed streams whose parameters are not bitwise equal to those without delays."""
    found, lock = [], threading.Lock()
    mesh = mesh_for(of[0][0], device_type)  # all scenarios have the same strategy
    for scenario in of:
        with pretending(new_accelerator(device_type)):
            expected = learn(scenario, mesh, lock)
        for seed in (*ALONE, *TOGETHER) if scenario in COMMON else TOGETHER:
            names, timed = some_late(seed)
            with pretending(late(new_accelerator(device_type), names, timed(sleep))):
                actual = learn(scenario, mesh, lock)
            found += difference(actual, expected, f"{scenario}, seed {seed}: late {sorted(names)}")
    return found


def difference(actual: Any, expected: Any, name: str) -> list[str]:
    try:
        assert_same(actual, expected, name=name)
    except AssertionError as error:
        return [str(error)]
    return []


def on_one_rank(strategy: str) -> Iterator[Scenario]:
    """Yield the common scenarios of `test_races.py`, and a sample of the others for `zero3` and `hsdp`.

    Captures are excluded, because `test_gpu.py` makes real ones, and transforms, which accept no inputs on the CPU.
    """
    sample = of_strategy(strategy, common=False) if strategy in ("zero3", "hsdp") else ()
    for scenario in (*of_strategy(strategy, common=True), *sample):
        if scenario[1] not in ("capture", "transforms"):
            yield scenario


@gpu
@pytest.mark.parametrize("strategy", ON_ONE_RANK)
def test_delayed_streams_on_one_rank_keep_results_bitwise_equal(strategy):
    of = list(on_one_rank(strategy))
    [found] = run_ranks(1, differing_when_late, of, "cuda", sleep_on_gpu, backend="nccl")
    assert not found


def differing_in_threads(world: int, strategy: str, device_type: str, sleep: Sleeping) -> list[str]:
    """Return the differences with threads as ranks. Communicated data is delayed, and no rank's host waits for it."""
    from benchmarks.threads import run_threads

    if dist.is_initialized():
        dist.destroy_process_group()
    with FakeTensorMode():  # the first one replaces torch's device guard without a GPU, which is not thread-safe
        pass
    scenario, found = (strategy, "steps", "bf16"), []

    def run(rank: int, lock: threading.Lock) -> list[Tensor]:
        return learn(scenario, mesh_for(strategy, device_type), lock)

    with pretending(new_accelerator(device_type)):
        expected = run_threads(world, run)
    for seed in (*ALONE, *TOGETHER):
        names, timed = some_late(seed)
        with pretending(late(new_accelerator(device_type), names, timed(sleep))):
            actual = run_threads(world, run)
        found += difference(actual, expected, f"{scenario}, seed {seed}: late {sorted(names)}")
    return found


@gpu
@pytest.mark.parametrize("strategy", IN_THREADS)
def test_delayed_streams_between_ranks_keep_results_bitwise_equal(strategy):
    [found] = run_ranks(1, differing_in_threads, 4, strategy, "cuda", sleep_on_gpu)
    assert not found


# -- without a GPU ----------------------------------------------------------------------------------------------------


@on_new_ranks(1)
def test_delayed_streams_on_cpu_sleep_and_keep_results_bitwise_equal():
    of = [("hsdp", "steps", "bf16"), ("hsdp", "accumulation", "offload")]
    slept: list[float] = []
    found = differing_when_late(of, "cpu", slept.append)
    assert not found
    assert len(slept) > 50 and max(slept) == 1.0  # a CPU has no marks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", IN_THREADS)
def test_ranks_can_run_as_threads(strategy):
    [found] = run_ranks(1, differing_in_threads, 4, strategy, "cpu", do_not_sleep)
    assert not found


def do_not_sleep(ms: float) -> None:
    pass


@pytest.mark.parametrize("name", QUEUES)
def test_each_stream_can_be_delayed(name):
    """Delay simulated streams, which identify the stream of each sleep."""
    accelerator = DryAccelerator(dry.Tape())
    where: list[str] = []
    late(accelerator, [name], lambda: where.append(accelerator.stream))
    stream = getattr(accelerator.streams, name)
    with stream.after(accelerator.streams.host):
        pass
    assert stream.mark() is not None
    assert where == [name, name]
