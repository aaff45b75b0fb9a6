"""LoRA on frozen bases of any dtype: training matches plain PyTorch, and frozen weights only cost an all-gather."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Shard, agree_with_plain, inputs, leave, under_strategies, whole_grads, wholes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    recording,
    summon_full_params,
)
from fullshard.testing import assert_same

WIDTH, HIDDEN, RANK, STEPS = 48, 192, 4, 4


class LoRA(nn.Module):
    """A frozen linear layer plus a trained low-rank one; `base` creates the former."""

    def __init__(self, base: Callable[[int, int], nn.Module], into: int, out: int) -> None:
        super().__init__()
        self.base = base(into, out)
        self.a = nn.Parameter(torch.randn(RANK, into) / into)
        self.b = nn.Parameter(torch.randn(out, RANK) / RANK)  # not zero as usual, so that both learn from step 0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def plain(dtype: torch.dtype, into: int, out: int) -> nn.Module:
    return Plain(into, out, dtype=dtype).requires_grad_(False)


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Quantized(nn.Module):
    """Weights of a dtype that cannot be trained, and a scale per row. The bias is not quantized."""

    def __init__(self, dtype: torch.dtype, into: int, out: int) -> None:
        super().__init__()
        weight = torch.randn(out, into) / into**0.5
        top = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
        scale = weight.abs().amax(1, keepdim=True) / top
        self.weight = nn.Parameter((weight / scale).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(out) / 10, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype in (torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Masked(nn.Module):
    """A weight, a mask and a permutation: parameters of three dtypes. Two of them are not floating-point."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, into) / into**0.5, requires_grad=False)
        self.mask = nn.Parameter(torch.rand(out, into) > 0.5, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(out), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask)[..., self.order]


BASES: dict[str, Callable[[int, int], nn.Module]] = {
    "float32": partial(plain, torch.float32),
    "bfloat16": partial(plain, torch.bfloat16),
    "float64": partial(plain, torch.float64),
    "int8": partial(Quantized, torch.int8),
    "int32": partial(Quantized, torch.int32),
    "e4m3": partial(Quantized, torch.float8_e4m3fn),
    "e5m2": partial(Quantized, torch.float8_e5m2),
    "masked": Masked,
}


