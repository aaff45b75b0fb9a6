"""A sharded model can be moved, copied in place and dropped like any other."""

import gc
import re
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import permutations
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from shared_ranks import run_ranks as run_on_shared_ranks
from small_models import torch_before
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    ConfigError,
    Offload,
    RankMismatchError,
    StateError,
    clip_grad_norm_,
    fully_shard,
    summon_full_params,
)
from fullshard._compat import default_store
from fullshard.checkpoint import async_save, load, save
from fullshard.checkpoint.safety_copy import SafetyCopies
from fullshard.comm.collectives import Collectives
from fullshard.device.memory import Slot
from fullshard.engine.registry import units_in
from fullshard.tape.context import drop_if_stale
from fullshard.testing import assert_same, run_ranks


def sharded(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    model[0].weight.mark = "mine"
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def step(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    loss = model(torch.ones(2, 8, dtype=dtype)).sum()
    loss.backward()
    return loss.detach()


@on_new_ranks(2)
def test_deleted_model_is_freed():
    model = sharded()
    for _ in range(3):
        step(model)
    gone = weakref.ref(model)
    del model
    for _ in range(3):  # tensors may need more than one round
        gc.collect()
    assert gone() is None


@dataclass
class Answer:
    """An output that is not a tensor, like those of the transformers library."""

    scores: Tensor


class Answering(nn.Linear):
    def forward(self, question: Answer) -> Answer:
        return Answer(super().forward(question.scores))


@on_new_ranks(2)
def test_inputs_outputs_and_gradients_are_freed_without_gc():
    """Otherwise, activations would accumulate until the garbage collector runs, and peak memory would vary."""
    import_module("torch.distributed.pipelining._backward")  # the engine then looks for its functions in the stack
    gc.disable()
    model = fully_shard(nn.Sequential(fully_shard(Answering(8, 8)), fully_shard(Answering(8, 8))))
    for _ in range(3):
        question = Answer(torch.ones(2, 8, requires_grad=True) * 1)
        answer = model(question)
        gone = [weakref.ref(question.scores), weakref.ref(answer.scores)]
        answer.scores.register_hook(lambda grad, gone=gone: gone.append(weakref.ref(grad)))
        answer.scores.sum().backward()
        del question, answer
        assert [ref() for ref in gone] == [None, None, None]


def change_dtype() -> tuple[bool, Tensor, Tensor]:
    model = sharded()
    step(model)
    model.zero_grad()
    weight = model[0].weight
    model.to(torch.float64)
    kept = model[0].weight is weight and weight.mark == "mine"
    return kept, step(model, torch.float64), model[0].weight.grad.full_tensor()


def change_dtype_plain() -> tuple[bool, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).to(torch.float64)
    return True, step(model, torch.float64), model[0].weight.grad


def test_a_model_changes_dtype_after_a_step():
    """Parameters stay the same objects and keep the attributes that users have set on them."""
    [expected] = run_ranks(1, change_dtype_plain)
    for actual in run_ranks(2, change_dtype):
        assert_same(actual, expected)


@on_new_ranks(2)
def test_a_model_sharded_on_the_meta_device_is_materialized_later():
    torch.manual_seed(0)
    values = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).state_dict()
    model = sharded("meta").to_empty(device="cpu")
    model.load_state_dict(values)
    loaded, built = step(model), step(sharded())
    assert_same(loaded, built)


@on_new_ranks(1)
def test_unit_partly_on_meta_device_is_rejected():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"1.weight is on the meta device, but 0.weight in the same unit is not"):
        fully_shard(model)


@on_new_ranks(2)
def test_unit_with_pending_backward_cannot_leave_shared_memory():
    model = nn.Sequential(*(fully_shard(nn.Linear(64, 64)) for _ in range(6)))
    fully_shard(model)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    units = {unit.name: unit for unit in units_in(model)}
    leaver, stayer = next(
        (a, b)
        for a, b in permutations(units.values(), 2)
        if a.slot is b.slot and a.unsharded_nbytes and b.unsharded_nbytes
    )
    leaver.residency.move(Slot(torch.device("cpu")))
    assert not stayer.slot.is_referenced
    waiting = stayer.module(torch.ones(2, 64, requires_grad=True))
    assert stayer.slot.is_referenced
    with pytest.raises(StateError, match="a graph that waits for its backward has views of"):
        stayer.residency.move(Slot(torch.device("cpu")))
    waiting.sum().backward()
    assert not stayer.slot.is_referenced


@pytest.mark.parametrize("reason", ["a pending gather", "garbage"])
def test_units_leave_shared_memory_despite_views_on_one_rank(reason):
    run_on_shared_ranks(2, unshard_all, reason)


