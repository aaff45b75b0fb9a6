"""Common idioms of training scripts work with sharded modules as with plain ones."""

import copy
import importlib
import inspect
import io
import logging
import subprocess
import sys
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import agree_with_plain, chain, inputs, sgd, take_step, wholes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from fullshard import (
    FSDPModule,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    clip_grad_norm_,
    fully_shard,
    share_comm_ctx,
)
from fullshard.engine.registry import unit_of
from fullshard.testing import assert_same
from fullshard.testing import run_ranks as run_fresh_ranks


def locals_of(state: dict[str, Any]) -> list[Tensor]:
    return [value.to_local().clone() for value in state.values()]


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_state_dicts_support_deepcopy_and_torch_save(strategy):
    """Keep the best weights with a deep copy and with `torch.save`, also through `get_model_state_dict`."""
    for get in (nn.Module.state_dict, get_model_state_dict):
        model = chain(partial(fully_shard, strategy=strategy))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        best = copy.deepcopy(get(model))
        expected = locals_of(best)
        file = io.BytesIO()
        torch.save(get(model), file)
        for step in range(2):
            model(inputs(step)).square().mean().backward()
            gradient = next(iter(model.parameters())).grad
            assert_same(copy.deepcopy(gradient).to_local(), gradient.to_local())
            optimizer.step()
            optimizer.zero_grad()
        copy.deepcopy(optimizer.state_dict())
        torch.save(optimizer.state_dict(), io.BytesIO())
        assert any(not torch.equal(a, b) for a, b in zip(locals_of(get(model)), expected, strict=True))
        assert_same(locals_of(best), expected)  # a copy, not the shards themselves
        model.load_state_dict(best)
        assert_same(locals_of(get(model)), expected)
        [copy.deepcopy(param) for param in model.parameters()]
    sharded = FullyShardedDataParallel(nn.Linear(64, 64))
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
        assert_same(locals_of(copy.deepcopy(sharded.state_dict())), locals_of(sharded.state_dict()))


class Scaled(nn.Module):
    """A model with a scalar among its parameters, such as the temperature of a contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        for param in self.first.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale.exp()


def learn_scale(make: Any, sharded: bool) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    model = Scaled()
    if sharded:
        fully_shard(model)
    optimizer = make(model.parameters())
    for step in range(4):
        torch.manual_seed(step)
        take_step(optimizer, model(torch.randn(4, 8)).square().mean())
    values = [param.full_tensor() if sharded else param.detach() for param in model.parameters()]
    state = optimizer.state[model.scale]
    return values, [tuple(value.shape) for value in state.values() if isinstance(value, Tensor)]


OPTIMIZERS = [
    partial(torch.optim.AdamW, lr=0.1, foreach=True),
    partial(torch.optim.AdamW, lr=0.1, fused=True),
    partial(torch.optim.AdamW, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    partial(torch.optim.RMSprop, lr=0.1, foreach=True),
]


def learn_scales() -> None:
    for make in OPTIMIZERS:
        (own, our_shapes), (plain, shapes) = learn_scale(make, True), learn_scale(make, False)
        if make.keywords.get("fused"):  # fused kernels round differently depending on the position of a value
            torch.testing.assert_close(own, plain)
        else:
            assert_same(own, plain)
        assert our_shapes == shapes


def test_scalar_parameters_are_updated_by_every_optimizer():
    run_ranks(1, learn_scales)
    run_ranks(2, learn_scales)


@on_ranks(2)
def test_units_with_empty_shards_are_materialized_from_meta_device():
    for shape in ((1, 1), (1, 8), (8, 1)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(*shape), nn.Linear(shape[1], 2))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.ones_(param)
        model(torch.ones(2, shape[0])).sum().backward()
        assert not any(param.is_meta or param.grad is None for param in model.parameters())
    dist.barrier()


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("zero3", None), ("zero3", False), ("zero2", None), ("zero1", None), ("ddp", None)]
)
@on_ranks(2)
def test_parameters_can_be_read_between_forward_and_backward(strategy, reshard):
    """The loss uses weights again after forward, which requires `unshard()`. Gradients are zeroed in between."""
    shard = partial(fully_shard, strategy=strategy, reshard_after_forward=reshard)
    plain, model = chain(lambda module: module), chain(shard)
    for step in range(3):
        values = [param.full_tensor() for param in model.parameters()]
        for item in (plain, model):
            y = item(inputs(step))
            assert item is plain or all(isinstance(param, DTensor) for param in item.parameters())
            for module in item.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            item.zero_grad(set_to_none=step == 1)
            whole = [param for param in item.parameters() if not isinstance(param, DTensor)]
            assert_same(whole, values)
            (y.square().mean() + sum(param.square().sum() for param in whole)).backward()
            assert len(whole) == len(values)
        wanted = [param.grad for param in plain.parameters()]
        assert_same([param.grad.full_tensor() for param in model.parameters()], wanted)
        with torch.no_grad():
            for param in (*plain.parameters(), *model.parameters()):
                param.sub_(param.grad, alpha=0.1)


def write_in_the_hook_before(shard: Any) -> list[Any]:
    """Modify the weights of the next layer in a forward hook. Their all-gather may already have started."""
    model = chain(shard)
    later, optimizer, left = list(model.layers[1].parameters()), sgd(model), []

    @torch.no_grad()
    def decay(*_: object) -> None:
        for param in later:
            param.mul_(0.5)

    hook = None
    for step in range(5):
        if step in (1, 4):
            hook = model.layers[0].register_forward_hook(decay)
        loss = model(inputs(step)).square().mean()
        loss.backward()
        if hook is not None and step == 2:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
    return [*left, wholes(model)]


def test_forward_hook_can_modify_weights_during_all_gather():
    run_ranks(2, agree_with_plain, write_in_the_hook_before)


def train_on_another_default_device(shard: Any) -> list[Any]:
    """Train while tensors without a device are created on the meta device, from the first forward on."""
    model, batches, left = chain(shard), [inputs(step) for step in range(3)], []
    optimizer = sgd(model)
    with torch.device("meta"):
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
            left.append(loss.detach())
    return [*left, wholes(model)]


def test_training_does_not_use_default_device():
    run_fresh_ranks(2, agree_with_plain, train_on_another_default_device, timeout=30.0)


class Registered(nn.Linear):
    """A layer whose subclasses must pass a keyword, as in a registry."""

    tags: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tags.append(tag)


class Tagged(Registered, tag="tagged"):
    pass


@on_ranks(1)
def test_fully_shard_does_not_call_init_subclass():
    module = fully_shard(Tagged(4, 4))
    assert isinstance(module, Tagged) and isinstance(module, FSDPModule)
    assert Registered.tags == ["tagged"]


class Closed(nn.Linear):
    """A layer that allows no new attributes once it is built."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "closed" in vars(self) and name not in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


