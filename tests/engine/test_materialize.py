"""Models built on the meta device: memory and values are created unit by unit, the same at every world size."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, gathered
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import ConfigError, FullyShardedDataParallel, StateError, fully_shard, recording, summon_full_params
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import peak_during, storage_bytes
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 64


class Scale(nn.Module):
    """Has a computed buffer, a persistent buffer, and a parameter that is initialized to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        self.table.copy_(torch.arange(WIDTH))
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + 0.01 * self.table


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.scale(x))))


class Model(nn.Module):
    """A model with tied weights, a separate bias in the head, and a frozen layer."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 32)
        self.head.weight = self.embedding.weight
        self.embedding.weight.mark = "mine"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def tokens() -> Tensor:
    return torch.arange(12) % 32


def values(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the full parameters and all buffers."""
    return gathered({**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())})


def step(model: nn.Module) -> Tensor:
    """Take one training step and return the loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(tokens()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# -- initialization ---------------------------------------------------------------------------------------------------


def wrap(policy: set[type[nn.Module]], **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(on_meta(), auto_wrap_policy=ModuleWrapPolicy(policy), **options)


def by_itself(**options: Any) -> nn.Module:
    """The wrapper calls `reset_parameters()` of each module."""
    return wrap({Block}, **options)


def by_function(**options: Any) -> nn.Module:
    def initialize(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()

    return wrap({Block}, param_init_fn=initialize, **options)


def tied_across_units(**options: Any) -> nn.Module:
    return wrap({Block, nn.Embedding, nn.Linear}, **options)


def shard_on_meta(strategy: str = "zero3", tied_separately: bool = False) -> Model:
    model = on_meta()
    for block in model.blocks:
        fully_shard(block, strategy=strategy)
    if tied_separately:
        fully_shard(model.embedding, strategy=strategy)
        fully_shard(model.head, strategy=strategy)
    return fully_shard(model, strategy=strategy)


def unit_by_unit(sharding_strategy: str = "zero3", tied_separately: bool = False) -> nn.Module:
    """Call `fully_shard`, allocate the shards, then initialize one unsharded unit after another."""
    model = shard_on_meta(sharding_strategy, tied_separately).to_empty(device="cpu")
    for unit in units_in(model):
        with summon_full_params(unit.modules[0], recurse=False), torch.no_grad():
            for module in own_modules_of(unit.modules[0]):
                module.reset_parameters()
    return model


def own_modules_of(unit: nn.Module) -> list[Any]:
    """Return the modules of `unit` that are outside of its nested units and have something to reset."""
    below = {module for unit in units_in(unit)[1:] for top in unit.modules for module in top.modules()}
    return [module for module in unit.modules() if hasattr(module, "reset_parameters") and module not in below]


WAYS: dict[str, Callable[..., nn.Module]] = {
    "by itself": by_itself,
    "by a function": by_function,
    "tied across units": tied_across_units,
    "unit by unit": unit_by_unit,
    "unit by unit, tied across units": partial(unit_by_unit, tied_separately=True),
}


def draw_values(strategies: tuple[str, ...]) -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for name, way in WAYS.items():
        for strategy in strategies if name in ("by itself", "unit by unit") else strategies[:1]:
            torch.manual_seed(3)
            model = way(sharding_strategy=strategy)
            assert model.head.weight is model.embedding.weight
            assert model.embedding.weight.mark == "mine"
            assert not model.frozen.weight.requires_grad
            found[f"{name}, {strategy}"] = clean(values(model))
            loss = step(model)
            assert torch.isfinite(loss)
            assert model.head.weight is model.embedding.weight
    return found


def clean(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in state.items()}


@pytest.mark.slow
def test_initial_values_match_at_every_world_size_and_strategy():
    """With the same seed on every rank, each rank draws the full values and keeps its shard."""
    [expected] = run_ranks(1, draw_values, ONE_AXIS)
    for name in ("by itself", "unit by unit"):
        for strategy in ONE_AXIS:
            assert_same(expected[f"{name}, {strategy}"], expected[f"{name}, ddp"])
    assert_same(expected["by a function, ddp"], expected["by itself, ddp"])
    for world in (2, 3):
        for found in run_ranks(world, draw_values, ("ddp", "zero3") if world == 3 else ONE_AXIS):
            for name, state in found.items():
                assert_same(state, expected[name], name=f"{name}, {world} ranks")
    for name, state in expected.items():
        assert_same(state["blocks.2.scale.gain"], torch.ones(WIDTH))
        assert_same(state["blocks.2.scale.table"], torch.arange(float(WIDTH)))
        assert 0 < state["head.bias"].abs().max() < 0.5
        assert state["embedding.weight"].std() > 0.9 or "unit" in name  # tied weights keep the first module's values


# -- memory -----------------------------------------------------------------------------------------------------------


def most_bytes(build: Callable[[], nn.Module]) -> tuple[int, int, int]:
    """Return the peak bytes while a model is built, those of its shards and buffers, and those of its largest unit."""
    model, peak = peak_during(build)
    stored = storage_bytes((*model.parameters(), *model.buffers()))
    whole = [sum(4 * param.layout.spec.numel for param in unit.params) for unit in units_in(model)]
    return peak, stored, max(whole)


def load(state: dict[str, Tensor], assign: bool) -> nn.Module:
    model = shard_on_meta()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:  # not part of the state dict
            model.get_submodule(name.rpartition(".")[0]).register_buffer("table", torch.arange(64.0), persistent=False)
    return model


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world")
def test_peak_memory_of_initialization_is_shards_plus_one_unit(tmp_path, world):
    """Memory is counted after every operation, for every way of initialization. Memory-mapped files do not count."""
    total = sum(param.nbytes for param in Model().parameters())
    path = str(tmp_path / "model.pt")
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        torch.save(Model().state_dict(), path)
    dist.barrier()
    found = {name: most_bytes(way) for name, way in WAYS.items()}
    mapped = torch.load(path, mmap=True)  # in the file, not in memory
    found["loaded"] = most_bytes(partial(load, mapped, False))
    found["assigned"] = most_bytes(partial(load, mapped, True))
    for name, (peak, stored, unit) in found.items():
        assert 0.9 * total / world < stored < 1.1 * total / world + 4096
        assert peak <= stored + unit + 4096, name  # padding, and tensors that belong to no parameter


# -- other ways to initialize -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_sync_module_states_broadcasts_model_built_on_rank_0():
    """Only rank 0 has values. The other ranks allocate memory and receive the values."""
    torch.manual_seed(0)
    expected = Model()
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        model, give_memory = Model(), None
    else:
        model = on_meta()

        def give_memory(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)

    policy = ModuleWrapPolicy({Block})
    net = FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=give_memory, sync_module_states=True)
    assert net.head.weight is net.embedding.weight
    found = values(net)
    tensors = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    assert_same(clean(found), tensors)


@on_ranks(2)
def test_to_empty_can_be_called_module_by_module():
    """Call `to_empty` on every module, whether it is a unit or part of one, then load a state dict."""
    for strategy in ONE_AXIS:
        model, plain = shard_on_meta(strategy), Model()
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
        for block in model.blocks:
            block.scale.table.copy_(torch.arange(WIDTH))  # not part of the state dict
        model.load_state_dict(plain.state_dict())
        for _ in range(2):
            assert_same(step(model), step(plain), name=strategy)


class Cached(nn.Module):
    """Has a buffer that is computed at construction, and a parameter that is materialized later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("frequencies", torch.arange(4.0, device="cpu"), persistent=False)
        self.ignored = nn.Parameter(torch.full((3,), 5.0, device="cpu"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.ignored)


@on_ranks(2)
def test_materialization_keeps_existing_values():
    with torch.device("meta"):
        module = Cached()
    ignored = module.ignored
    net = FullyShardedDataParallel(module, ignored_states=[ignored])
    assert net.ignored is ignored
    assert_same([net.ignored.detach(), net.frequencies], [torch.full((3,), 5.0), torch.arange(4.0)])
    assert_same(values(net)["weight"], torch.ones(4, 4))


@on_ranks(2)
def test_forward_with_parameters_on_meta_device_raises():
    model = shard_on_meta()
    refused = pytest.raises(StateError, match=r"parameters are still on the meta device.*to_empty.*param_init_fn")
    with recording() as record, refused:
        model(tokens())
    assert record.names() == []
    for unit in (model, *model.blocks):
        unit.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    model.blocks[0].scale.table.zero_()
    assert isinstance(model.head.weight, DTensor)
    model(tokens())


@on_ranks(1)
def test_recurrent_layers_are_materialized_from_meta_device():
    """A recurrent layer has weak references to its weights, and torch does not swap tensors with weak references."""
    torch.manual_seed(0)
    plain = nn.GRU(3, 4)

    def replace(module: nn.Module) -> None:
        for name, value in plain.named_parameters():
            setattr(module, name, nn.Parameter(value.detach().clone()))

    x = torch.ones(2, 3)
    for init in (None, replace):
        torch.manual_seed(0)
        with torch.device("meta"):
            module = nn.GRU(3, 4)
        model = FullyShardedDataParallel(module, param_init_fn=init)
        assert_same(model(x)[0].detach(), plain(x)[0].detach())
    with torch.device("meta"):
        ignoring = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 4))
    fully_shard(ignoring, ignored_params=set(ignoring[0].parameters()))
    ignoring.to_empty(device="cpu")
    values = {f"0.{name}": value for name, value in plain.state_dict().items()}
    ignoring.load_state_dict(values | {"1.weight": torch.zeros(4, 4), "1.bias": torch.zeros(4)})
    assert_same(ignoring[0](x)[0].detach(), plain(x)[0].detach())


