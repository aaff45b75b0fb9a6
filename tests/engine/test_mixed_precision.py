"""Mixed precision: float32 master parameters, low-precision compute and communication, sums in the requested dtype."""

import copy
import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import on_ranks
from small_models import ONE_AXIS, Layer, chain, inputs, leave, sgd, whole_grads, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    RankMismatchError,
    fully_shard,
    recording,
)
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 4


def batch(step: int) -> Tensor:
    return inputs(10 * step + dist.get_rank())


def by_hand(compute: torch.dtype, reduce: torch.dtype) -> list[Any]:
    """Train with manual casts: of float32 master parameters before each step, and of gradients.

    Gradients are cast to `reduce`, summed in rank order, divided once and cast back.
    """
    plain, low = chain(leave), chain(leave).to(compute)
    optimizer, left = sgd(plain), []
    for step in range(STEPS):
        with torch.no_grad():
            for master, param in zip(plain.parameters(), low.parameters(), strict=True):
                param.copy_(master)
        loss = low(batch(step).to(compute)).square().mean()
        loss.backward()
        for master, param in zip(plain.parameters(), low.parameters(), strict=True):
            assert param.grad is not None
            local = param.grad.to(reduce)
            terms = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(terms, local)
            master.grad = (sum(terms[1:], terms[0]) / len(terms)).to(master.dtype)
            param.grad = None
        left += [loss.detach(), whole_grads(plain)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(plain)]


def learn(model: Any) -> list[Any]:
    optimizer, left = sgd(model), []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        assert all(param.grad.dtype == param.dtype == FP32 for param in model.parameters())
        left += [loss.detach(), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "reduce"), [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, BF16)])
@on_ranks(2)
def test_mixed_precision_matches_manual_casts_bitwise(compute, reduce):
    expected = by_hand(compute, reduce)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for strategy in ONE_AXIS:
        assert_same(learn(chain(partial(fully_shard, strategy=strategy, mp_policy=policy))), expected, name=strategy)
    wrapper = FullyShardedDataParallel(
        chain(leave),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=reduce),
    )
    assert_same(learn(wrapper), expected, name="the wrapper")


@pytest.mark.parametrize(("ranks", "size"), [(2, None), (3, None), (4, 2)])
@on_ranks("ranks")
def test_float16_reduction_does_not_overflow_if_mean_is_representable(ranks, size):
    """float16 can represent 40000, but not twice that."""
    replicas, large = dist.get_world_size() // (size or 1), 40000.0
    mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("replicate", "shard")) if size else None
    for strategy in ("hsdp", "hsdp_zero2") if size else ONE_AXIS:
        for policy in (MixedPrecisionPolicy(FP16), MixedPrecisionPolicy(reduce_dtype=FP16)):
            model = fully_shard(nn.Linear(4, 4, bias=False), strategy=strategy, mesh=mesh, mp_policy=policy)
            for microbatch in range(2):
                model.set_requires_gradient_sync(microbatch == 1)
                model(torch.full((1, 4), large / 2)).sum().backward()
            assert_same(whole_grads(model)["weight"], torch.full((4, 4), large), name=strategy)


class Scaled(nn.Module):
    """A layer with parameters of several sizes, which may have different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.down = nn.Linear(96, 48, bias=False)
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        for linear in (self.up, self.down):
            y = F.linear(x.to(linear.weight.dtype), linear.weight).float()
            x = y if linear.bias is None else (y + linear.bias).relu()
        return x * self.scale


def learn_with_some_kept(kept: set[str], shard: Any, reduce: torch.dtype | None) -> list[Any]:
    """Train with the parameters `kept` in float32 and others in bfloat16. Without `shard`, cast manually."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    params = dict(model.named_parameters())
    ids, left = {id(params[name]) for name in kept}, []
    for module in [*model, model] if shard else ():
        policy = MixedPrecisionPolicy(
            BF16,
            reduce,
            cast_forward_inputs=False,
            param_dtype_override_fn=lambda param: FP32 if id(param) in ids else None,
        )
        shard(module, mp_policy=policy)
    low = model if shard else copy.deepcopy(model)
    optimizer = sgd(model)
    for step in range(3):
        for name, param in low.named_parameters() if not shard else ():
            param.data = params[name].data.to(FP32 if name in kept else BF16)
        loss = low(inputs(step)).square().mean()
        loss.backward()
        for name, param in low.named_parameters() if not shard else ():
            params[name].grad, param.grad = param.grad.to(reduce or param.dtype).float(), None
        left += [loss.detach(), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


@pytest.mark.slow
@on_ranks(2)
def test_param_dtype_override_matches_manual_casts_bitwise():
    names, rng = list(dict(nn.Sequential(Scaled(), Scaled()).named_parameters())), random.Random(3)
    for strategy, reduce in product(ONE_AXIS, (None, FP32, BF16)):
        kept = {name for name in names if rng.random() < 0.5}
        expected = learn_with_some_kept(kept, None, reduce)
        found = learn_with_some_kept(kept, partial(fully_shard, strategy=strategy), reduce)
        assert_same(found, expected, name=f"{strategy} {reduce} {sorted(kept)}")


@on_ranks(2)
def test_overridden_parameters_stay_exact_with_encoded_all_gather():
    """Also if gradients are summed in another dtype later, and if the module is cast on the meta device first."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Scaled()
    policy = MixedPrecisionPolicy(
        BF16, gather_wire="int8", param_dtype_override_fn=lambda param: FP32 if param.dim() == 1 else BF16
    )
    fully_shard(model, mp_policy=policy).double().float().to_empty(device="cpu")
    for param in model.parameters():
        nn.init.normal_(param.to_local())
    expected = {name: param for name, param in wholes(model).items() if param.dim() == 1}
    assert set(expected) == {"up.bias", "scale"}
    model.unshard()
    found = dict(model.named_parameters())
    assert {name: param.dtype for name, param in found.items()} == {
        name: FP32 if name in expected else BF16 for name in found
    }
    assert_same({name: found[name].detach() for name in expected}, expected)


@on_ranks(2)
def test_different_param_dtype_overrides_across_ranks_raise():
    first = dist.get_rank() == 0
    policy = MixedPrecisionPolicy(
        BF16, param_dtype_override_fn=lambda param: FP32 if first and param.dim() == 1 else None
    )
    model = fully_shard(Scaled(), mp_policy=policy)
    with pytest.raises(RankMismatchError, match="float32"):
        model(inputs())


class Looking(nn.Module):
    """Records the dtypes of inputs, weight and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48)
        self.register_buffer("mean", torch.ones(48))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))
        self.visited: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        self.visited = {"weight": self.inner.weight.dtype, "x": x.dtype, "mask": mask.dtype, "scale": scale.dtype}
        self.visited |= {"mean": self.mean.dtype, "count": self.count.dtype}
        return {"out": F.linear(x.to(self.inner.weight.dtype), self.inner.weight), "mask": mask}


