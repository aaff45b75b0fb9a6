"""Arguments and results of the two front ends: every argument works as documented, or raises."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import small_models
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    Chain,
    Layer,
    Shard,
    agree_with_plain,
    chain,
    initialize,
    inputs,
    leave,
    sgd,
    whole_grads,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, LowPrecisionState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import MixedPrecision as TorchPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    ConfigError,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateError,
    fully_shard,
    recording,
)
from fullshard.engine.hooks import runtime_of
from fullshard.engine.registry import units_in
from fullshard.policy.strategy import resolve_placements
from fullshard.tape.recorder import Phase, Recorder
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

LAYERS = ModuleWrapPolicy({Layer})


def wrapped(model: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
    """Return a chain that always has the same initial weights, with a unit per layer and a root unit."""
    model = Chain() if model is None else model
    initialize(model)
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": LAYERS, **options})


def learn(model: nn.Module, steps: int = 3, part: bool = False) -> list[Any]:
    """Return losses, gradients and weights of some steps. With `part`, each rank trains on its own rows."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = inputs(step).tensor_split(dist.get_world_size())[dist.get_rank()] if part else inputs(step)
        return model(x).square().mean()

    return small_models.learn(model, steps, loss_of)


# -- module interface -------------------------------------------------------------------------------------------------


class Talking(Chain):
    """Has additional attributes and methods, and supports indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "mine"
        self.register_buffer("table", torch.arange(3.0))

    def log(self, word: str) -> str:
        return f"{word} {self.note}"

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]


STRUCTURE = f"""FullyShardedDataParallel(
  (_fsdp_wrapped_module): Talking(
    (layers): ModuleList(
      (0-3): 4 x FullyShardedDataParallel(
        (_fsdp_wrapped_module): Layer(
          (norm): {nn.LayerNorm(48)}
          (up): Linear(in_features=48, out_features=192, bias=True)
          (down): Linear(in_features=192, out_features=48, bias=True)
        )
      )
    )
    (head): Linear(in_features=48, out_features=5, bias=True)
  )
)"""  # torch 2.11 does not say whether it has a bias


@on_ranks(2)
def test_wrapper_exposes_the_interface_of_the_wrapped_module():
    plain, model = Talking(), wrapped(Talking())
    assert str(model) == STRUCTURE
    assert isinstance(model.module, Talking)
    assert isinstance(model.layers[0], FullyShardedDataParallel)
    assert isinstance(model.layers[0].module, Layer)
    assert model[1] is model.layers[1]
    assert (model.note, model.log("word")) == ("mine", "word mine")
    assert model.layers[0].up.out_features == 192  # through two wrappers
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing
    model.module.note = "yours"
    assert model.note == "yours"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == ["table"]
    assert [n for n, _ in model.layers[0].named_parameters()] == [n for n, _ in plain.layers[0].named_parameters()]
    assert [n for n, _ in model.named_parameters(prefix="p", recurse=False)] == []
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert [param.shape for param in model.parameters()] == [param.shape for param in plain.parameters()]
    assert model.train(False).layers[2].module.training is False
    assert model.requires_grad_(False) is model
    assert not any(param.requires_grad for param in model.parameters())


@on_ranks(2)
def test_fsdp_modules_and_check_is_root_return_units_and_root():
    inner = FullyShardedDataParallel(Layer())
    model = FullyShardedDataParallel(Chain([inner, Layer()]), auto_wrap_policy=LAYERS)
    assert FullyShardedDataParallel.fsdp_modules(model) == [model, inner, model.layers[1]]
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    assert FullyShardedDataParallel.fsdp_modules(model.module, root_only=True) == [inner, model.layers[1]]
    assert FullyShardedDataParallel.fsdp_modules(nn.Linear(2, 2)) == []
    model(inputs())
    assert model.check_is_root()
    assert not inner.check_is_root()
    alone = FullyShardedDataParallel(Layer())
    assert alone.check_is_root()


@torch.no_grad()
def fill_linears(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert not isinstance(module.weight, DTensor)
        module.weight.fill_(module.weight.shape[0] / 1000)
        module.bias.zero_()


def apply_a_function(shard: Shard) -> list[Any]:
    model = Chain() if shard is leave else wrapped()
    initialize(model) if shard is leave else None
    visited: list[str] = []
    left = learn(model, steps=1)
    assert model.apply(fill_linears) is model
    model.apply(lambda module: visited.append(type(module).__name__))
    if shard is not leave:
        visited = [name for name in visited if name != "FullyShardedDataParallel"]
    return [*left, *learn(model, steps=1), visited]


def test_apply_sees_unsharded_parameters_and_keeps_changes():
    run_ranks(2, agree_with_plain, apply_a_function)


@on_ranks(2)
def test_pickling_raises_and_recommends_state_dict():
    """Neither a sharded model nor the module in a wrapper can be pickled, by any method."""
    inside = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    for model in (wrapped(), wrapped().module, chain(fully_shard), nn.Sequential(inside), nn.Sequential(wrapped())):
        for copies in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(StateError, match=r"which is sharded: .* state_dict\(\)"):
                copies(model)
    with pytest.raises(StateError, match=r"copy\.copy of FSDPSequential, which is sharded"):
        copy.copy(inside)


# -- ranks and strategies ---------------------------------------------------------------------------------------------


def shard_over_some() -> tuple[int, list[Any]]:
    """Train separately in two groups of two ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    model = wrapped(process_group=group)
    return model.head.weight.device_mesh.size(), learn(model, steps=1)