def unshard_all(reason: str) -> None:
    """Unshard more units than a step needs at a time, while views of their memory exist on one rank only."""
    model = nn.Sequential(*(fully_shard(nn.Linear(64, 64)) for _ in range(6)))
    fully_shard(model)
    for _ in range(3):
        loss = model(torch.ones(2, 64)).sum()
        loss.backward()
    expected = [layer.weight.full_tensor() for layer in model]
    output = model(torch.ones(2, 64))
    if dist.get_rank() == 0 and reason == "garbage":
        cycle: list[object] = [output]
        cycle.append(cycle)
        del cycle
    del output, loss
    if dist.get_rank() == 1 and reason == "a pending gather":
        sleep(0.2)
    handles = [layer.unshard(async_op=True) for layer in model]
    for handle in handles:
        handle.wait()
    assert_same([layer.weight for layer in model], expected)


# -- recreated process groups -----------------------------------------------------------------------------------------


def kept_by_process() -> dict[str, int]:
    """Count the system resources of this process: file descriptors by kind, threads, children, shared memory."""
    drop_if_stale()  # as the next process group does
    gc.collect()
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[re.sub(r"\d+", "N", str(link.readlink()).partition(":")[0])] += 1
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    found["children"] = sum(
        len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children") if path.exists()
    )
    found["collectives"] = sum(isinstance(one, Collectives) for one in gc.get_objects())
    found["shared mappings"] = Path("/proc/self/maps").read_text().count("memfd:fullshard")
    return dict(found)


def use_all(folder: Path, cycle: int, features: frozenset[str]) -> None:
    """Train for two steps and use the features that keep resources for the process group."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model)
        if "clip" in features:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if "save" in features:
        load(save(folder, model=model, optimizer=optimizer, step=cycle, keep=1), model=model, optimizer=optimizer)
    if "async_save" in features:
        async_save(folder, model=model, optimizer=optimizer, step=100 + cycle, keep=1).wait()
    if "safety copy" in features:
        memory = folder / f"memory{dist.get_rank()}"
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        SafetyCopies(memory).save(model=model, optimizer=optimizer, step=cycle, extra=None).wait()
    if "summon" in features:
        with summon_full_params(model):
            pass
    if "states" in features:
        whole = StateDictOptions(full_state_dict=True)
        get_model_state_dict(model, options=whole)
        get_optimizer_state_dict(model, optimizer, options=whole)
    if "disk" in features:
        step(fully_shard(nn.Linear(8, 8), offload_policy=Offload(parameters={"disk": 1.0}, folder=folder / "disk")))
    if "hsdp" in features:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        step(fully_shard(nn.Linear(8, 8), strategy="hsdp", mesh=mesh))
    if "mismatch" in features:  # last, since the process group cannot be used afterwards
        with pytest.raises(RankMismatchError):
            step(model if dist.get_rank() == 0 else fully_shard(nn.Linear(8, 8)))


def leaks_of_process_groups(folder: Path, cycles: int, features: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Return the counts that grow from the first three cycles to the last one. Each cycle creates, uses and destroys
    a process group, whose threads may take some seconds to end.
    """
    store = default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    most: Counter[str] = Counter()
    for cycle in range(cycles):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"cycle {cycle}", store), rank=rank, world_size=world)
        use_all(folder, cycle, features)
        dist.barrier()
        dist.destroy_process_group()
        if cycle < 3:
            most |= Counter(kept_by_process())
    deadline = monotonic() + 20
    while True:
        grown = {kind: (most[kind], now) for kind, now in kept_by_process().items() if now > most[kind]}
        if not grown or monotonic() > deadline:
            return grown
        sleep(0.2)


FEATURES = frozenset({"clip", "save", "async_save", "safety copy", "summon", "states", "disk", "hsdp", "mismatch"})


@pytest.mark.slow
@torch_before((2, 13), "torch 2.11 keeps process groups of foreach operations on DTensors")
def test_recreated_process_groups_do_not_leak_resources(tmp_path):
    """Descriptors, threads, children and shared memory do not grow between the third and the seventh cycle."""
    assert run_ranks(2, leaks_of_process_groups, tmp_path, 7, FEATURES) == [{}, {}]


@on_new_ranks(2)
def test_parameters_have_mesh_of_current_process_group():
    """torch caches the results of operations with their meshes, and meshes of two process groups can be equal."""
    store = default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    found = []
    for cycle in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"cycle {cycle}", store), rank=rank, world_size=world)
        for _ in range(cycle):
            dist.new_group([0, 1])  # so that the process groups of the mesh have different names than before
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(8, 8), mesh=mesh, strategy="hsdp")
        step(model)
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()
        kept = [*model.parameters(), *(param.grad for param in model.parameters()), *model.state_dict().values()]
        found += [tensor.device_mesh is mesh for tensor in kept]
        found += [tensor.device_mesh.get_group(1) is mesh.get_group(1) for tensor in kept]
        del model, kept
        dist.barrier()
        dist.destroy_process_group()
    assert all(found)
