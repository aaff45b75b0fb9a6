"""Predicted seconds of operations and collectives: general properties, and comparison with NCCL's figures."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard import CPUOffloadPolicy, dry, fully_shard
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import AttentionRates, hardware
from fullshard.plan.timeline import lay_out
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Collective, Operation

HERE = Origin("blocks.0", Phase.FORWARD)
MIB = 1 << 20
SIZES = st.integers(1, 1 << 32)
KINDS = st.sampled_from(("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_"))
A100, H100 = costs_of(hardware("a100-80")), costs_of(hardware("h100-80"))


def collective(name: str, whole: int, ranks: int, hosts_of: int = 1) -> Collective:
    """Return a collective among `ranks` ranks, which are every `hosts_of`-th of all ranks."""
    reads = (Access(1, 0, whole),)
    return Collective(name, "reduce", HERE, reads, (), tuple(range(0, ranks * hosts_of, hosts_of)), (whole,))


def product(rows: int, inner: int, columns: int, itemsize: int = 2, dtype: str = "bfloat16") -> Operation:
    matrices = [Access(i, 0, itemsize * numel) for i, numel in enumerate((rows * inner, inner * columns))]
    out = (Access(2, 0, itemsize * rows * columns),)
    return Operation("aten.mm", "compute", HERE, tuple(matrices), out, 2 * rows * inner * columns, dtype=dtype)


def seconds(costs: Costs, name: str, whole: int, ranks: int, hosts_of: int = 1) -> float:
    return costs.of_collective(collective(name, whole, ranks, hosts_of))


# -- collectives ------------------------------------------------------------------------------------------------------


@given(KINDS, SIZES, SIZES, st.integers(1, 64))
def test_collective_time_is_monotonic_in_bytes(name, one, other, ranks):
    few, many = sorted((one, other))
    assert seconds(A100, name, few, ranks) <= seconds(A100, name, many, ranks)


@given(st.one_of(st.tuples(SIZES, st.integers(2, 8)), st.tuples(st.integers(128 * MIB, 1 << 32), st.integers(2, 64))))
def test_all_reduce_is_not_faster_than_reduce_scatter(size):
    """Small all-reduces over several hosts are excluded, because they use a tree."""
    whole, ranks = size
    assert seconds(A100, "allreduce_", whole, ranks) >= seconds(A100, "reduce_scatter_tensor_coalesced_", whole, ranks)


@given(KINDS, st.integers(MIB, 1 << 32), st.integers(2, 8))
def test_collective_across_hosts_is_slower_than_within_one_host(name, whole, ranks):
    assert seconds(A100, name, whole, ranks, 8) > seconds(A100, name, whole, ranks)


@given(KINDS, st.integers(MIB, 1 << 32))
def test_collective_on_two_hosts_is_slower_than_on_one(name, whole):
    assert seconds(A100, name, whole, 16) > seconds(A100, name, whole, 8)


@pytest.mark.parametrize("name", ["a100-80", "h100-80", "b200"])
@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_large_all_gather_matches_nccl_ring_model_of_ll128_or_simple(name, hosts):
    machine, whole = hardware(name), 1 << 30
    ranks = 8 * hosts
    bus = machine.link.bytes_per_s if hosts == 1 else min(machine.link.bytes_per_s, 8 * machine.network.bytes_per_s)
    ways = ((8.4e-6, 3.4e-6, 14e-6, 1), (14e-6, 1.9e-6, 4e-6, 120 / 128))
    expected = min(
        base + (ranks - 1 - (hosts - 1)) * step + (hosts - 1) * across + whole / (share * bus * ranks / (ranks - 1))
        for base, step, across, share in ways
    )
    assert seconds(costs_of(machine), "allgather_into_tensor_coalesced_", whole, ranks) == pytest.approx(expected)


def test_small_messages_use_the_lowest_latency_protocol():
    ll = 6.6e-6 + 7 * 0.6e-6
    assert seconds(A100, "allgather_into_tensor_coalesced_", 8, 8) == pytest.approx(ll, rel=1e-3)


def test_small_all_reduce_over_many_hosts_uses_a_tree():
    ring = 6.6e-6 + 2 * (511 - 63) * 0.6e-6 + 2 * 63 * 2.7e-6
    assert seconds(A100, "allreduce_", 1024, 512) < ring / 5


# Bus bandwidths in bytes/s that vTrain (Bang et al., MICRO 2024) measured, of all-reduces on 8 A100 of one host.
MEASURED = {MIB: 19.8e9, 16 * MIB: 126e9, 64 * MIB: 202e9, 256 * MIB: 217e9, 1024 * MIB: 229e9}


@pytest.mark.parametrize(("whole", "within"), [(64 * MIB, 0.1), (256 * MIB, 0.1), (1024 * MIB, 0.05)])
def test_large_all_reduce_time_matches_published_measurements(whole, within):
    assert seconds(A100, "allreduce_", whole, 8) == pytest.approx(1.75 * whole / MEASURED[whole], rel=within)


@pytest.mark.parametrize("whole", [MIB, 16 * MIB])
def test_small_all_reduce_model_omits_only_the_start_latency(whole):
    """NCCL's cost model does not include the 60 us or so between a call and the first byte."""
    missing = 1.75 * whole / MEASURED[whole] - seconds(A100, "allreduce_", whole, 8)
    assert 40e-6 < missing < 80e-6


# -- operations -------------------------------------------------------------------------------------------------------


