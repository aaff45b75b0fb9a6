"""Deep copies of sharded models, and weight averages made from them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from small_models import ONE_AXIS, SmallGPT, chain, inputs, take_step
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, StateDictType, fully_shard
from fullshard.engine.registry import units_in
from fullshard.errors import StateError
from fullshard.testing import assert_same

Shard = Callable[[nn.Module], nn.Module]


def wholes(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, steps: int, first: int = 0) -> list[Tensor]:
    return go_on(model, torch.optim.AdamW(model.parameters(), lr=0.1), steps, first)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    for step in range(first, first + steps):
        take_step(optimizer, model(inputs(step)).square().mean())
    return wholes(model)


SHARDS: dict[str, Shard] = {
    **{strategy: partial(fully_shard, strategy=strategy) for strategy in ONE_AXIS},
    "grouped": partial(fully_shard, reshard_after_forward=2),
    "offloaded": partial(fully_shard, offload_policy=CPUOffloadPolicy()),
    "encoded": partial(fully_shard, mp_policy=MixedPrecisionPolicy(gather_wire="int8")),
    "wrapper": FullyShardedDataParallel,
}


@pytest.mark.parametrize("name", SHARDS)
@on_ranks(2)
def test_deepcopy_trains_identically_and_independently(name):
    shard = SHARDS[name]
    model = chain(lambda module: module) if shard is FullyShardedDataParallel else chain(shard)
    if shard is FullyShardedDataParallel:
        model = FullyShardedDataParallel(model)
    train(model, 3)
    model.eval()
    before = wholes(model)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert not copied.training
    assert_same(wholes(copied), before)
    assert_same(copied(inputs()).detach(), model(inputs()).detach())
    trained = train(copied, 3, first=7)
    assert_same(wholes(model), before)  # separate memory
    assert_same(train(model, 3, first=7), trained)
    assert [unit.name for unit in units_in(copied)] == [unit.name for unit in units_in(model)]
    assert_same(wholes(copy.deepcopy(copied)), trained)  # a copy of a copy
    for module, other in zip(model.modules(), copied.modules(), strict=True):
        hooks = [name for name in vars(module) if name.endswith("_hooks")]
        assert [len(getattr(module, name)) for name in hooks] == [len(getattr(other, name)) for name in hooks]


@pytest.mark.parametrize("name", SHARDS)
@on_ranks(2)
def test_deepcopy_copies_model_and_optimizer_together(name):
    for steps in (0, 2) if name in ("zero3", "wrapper") else (2,):  # the second step is taken on plain shards
        model = FullyShardedDataParallel(chain(lambda module: module)) if name == "wrapper" else chain(SHARDS[name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        go_on(model, optimizer, steps)
        copied, its = copy.deepcopy((model, optimizer))
        assert all(a is b for a, b in zip(its.param_groups[0]["params"], copied.parameters(), strict=True))
        before = wholes(model)
        trained = go_on(copied, its, 2)
        assert_same(wholes(model), before)
        assert_same(go_on(model, optimizer, 2), trained)
    for copied_before in (optimizer, list(model.parameters())):
        with pytest.raises(StateError, match="was already copied in this call"):
            copy.deepcopy((copied_before, model))


class CountedCopies(nn.Linear):
    """A layer with a custom `__deepcopy__`."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.copies = self.copies + 1
        return copied


@on_ranks(2)
def test_deepcopy_calls_custom_deepcopy_of_modules():
    for shard_root in (fully_shard, FullyShardedDataParallel):
        for is_unit in (True, False):
            model = nn.Sequential(weight_norm(nn.Linear(48, 48)), CountedCopies(48, 48), nn.Linear(48, 48))
            if is_unit:
                for module in model[:2]:
                    fully_shard(module)
            model = shard_root(model)
            train(model, 1)
            copied = copy.deepcopy(model)
            assert [getattr(m, "copies", None) for m in copied.modules() if isinstance(m, CountedCopies)] == [1]
            trained = train(model, 2, first=1)
            assert_same(train(copied, 2, first=1), trained)
            assert_same(wholes(model), trained)


@pytest.mark.parametrize("first", [0, 2])
@on_ranks(2)
def test_deepcopy_keeps_tied_weights_across_units(first):
    for are_tied_before in (True, False):
        model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48))
        if are_tied_before:
            model[2].weight = model[0].weight
        for number in (first, 2 - first):  # the first one has the weight, the other one borrows it
            fully_shard(model[number])
        fully_shard(model)
        if not are_tied_before:
            model[2].weight = model[0].weight
            train(model, 1)
        copied = copy.deepcopy(model)
        assert copied[2].weight is copied[0].weight
        assert_same(train(copied, 3), train(model, 3))