@pytest.mark.slow
def test_process_group_selects_the_ranks_to_shard_over():
    for size, left in run_ranks(4, shard_over_some):
        assert size == 2
        assert_same(left, run_ranks(2, learn_wrapped, 1)[0])


def learn_wrapped(steps: int) -> list[Any]:
    return learn(wrapped(), steps)


@pytest.mark.slow
@on_ranks(2)
def test_sharding_strategy_accepts_enum_value_and_placements():
    """All strategies give bitwise equal results, with different data on every rank. The default is FULL_SHARD."""
    assert {strategy.name for strategy in ShardingStrategy} >= {
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    }
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    expected = learn(wrapped(), part=True)
    for strategy in ShardingStrategy:
        placements = resolve_placements(strategy)
        for given in (strategy, strategy.value, placements):
            options = {"device_mesh": mesh} if placements.replicated else {}
            model = wrapped(sharding_strategy=given, **options)
            assert {unit.options.placements for unit in units_in(model)} == {placements}
        assert_same(learn(model, part=True), expected, name=strategy.value)
        assert model.head.weight.placements[-1] == (Replicate() if strategy.value == "ddp" else Cut(0))
    assert {unit.options.placements for unit in units_in(wrapped())} == {resolve_placements("zero3")}


@on_ranks(4)
def test_2d_mesh_replicates_over_its_first_dimension():
    """Test the wrapper and `fully_shard`."""
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for model in (wrapped(device_mesh=mesh), chain(partial(fully_shard, mesh=mesh))):
            assert model.head.weight.device_mesh == mesh
            assert model.layers[0].up.weight.to_local().shape[0] == 192 // shape[-1]
            assert runtime_of(units_in(model)[0].modules[0]).units[1].axes.world == 4
            with recording() as record:
                model(inputs()).sum().backward()
            assert set(record.names()) == {"all_gather", "reduce_scatter", *(["all_reduce"] if len(shape) > 1 else [])}


# -- ignored modules and parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "what"),
    [("ignored_modules", "modules"), ("ignored_states", "modules"), ("ignored_states", "parameters")],
)
@on_ranks(2)
def test_ignored_modules_and_parameters_stay_plain_and_unsynchronized(argument, what):
    """They keep the same plain, unsharded parameters and are not synchronized. Ignored modules are not units."""
    for strategy in ONE_AXIS:
        model = Chain()
        modules, params = [model.layers[1], model.head], [model.layers[1].up.weight, model.head.bias]
        kept = params if what == "parameters" else [param for module in modules for param in module.parameters()]
        ignored = {argument: params if what == "parameters" else modules}
        net = wrapped(model, sharding_strategy=strategy, **ignored)
        plain = [param for param in net.parameters() if not isinstance(param, DTensor)]
        assert {id(param) for param in plain} == {id(param) for param in kept}
        assert isinstance(net.layers[1], FullyShardedDataParallel) == (what == "parameters")
        reference = Chain()
        initialize(reference)
        assert_same(learn(net), learn(reference))


