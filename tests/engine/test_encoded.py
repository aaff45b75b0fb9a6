"""Encoded communication: all ranks compute with the same values, bytes match formulas, and no gradient is lost."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import chain, inputs, leave, sgd, take_step, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    Placement,
    Placements,
    ShardingStrategy,
    explain,
    fully_shard,
    recording,
    share_memory_between_ranks,
)
from fullshard.comm import encoded, routes
from fullshard.comm.codec import codec_named
from fullshard.comm.pairwise import PairwiseCollectives
from fullshard.comm.routes import register_backend
from fullshard.device.memory import Pool
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import measure_ledger, predict_ledger
from fullshard.tape.recorder import Recorder
from fullshard.testing import assert_same

S, G = Placement.SHARDED, Placement.GROUPED
HPZ = Placements(parameters=S, parameters_in_step=G, gradients=S, optimizer=S, group=2)
HFSDP = Placements(parameters=G, parameters_in_step=G, gradients=G, optimizer=S, group=2)
SHARDING = ("zero1", "zero2", "zero3")
STEPS = 2


def mesh_for(strategy: Any) -> Any:
    hybrid = isinstance(strategy, str) and "hsdp" in strategy
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None


def sharded(strategy: Any, policy: MixedPrecisionPolicy) -> Any:
    return chain(partial(fully_shard, strategy=strategy, mesh=mesh_for(strategy), mp_policy=policy))


def batch(step: int) -> Tensor:
    return inputs(10 * step + dist.get_rank())


def param_groups(model: nn.Module) -> list[ParamGroup]:
    return [param_group for unit in units_in(model) for param_group in unit.param_groups]


def same_everywhere(tensors: list[Tensor]) -> None:
    """Assert that the tensors are bitwise equal on all ranks."""
    local = torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors])
    all_of_them = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, local)
    assert all(torch.equal(local, other) for other in all_of_them)


def unsharded(model: Any) -> list[Tensor]:
    """Unshard one unit at a time. Return each parameter as modules compute with it, in the plain model's order."""
    found: dict[str, Tensor] = {}
    for unit in units_in(model):
        unit.module.unshard()
        found |= {
            name: param.detach().clone() for name, param in model.named_parameters() if not isinstance(param, DTensor)
        }
        unit.module.reshard()
    return [found[name] for name, _ in model.named_parameters()]


def learn(model: Any, *, steps: int = STEPS) -> list[Any]:
    """Return losses and final masters."""
    optimizer, losses = sgd(model), []
    for step in range(steps):
        losses.append(take_step(optimizer, model(batch(step)).square().mean()))
    return [losses, wholes(model)]


# -- gathers ----------------------------------------------------------------------------------------------------------


def rounded(model: Any, transport: str, world: int) -> list[Tensor]:
    """Return the parameters of plain `model` after each part was encoded and decoded separately."""
    codec, scratch, found = codec_named(transport), Pool(torch.device("cpu")), []
    for param in model.parameters():
        parts = []
        for part in param.detach().chunk(world):
            encoded = torch.zeros(1, codec.nbytes(part.numel()), dtype=torch.uint8)
            out = torch.empty(1, part.numel())
            codec.encode(part.reshape(1, -1), encoded, scratch)
            codec.decode(encoded, part.numel(), out, scratch)
            parts.append(out.view(part.shape))
        found.append(torch.cat(parts))
    return found