def train_without_new_attributes(shard: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(2)), Closed(48, 48))
    model[2].closed = True
    for layer in model:
        shard(layer)
    shard(model)
    optimizer = sgd(model)
    model(inputs()).square().mean().backward()
    optimizer.step()
    return [wholes(model)]


def test_fully_shard_supports_modules_that_reject_new_attributes():
    run_ranks(2, agree_with_plain, train_without_new_attributes)


@on_ranks(2)
def test_parameters_combine_with_dtensors_on_equal_mesh():
    """Use a second mesh of the same ranks, as scripts do with torch's FSDP. Neither has dimension names."""
    model = fully_shard(nn.Linear(8, 8, bias=False))
    own = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    with torch.no_grad():
        model.weight.copy_(own)
        assert_same((model.weight + own).full_tensor(), torch.full((8, 8), 2.0))


class Sized(nn.Module):
    def __new__(cls, size: int) -> Any:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)


@on_ranks(2)
def test_sequential_slices_are_plain_and_ddp_wraps_unsharded_layers():
    """Check that a slice is not a unit but its layers are, and that DDP ignores what it has to ignore."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    assert type(type(fully_shard(Sized(2)))(3)) is Sized
    part = model[:2]
    assert type(part) is nn.Sequential
    assert [isinstance(item, FSDPModule) for item in (model, part, part[0], part[1])] == [True, False, True, False]
    parametrized = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    parametrized.__class__ = type("Parametrized", (type(parametrized),), {})
    assert type(parametrized[:1]) is nn.Sequential
    whole = fully_shard(nn.Linear(8, 8), strategy="ddp")
    assert not hasattr(whole, "_is_fsdp_managed_module")  # so one rank can generate without the others
    assert model[1]._is_fsdp_managed_module
    with implicit_replication():
        model[1](torch.ones(2, 8))  # torch treats plain tensors as replicated
    alongside = nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8))
    alongside._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]
    wrapped = DistributedDataParallel(alongside)
    wrapped(torch.full((2, 8), float(dist.get_rank()))).sum().backward()
    grads = [torch.empty(8, 8) for _ in range(2)]
    dist.all_gather(grads, alongside[1].weight.grad)
    assert_same(grads[0], grads[1])
    assert isinstance(alongside[0].weight.grad, DTensor)


def learn_statistics(kind: str) -> list[Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "wrapper":
        model = FullyShardedDataParallel(model, broadcast_buffers=True)
    else:
        fully_shard(model[1], broadcast_buffers=kind == "shared")
        fully_shard(model, broadcast_buffers=kind == "shared")
    visited = []
    for step in range(3):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        output = model(batch)
        visited += [output.detach(), *(buffer.clone() for buffer in model.buffers())]
        output.square().mean().backward()
        with torch.no_grad():
            visited += [model(batch), model(batch + 1)]
    return visited


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@on_ranks(2)
def test_broadcast_buffers_matches_ddp_bitwise():
    twice = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    fully_shard(twice, broadcast_buffers=True).eval()
    (twice(torch.ones(2, 8)) + twice(torch.ones(2, 8))).sum().backward()  # no buffer is written in between
    expected = learn_statistics("ddp")
    assert_same(learn_statistics("shared"), expected)
    assert_same(learn_statistics("wrapper"), expected)
    alone = learn_statistics("each its own")
    assert_same(alone[:4], expected[:4])
    assert torch.equal(alone[7], expected[7]) == (dist.get_rank() == 0)


def learn_with_slope(model: nn.Module) -> list[Any]:
    """Train one step with two forwards, and a gradient of inputs between them."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    first = model(x).square().sum()
    slope = torch.autograd.grad(first, x, create_graph=True)[0]
    loss = first + slope.square().sum() + model(x + 1).square().sum()
    loss.backward()
    return [loss.detach(), *(buffer.clone() for buffer in model.buffers())]