def ignored_gradients_stay_own() -> tuple[Tensor, Tensor]:
    model = Chain()
    model = wrapped(model, ignored_modules=[model.head])
    model(torch.full((2, 48), float(dist.get_rank() + 1))).sum().backward()
    return model.head.weight.grad, gradient_of(model.layers[0].up.weight)


def gradient_of(param: nn.Parameter) -> Tensor:
    return param.grad.full_tensor()


def test_gradients_of_ignored_modules_are_not_reduced():
    (first, shared), (second, same) = run_ranks(2, ignored_gradients_stay_own)
    assert not torch.equal(first, second)
    assert_same(shared, same)


# -- dtypes -----------------------------------------------------------------------------------------------------------


class Telling(nn.Module):
    """Records the dtypes in forward: of the input, the weight and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.register_buffer("shift", torch.zeros(48))
        self.register_buffer("count", torch.tensor(0))
        self.visited: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        self.visited = [x.dtype, weight.dtype, self.shift.dtype, self.count.dtype]
        return self.linear(x.to(weight.dtype))


class Inner(Telling):
    """A separate unit."""


class Telltale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner, self.norm = Telling(), Inner(), nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(self.own(x).float()).float())


F32, BF16, INT = torch.float32, torch.bfloat16, torch.int64


@pytest.mark.parametrize(
    ("precision", "root", "inner", "reduced_itemsize"),
    [
        (None, [F32, F32, F32, INT], [F32, F32, F32, INT], 4),
        (MixedPrecision(), [F32, F32, F32, INT], [F32, F32, F32, INT], 4),
        (MixedPrecision(param_dtype=BF16), [BF16, BF16, F32, INT], [F32, BF16, F32, INT], 2),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=F32), [BF16, BF16, F32, INT], [F32, BF16, F32, INT], 4),
        (MixedPrecision(reduce_dtype=BF16), [F32, F32, F32, INT], [F32, F32, F32, INT], 2),
        (MixedPrecision(buffer_dtype=BF16), [F32, F32, BF16, INT], [F32, F32, BF16, INT], 4),
        (MixedPrecision(BF16, cast_root_forward_inputs=False), [F32, BF16, F32, INT], [F32, BF16, F32, INT], 2),
        (MixedPrecision(BF16, cast_forward_inputs=True), [BF16, BF16, F32, INT], [BF16, BF16, F32, INT], 2),
    ],
)
@on_ranks(2)
def test_mixed_precision_sets_compute_buffer_and_reduction_dtypes(precision, root, inner, reduced_itemsize):
    """Check dtypes of inputs, weights and buffers in compute and communication. Sharded values keep their dtype."""
    model = Telltale()
    sharded = FullyShardedDataParallel(model, mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({Inner}))
    separate = isinstance(model.norm, FullyShardedDataParallel)
    with recording() as record:
        out = sharded(inputs())
        out.float().sum().backward()
    stored = {tensor.dtype for param in sharded.parameters() for tensor in (param, param.grad)}
    sent = [event.sent_bytes for event in record.collectives("reduce_scatter") if event.origin.unit == "inner"]
    visited, observed_inner, out, sent = model.own.visited, model.inner.visited, out.dtype, sum(sent)
    assert (visited, observed_inner) == (root, inner)
    assert separate == (precision is not None)
    assert (stored, out) == ({F32}, F32)  # batch norm computes in full precision, as a separate unit
    assert sent == (48 * 48 + 48) // 2 * reduced_itemsize


class Recomputing(nn.Module):
    """A separate unit within a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Inner(), reentrant
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x.float(), use_reentrant=self.reentrant)
        self.seen += [self.inner.visited[0]]
        return y


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1)
def test_a_recomputed_unit_casts_its_inputs_as_it_did_in_forward(reentrant):
    """Only the root casts inputs by default. In a recomputation the outermost unit may be another one."""
    model = Recomputing(reentrant)
    wrapped = FullyShardedDataParallel(
        model, mixed_precision=MixedPrecision(param_dtype=BF16), auto_wrap_policy=ModuleWrapPolicy({Inner})
    )
    wrapped(inputs().requires_grad_()).float().sum().backward()
    seen = [*model.seen, model.inner.visited[0]]

    assert seen == [F32, F32]