class Block(nn.Module):
    """Two adapters over bases of one dtype, a trained norm, and buffers of dtypes that are never cast."""

    def __init__(self, base: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = LoRA(base, WIDTH, HIDDEN)
        self.down = LoRA(base, HIDDEN, WIDTH)
        self.register_buffer("table", (torch.randn(WIDTH) * 4).to(torch.float8_e4m3fn))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        assert self.table.dtype is torch.float8_e4m3fn
        self.calls += 1
        return x + self.down(F.gelu(self.up(self.norm(x)))) + self.table.to(x.dtype)


def adapted(shard: Shard, base: str = "float32", **options: Any) -> Any:
    """Build three blocks, each a unit, and a trained head, always with the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(BASES[base]) for _ in range(3)), nn.Linear(WIDTH, 5))
    for block in list(model)[:3]:
        shard(block, **options)
    return shard(model, **options)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05, momentum=0.9)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    loss = model(inputs(number)).square().mean()
    loss.backward()
    left = [loss.detach(), whole_grads(model)]
    optimizer.step()
    optimizer.zero_grad()
    return left


def learn(model: Any) -> list[Any]:
    optimizer = momentum(model)
    return [*(step(model, optimizer, number) for number in range(STEPS)), wholes(model)]


# -- results ----------------------------------------------------------------------------------------------------------


def learn_on(base: str, shard: Shard) -> list[Any]:
    return learn(adapted(shard, base))


@pytest.mark.slow
@under_strategies
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("bases", [["float32", "bfloat16", "float64", "masked"], ["int8", "int32", "e4m3", "e5m2"]])
@on_ranks("world")
def test_adapters_on_bases_of_any_dtype_match_plain_pytorch_bitwise(world, bases, strategies):
    for base in bases:
        agree_with_plain(partial(learn_on, base), *strategies)


@pytest.mark.slow
@on_ranks(3)
def test_lora_strategies_match_each_other_bitwise_with_uneven_shards():
    for base in ("bfloat16", "int8", "e4m3", "masked"):
        first, *others = (learn(adapted(partial(fully_shard, strategy=strategy), base)) for strategy in ONE_AXIS)
        for other in others:
            assert_same(other, first, name=base)


@on_ranks(2)
def test_quantized_weights_are_never_cast():
    """Only floating-point tensors are cast. The modules' forwards contain further assertions."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    whole = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for base in ("int8", "e4m3", "masked"):
        model = adapted(partial(fully_shard, mp_policy=policy), base)
        other = FullyShardedDataParallel(adapted(leave, base), mixed_precision=whole)
        weight = model[0].up.base.weight
        stored = weight.dtype
        for number in range(3):
            assert model(inputs(number)).dtype is torch.bfloat16
            model(inputs(number)).float().square().mean().backward()
            other(inputs(number)).float().square().mean().backward()
        assert model[0].up.base.weight is weight
        assert weight.dtype is stored
        assert other[0].table.dtype is torch.float8_e4m3fn


# -- changes during training ------------------------------------------------------------------------------------------


def thaw_and_freeze(shard: Shard) -> list[Any]:
    """Train the adapters, then also bases in two blocks, then one base alone."""
    model = adapted(shard)
    optimizer = momentum(model)
    left = [step(model, optimizer, number) for number in range(3)]
    thawed = [*model[0].up.base.parameters(), *model[2].parameters()]
    fresh = [param for param in thawed if not param.requires_grad]
    for param in fresh:
        param.requires_grad_(True)
    optimizer.add_param_group({"params": fresh, "lr": 0.01})
    left += [step(model, optimizer, number) for number in range(3, 6)]
    model.requires_grad_(False)
    for param in model[0].up.base.parameters():
        param.requires_grad_(True)
    left += [step(model, optimizer, number) for number in range(6, 9)]
    return [*left, wholes(model)]


@under_strategies
def test_bases_can_be_unfrozen_and_adapters_frozen_between_steps(strategies):
    run_ranks(2, agree_with_plain, thaw_and_freeze, *strategies)


def merge(shard: Shard) -> list[Any]:
    """Merge adapters into their bases and reinitialize the adapters, as between two tasks."""
    model = adapted(shard)
    left = learn(model)
    for block in list(model)[:3]:
        for lora in (block.up, block.down):
            with torch.no_grad() if shard is leave else summon_full_params(block):
                lora.base.weight.data += lora.b.data @ lora.a.data
                lora.b.data.zero_()
    return [*left, *learn(model)]


def test_adapters_are_merged_into_their_bases():
    run_ranks(2, agree_with_plain, merge, "ddp", "zero1", "zero3")


# -- communication ----------------------------------------------------------------------------------------------------


TRAFFIC = ("all_gather", "reduce_scatter")


@pytest.mark.parametrize("base", ["float32", "int8", "e4m3", "masked"])
@on_ranks(2)
def test_frozen_base_is_gathered_in_its_own_dtype_without_reduction(base):
    """Compare the bytes that a block sends in a step with the bytes of its parameters."""
    model = adapted(fully_shard, base)
    optimizer = momentum(model)
    for number in range(3):
        step(model, optimizer, number)
    with recording() as record:
        model(inputs(3)).square().mean().backward()
    params = list(model[1].parameters())
    room = 16 * len(params)  # allowance for alignment
    half = sum(param.numel() * param.dtype.itemsize for param in params) // 2
    half_of_trained = sum(param.numel() * param.dtype.itemsize for param in params if param.requires_grad) // 2
    sent = {name: [e.sent_bytes for e in record.collectives(name) if e.origin.unit == "1"] for name in TRAFFIC}
    assert len(sent["all_gather"]) % 2 == 0  # each dtype once in forward and once in backward
    assert 2 * half <= sum(sent["all_gather"]) <= 2 * (half + room)
    assert half_of_trained <= sum(sent["reduce_scatter"]) <= half_of_trained + room
    assert all(param.grad is None for param in model.parameters() if not param.requires_grad)


# -- ignored parameters -----------------------------------------------------------------------------------------------


def learn_with_some_ignored(base: str, ignores: Callable[[str], bool], shard: Shard) -> list[Any]:
    """Train with ignored parameters, and check that they are not `DTensor`s: they stay plain and local to each rank."""
    model = adapted(leave, base)
    ignored = [param for name, param in model.named_parameters() if ignores(name)]
    for block in list(model)[:3]:
        shard(block, ignored_params=ignored)
    shard(model, ignored_params=ignored)
    left = learn(model)
    assert ignored
    for param in model.parameters():
        assert isinstance(param, DTensor) == (shard is not leave and all(param is not other for other in ignored))
    return left


def is_base(name: str) -> bool:
    return ".base." in name


def is_adapter(name: str) -> bool:
    return not is_base(name)


def is_in_last_block(name: str) -> bool:
    return name.startswith("2.")


@under_strategies
@pytest.mark.parametrize(("base", "ignores"), [("e4m3", is_base), ("float32", is_adapter), ("int8", is_in_last_block)])
def test_ignored_parameters_stay_plain_and_use_local_gradients(base, ignores, strategies):
    run_ranks(2, agree_with_plain, partial(learn_with_some_ignored, base, ignores), *strategies)


# -- full values ------------------------------------------------------------------------------------------------------


def own_parameters(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: state[name] for name, _ in model.named_parameters()}


@pytest.mark.parametrize("base", ["int8", "e4m3", "masked"])
@on_ranks(2)
def test_weights_of_any_dtype_support_summon_and_state_dict(base):
    expected = adapted(leave, base).state_dict()
    wrapper = FullyShardedDataParallel(adapted(leave, base), sync_module_states=True)
    assert_same(dict(wrapper.state_dict()), dict(expected))
    for strategy in ("zero1", "zero3"):
        model = adapted(partial(fully_shard, strategy=strategy), base)
        with summon_full_params(model):
            assert_same(
                {name: param.detach() for name, param in model.named_parameters()}, own_parameters(expected, model)
            )
        for param in model.parameters():
            with torch.no_grad():
                param.to_local().zero_()
        model.load_state_dict(expected)
        assert_same(wholes(model), dict(expected))