def in_place(model: nn.Module) -> set[str]:
    """Return the FQNs of the parameters whose chunks are encoded separately."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param.sharded)]
        for param_group in param_groups(model)
        for param in param_group.params
        if param.layout.in_place
    }


def gathers_of(strategies: Any, transport: str) -> list[Any]:
    plain, left = chain(leave), []
    expected = rounded(plain, transport, dist.get_world_size())
    for strategy in strategies:
        model = sharded(strategy, MixedPrecisionPolicy(gather_wire=transport))
        assert_same(wholes(model), wholes(plain), name="masters")
        alone, found = in_place(model), unsharded(model)
        same_everywhere(found)
        for (name, _), local, peer in zip(plain.named_parameters(), found, expected, strict=True):
            if name in alone:
                assert torch.equal(local, peer), name
        left.append(learn(model))
        same_everywhere(unsharded(model))
    return left


def gathers_of_all(shares: bool, strategies: Any) -> list[Any]:
    share_memory_between_ranks(shares)
    plain = learn(sharded("zero3", MixedPrecisionPolicy()))
    left = []
    for transport in ("int8", "fp8"):
        first, *others = gathers_of(strategies, transport)
        for other in others:
            assert_same(other, first)
        assert not torch.equal(first[0][-1], plain[0][-1])
        left.append(first)
    return left


@pytest.mark.slow
def test_encoded_all_gather_is_bitwise_equal_across_ranks_and_strategies():
    """Results are bitwise equal under every strategy, and with or without shared memory."""
    assert_same(run_ranks(2, gathers_of_all, True, SHARDING), run_ranks(2, gathers_of_all, False, ["zero3"]))


@pytest.mark.slow
def test_encoded_all_gather_is_equal_across_groups_and_replicas():
    """Messages across groups are encoded, and gathers within a group return the decoded values."""
    for zero3, *grouped in run_ranks(4, gathers_of, ("zero3", HPZ), "int8"):
        for other in grouped:
            assert_same(other, zero3)
    run_ranks(4, gathers_of, (HFSDP, "hsdp"), "int8")  # these sum in a different order


@on_ranks(1)
def test_encoding_on_one_rank_matches_plain_pytorch_bitwise():
    plain = learn(chain(leave))
    policy = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int4")
    for strategy in SHARDING:
        assert_same(learn(sharded(strategy, policy)), plain)


WIDTH = 256
MATRIX = WIDTH * WIDTH


class Plain(nn.Sequential):
    """Two matrices, the second one in the root: gathered once per microbatch, the first one twice under zero3."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))


def matrices(strategy: Any, policy: MixedPrecisionPolicy) -> Any:
    model = Plain()
    options: dict[str, Any] = {"strategy": strategy, "mesh": mesh_for(strategy), "mp_policy": policy}
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def one_step(model: Any) -> Recorder:
    optimizer = sgd(model)
    for _ in range(2):
        with recording() as record:
            model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return record


def gathered_bytes(strategies: Any) -> list[int]:
    policies = [MixedPrecisionPolicy(gather_wire=transport) for transport in ("int8", "fp8")]
    records = [one_step(matrices(strategy, policy)) for strategy in strategies for policy in policies]
    return [record.sent_bytes("all_gather") for record in records]


def test_encoded_all_gather_sends_one_byte_per_element_plus_scales():
    part = MATRIX // 2 + 4 * MATRIX // 2 // 128
    assert run_ranks(2, gathered_bytes, SHARDING) == [[gathers * part for gathers in (2, 2, 2, 2, 3, 3)]] * 2
    part = MATRIX // 4 + 4 * MATRIX // 4 // 128  # across groups; within groups, values are not encoded
    within = 2 * MATRIX // 4 * 4
    assert run_ranks(4, gathered_bytes, [HPZ]) == [[2 * (part + within) + within] * 2] * 4


class Wide(nn.Module):
    """A model with dtypes that are encoded and dtypes that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 192)
        self.second = nn.Linear(192, 48, dtype=torch.float64)
        self.codes = nn.Parameter(torch.arange(50000, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double()).float() + self.codes.sum()


def doubles_and_integers() -> None:
    torch.manual_seed(0)
    model = Wide()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int8"))
    model.unshard()
    found = dict(model.named_parameters())
    for name in ("second.weight", "second.bias", "codes"):
        assert torch.equal(found[name], expected[name])
    assert not torch.equal(found["first.weight"], expected["first.weight"])


@on_ranks(2)
def test_encoding_uses_master_weights_and_skips_float64_and_integers():
    transport = "int8"
    doubles_and_integers()
    plain = Plain()
    expected = rounded(plain, transport, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, gather_wire=transport)
    found = unsharded(matrices("zero3", policy))
    for local, peer in zip(found, expected, strict=True):
        assert torch.equal(local, peer.bfloat16())  # encoded from the masters, not from the cast values


# -- reductions -------------------------------------------------------------------------------------------------------


def own_grads(step: int) -> list[Tensor]:
    """Return this rank's gradients of the plain model."""
    plain = chain(leave)
    plain(batch(step)).square().mean().backward()
    return [param.grad for param in plain.parameters()]