@on_ranks(1)
def test_buffers_of_ignored_modules_keep_their_dtype():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4)))
    wrapped = FullyShardedDataParallel(
        model,
        ignored_modules=[model[1]],
        mixed_precision=MixedPrecision(buffer_dtype=BF16, _module_classes_to_ignore=()),
        auto_wrap_policy=ModuleWrapPolicy({nn.BatchNorm1d}),
    )
    found = [{buffer.dtype for buffer in part.buffers()} for part in wrapped.module]
    assert found == [{BF16, INT}, {F32, INT}]


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.BatchNorm1d})])
@on_ranks(1)
def test_shared_buffer_stays_shared_after_cast_to_buffer_dtype(policy):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    wrapped = FullyShardedDataParallel(
        model,
        mixed_precision=MixedPrecision(buffer_dtype=BF16, _module_classes_to_ignore=()),
        auto_wrap_policy=policy,
    )
    first, second = (part.running_mean for part in wrapped.module)
    assert first is second
    assert first.dtype is BF16


class Offset(nn.Module):
    """A weight with two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.full((4,), float(dist.get_rank())))
        self.register_buffer("cut", torch.full((2,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.offset.to_local() if isinstance(self.offset, DTensor) else self.offset
        return x * self.weight + offset


@on_ranks(2)
def test_buffers_that_are_distributed_tensors_are_broadcast():
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("sync_module_states", "broadcast_buffers"):
        model = Offset()
        model.offset = DTensor.from_local(model.offset, mesh, [Replicate()], run_check=False)
        model.cut = DTensor.from_local(model.cut, mesh, [Cut(0)], run_check=False)
        wrapped = FullyShardedDataParallel(model, **{kind: True})
        wrapped(torch.zeros(4))
        assert_same(model.offset.to_local(), torch.zeros(4))  # the first rank's
        assert_same(model.cut.to_local(), torch.full((2,), float(dist.get_rank())))  # a different part on each


@on_ranks(1)
def test_mixed_precision_module_classes_to_ignore_can_be_empty():
    precision = MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=())
    model = wrapped(Chain(), mixed_precision=precision).module
    assert not isinstance(model.layers[0].norm, FullyShardedDataParallel)


class Norm(nn.Module):
    """A norm that computes in the dtype of its inputs, with an output that is not a tensor."""

    def __init__(self, parameters: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 48)) if parameters else 1.5

    def forward(self, x: Tensor, count: int) -> tuple[Tensor, int]:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight, count + 1


class Normed(nn.Module):
    """Two norms between linear layers, which need inputs in the dtype of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.fixed, self.down = nn.Linear(48, 48), Norm(True), Norm(False), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x, count = self.norm(self.up(x), 0)
        x, count = self.fixed(self.down(x), count)
        assert count == 2
        return self.down(x)