@on_ranks(2)
def test_deepcopy_preserves_all_model_attributes():
    """Check tied and frozen weights, attributes, buffers, ignored parameters, user hooks and the meta device."""
    model = SmallGPT()
    model.embedding.weight.mark = "tied"
    model.extra = nn.Linear(4, 4)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params=model.extra.parameters())
    model.set_requires_gradient_sync(False, recurse=False)
    visited: list[Any] = []
    model.register_forward_hook(lambda module, args, output: visited.append(module))
    copied = copy.deepcopy(model)
    tokens = torch.arange(12).view(2, 6)
    assert_same(copied(tokens), model(tokens))
    assert visited == [copied, model]
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    names = [dict(item.named_parameters(remove_duplicate=False)) for item in (model, copied)]
    ties = [[[a is b for b in params.values()] for a in params.values()] for params in names]
    assert ties[0] == ties[1]
    assert copied.embedding.weight.mark == "tied"
    assert not isinstance(copied.extra.weight, DTensor)
    assert copied.extra.weight is not model.extra.weight
    before, after = ([unit.settings.syncs_gradients for unit in units_in(each)] for each in (model, copied))
    assert after == before
    holder = copy.deepcopy(nn.ModuleDict({"model": model, "head": nn.Linear(2, 2)}))
    assert_same(wholes(holder["model"]), wholes(model))
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(8, 8))
    filled = copy.deepcopy(empty).to_empty(device="cpu")
    assert empty.weight.is_meta
    assert not filled.weight.is_meta
    wrapped = FullyShardedDataParallel(nn.Linear(8, 8))
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
    assert isinstance(copy.deepcopy(wrapped).state_dict()["weight"], DTensor)


@on_ranks(4)
def test_deepcopy_keeps_placements_of_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    copied = copy.deepcopy(model)
    assert_same(copied(torch.ones(2, 8)).detach(), model(torch.ones(2, 8)).detach())
    assert copied[0].weight.placements == model[0].weight.placements


@on_ranks(2)
def test_deepcopy_keeps_values_of_parameters_frozen_after_sharding():
    """The units of a copy group parameters by their current requires_grad, so their order may differ."""
    for frozen in range(3):
        torch.manual_seed(frozen)
        layers = [nn.Linear(6, 6, bias=bias) for bias in (False, False, True)]
        model = fully_shard(nn.Sequential(*layers))
        list(model.parameters())[frozen].requires_grad_(False)
        copied = copy.deepcopy(model)
        assert_same(wholes(copied), wholes(model))
        assert [param.requires_grad for param in copied.parameters()] == [
            param.requires_grad for param in model.parameters()
        ]
        assert_same(wholes(copy.deepcopy(copied)), wholes(model))


class Normed(nn.Module):
    """A model with batch statistics, which an averaged model must recompute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def average(shard: Shard, options: Any) -> list[Any]:
    if options == "ema":
        options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    elif options == "ema of buffers":
        options = {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True}
    model = Normed()
    for part in (model.up, model):
        model = shard(part)
    averaged = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    for batch in batches:
        take_step(optimizer, model(batch).square().mean())
        averaged.update_parameters(model)
    update_bn(batches, averaged)
    averaged.eval()
    state = [v.full_tensor() if isinstance(v, DTensor) else v for v in averaged.state_dict().values()]
    return [averaged(batches[0]).detach(), wholes(averaged), state]


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@pytest.mark.parametrize("options", [{}, {"use_buffers": True}, "ema", "ema of buffers"], ids=str)
@on_ranks(2)
def test_averaged_model_of_shards_matches_plain_averaged_model(strategy, options):
    plain = average(lambda module: module, options)
    assert_same(average(partial(fully_shard, strategy=strategy), options), plain)
    dist.barrier()


class Forwarding(nn.Module):
    """A wrapper that looks up unknown attributes in the wrapped module, as those of many libraries do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class CopiesItself(Forwarding):
    """A wrapper that calls the method of the wrapped module itself."""

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        method = getattr(self.inner, "__deepcopy__", partial(copy.deepcopy, self.inner))
        return CopiesItself(method(memo))


def compiled(module: nn.Module) -> nn.Module:
    """Look up ``torch.compile`` when it is called: Lightning replaces it."""
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("shard", [fully_shard, FullyShardedDataParallel])
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, Forwarding, CopiesItself, compiled])
@on_ranks(2)
def test_deepcopy_copies_wrapper_around_a_unit(wrap, shard):
    def normalized() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))

    def stepped(model: nn.Module) -> list[Tensor]:
        model(torch.arange(32.0).reshape(4, 8) + dist.get_rank()).sum().backward()
        return [buffer.clone() for buffer in model.buffers()]

    plain = nn.Sequential(wrap(normalized()))
    inside, outside = nn.Sequential(wrap(shard(normalized()))), wrap(shard(normalized()))
    shard(inside)
    for model in (inside, outside):
        copied = copy.deepcopy(model)
        classes = [[type(module).__name__ for module in tree.modules()] for tree in (model, copied)]
        assert classes[0] == classes[1]
        assert len(set(copied.modules()) & set(model.modules())) == 0
        assert_same(stepped(copied), stepped(copy.deepcopy(plain)))
        assert_same(stepped(model), stepped(copy.deepcopy(plain)))