@on_ranks(1)
def test_recurrent_units_do_not_flatten_parameters():
    """On a GPU, a layer that finds new weights would move them to a buffer that no all-gather writes to."""
    moved = []
    with mock.patch.object(nn.RNNBase, "flatten_parameters", lambda layer: moved.append(layer)):
        model = nn.Sequential(nn.LSTM(3, 3), nn.GRU(3, 4))
        fully_shard(model[0])
        model = copy.deepcopy(fully_shard(model, ignored_params=set(model[1].parameters())))
        moved.clear()
        for _ in range(2):
            model[0].flatten_parameters()
            model[1](model[0](torch.ones(2, 3))[0])[0].sum().backward()
    assert model[0] not in moved


def fail_to_initialize(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    raise RuntimeError("no values")


@on_ranks(1)
def test_parameters_stay_on_meta_device_if_param_init_fn_raises():
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="no values"):
        FullyShardedDataParallel(layer, param_init_fn=fail_to_initialize)
    assert layer.weight is weight
    assert layer.weight.is_meta and layer.bias.is_meta


class Mute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


@on_ranks(2)
def test_error_names_module_that_cannot_be_initialized():
    with recording() as record:
        with torch.device("meta"):
            mute, left = nn.Sequential(Mute()), nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(
            ConfigError, match=r"0 \(Mute\) has parameters on the meta device, such as 'weight', but no"
        ):
            FullyShardedDataParallel(mute)
        with pytest.raises(ConfigError, match=r"param_init_fn left 'weight' of 0 on the meta device\. It must call"):
            FullyShardedDataParallel(left, param_init_fn=lambda module: None)
        assert left[0].weight.is_meta  # unchanged
    assert record.names() == []