@on_ranks(2)
def test_module_classes_to_ignore_compute_in_full_precision_like_fsdp1():
    """Their inputs are cast to full precision, and their outputs back to the dtype of the inputs."""

    def losses(wrapper: Any, precision: Any, policy: Any, **options: Any) -> list[Any]:
        torch.manual_seed(0)
        model = wrapper(Normed(), auto_wrap_policy=policy, mixed_precision=precision, **options)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            x = inputs(step).requires_grad_()
            loss = model(x).float().square().mean()
            loss.backward()
            found += [loss.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
        return found

    for dtype in (BF16, torch.float16):
        fields: Any = {"param_dtype": dtype, "reduce_dtype": F32, "_module_classes_to_ignore": (Norm,)}
        ours = losses(FullyShardedDataParallel, MixedPrecision(**fields), ModuleWrapPolicy({Inner}))
        options = {"use_orig_params": True, "device_id": torch.device("cpu")}
        with pytest.warns(UserWarning, match="mixed precision disabled"):
            expected = losses(TorchWrapper, TorchPrecision(**fields), TorchPolicy({Inner}), **options)
        assert_same(ours, expected)


# -- prefetch ---------------------------------------------------------------------------------------------------------


@contextmanager
def noting_compute(model: nn.Module, record: Recorder) -> Iterator[dict[str, list[int]]]:
    """Yield, per layer, how many all-gathers had started when its forward and its backward ran."""
    started: dict[str, list[int]] = {"forward": [], "backward": []}

    def note(phase: str) -> None:
        started[phase].append(len(record.collectives("all_gather")))

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            note("forward")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            note("backward")
            return grad

    handles = [
        module.register_forward_hook(lambda module, args, out: Note.apply(out))
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
    ]
    yield started
    for handle in handles:
        handle.remove()


LATE, BETWEEN, EARLY = ["pre-backward"] * 4, ["pre-backward", *["backward"] * 3], ["backward"] * 4


@pytest.mark.parametrize(
    ("options", "forward", "backward", "phases"),
    [
        ({}, [2, 3, 4, 5], [7, 8, 9, 9], EARLY),
        ({"forward_prefetch": True}, [3, 4, 5, 5], [7, 8, 9, 9], EARLY),
        ({"forward_prefetch": True, "limit_all_gathers": False}, [4, 5, 5, 5], [8, 9, 9, 9], EARLY),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, [2, 3, 4, 5], [7, 8, 9, 9], EARLY),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, [2, 3, 4, 5], [6, 7, 8, 9], BETWEEN),
        ({"backward_prefetch": None}, [2, 3, 4, 5], [6, 7, 8, 9], LATE),
    ],
)
@on_ranks(2)
def test_prefetch_options_set_when_all_gathers_start(options, forward, backward, phases):
    """Count the all-gathers started before each layer's forward and backward, and compare their phases."""
    model = wrapped(**options)
    expected = learn(model, steps=2)  # the order of units is known after these steps
    assert_same(expected, learn(wrapped(), steps=2))
    with recording() as record, noting_compute(model, record) as started:
        model(inputs()).sum().backward()
    gathers = record.collectives("all_gather")
    assert len(gathers) == 5 + 4  # of the root and four layers, then of the layers again
    found = [gather.origin.phase.value for gather in gathers[5:]]
    assert started == {"forward": forward, "backward": backward}
    assert found == phases


# -- values -----------------------------------------------------------------------------------------------------------


def share_values(sync: bool, shape: tuple[int, ...] | None) -> dict[str, Tensor | None]:
    torch.manual_seed(dist.get_rank())
    model = Chain([Layer(), Layer()])
    model.register_buffer("table", torch.randn(3))
    model.register_buffer("count", torch.tensor(dist.get_rank()))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    return wholes(FullyShardedDataParallel(model, sync_module_states=sync, auto_wrap_policy=LAYERS, device_mesh=mesh))


def values_of_rank(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model = Chain([Layer(), Layer()])
    return {**model.state_dict(), "table": torch.randn(3), "count": torch.tensor(rank)}


@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_sync_module_states_broadcasts_values_of_rank_0(shape):
    """Parameters and buffers of every unit."""
    for values in run_ranks(4 if shape else 3, share_values, True, shape):
        assert_same(values, values_of_rank(0))


@on_ranks(2)
def test_sync_module_states_broadcasts_buffers_of_all_dtypes():
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.float8_e4m3fn, torch.bool):
        model = nn.Linear(4, 4)
        for name, shape in (("table", (2, 3)), ("count", ())):
            model.register_buffer(name, torch.full(shape, float(dist.get_rank())).to(dtype))
        module = FullyShardedDataParallel(model, sync_module_states=True).module
        assert_same([module.table, module.count], [torch.zeros(2, 3, dtype=dtype), torch.zeros((), dtype=dtype)])