@on_ranks(2)
def test_input_gradient_does_not_trigger_buffer_broadcast():
    """A broadcast between the two forwards would write to buffers that the graph of the first one has saved."""
    made = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        made.append(learn_with_slope(fully_shard(model, broadcast_buffers=True) if shard else model))
    assert_same(made[1], made[0])


MIXES = """
import torch, torch.distributed as dist
from torch import nn
from fullshard import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def loss_of(hidden, head):
    return (hidden @ head.weight).sum()

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(model[0])
fully_shard(model)
loss_of(model(torch.ones(2, 8)), model[1])
"""


@pytest.mark.slow
def test_function_of_sharded_weight_reports_remedy():
    ended = subprocess.run([sys.executable, "-c", MIXES], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "mixed torch.Tensor and DTensor" in ended.stderr
    stated = ended.stderr.rsplit("[fullshard] ", 1)[1]
    assert stated.startswith(
        "Sharded parameters in scope there: 1.weight of the root, 1.bias of the root, weight of 0 and others."
    )
    assert "call unshard() on the unit before" in stated


AVERAGES = """
import torch, torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from fullshard import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(), use_buffers=True)
for _ in range(2):
    averaged.update_parameters(model)
"""


NORMS = """
import torch, torch.distributed as dist
from torch import nn
from fullshard import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(8, 8))
model.weight.detach().norm().clamp_(min=1e-3)
"""


@pytest.mark.slow
def test_inplace_change_of_parameter_norm_reports_remedy():
    ended = subprocess.run([sys.executable, "-c", NORMS], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "[fullshard] The norm of a sharded parameter" in ended.stderr
    assert "fullshard.clip_grad_norm_" in ended.stderr


@pytest.mark.slow
def test_foreach_average_of_parameters_and_buffers_reports_remedy():
    ended = subprocess.run([sys.executable, "-c", AVERAGES], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "[fullshard] A foreach operation received sharded parameters and plain buffers" in ended.stderr
    assert "Use get_ema_avg_fn" in ended.stderr


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@on_ranks(2)
def test_optim_state_dict_is_scattered_without_optimizer_argument():
    """Load as PyTorch's T5 example does: only rank 0 has the full state, and no optimizer is passed."""
    model = FullyShardedDataParallel(chain(lambda module: module))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(inputs()).square().mean().backward()
    optimizer.step()
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    every = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    states = [
        FullyShardedDataParallel.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model),
        FullyShardedDataParallel.shard_full_optim_state_dict(every, model),
        FullyShardedDataParallel.shard_full_optim_state_dict(every, model, model.parameters()),
    ]
    for state in states:
        fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["lr"] == 0.1
        for param in model.parameters():
            for name, value in optimizer.state[param].items():
                assert_same(local(fresh.state[param][name]), local(value))


@on_ranks(2)
def test_rekey_optim_state_dict_converts_between_names_and_ids():
    model = FullyShardedDataParallel(chain(lambda module: module))
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs()).square().mean().backward()
    optimizer.step()
    numbered = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    rekeyed = FullyShardedDataParallel.rekey_optim_state_dict
    for given in ({"optim": optimizer}, {"optim_input": list(model.parameters())}, {}):
        named = rekeyed(numbered, OptimStateKeyType.PARAM_NAME, model, **given)
        assert list(named["state"]) == named["param_groups"][0]["params"] == names
        assert rekeyed(named, OptimStateKeyType.PARAM_NAME, model, **given) == named
        assert rekeyed(named, OptimStateKeyType.PARAM_ID, model, **given) == numbered
        named["param_groups"][0]["params"].reverse()  # as for an optimizer with its parameters in another order
        assert rekeyed(named, OptimStateKeyType.PARAM_ID, model, **given) == numbered


@on_ranks(2)
def test_share_comm_ctx_shares_streams_between_roots():
    first, second = fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8))
    share_comm_ctx([first, second])
    second(first(torch.ones(2, 8))).sum().backward()
    assert unit_of(first).streams is unit_of(second).streams
    share_comm_ctx([])


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="torch's classes are those of 2.13")
@on_ranks(2)
def test_fully_shard_accepts_mesh_classes_of_torch():
    from torch.distributed import fsdp as peer
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = peer.DataParallelMeshDims(shard="dp")
    result = ShardPlacementResult(Shard(1), FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0))
    found = []
    for options in ({"mesh": mesh, "dp_mesh_dims": dims}, {"shard_placement_fn": lambda _: result}):
        model = fully_shard(nn.Linear(8, 6, bias=False), **options)
        found.append((model.weight.placements, model.weight.device_mesh.mesh_dim_names))
    assert found == [((Shard(0),), ("dp",)), ((Shard(1),), ("dp",))]


