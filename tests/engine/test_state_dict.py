"""State dicts of sharded modules have the user's FQNs and values, full or sharded, and load at any world size."""

import copy
import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, gathered
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigError,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedStateDictConfig,
    StateDictType,
    StateError,
    fully_shard,
    recording,
)
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

WIDTH, TOKENS = 20, 11
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Cell(nn.Module):
    """Has a buffer, a scalar parameter and rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("gain", torch.rand(WIDTH))
        self.up = nn.Linear(WIDTH, 33)
        self.down = nn.Linear(33, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x) * self.gain.to(x.dtype))))


class Centre(nn.Module):
    """Has buffers that change in training, one of them an integer; computes in any dtype, as batch norm does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).float(), 0.1)
            self.count += 1
        return x - self.mean.to(x.dtype)


class Model(nn.Module):
    """Tied weights, a frozen and an ignored layer, buffers that are saved and not saved, and extra state."""

    def __init__(self, cells: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(cells))
        self.centre = Centre()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.aside = nn.Linear(WIDTH, WIDTH)  # ignored: whole and unsynchronized
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.randn(7))
        self.register_buffer("scratch", torch.randn(7), persistent=False)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens) + self.table.sum()
        for cell in self.cells:
            x = cell(x)
        x = self.frozen(self.centre(x)) + 0.1 * self.aside(x.float()).to(x.dtype)
        return self.head(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def model(seed: int = 0, device: str = "cpu") -> Model:
    torch.manual_seed(seed)
    with torch.device(device):
        return Model()


def tokens(step: int = 0) -> Tensor:
    """Return the same on every rank, so that the ignored layer stays equal."""
    return torch.randint(TOKENS, (12,), generator=torch.Generator().manual_seed(step))


def learn(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = F.cross_entropy(net(tokens(step)).float(), (tokens(step) * 5 + 2) % TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam((param for param in net.parameters() if param.requires_grad), lr=1e-2)


# -- ways of sharding -------------------------------------------------------------------------------------------------


def by_function(net: Model, *, tied_separately: bool = False, **options: Any) -> Model:
    """Make each cell a unit and the model the root; tied weights are across two more units on request."""
    ignored = {"ignored_params": list(net.aside.parameters()), **options}
    for cell in net.cells:
        fully_shard(cell, **options)
    if tied_separately:
        fully_shard(net.embedding, **options)
        fully_shard(net.head, **options)
    return fully_shard(net, **ignored)


def by_wrapper(net: Model, *, tied_separately: bool = False, strategy: str = "zero3", mesh: Any = None, **options: Any):
    return FullyShardedDataParallel(
        net,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Cell, nn.Embedding} if tied_separately else {Cell}),
        ignored_modules=[net.aside],
        device_mesh=mesh,
        **options,
    )


def by_nested_wrappers(net: Model, **options: Any) -> nn.Module:
    """Return a wrapper in a wrapper in a wrapper, the innermost around one layer."""
    for cell in net.cells:
        cell.up = FullyShardedDataParallel(cell.up)
    return by_wrapper(net, **options)


def checkpointed_before(shard: Callable[..., Any], net: Model, **options: Any) -> nn.Module:
    net.cells = nn.ModuleList(checkpoint_wrapper(cell) for cell in net.cells)
    return shard(net, **options)


def checkpointed_after(shard: Callable[..., Any], net: Model, **options: Any) -> nn.Module:
    sharded = shard(net, **options)
    apply_activation_checkpointing(sharded, checkpoint_wrapper, check_fn=lambda m: isinstance(m, Cell | nn.Embedding))
    return sharded


def below_a_plain_root(net: Model, **options: Any) -> nn.Module:
    """Shard below a plain root: the user's module, which is not a unit, holds all units."""
    for name, child in list(net.named_children()):
        if name == "cells":
            net.cells = nn.ModuleList(by_wrapper_alone(cell, **options) for cell in child)
        elif name != "aside":
            setattr(net, name, by_wrapper_alone(child, **options))
    return net


def by_wrapper_alone(module: nn.Module, *, strategy: str = "zero3", **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, sharding_strategy=strategy, **options)


SHARDINGS = {
    "fully_shard": by_function,
    "wrapper": by_wrapper,
    "fully_shard, tied across units": partial(by_function, tied_separately=True),
    "wrapper, tied across units": partial(by_wrapper, tied_separately=True),
    "nested wrappers": by_nested_wrappers,
    "checkpoints in fully_shard": partial(checkpointed_before, by_function),
    "checkpoints in the wrapper": partial(checkpointed_before, by_wrapper),
    "checkpoints, put in after the wrapper": partial(checkpointed_after, by_wrapper),
    "checkpoints, put in after fully_shard": partial(checkpointed_after, by_function),
    "wrappers below a plain root": below_a_plain_root,
}


def whole_state(net: nn.Module) -> dict[str, Any]:
    """Return the full state dict, in whichever way the front end gives it."""
    with FullyShardedDataParallel.state_dict_type(net, FULL):
        state = net.state_dict()
    tensors = gathered({name: value for name, value in state.items() if isinstance(value, Tensor)})
    return {name: tensors.get(name, value) for name, value in state.items()}


# -- names and values -------------------------------------------------------------------------------------------------


def compare_state_dicts(name: str, strategy: str) -> None:
    """Full and sharded, before a step and after two, against the plain model that did the same."""
    world, options = dist.get_world_size(), {}
    if strategy.startswith("hsdp"):
        options["mesh"] = init_device_mesh("cpu", (world, 1) if strategy == "hsdp" else (1, world))
    plain, net = model(), SHARDINGS[name](model(), strategy=strategy, **options)
    for steps in range(2), range(2, 3):
        expected = plain.state_dict()
        full = whole_state(net)
        assert list(full) == list(expected)
        assert_same(full, dict(expected), name=f"{name}, {strategy}: ")
        assert not any(isinstance(value, DTensor) for value in full.values())
        with FullyShardedDataParallel.state_dict_type(net, SHARDED):
            sharded = net.state_dict()
        assert list(sharded) == list(expected)
        for key, own in net.named_parameters():
            value = sharded[clean(key)]
            assert isinstance(value, DTensor) == isinstance(own, DTensor) == ("aside" not in key)
            assert value.shape == expected[clean(key)].shape
            assert local(value).data_ptr() == local(own).data_ptr()  # no copy
        learn(plain, adam(plain), steps)
        learn(net, adam(net), steps)


def clean(name: str) -> str:
    """Return a name of a module that has wrappers in it, without theirs."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", "")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@on_ranks("world")
def test_model_state_dicts_have_original_fqns_and_values(world):
    """In the order of the original model, before and after training, under every strategy."""
    for name in SHARDINGS:
        compare_state_dicts(name, "zero3")
    for strategy in (*ONE_AXIS, "hsdp", "hsdp_zero2"):
        compare_state_dicts("fully_shard, tied across units", strategy)
        compare_state_dicts("wrapper", strategy)


@on_ranks(2)
def test_full_state_dict_does_not_change_during_later_training():
    """Buffers and ignored parameters in it do not change either, so that it can hold the best model so far."""
    for strategy in ONE_AXIS:
        net = by_wrapper(model(), strategy=strategy)
        state = net.state_dict()
        before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        learn(net, adam(net), range(2))
        assert_same(state, before, name=strategy)


# -- options ----------------------------------------------------------------------------------------------------------


def states_with_options() -> tuple[list[int], list[str]]:
    """Return the numbers of entries of a full state dict with `rank0_only`, and the messages sent for it."""
    sizes, sent = [], []
    for strategy in ("ddp", "zero3"):
        net, plain = by_wrapper(model(), strategy=strategy), model().state_dict()
        FullyShardedDataParallel.set_state_dict_type(
            net, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        )
        state = net.state_dict()
        sizes.append(len(state))
        if dist.get_rank() == 0:
            assert_same(dict(state), dict(plain))
        with recording() as record, FullyShardedDataParallel.state_dict_type(net, SHARDED):
            assert_same(gathered(tensors_of(net.state_dict())), tensors_of(plain))
        sent += record.names()
        with FullyShardedDataParallel.state_dict_type(net, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
            offloaded = net.state_dict()
        assert {value.device.type for value in tensors_of(offloaded).values()} == {"cpu"}
        assert len(net.state_dict()) == len(state)  # the context is over: what was set before it holds again
    return sizes, sent


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def test_rank0_only_returns_empty_dict_elsewhere_and_sharded_sends_nothing():
    whole = len(model().state_dict())
    (first, sent), *others = run_ranks(3, states_with_options)
    assert (first, sent) == ([whole, whole], [])
    assert others == [([0, 0], [])] * 2


def first_rank_of_a_mesh_in_the_middle() -> int:
    """Ranks 1 and 2 shard; the first of *them* gets the full state dict."""
    if dist.get_rank() in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        net = FullyShardedDataParallel(nn.Linear(6, 6), process_group=group)
        with FullyShardedDataParallel.state_dict_type(net, FULL, FullStateDictConfig(rank0_only=True)):
            return len(net.state_dict())
    return -1


def test_rank0_only_selects_first_rank_of_mesh():
    assert run_ranks(4, first_rank_of_a_mesh_in_the_middle) == [-1, 2, 0, -1]


@on_ranks(2)
def test_state_dicts_keep_stored_dtype_with_mixed_precision():
    """bfloat16 compute leaves the stored float32 in every state dict, bit for bit, and buffers unchanged."""
    plain = dict(model().state_dict())
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for strategy in ONE_AXIS:
        for net in (
            by_function(model(), strategy=strategy, mp_policy=half),
            by_wrapper(model(), strategy=strategy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
        ):
            with torch.no_grad():
                assert net.eval()(tokens()).dtype is torch.bfloat16
            assert_same({**whole_state(net), "_extra_state": plain["_extra_state"]}, plain, name=strategy)


# -- loading ----------------------------------------------------------------------------------------------------------


def save_after_steps(folder: str, shard: str, strategy: str) -> dict[str, Any]:
    """Train, save full by torch and safetensors, sharded by torch.distributed.checkpoint; the full state."""
    net = SHARDINGS[shard](model(), strategy=strategy)
    optimizer = adam(net)
    learn(net, optimizer, range(2))
    state = whole_state(net)
    if dist.get_rank() == 0:
        tensors = {name: value for name, value in tensors_of(state).items() if name != "head.weight"}  # tied
        save_file(tensors, Path(folder) / "full.safetensors")
        torch.save(state, Path(folder) / "full.pt")
    with FullyShardedDataParallel.state_dict_type(net, SHARDED):
        dcp.save({"model": net.state_dict()}, checkpoint_id=Path(folder) / "dcp")
    return state


def load_everywhere(folder: str, expected: dict[str, Any]) -> None:
    """Every file, into every strategy and front end; then the same forward as a plain model that loaded it."""
    plain = model(seed=2)
    plain.load_state_dict(torch.load(Path(folder) / "full.pt", weights_only=True))
    out = plain.eval()(tokens()).detach()
    ways = [("zero3", shard, load) for shard in ("fully_shard", "checkpoints in the wrapper") for load in LOADS]
    ways += [(strategy, "wrapper, tied across units", load) for strategy in ONE_AXIS for load in (load_full, load_dcp)]
    for strategy, shard, load in ways:
        net = SHARDINGS[shard](model(seed=1), strategy=strategy)
        with recording() as record:
            load(net, Path(folder))
        assert record.names() == []
        found = whole_state(net)
        if load is load_safetensors:
            found["_extra_state"] = expected["_extra_state"]  # which is not a tensor
        assert_same(found, expected, name=f"{strategy}, {shard}, {load.__name__}: ")
        assert_same(net.eval()(tokens()).detach(), out)


def load_full(net: nn.Module, folder: Path) -> None:
    assert (
        str(net.load_state_dict(torch.load(folder / "full.pt", weights_only=True))) == "<All keys matched successfully>"
    )


def load_mapped(net: nn.Module, folder: Path) -> None:
    """Load from a mapped file, so that no rank holds the whole model."""
    net.load_state_dict(torch.load(folder / "full.pt", weights_only=True, mmap=True))


def load_safetensors(net: nn.Module, folder: Path) -> None:
    missing, unexpected = net.load_state_dict(load_file(folder / "full.safetensors"), strict=False)
    assert (sorted(missing), unexpected) == (["_extra_state", "head.weight"], [])


def load_dcp(net: nn.Module, folder: Path) -> None:
    with FullyShardedDataParallel.state_dict_type(net, SHARDED):
        state = net.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder / "dcp")
        net.load_state_dict(state)


LOADS = [load_full, load_mapped, load_safetensors, load_dcp]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "strategy", "shard", "loaded_by"),
    [
        (2, "zero3", "wrapper", 3),
        pytest.param(3, "ddp", "fully_shard", 2, marks=pytest.mark.slow),
        pytest.param(3, "zero2", "nested wrappers", 1, marks=pytest.mark.slow),
    ],
)
def test_saved_model_loads_at_any_world_size_under_any_strategy(tmp_path, saved_by, strategy, shard, loaded_by):
    """Full or sharded, from three file formats, bitwise equal. Loading full tensors sends nothing."""
    expected = run_ranks(saved_by, save_after_steps, str(tmp_path), shard, strategy)[0]
    run_ranks(loaded_by, load_everywhere, str(tmp_path), expected)


def drop(state: dict[str, Any]) -> None:
    del state["cells.1.up.bias"]


def add(state: dict[str, Any]) -> None:
    state["cells.1.left"] = torch.zeros(3)


def misshape(state: dict[str, Any]) -> None:
    state["cells.1.up.weight"] = torch.zeros(34, WIDTH)


def misshape_a_shard(state: dict[str, Any]) -> None:
    state["cells.1.up.weight"] = fully_shard(nn.Linear(WIDTH, 34)).weight.detach()


@pytest.mark.parametrize(
    ("spoil", "stated"),
    [
        (drop, 'Missing key(s) in state_dict: "cells.1.up.bias".'),
        (add, 'Unexpected key(s) in state_dict: "cells.1.left".'),
        (misshape, "cells.1.up.weight is of shape (33, 20) in the model, but of (34, 20) in the state dict."),
        (misshape_a_shard, "cells.1.up.weight is of shape (33, 20) in the model, but of (34, 20) in the state dict."),
    ],
)
@on_ranks(2)
def test_load_state_dict_raises_on_every_rank_with_original_fqns(spoil, stated):
    """Before any communication, through any wrappers."""
    messages = []
    for name, shard in SHARDINGS.items():
        state = dict(model().state_dict())
        spoil(state)
        net = shard(model(seed=1))
        with pytest.raises(RuntimeError) as error, recording() as record:
            net.load_state_dict(state)
        assert record.names() == [], name
        messages.append(str(error.value))
        if "misshape" not in spoil.__name__:
            missing, unexpected = net.load_state_dict(state, strict=False)
            assert (missing, unexpected) == ((["cells.1.up.bias"], []) if spoil is drop else ([], ["cells.1.left"]))
    for name, message in zip(SHARDINGS, messages, strict=True):
        assert stated in message, f"{name}: {message}"


@on_ranks(2)
def test_training_uses_state_loaded_with_assign():
    """Assigned tensors replace parameters, on any device and of any dtype."""
    expected = dict(model().state_dict())
    for strategy in ONE_AXIS:
        for shard in (by_function, by_wrapper):
            net = shard(model(seed=1), strategy=strategy)
            with torch.no_grad():
                net.eval()(tokens())
            whole = model().state_dict()
            net.load_state_dict(whole, assign=True)
            assert_same({**whole_state(net), "_extra_state": expected["_extra_state"]}, expected, name=strategy)
            frozen = {name: param.requires_grad for name, param in net.named_parameters()}
            assert {name for name, trained in frozen.items() if not trained} == {"frozen.weight", "frozen.bias"}
            want, got = model(), net.train()
            assert_same(learn(got, adam(got), range(2)), learn(want, adam(want), range(2)), name=strategy)
            assert_same(
                {k: v for k, v in whole_state(net).items() if k != "_extra_state"}, tensors_of(want.state_dict())
            )
            if shard is by_function:
                sharded = shard(model(seed=3), strategy=strategy).state_dict()
                net.load_state_dict(sharded, assign=True)
                assert_same(whole_state(net)["cells.0.up.weight"], model(seed=3).cells[0].up.weight.detach())


@on_ranks(2)
def test_assign_loads_module_registered_twice():
    layer = nn.Linear(6, 6)
    values = {name: torch.full_like(value, 0.5) for name, value in layer.state_dict().items()}
    net = nn.Sequential(layer, layer)
    fully_shard(net)
    net.load_state_dict({f"{i}.{name}": value for i in range(2) for name, value in values.items()}, assign=True)
    assert_same(whole_state(net)["1.weight"], values["weight"])
    assert net[0].weight is net[1].weight
    net(torch.ones(2, 6)).sum().backward()
    assert isinstance(net[0].weight.grad, DTensor)


@on_ranks(2)
def test_assign_loads_tied_weight_after_other_owners_are_removed():
    for strategy, kept, whole in product(ONE_AXIS, range(3), (True, False)):
        net, other = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))) for _ in range(2))
        for layers in (net, other):
            layers[1].weight = layers[2].weight = layers[0].weight
            fully_shard(layers, strategy=strategy)
        for removed in {0, 1, 2} - {kept}:
            net[removed], other[removed] = nn.Identity(), nn.Identity()
        expected = whole_state(other)
        state = expected if whole else {name: value.clone() for name, value in other.state_dict().items()}
        net.load_state_dict(state, assign=True)
        assert_same(whole_state(net), expected, name=f"{strategy}, {kept}")
        x = torch.ones(2, 6)
        assert_same(net(x), other(x), name=f"{strategy}, {kept}")


@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_state_dict_with_several_dtypes_round_trips_through_torch_save(world):
    for strategy in ONE_AXIS:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double(), nn.PReLU(1), nn.LSTM(3, 2).bfloat16())
        net.register_parameter("none", nn.Parameter(torch.empty(0, dtype=torch.float64)))
        fully_shard(net, strategy=strategy)
        file = io.BytesIO()
        state = net.state_dict()
        torch.save(state, file)
        file.seek(0)
        assert_same(torch.load(file), state, name=strategy)

        with torch.no_grad():
            for value in state.values():  # they share memory with the parameters, as in plain models
                value.fill_(0.25)
        assert all((param.full_tensor() == 0.25).all() for param in net.parameters())


@on_ranks(2)
def test_assign_changes_dtype_only_for_all_parameters_of_a_group():
    for shard in (by_function, by_wrapper):
        net, plain = shard(model()), model()
        state = {
            k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors_of(model(seed=1).state_dict()).items()
        }
        state["_extra_state"] = {"calls": 0}
        for module in (net, plain):
            module.load_state_dict(state, assign=True)
        assert {param.dtype for param in net.parameters()} == {torch.bfloat16}
        assert_same(tensors_of(whole_state(net)), tensors_of(plain.state_dict()))
        mixed = {**state, "cells.1.norm.weight": torch.ones(WIDTH)}
        with pytest.raises(
            ConfigError, match=r"norm.weight now has dtype torch.float32, but scale has torch.bfloat16. They"
        ):
            net.load_state_dict(mixed, assign=True)


@pytest.mark.slow
@on_ranks(2)
def test_load_state_dict_materializes_meta_device_model():
    """Shard on the meta device, then load: no initialization is ever computed."""
    for strategy in ONE_AXIS:
        for assign in (False, True):
            net = by_function(model(device="meta"), strategy=strategy)
            if not assign:
                net.to_empty(device="cpu")
            net.load_state_dict(model().state_dict(), assign=assign)
            net.register_buffer("scratch", model().scratch, persistent=False)  # which no state dict has
            assert_same(tensors_of(whole_state(net)), tensors_of(model().state_dict()), name=strategy)
            plain = model()
            assert_same(learn(net, adam(net), range(2)), learn(plain, adam(plain), range(2)))


@on_ranks(2)
def test_meta_device_model_has_meta_state_dict_with_original_fqns():
    net = by_function(model(device="meta"))
    state = net.state_dict()
    assert all(value.is_meta for value in tensors_of(state).values())
    assert list(state) == list(model().state_dict())


@pytest.mark.slow
@on_ranks(2)
def test_sharded_state_dict_loads_under_any_other_strategy():
    """Load sharded state dicts of one strategy directly into all others, without changes."""
    for given in ONE_AXIS:
        source = by_function(model(seed=1), strategy=given).state_dict()
        before = dict(source)
        for taken in ONE_AXIS:
            for shard in (by_function, by_wrapper):
                net = shard(model(), strategy=taken)
                net.load_state_dict(source)
                assert_same(
                    tensors_of(whole_state(net)), tensors_of(model(seed=1).state_dict()), name=f"{given}->{taken}"
                )
                assert all(source[key] is before[key] for key in [*source, *before])


@on_ranks(2)
def test_next_forward_uses_values_loaded_between_steps():
    """Loaded values are used in the next forward, also with unsharded parameters that are kept."""
    plain = model(seed=1).eval()
    for strategy in ONE_AXIS:
        net = by_function(model(), strategy=strategy, reshard_after_forward=False)
        net.set_reshard_after_backward(False)
        learn(net, adam(net), range(3))
        net.zero_grad()
        net.load_state_dict(model(seed=1).state_dict())
        assert_same(net.eval()(tokens()).detach(), plain(tokens()).detach(), name=strategy)
        net.cells[1].load_state_dict(model(seed=2).cells[1].state_dict())  # a part
        net.frozen.load_state_dict(model(seed=2).frozen.state_dict())  # not a separate unit
        other = model(seed=1).eval()
        other.cells[1], other.frozen = model(seed=2).cells[1], model(seed=2).frozen
        assert_same(net(tokens()).detach(), other(tokens()).detach(), name=strategy)
        assert_same(tensors_of(whole_state(net)), tensors_of(other.state_dict()))


def use_within_forward(hooked: nn.Module, use: Callable[[], Any], run: Callable[[], Any]) -> str:
    handle = hooked.register_forward_hook(lambda *_: use())
    with pytest.raises(StateError) as error:
        run()
    handle.remove()
    return str(error.value)


@on_ranks(1)
def test_state_dict_within_forward_raises():
    for shard in (by_function, by_wrapper):
        net = shard(model())
        for use in (net.state_dict, lambda net=net: net.load_state_dict({})):
            stated = use_within_forward(net.cells[0], use, lambda net=net: net(tokens()))
            assert "state dict within a forward or backward of " in stated
            assert "Save and load between steps." in stated
        learn(net, adam(net), range(1))


@on_ranks(2)
def test_state_dict_within_summon_full_params_is_full():
    """Within `summon_full_params` a state dict is whole, and one that is loaded is written back."""
    for strategy in ONE_AXIS:
        for shard in (by_function, by_wrapper):
            net = shard(model(), strategy=strategy)
            with FullyShardedDataParallel.summon_full_params(net):
                assert_same(tensors_of(net.state_dict()), tensors_of(model().state_dict()))
                net.load_state_dict(model(seed=1).state_dict())
            assert_same(tensors_of(whole_state(net)), tensors_of(model(seed=1).state_dict()), name=strategy)


# -- torch.distributed.checkpoint.state_dict --------------------------------------------------------------------------


def without_scalars(seed: int = 0) -> Model:
    """torch leaves full optimizer state of parameters without a dimension plain, next to `DTensor` parameters."""
    net = model(seed)
    for cell in net.cells:
        cell.scale = nn.Parameter(torch.full((1,), 0.5))
    return net


def resume_by_torch_s_helpers(shard: Callable[..., nn.Module]) -> None:
    """Model and optimizer by torch's own functions: sharded, full, and full through the first rank."""
    net = shard(without_scalars())
    optimizer = adam(net)
    learn(net, optimizer, range(2))
    with FullyShardedDataParallel.state_dict_type(net, SHARDED):
        sharded = copied(get_state_dict(net, optimizer))
        full = copied(get_state_dict(net, optimizer, options=WHOLE))
    onward = learn(net, optimizer, range(2, 4))
    trained = {name for name, param in without_scalars().named_parameters() if param.requires_grad}
    assert set(sharded[1]["state"]) == set(full[1]["state"]) == trained
    through_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    received = full if dist.get_rank() == 0 else ({}, {})
    for (params, states), options in ((sharded, StateDictOptions()), (full, WHOLE), (received, through_first)):
        net = shard(without_scalars(seed=1))
        optimizer = adam(net)
        set_model_state_dict(net, copied(params), options=options)
        set_optimizer_state_dict(net, optimizer, copied(states), options=options)
        assert_same(learn(net, optimizer, range(2, 4)), onward, name=str(shard))


WHOLE = StateDictOptions(full_state_dict=True)


def copied(state: Any) -> Any:
    """Copy `state` into separate memory, as a file would hold it."""
    return torch.utils._pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, state)