def test_each_rank_keeps_its_values_without_sync_module_states():
    for rank, values in enumerate(run_ranks(2, share_values, False, None)):
        assert_same([values["table"], values["count"]], [values_of_rank(rank)["table"], values_of_rank(rank)["count"]])
        up = values["layers.0.up.weight"]
        assert_same(up, torch.cat([values_of_rank(r)["layers.0.up.weight"].chunk(2)[r] for r in range(2)]))


@on_ranks(1)
def test_device_id_selects_cpu_explicitly_or_without_accelerator():
    for device in (None, torch.device("cpu")):
        assert next(wrapped(device_id=device).parameters()).device.type == "cpu"


# -- methods of units -------------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 48)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.abs().mul(10).long().clamp(max=96)[:, 0])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def embedding_left_alone_in_backward(shard: Shard) -> list[Any]:
    model = Embedded()
    initialize(model)
    shard(model.embedding)
    for layer in model.layers:
        shard(layer)
    shard(model)
    if shard is not leave:
        model.embedding.set_unshard_in_backward(False)
    return learn(model, steps=4)


def gathers_in_backward() -> list[str]:
    model = Embedded()
    for module in (model.embedding, *model.layers):
        fully_shard(module)
    fully_shard(model)
    model.embedding.set_unshard_in_backward(False)
    learn(model, steps=3)
    loss = model(inputs()).sum()
    with recording() as record:
        loss.backward()
    return [event.origin.unit for event in record.collectives("all_gather")]


def test_set_unshard_in_backward_false_skips_the_all_gather():
    run_ranks(2, agree_with_plain, embedding_left_alone_in_backward)
    for gathered in run_ranks(2, gathers_in_backward):
        assert gathered == ["layers.1", "layers.0"]


@on_ranks(2)
def test_gradient_divide_factor_applies_to_its_unit_only():
    """The factor applies to that unit alone. Powers of two are exact."""
    expected = learn(chain(fully_shard), steps=1)[1]
    for name in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        model = chain(fully_shard)
        for layer in model.layers:
            getattr(layer, name)(8.0)
        found = learn(model, steps=1)[1]
        for fqn, grad in found.items():
            assert_same(grad, expected[fqn] * (2 / 8.0) if "layers" in fqn else expected[fqn], name=fqn)


@on_ranks(2)
def test_switches_without_effect_keep_results_bitwise_equal():
    """Results are bitwise equal with switches that have no effect here."""
    expected = learn(chain(fully_shard))
    model = chain(fully_shard)
    model.set_force_sum_reduction_for_comms(True)
    model.set_is_last_backward(False)
    model.set_post_optim_event(torch.Event("cpu"))
    assert_same(learn(model), expected)


class Stop(Exception):  # noqa: N818  # any exception of a model
    pass


def fail(*_: Any) -> None:
    raise Stop


