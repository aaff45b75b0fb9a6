"""Less on the wire: every rank computes with the same numbers, bytes are those of the formulas, and nothing is lost."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import chain, inputs, leave, sgd, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    ConfigError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    Placement,
    Placements,
    ShardingStrategy,
    fully_shard,
    recording,
    share_memory_between_ranks,
)
from fullshard.buffers import Pool
from fullshard.record import Recorder
from fullshard.runtime import turns_in
from fullshard.section import Section
from fullshard.testing import assert_same, run_ranks
from fullshard.wire_codec import codec_named

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


def sections(model: nn.Module) -> list[Section]:
    return [section for turn in turns_in(model) for section in turn.unit.sections]


def same_everywhere(tensors: list[Tensor]) -> None:
    """Nothing, if all ranks have the same bits."""
    mine = torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(mine, other) for other in all_of_them)


def unsharded(model: Any) -> list[Tensor]:
    """Every parameter as the modules compute with it."""
    for turn in turns_in(model):
        turn.unit.module.unshard()
    found = [param.detach().clone() for param in model.parameters()]
    for turn in turns_in(model):
        turn.unit.module.reshard()
    return found


def learn(model: Any, *, steps: int = STEPS) -> list[Any]:
    """Losses and, in the end, masters."""
    optimizer, losses = sgd(model), []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [losses, wholes(model)]


# -- gathers ----------------------------------------------------------------------------------------------------------


def rounded(model: Any, wire: str, world: int) -> list[Tensor]:
    """The whole parameters of plain `model` as they come of parts that were encoded alone."""
    codec, scratch, found = codec_named(wire), Pool(torch.device("cpu")), []
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
    """The parameters whose parts are encoded alone, by FQN."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param.sharded)] for section in sections(model) for param in section.params if param.place.in_place}


def gathers_of(strategies: Any, wire: str) -> list[Any]:
    plain, left = chain(leave), []
    expected = rounded(plain, wire, dist.get_world_size())
    for strategy in strategies:
        model = sharded(strategy, MixedPrecisionPolicy(gather_wire=wire))
        assert_same(wholes(model), wholes(plain), name="masters")
        alone, found = in_place(model), unsharded(model)
        same_everywhere(found)
        for (name, _), mine, theirs in zip(plain.named_parameters(), found, expected, strict=True):
            if name in alone:
                assert torch.equal(mine, theirs), name
        left.append(learn(model))
        same_everywhere(unsharded(model))
    return left


def gathers_of_all(shares: bool, strategies: Any) -> list[Any]:
    share_memory_between_ranks(shares)
    plain = learn(sharded("zero3", MixedPrecisionPolicy()))
    left = []
    for wire in ("int8", "fp8"):
        first, *others = gathers_of(strategies, wire)
        for other in others:
            assert_same(other, first)
        assert not torch.equal(first[0][-1], plain[0][-1])
        left.append(first)
    return left


def test_every_rank_computes_with_what_the_same_bytes_stand_for():
    """Bits do not depend on the strategy here either, nor on whether ranks share memory."""
    assert_same(run_ranks(2, gathers_of_all, True, SHARDING), run_ranks(2, gathers_of_all, False, ["zero3"]))


def test_groups_and_replicas_have_the_same_numbers_too():
    """What crosses groups is encoded, and what is gathered within a group is what came of it."""
    for zero3, *grouped in run_ranks(4, gathers_of, ("zero3", HPZ), "int8"):
        for other in grouped:
            assert_same(other, zero3)
    run_ranks(4, gathers_of, (HFSDP, "hsdp"), "int8")  # which sum in another order


def worlds_of_one() -> None:
    plain = learn(chain(leave))
    policy = MixedPrecisionPolicy(gather_wire="int8", reduce_wire="int4")
    for strategy in SHARDING:
        assert_same(learn(sharded(strategy, policy)), plain)


def test_with_one_rank_nothing_travels_and_no_bit_changes():
    run_ranks(1, worlds_of_one)


WIDTH = 256
MATRIX = WIDTH * WIDTH


class Plain(nn.Sequential):
    """Two matrices, the second of which stays with the root: gathered once a microbatch, the first twice by zero3."""

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
    policies = [MixedPrecisionPolicy(gather_wire=wire) for wire in ("int8", "fp8")]
    records = [one_step(matrices(strategy, policy)) for strategy in strategies for policy in policies]
    return [record.sent_bytes("all_gather") for record in records]


def test_a_gather_sends_one_byte_a_number_and_a_scale_a_block():
    part = MATRIX // 2 + 4 * MATRIX // 2 // 128
    assert run_ranks(2, gathered_bytes, SHARDING) == [[gathers * part for gathers in (2, 2, 2, 2, 3, 3)]] * 2
    part = MATRIX // 4 + 4 * MATRIX // 4 // 128  # across groups; the rest within them, in full
    within = 2 * MATRIX // 4 * 4
    assert run_ranks(4, gathered_bytes, [HPZ]) == [[2 * (part + within) + within] * 2] * 4


class Wide(nn.Module):
    """Dtypes that are encoded and such that are not."""

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


def encodes_masters(wire: str) -> None:
    doubles_and_integers()
    plain = Plain()
    expected = rounded(plain, wire, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, gather_wire=wire)
    found = unsharded(matrices("zero3", policy))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs.bfloat16())  # encoded from the masters, not from what was cast already


def test_what_is_encoded_are_the_masters_and_never_doubles_nor_integers():
    run_ranks(2, encodes_masters, "int8")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [MixedPrecision, MixedPrecisionPolicy])
def test_what_is_no_wire_is_refused_by_name(policy):
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\(gather_wire='int4'\): one of 'int8', 'fp8' is needed"):
        policy(gather_wire="int4")
    with pytest.raises(ConfigError, match=r"\(reduce_wire=torch.bfloat16\): one of 'bf16', 'int8', 'int4' is needed"):
        policy(reduce_wire=torch.bfloat16)
    with pytest.raises(ConfigError, match="what travels encoded is summed in float32"):
        policy(reduce_wire="int8", reduce_dtype=torch.bfloat16)


def refused_under_ddp() -> None:
    with pytest.raises(ConfigError, match="every rank keeps whole parameters and updates all of them"):
        fully_shard(nn.Linear(4, 4), strategy="ddp", mp_policy=MixedPrecisionPolicy(gather_wire="int8"))
    with pytest.raises(ConfigError, match="every rank keeps whole parameters and updates all of them"):
        FullyShardedDataParallel(
            nn.Linear(4, 4),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            mixed_precision=MixedPrecision(gather_wire="int8"),
        )


def test_gathers_cannot_be_encoded_where_there_are_none():
    run_ranks(1, refused_under_ddp)