def all_grads(steps: int) -> list[list[list[Tensor]]]:
    """Return every rank's gradients of every step, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [own_grads(step) for step in range(steps)])
    return found


REPEATS = 10


def sums_are_off_by_one_message(strategies: Any, transports: Any) -> None:
    """Accumulate encoded gradients of the same batches. The total error is at most the error of one message."""
    peer = all_grads(2)
    world = dist.get_world_size()
    true = [REPEATS * sum(grads) / world for grads in zip(*(grads for of in peer for grads in of), strict=True)]
    largest = max(grad.abs().max().item() for of_rank in peer for grads in of_rank for grad in grads)
    for strategy in strategies:
        for transport in transports:
            model = sharded(strategy, MixedPrecisionPolicy(reduce_wire=transport))
            for step in range(2 * REPEATS):
                model(batch(step % 2)).square().mean().backward()
            found = [param.grad.full_tensor() for param in model.parameters()]
            same_everywhere(found)
            steps = {"int8": 127, "int4": 7}[transport]
            # The error is half a quantization step of the largest element of a block, which is a gradient plus its
            # error feedback. It occurs twice if sums have two levels, or if the sums are encoded too.
            bound = 2 * 1.01 * largest / (2 * steps - 1)
            off = max((a - b).abs().max().item() for a, b in zip(found, true, strict=True))
            assert 0 < off <= bound, (strategy, transport, off, bound)


@pytest.mark.slow
def test_accumulated_error_of_encoded_gradients_is_that_of_one_message():
    run_ranks(2, sums_are_off_by_one_message, ("ddp", "zero1", "zero3"), ("int8", "int4"))


@pytest.mark.slow
def test_two_level_encoded_sums_have_the_error_of_one_message():
    run_ranks(4, sums_are_off_by_one_message, ("hsdp", HFSDP, "zero3"), ("int4",))


def learn_reduced(shares: bool) -> list[Any]:
    share_memory_between_ranks(shares)
    left = []
    for strategy, transport in (("zero3", "bf16"), ("zero1", "int8"), ("ddp", "int4")):
        model = sharded(strategy, MixedPrecisionPolicy(reduce_wire=transport))
        left.append(learn(model))
        same_everywhere(unsharded(model))
    by_hand = [sum_by_hand(torch.stack(grads)) for grads in zip(*(of[0] for of in all_grads(1)), strict=True)]
    for strategy in ("zero1", "zero3"):
        model = sharded(strategy, MixedPrecisionPolicy(reduce_wire="bf16"))
        model(batch(0)).square().mean().backward()
        assert_same([param.grad.full_tensor() for param in model.parameters()], by_hand)
    return left


def sum_by_hand(grads: Tensor) -> Tensor:
    """Sum the gradients of two ranks. Each row is summed by its owner, with the encoded row of the other rank."""
    spec = -(-len(grads[0]) // 2)
    first, second = grads[0].clone(), grads[1].clone()
    first[spec:] = first[spec:].bfloat16().float()
    second[:spec] = second[:spec].bfloat16().float()
    return (first + second) / 2


@pytest.mark.slow
def test_encoded_reductions_sum_in_float32_with_or_without_shared_memory():
    assert_same(run_ranks(2, learn_reduced, True), run_ranks(2, learn_reduced, False))


class Queue(PairwiseCollectives):
    """A stand-in for a backend with queued calls, without waiting."""

    is_queued = True

    def _compare(self, call: Any, **_: Any) -> None:
        return None

    def all_gather(self, *args: Any) -> Any:
        super().all_gather(*args)()
        return lambda: None

    def all_to_all(self, *args: Any) -> Any:
        super().all_to_all(*args)()
        return lambda: None


@pytest.mark.slow
@on_ranks(3)
def test_encoded_results_match_bitwise_with_queued_or_chunked_decoding():
    cases = [("zero3", "int4"), ("zero1", "bf16"), ("ddp", "int8")]

    def learn_all() -> list[Any]:
        policies = [MixedPrecisionPolicy(gather_wire="int8" if s != "ddp" else None, reduce_wire=w) for s, w in cases]
        return [learn(sharded(strategy, policy)) for (strategy, _), policy in zip(cases, policies, strict=True)]

    share_memory_between_ranks(False)
    expected = learn_all()
    encoded._DECODED_AT_ONCE = 1
    assert_same(learn_all(), expected, name="decoded one at a time")
    register_backend("gloo", Queue)
    routes._of_group.drop()
    assert_same(learn_all(), expected, name="queued")


def reduced_bytes(strategies: Any, transports: Any) -> list[tuple[int, int, int, int]]:
    left = []
    for strategy in strategies:
        for transport in transports:
            record = one_step(matrices(strategy, MixedPrecisionPolicy(reduce_wire=transport)))
            names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
            left.append(tuple(record.sent_bytes(name) for name in names))
    return left


def test_encoded_reduction_sends_requested_bits_and_block_scales():
    part = {
        "bf16": MATRIX // 2 * 2,
        "int8": MATRIX // 2 + 4 * MATRIX // 2 // 128,
        "int4": MATRIX // 4 + 4 * MATRIX // 2 // 128,
    }
    expected = [(2 * part[transport], 3 * MATRIX // 2 * 4, 0, 0) for transport in part]
    expected += [(2 * part[transport], 2 * part[transport], 0, 0) for transport in part]
    assert run_ranks(2, reduced_bytes, ("zero3", "ddp"), tuple(part)) == [expected] * 2


@pytest.mark.slow
@on_ranks(2)
def test_nonfinite_encoded_gradients_stay_nonfinite_for_one_step_only():
    for strategy in ("zero3", "ddp"):
        for transport in ("bf16", "int8", "int4"):
            model = sharded(strategy, MixedPrecisionPolicy(reduce_wire=transport))
            for wrong in (torch.nan, torch.inf, 1.0):
                model(inputs() * (wrong if dist.get_rank() == 1 else 1)).square().mean().backward()
                finite = [param.grad.full_tensor().isfinite().all().item() for param in model.parameters()]
                assert all(finite) if wrong == 1 else not any(finite), (strategy, transport, wrong)
                for param in model.parameters():
                    param.grad = None


class Branching(nn.Module):
    """Two branches. Each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