def look(shard: Any) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    model = shard(Looking())
    found = model(torch.ones(2, 48), torch.ones(2, dtype=torch.bool), scale=torch.ones(1, dtype=torch.float64))
    return getattr(model, "module", model).visited, {name: tensor.dtype for name, tensor in found.items()}


@on_ranks(1)
def test_policy_casts_floating_point_inputs_outputs_and_buffers_only():
    bf16 = partial(MixedPrecisionPolicy, param_dtype=BF16)
    visited, given = look(partial(fully_shard, mp_policy=bf16()))
    assert (visited["weight"], visited["x"], visited["scale"], visited["mask"]) == (BF16, BF16, BF16, torch.bool)
    assert (visited["mean"], visited["count"]) == (FP32, torch.int64)
    assert given == {"out": BF16, "mask": torch.bool}
    visited, given = look(partial(fully_shard, mp_policy=bf16(cast_forward_inputs=False, output_dtype=FP32)))
    assert (visited["weight"], visited["x"], visited["scale"]) == (BF16, FP32, torch.float64)
    assert given == {"out": FP32, "mask": torch.bool}

    wrap = partial(FullyShardedDataParallel)
    visited, _ = look(partial(wrap, mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=FP16)))
    assert (visited["weight"], visited["x"], visited["mean"], visited["count"]) == (BF16, BF16, FP16, torch.int64)
    policy = MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False)
    visited, _ = look(partial(wrap, mixed_precision=policy))
    assert (visited["weight"], visited["x"]) == (BF16, FP32)


class Mixed(nn.Module):
    """Parameters of three dtypes, one of them frozen, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 96)
        self.second = nn.Linear(96, 48).double()
        self.steps = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double()).float() + self.steps.sum()


@on_ranks(2)
def test_a_unit_may_have_parameters_of_several_dtypes():
    def learn_mixed(shard: Any) -> list[Any]:
        torch.manual_seed(0)
        model = shard(Mixed())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        left = []
        for step in range(STEPS):
            model(inputs(step)).square().mean().backward()
            left.append(whole_grads(model))
            optimizer.step()
            optimizer.zero_grad()
        return [*left, wholes(model)]

    expected = learn_mixed(leave)
    for strategy in ONE_AXIS:
        assert_same(learn_mixed(partial(fully_shard, strategy=strategy)), expected, name=strategy)


@on_ranks(2)
def test_all_gather_uses_param_dtype_and_reduction_uses_reduce_dtype():
    sent = []
    for dtype in (None, BF16):
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32))
        with recording() as record:
            model(torch.ones(2, 256)).sum().backward()
        sent.append((record.sent_bytes("all_gather"), record.sent_bytes("reduce_scatter")))
    (full, reduced), (low, reduced_low) = sent
    assert reduced == reduced_low
    assert low * 2 == full


def learn_in_wider_gradients(reduce: torch.dtype | None, shard: Any) -> list[Any]:
    """Train with two microbatches per step. Matrices compute in bfloat16 and have float32 gradients."""
    model = chain(leave).to(BF16)
    for param in model.parameters():
        if param.ndim > 1:
            param.grad_dtype = FP32
    for layer in model.layers:
        shard(layer)
    shard(model)
    # torch rounds differently in the last few elements of a bfloat16 tensor, unless products are exact.
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-4, foreach=False)
    left = []
    for step in range(3):
        for i in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == 1)
            loss = model(inputs(2 * step + i).to(BF16)).square().mean()
            loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.dtype == param.grad_dtype == (FP32 if param.ndim > 1 else BF16)
            if shard is leave and reduce is not None:  # communicated gradients are rounded
                param.grad = param.grad.to(reduce).to(param.grad.dtype)
        left += [loss.detach(), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    copied = model if shard is leave else copy.deepcopy(model)
    assert [param.grad_dtype for param in copied.parameters()] == [param.grad_dtype for param in model.parameters()]
    return [*left, wholes(model)]


@pytest.mark.slow
@on_ranks(2)
def test_gradients_have_grad_dtype_of_parameters():
    for reduce in (None, BF16):
        expected = learn_in_wider_gradients(reduce, leave)
        for strategy in ONE_AXIS:
            shard = partial(fully_shard, strategy=strategy, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
            assert_same(learn_in_wider_gradients(reduce, shard), expected, name=f"{strategy} {reduce}")