def give_hints() -> list[str]:
    model = fully_shard(nn.Linear(8, 8))
    stated: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: stated.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fullshard.fsdp_module")
    logger.addHandler(handler)
    for _ in range(2):
        model.set_reduce_scatter_max_input_buffers(2, recurse=False)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_symm_mem_for_comm()
        model.set_separate_reduce_scatter_group()
    logger.removeHandler(handler)
    return stated


def test_setters_without_effect_log_once():
    stated = run_fresh_ranks(1, give_hints)[0]
    assert len(stated) == 4
    assert all("has no effect: " in line for line in stated)


def check_called_identically(peer: Any, ours: Any, name: str) -> None:
    """Check that `ours` has each argument of `peer` at the same position, and optional if it is optional in `peer`."""
    wanted, has = inspect.signature(peer).parameters, inspect.signature(ours).parameters
    for position, (argument, parameter) in enumerate(wanted.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        assert argument in has, f"{name}({argument})"
        if parameter.default is not parameter.empty:
            assert has[argument].default is not parameter.empty, f"{name}({argument}) can be left out"
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(has)[position] == argument, f"{name}({argument})"
            assert has[argument].kind is not parameter.KEYWORD_ONLY, f"{name}({argument})"


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 has other signatures")
@pytest.mark.parametrize("module", ["torch.distributed.fsdp", "torch.distributed.fsdp.wrap"])
def test_public_names_and_signatures_match_torch_fsdp(module):
    """Compare names, functions, constructors and methods. docs/moving_over.md lists the methods that are missing, and
    tests/unit/test_docs.py checks that list.
    """
    peer = importlib.import_module(module)
    ours = importlib.import_module(module.replace("torch.distributed.fsdp", "fullshard"))
    names = getattr(peer, "__all__", [name for name, var in vars(peer).items() if is_public(name, var, peer)])
    assert len(names) > 5
    for name in names:
        assert hasattr(ours, name), name
        them, us = getattr(peer, name), getattr(ours, name)
        if not (inspect.isclass(them) and issubclass(them, Enum)):
            check_called_identically(them, us, name)
        for method in vars(them) if inspect.isclass(them) else ():
            if not method.startswith("_") and callable(getattr(them, method)) and hasattr(us, method):
                check_called_identically(getattr(them, method), getattr(us, method), f"{name}.{method}")


def is_public(name: str, item: Any, module: Any) -> bool:
    return not name.startswith("_") and getattr(item, "__module__", None) == module.__name__ and callable(item)