def test_operation_time_is_the_maximum_of_bytes_and_flops():
    costs = Costs(flops_per_s=10, memory_bytes_per_s=1, launch_s=0)
    reads = (Access(1, 0, 30),)
    assert costs.of_operation(Operation("work", "compute", HERE, reads, (), flops=100)) == 30
    assert costs.of_operation(Operation("work", "compute", HERE, reads, (), flops=1000)) == 100


def test_host_device_copies_use_the_host_link_rate():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    def make() -> nn.Module:
        return fully_shard(Scaled(), offload_policy=CPUOffloadPolicy())

    tape = dry.run(make, lambda: torch.ones(1 << 20), world=4, steps=1)
    copies = [
        operation for operation in tape.of(Operation) if operation.crosses and operation.origin.phase is not Phase.IDLE
    ]
    assert {copy.stream for copy in copies} == {"gather", "offload"}  # parameters to the device, gradients to the host
    for copy in copies:
        nbytes = sum(access.nbytes for access in copy.writes)
        assert nbytes == MIB  # a quarter
        assert A100.of_operation(copy) == pytest.approx(
            A100.launch_s + nbytes / hardware("a100-80").host_link_bytes_per_s
        )


def test_matmul_time_depends_on_the_dtype_rate():
    fast, slow = product(8192, 8192, 8192), product(8192, 8192, 8192, itemsize=4, dtype="float32")
    ratio = hardware("a100-80").flops_per_s["bfloat16"] / hardware("a100-80").flops_per_s["float32"]
    assert A100.of_operation(slow) / A100.of_operation(fast) == pytest.approx(ratio, rel=0.05)


def test_partial_last_wave_costs_as_much_as_a_full_wave():
    full, one_more = product(27 * 256, 8192, 512), product(27 * 256 + 1, 8192, 512)
    assert A100.of_operation(one_more) > 1.3 * A100.of_operation(full)


@given(*(st.sampled_from((64, 768, 2048, 5120)) for _ in range(3)))
def test_matmul_does_not_exceed_the_flops_rate(rows, inner, columns):
    operation = product(rows, inner, columns)
    assert A100.of_operation(operation) >= operation.flops / A100.flops_per_s
    assert A100.of_operation(operation) <= 100 * operation.flops / A100.flops_per_s + 1e-4


def test_matmul_with_long_inner_dimension_uses_all_multiprocessors():
    operation = product(768, 100_000, 768)  # 18 tiles for 108 multiprocessors
    assert A100.of_operation(operation) < 2 * operation.flops / A100.flops_per_s


def test_matmuls_slow_down_alongside_collectives_and_copies_do_not():
    copy = Operation("aten.copy_", "compute", HERE, (Access(1, 0, MIB),), (Access(2, 0, MIB),))
    assert A100.alongside(copy) == A100.of_operation(copy)
    large = product(8192, 8192, 8192)
    assert A100.alongside(large) == pytest.approx((1 + A100.slowdown) * A100.of_operation(large), rel=0.01)
    gather = collective("allgather_into_tensor_coalesced_", 1 << 34, 8)
    slowed, alone = lay_out([gather, large], A100).placed[1], lay_out([large], A100).placed[0]
    assert slowed.end - slowed.start == pytest.approx(A100.alongside(large))
    assert alone.end - alone.start == pytest.approx(A100.of_operation(large))


def test_matmul_returns_to_full_speed_after_a_collective_ends():
    large, gather = product(8192, 8192, 8192), collective("allgather_into_tensor_coalesced_", 64 * MIB, 8)
    slowed = lay_out([gather, large], A100).placed[1]
    alone, took = A100.of_operation(large), slowed.end - slowed.start
    alongside = A100.of_collective(gather) - A100.host_s  # the host launches the product a little later
    assert took == pytest.approx(alone + alongside - alongside * alone / A100.alongside(large))


# -- attention on a tape ----------------------------------------------------------------------------------------------


def attention_of(seq: int, is_causal: bool) -> list[Operation]:
    """Return the attention operations of forward and backward in a dry step."""
    shape = 2, 4, seq, 64

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x * self.scale, x * self.scale, x * self.scale, is_causal=is_causal)

    with dry.world(1), dry.taped() as tape:
        Attend()(torch.ones(shape, dtype=torch.bfloat16)).sum().backward()
    return [operation for operation in tape.of(Operation) if "attention" in operation.name]


def test_attention_is_one_kernel_per_pass_without_stored_scores():
    forward, backward = attention_of(2048, is_causal=True)
    numel = 2 * 4 * 2048 * 64
    assert forward.flops == 4 * numel * 2048
    assert backward.flops == 10 * numel * 2048  # recomputed scores, and two products for each forward product
    assert forward.nbytes < 5 * 2 * numel  # queries, keys, values, the result and a number for each row
    assert backward.nbytes < 9 * 2 * numel


def test_causal_attention_skips_masked_blocks():
    whole, _ = attention_of(2048, is_causal=False)
    causal, _ = attention_of(2048, is_causal=True)
    assert whole.skipped_flops == 0
    assert causal.flops - causal.skipped_flops == pytest.approx((16 + 1) / 32 * whole.flops)  # 16 blocks each way
    short, _ = attention_of(128, is_causal=True)
    assert short.skipped_flops == 0


def test_attention_uses_separate_forward_and_backward_rates():
    costs = Costs(
        launch_s=0,
        flops_by_dtype={"bfloat16": 80.0},
        peak_by_dtype={"bfloat16": 100.0},
        attention=AttentionRates(forward=0.5, backward=0.25),
    )
    forward, backward = attention_of(256, is_causal=False)
    assert costs.of_operation(forward) == forward.flops / 50
    assert costs.of_operation(backward) == backward.flops / 25