@on_ranks(2)
def test_encoded_reduction_supports_missing_gradients():
    x = torch.randn(4, 256)
    for strategy in ("zero3", "ddp"):
        plain = Branching()
        model = fully_shard(
            Branching(), strategy=strategy, mp_policy=MixedPrecisionPolicy(reduce_wire="int8", gather_wire=None)
        )
        for way in (0, 1, 1, 0):
            for either in (plain, model):
                for param in either.parameters():
                    param.grad = None
                either(x, way).square().mean().backward()
            for local, peer in zip(model.parameters(), plain.parameters(), strict=True):
                if peer.grad is None:
                    assert local.grad is None
                else:
                    assert (local.grad.full_tensor() - peer.grad).abs().max() <= peer.grad.abs().max() / 60


def error_feedback_is_counted(strategies: Any) -> None:
    for strategy in strategies:
        for transport in (None, "bf16", "int8"):
            model = sharded(strategy, MixedPrecisionPolicy(reduce_wire=transport))
            optimizer = torch.optim.AdamW(model.parameters())
            take_step(optimizer, model(inputs()).square().mean())
            measured = measure_ledger(model, optimizer, lambda model=model: model(inputs()).square().mean())
            kept = sum(param_group.error_feedback_nbytes for param_group in param_groups(model))
            formula = predict_ledger(model)
            assert measured.gradients == formula.gradients
            assert measured.parameters == formula.parameters
            assert (kept > 0) == (transport == "int8")
            assert set(model.state_dict()) == set(chain(leave).state_dict())
            assert ("error feedback" in explain(model)) == (transport == "int8")


@pytest.mark.slow
def test_predicted_gradient_memory_with_error_feedback_matches_measurement():
    run_ranks(2, error_feedback_is_counted, ("ddp", "zero1", "zero3"))
    run_ranks(4, error_feedback_is_counted, ("hsdp", HFSDP))


# -- rejected options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [MixedPrecision, MixedPrecisionPolicy])
def test_unknown_encodings_are_rejected_by_name(policy):
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\(gather_wire='int4'\): expected one of 'int8', 'fp8'"):
        policy(gather_wire="int4")
    with pytest.raises(ConfigError, match=r"\(reduce_wire=torch.bfloat16\): expected one of 'bf16', 'int8', 'int4'"):
        policy(reduce_wire=torch.bfloat16)
    with pytest.raises(ConfigError, match="encoded gradients are summed in float32"):
        policy(reduce_wire="int8", reduce_dtype=torch.bfloat16)


@on_ranks(1)
def test_gather_encoding_without_all_gather_is_rejected():
    with pytest.raises(ConfigError, match="every rank keeps and updates full parameters"):
        fully_shard(nn.Linear(4, 4), strategy="ddp", mp_policy=MixedPrecisionPolicy(gather_wire="int8"))
    with pytest.raises(ConfigError, match="every rank keeps and updates full parameters"):
        FullyShardedDataParallel(
            nn.Linear(4, 4),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            mixed_precision=MixedPrecision(gather_wire="int8"),
        )