@on_ranks(2)
def test_reset_iter_state_recovers_from_a_failed_step():
    expected, model = learn(chain(fully_shard)), chain(fully_shard)
    handle = model.layers[2].register_full_backward_hook(fail)
    with pytest.raises(Stop):
        model(inputs(7)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    assert runtime_of(model).phase is Phase.IDLE
    assert all(unit.residency.users == 0 for unit in units_in(model))
    assert_same(learn(model), expected)
    handle = model.layers[2].register_forward_hook(lambda *_: model.reset_iter_state())
    with pytest.raises(StateError, match="reset_iter_state was called within a forward"):
        model(inputs())


# -- sharded dim ------------------------------------------------------------------------------------------------------


def last_dim(param: nn.Parameter) -> Cut | None:
    """Shard along the last dim, given as -1. Return None for parameters with a single dim."""
    return Cut(-1) if param.ndim > 1 else None


def cut_along_the_last_dim(shard: Shard) -> list[Any]:
    model = chain(shard if shard is leave else partial(shard, shard_placement_fn=last_dim))
    if shard is not leave and model.head.weight.placements[-1].is_shard():
        assert model.head.weight.placements[-1] == Cut(1)
        assert model.head.weight.to_local().shape == (5, 48 // dist.get_world_size())
        assert model.head.bias.placements[-1] == Cut(0)
        assert model.layers[0].up.weight.placements[-1] == Cut(1)
    return learn(model)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_are_sharded_along_requested_dims(world):
    """Results are bitwise equal to plain training under every strategy."""
    run_ranks(world, agree_with_plain, cut_along_the_last_dim)


@pytest.mark.slow
@on_ranks(4)
def test_sharded_dim_does_not_change_results():
    """Uneven shards, and shards that groups of ranks keep, give the same results along any dim."""
    for options in ({}, {"reshard_after_forward": 2}, {"strategy": "zero1"}):
        expected = learn(chain(partial(fully_shard, **options)), part=True)
        for choose in (last_dim, lambda param: Cut(0), lambda param: None):
            model = chain(partial(fully_shard, shard_placement_fn=choose, **options))
            assert_same(learn(model, part=True), expected)
            model.to(torch.float64)  # with a new layout
            assert model.head.weight.placements[-1] == (Cut(1) if choose is last_dim else Cut(0))


@pytest.mark.parametrize("answer", [Cut(2), Cut(-3), Replicate(), 0, "0"])
@on_ranks(2)
def test_shard_placement_fn_with_invalid_placement_raises(answer):
    model = chain(leave)
    with pytest.raises(ConfigError) as error, recording() as record:
        fully_shard(model, shard_placement_fn=lambda param: answer)
    assert record.names() == []
    message = str(error.value)
    assert f"shard_placement_fn returned {answer!r} for layers.0.norm.weight of shape (48,)" in message
    assert "Return Shard(dim) with one of its 1 dims" in message


# -- changes to modules after sharding --------------------------------------------------------------------------------


def cast_a_part(shard: Shard) -> list[Any]:
    """Cast the submodules of a unit one after another. None of them is a unit itself."""
    model = Chain()
    initialize(model)
    model = shard(model)
    left = learn(model)
    for part in (*model.layers, model.head):
        part.to(torch.float64)
    return [*left, *small_models.learn(model, 2, lambda model, step: model(inputs(step).double()).square().mean())]


def test_parts_of_a_unit_can_be_cast_one_after_another():
    run_ranks(2, agree_with_plain, cast_a_part)


@on_ranks(2)
def test_unit_with_parameters_of_different_dtypes_raises():
    model = chain(fully_shard)
    model.layers[0].norm.double()
    with pytest.raises(ConfigError, match=r"up.weight now has dtype torch.float32, but norm.weight has torch.float64"):
        model(inputs())


def replace_weight(model: Any) -> None:
    model.layers[1].up.weight = nn.Parameter(torch.zeros(192, 48))


def remove_weight(model: Any) -> None:
    del model.layers[1].up.weight


@pytest.mark.parametrize(
    ("change", "by"),
    [
        (replace_weight, "another parameter, (192, 48)"),
        (remove_weight, "nothing"),
    ],
)
@on_ranks(2)
def test_replaced_or_removed_parameter_raises_in_forward(change, by):
    messages = []
    for shard in (partial(chain, fully_shard), wrapped):
        for steps in (0, 2):
            model = shard()
            learn(model, steps=steps)
            change(model)
            with pytest.raises(StateError) as error:
                model(inputs())
            messages.append(str(error.value))
    for message in messages:
        assert f"weight of Linear (up.weight) was replaced by {by} after it was sharded" in message
        assert "before sharding" in message


@on_ranks(2)
def test_nested_wrappers_do_not_change_results():
    """torch also allows nested wrappers."""
    expected = None
    for wrappers in (1, 2, 3):
        model = chain(leave)
        for _ in range(wrappers):
            model = FullyShardedDataParallel(model)
        optimizer = sgd(model)
        model(inputs()).square().mean().backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        found = [norm, model(inputs()), dict(model.named_parameters()), model.state_dict()]
        found += [FullyShardedDataParallel.optim_state_dict(model, optimizer), copy.deepcopy(model).state_dict()]
        expected = expected or found
        assert_same(found, expected)
        assert [each.check_is_root() for each in model.fsdp_modules(model)] == [True, *[False] * (wrappers - 1)]


@on_ranks(2)
def test_wrapper_attributes_return_constructor_arguments():
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD):
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        model = FullyShardedDataParallel(
            FullyShardedDataParallel(Layer(), process_group=group),
            sharding_strategy=strategy,
            mixed_precision=precision,
        )
        inner = model.module
        assert model.sharding_strategy is strategy
        assert model.process_group.size() == model.world_size == dist.get_world_size()
        assert model.rank == dist.get_rank()
        assert (inner.process_group, inner.rank, inner.world_size) == (group, 0, 1)
        assert model.mixed_precision is precision
        assert inner.mixed_precision == MixedPrecision()
        assert model.cpu_offload == CPUOffload()
        assert FullyShardedDataParallel(Layer(), cpu_offload=CPUOffload(True)).cpu_offload == CPUOffload(True)
        assert model.compute_device == torch.device("cpu")
        assert copy.deepcopy(model).sharding_strategy is strategy
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = FullyShardedDataParallel(Layer(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert (hybrid.sharding_strategy, hybrid.world_size) == (ShardingStrategy.HYBRID_SHARD, 1)
    assert hybrid.process_group == mesh.get_group("shard")


def wholes_of(learned: list[Any]) -> list[Tensor]:
    """Return the final weights from the result of `learn`."""
    return list(learned[-1].values())


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"sharding_strategy": "ddp"}),
        (3, {"sharding_strategy": "zero2"}),
        (2, {"cpu_offload": CPUOffload(True)}),
    ],
)
@on_ranks("world")
def test_torch_comm_hooks_set_the_reduction_dtype(world, options):
    hooks = {
        default_hooks.allreduce_hook: (None, DefaultState),
        default_hooks.reduce_scatter_hook: (None, DefaultState),
        default_hooks.bf16_compress_hook: (torch.bfloat16, LowPrecisionState),
        default_hooks.fp16_compress_hook: (torch.float16, LowPrecisionState),
    }
    plain = learn(wrapped(**options))
    for hook, (dtype, state) in hooks.items():
        expected = learn(wrapped(mixed_precision=MixedPrecision(reduce_dtype=dtype), **options))
        model = wrapped(**options)
        model.register_comm_hook(state(model.process_group), hook)
        assert_same(learn(copy.deepcopy(model)), expected)
        assert_same(learn(model), expected)
        differs = any(not torch.equal(a, b) for a, b in zip(wholes_of(plain), wholes_of(expected), strict=True))
        assert differs == (dtype is not None)


@on_ranks(1)
def test_refused_comm_hook_is_not_registered():
    model, state = wrapped(mixed_precision=MixedPrecision(reduce_wire="int8")), LowPrecisionState(dist.group.WORLD)
    for _ in range(2):
        with pytest.raises(ConfigError, match="reduce_wire"):
            model.register_comm_hook(state, default_hooks.fp16_compress_hook)
    model.register_comm_hook(DefaultState(dist.group.WORLD), default_hooks.allreduce_hook)


@on_ranks(2)
def test_comm_hook_can_be_registered_between_steps():
    model, expected = wrapped(), wrapped(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    optimizer = sgd(model)
    model(inputs(0)).sum().backward()
    optimizer.zero_grad()
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), default_hooks.bf16_compress_hook)
    for each in (model, expected):
        each(inputs(1)).square().mean().backward()
    assert_same(whole_grads(model), whole_grads(expected))
    optimizer.step()
    assert not torch.equal(wholes(model)["head.weight"], wholes(expected)["head.weight"])