@pytest.mark.slow
@on_ranks(2)
def test_torch_state_dict_helpers_resume_model_and_optimizer():
    for strategy in ("ddp", "zero3"):
        resume_by_torch_s_helpers(partial(by_function, strategy=strategy))
    resume_by_torch_s_helpers(by_wrapper)
    resume_by_torch_s_helpers(partial(checkpointed_before, by_wrapper))


class Renamed(nn.Linear):
    """A layer whose state dict has another name for the weight, by hooks from before sharding."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._rename_back)

    @staticmethod
    def _rename(module, state, prefix, metadata):
        state[f"{prefix}old"] = state.pop(f"{prefix}weight")

    @staticmethod
    def _rename_back(module, state, prefix, *others):
        state[f"{prefix}weight"] = state.pop(f"{prefix}old")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_state_dict_with_keys_renamed_by_hooks_can_be_copied_and_saved(strategy):
    model = fully_shard(nn.Sequential(Renamed(), nn.Linear(4, 4)), strategy=strategy)
    model(torch.ones(1, 4)).sum().backward()
    expected = gathered(dict(model.named_parameters()))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    copied = copy.deepcopy(model.state_dict())
    file.seek(0)
    for state in (copied, torch.load(file)):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        assert_same(gathered(dict(model.named_parameters())), expected)
