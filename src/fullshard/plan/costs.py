"""Seconds that the entries of a trace take on a machine.

An operation takes the time of a launch, plus the larger of its FLOPs divided by a rate and its bytes divided by the
memory bandwidth. Two kinds of operations have FLOPs:

    products of matrices    cut into tiles; each multiprocessor computes one at a time. All tiles of a wave
                            take as long as one, so a last wave of few tiles costs as much as a full one. A long inner
                            dimension may be cut too. Partial sums are then written and added. The fastest of several
                            cuts counts, because libraries choose it
    attention               a separate share of the peak rate, forward and backward: kernels fuse a softmax into
                            their two products, and do five products in backward. Blocks that a causal mask leaves out
                            cost nothing

The cost of a collective follows NCCL's own tuning model (`src/graph/tuning.cc` of NCCL): a base, steps, and bytes over
the bus bandwidth, for the fastest algorithm (ring, and tree for an all-reduce) and protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2
from types import MappingProxyType

from fullshard.errors import ConfigError
from fullshard.plan.hardware import AttentionRates, Hardware, Link
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation

_TILES = ((256, 128), (128, 256), (128, 128))
_INNER_CUTS = (1, 2, 3, 4, 6, 8)
_PARTIAL_SUM_BYTES = 4
_TREE_SHARE = 0.92  # of the bus bandwidth, with the Simple protocol
_RING_BASES_S = {"ll": 6.6e-6, "ll128": 14e-6}
_TREE_BASES_S = {"ll": 6.8e-6, "ll128": 14e-6}
_LL128_SHARE = 120 / 128
_OPERATIONS_OF_A_COLLECTIVE = 8
_OPERATIONS_OF_A_TENSOR = 3
"""The host cost of the engine for each gather and reduction, and for each tensor that it sends, in operations: with
hooks, views and marks.

On the host of an H200, where an operation takes 40 us, steps of GPT-2 with units of one block and of four took 55.2 and
42.8 ms (`benchmarks/one_gpu.py --parts eager`, the mean of two machines, whose rounds vary by 20 %). These constants
give 52.6 and 38.5 ms.
"""
_REREAD = frozenset(("aten.native_layer_norm_backward",))
"""Operations with two kernels that both read all inputs: for the input's gradient, and for the weights'."""


@dataclass(frozen=True)
class _Protocol:
    """The constants of an NCCL protocol on the links within a host and between hosts."""

    ring_base_s: float
    tree_base_s: float
    step_s: float
    network_step_s: float
    bytes_per_s: float  # bus bandwidth within a host
    network_bytes_per_s: float  # of one rank
    tree_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The speeds of a machine. The defaults are a host of 8 NVIDIA H100 SXM, each with its own network card.

    Peaks are from NVIDIA's data sheet of the H100 SXM: 989e12 dense bf16 FLOP/s, 3.35e12 B/s of HBM3, and 900e9 B/s of
    NVLink in both directions together, so 450e9 B/s one way. A 400 Gb/s network card transfers 50e9 B/s. The fractions
    of these peaks that kernels reach (65 % and 80 %), the launch time, the latency and the host times are assumptions.
    In eager PyTorch, an operation takes about 6 us of host time. Ratios between two tapes hardly depend on these
    assumptions, but absolute times do.
    """

    flops_per_s: float = 0.65 * 989e12  # the rate of large matrix products for dtypes not in `flops_by_dtype`
    # The rate of large matrix products by the dtype of their operands.
    flops_by_dtype: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    memory_bytes_per_s: float = 0.8 * 3.35e12  # the bandwidth of memory-bound kernels
    launch_s: float = 2e-6  # the time between two kernels of a stream
    # The number of multiprocessors that compute the tiles of a matrix product; 0 to ignore tiles.
    multiprocessors: int = 0
    # See `AttentionRates`, relative to `peak_by_dtype`. If None, attention is like other matrix products.
    attention: AttentionRates | None = None
    peak_by_dtype: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    latency_s: float = 20e-6  # the latency of a collective with the Simple protocol, before its first step
    ranks_per_host: int = 8  # the number of ranks per host. Ranks are numbered host by host
    link_bytes_per_s: float = 450e9  # the bus bandwidth of one rank to other ranks of its host, one way
    network_bytes_per_s: float = 50e9  # the bandwidth of one rank to other hosts, one way
    # The steps and protocols of the links within a host. If `link` and `network` are None, steps take no time.
    link: Link | None = None
    network: Link | None = None  # the same for links between hosts
    slowdown: float = 0.0  # the relative increase of compute time during a collective. 0.1 is 10 %
    host_s: float = 6e-6  # the host time to queue an operation
    host_collective_s: float = 6e-6  # the host time to queue a collective, including the engine's work around it
    host_tensor_s: float = 0.0  # the additional host time for each tensor of a collective
    host_mark_s: float = 1e-6  # the host time to record an event, or to make a stream wait for one
    segment_s: float = 1e-3  # the assumed time to request a segment of device memory, or to return one
    # The rate at which the CPU reads and writes for this rank, while it does so for all ranks of the host.
    host_memory_bytes_per_s: float = 20e9
    host_link_bytes_per_s: float = 55e9  # the bandwidth of copies between host and accelerator memory

    def note_before(self, entry: Entry) -> None:
        """Process `entry`, which precedes the timed part. It costs nothing, but may make the timed part cheaper."""

    def note_memory(self, entry: Allocation | Free) -> None:
        """Process an allocation or free. It costs nothing, but may make the next operation more expensive."""

    def of_operation(self, operation: Operation) -> float:
        """Return the seconds that `operation` takes a stream of the accelerator."""
        return self.launch_s + max(self._flops_s(operation), self._bytes_s(operation))

    def alongside(self, operation: Operation) -> float:
        """Return the seconds of `operation` during a collective, which uses multiprocessors but no memory bandwidth."""
        return self.launch_s + max((1 + self.slowdown) * self._flops_s(operation), self._bytes_s(operation))

    def of_collective(self, collective: Collective) -> float:
        """Return the seconds that `collective` takes once all ranks have started it.

        With n ranks on h hosts, a ring of k rounds (one for an all-gather or reduce-scatter, two for an all-reduce) has
        k (n - 1) steps, and k (h - 1) of them cross hosts. Each rank sends k S (n - 1) / n of S bytes: over the link
        within its host, or over one network card per rank that its host has in the group. A tree goes up and down once:
        within hosts along a chain, between hosts in log2 h steps.
        """
        ranks = len(collective.ranks)
        if ranks < 2:
            return self.launch_s
        read, written = (sum(item.nbytes for item in those) for those in (collective.reads, collective.writes))
        is_all_reduce = "reduce" in collective.name and "scatter" not in collective.name
        return min(self._ways(max(read, written), _places(collective.ranks, self.ranks_per_host), is_all_reduce))

    def _ways(self, whole: int, places: tuple[int, int, int], is_all_reduce: bool) -> Iterator[float]:
        """Yield the seconds by each available algorithm and protocol."""
        ranks, hosts, on_host = places
        rounds = 2 if is_all_reduce else 1
        for way in self._protocols():
            bus = way.bytes_per_s if on_host > 1 else float("inf")
            if hosts > 1:
                bus = min(bus, on_host * way.network_bytes_per_s)
            crossing = rounds * (hosts - 1)
            within = rounds * (ranks - 1) - crossing
            sent = rounds * whole * (ranks - 1) / ranks
            yield way.ring_base_s + within * way.step_s + crossing * way.network_step_s + sent / bus
            if is_all_reduce and hosts > 1:
                steps = (on_host - 1) * way.step_s + log2(hosts) * way.network_step_s
                yield way.tree_base_s + 2 * steps + sent / (way.tree_share * bus)

    def _protocols(self) -> Iterator[_Protocol]:
        link, network, across = self.link, self.network, self.network_bytes_per_s
        steps = (link.step_s, network.step_s) if link and network else (0.0, 0.0)
        yield _Protocol(self.latency_s, self.latency_s, *steps, self.link_bytes_per_s, across, _TREE_SHARE)
        if link is None or network is None:
            return
        if link.ll_step_s and network.ll_step_s:
            half, most = self.link_bytes_per_s / 2, link.ll_bytes_per_s or float("inf")
            bases = _RING_BASES_S["ll"], _TREE_BASES_S["ll"]
            yield _Protocol(*bases, link.ll_step_s, network.ll_step_s, min(half, most), across / 2)
        if link.ll128_step_s and network.ll128_step_s:
            bases, share = (_RING_BASES_S["ll128"], _TREE_BASES_S["ll128"]), _LL128_SHARE
            speeds = share * self.link_bytes_per_s, share * across
            yield _Protocol(*bases, link.ll128_step_s, network.ll128_step_s, *speeds)

    def _bytes_s(self, operation: Operation) -> float:
        if operation.crosses:
            return sum(write.nbytes for write in operation.writes) / self.host_link_bytes_per_s
        twice = operation.reads if operation.name in _REREAD else ()
        return (operation.nbytes + sum(item.nbytes for item in twice)) / self.memory_bytes_per_s

    def _flops_s(self, operation: Operation) -> float:
        flops = operation.flops - operation.skipped_flops
        if not flops:
            return 0.0
        dtype = rate_name(operation.dtype)
        rate = self.flops_by_dtype.get(dtype, self.flops_per_s)
        if "attention" in operation.name:
            if self.attention is not None and dtype in self.peak_by_dtype:
                shares = self.attention
                share = shares.backward if "backward" in operation.name else shares.forward
                rate = share * self.peak_by_dtype[dtype]
            return flops / rate
        return self._product_s(operation, flops, rate)

    def _product_s(self, operation: Operation, flops: float, rate: float) -> float:
        """Return the seconds of a matrix product, computed in waves of tiles if the machine has multiprocessors."""
        dims = _dims(operation, flops) if self.multiprocessors else None
        if dims is None:
            return flops / rate
        return _tiled_s(*dims, self.multiprocessors, rate, self.memory_bytes_per_s)


@lru_cache(maxsize=4096)
def _tiled_s(
    rows: int, inner: int, columns: int, multiprocessors: int, flops_per_s: float, memory_bytes_per_s: float
) -> float:
    """Return the seconds of a product that is cut into tiles, in waves over the multiprocessors, by the fastest cut."""
    each = flops_per_s / multiprocessors

    def most_flops(tile: int, tiles: int, cuts: int) -> float:
        """Return the FLOPs of the multiprocessor with the most tiles, which it computes sequentially."""
        return ceil(tiles * cuts / multiprocessors) * 2 * tile * inner / cuts

    return min(
        most_flops(high * wide, ceil(rows / high) * ceil(columns / wide), cuts) / each
        + (2 * cuts * rows * columns * _PARTIAL_SUM_BYTES / memory_bytes_per_s if cuts > 1 else 0.0)
        for high, wide in _TILES
        for cuts in _INNER_CUTS
    )


def _dims(operation: Operation, flops: float) -> tuple[int, int, int] | None:
    """Return rows, inner dimension and columns of a product of two matrices; None if `operation` is not such a product.

    They are computed from bytes. With s bytes per element, the bytes of A (m, k), B (k, n) and their product are
    a = s m k, b = s k n and c = s m n, and the FLOPs are 2 m k n: four equations with four unknowns. Batched products
    are not supported.
    """
    if operation.name == "aten._scaled_mm":  # 8-bit operands, their scales, and a wider product
        a, b = (matrix.nbytes for matrix in operation.reads[:2])
        half = flops / 2
        return round(half / b), round(a * b / half), round(half / a)
    if operation.name not in ("aten.mm", "aten.addmm"):
        return None
    matrices: Sequence[Access] = operation.reads[-2:]
    a, b, c = (matrix.nbytes for matrix in (*matrices, operation.writes[0]))
    if not (a and b and c):
        return None
    itemsize = (2 * (a * b * c) ** 0.5 / flops) ** (2 / 3)
    rows, inner, columns = (round(itemsize * flops / 2 / nbytes) for nbytes in (b, c, a))
    return rows, inner, columns


def rate_name(dtype: str) -> str:
    """Return the name under which machine descriptions give the rate of products of this dtype, such as "float8"."""
    return "float8" if dtype.startswith("float8") else dtype


@lru_cache(maxsize=64)
def _places(ranks: tuple[int, ...], ranks_per_host: int) -> tuple[int, int, int]:
    """Return the number of ranks, of their hosts, and of ranks on the host of the first rank."""
    hosts = [rank // ranks_per_host for rank in ranks]
    return len(ranks), len(set(hosts)), hosts.count(hosts[0])


def costs_of(hardware: Hardware, *, dtype: str = "bfloat16", ranks: int | None = None) -> Costs:
    """Return the costs of a trace on `hardware`. Matrix products without a recorded dtype count as `dtype`.

    The costs of a CPU can be used for one trace only, from its beginning. `ranks` ranks share its cores. If None, each
    core has one rank.

    Raises:
        ConfigError: The machine has no rate for `dtype`.
    """
    if dtype not in hardware.flops_per_s:
        raise ConfigError(
            f"{hardware.name} has no rate for matrix products in {dtype}, the dtype of most products of the model. "
            f"Known dtypes: {', '.join(hardware.flops_per_s)}. Train in one of these dtypes."
        )
    if hardware.kind == "cpu":
        from fullshard.plan.cpu_costs import CpuCosts  # a subclass of `Costs`

        return CpuCosts.of(hardware, dtype=dtype, ranks=ranks or hardware.ranks_per_host)
    fitted, parts = hardware.fitted, hardware.multiprocessors
    return Costs(
        flops_per_s=fitted.matmul_share * hardware.flops_per_s[dtype],
        flops_by_dtype={name: fitted.matmul_share * rate for name, rate in hardware.flops_per_s.items()},
        memory_bytes_per_s=fitted.memory_share * hardware.memory_bytes_per_s,
        multiprocessors=parts,
        attention=hardware.attention,
        peak_by_dtype=hardware.flops_per_s,
        latency_s=hardware.base_s,
        ranks_per_host=hardware.ranks_per_host,
        link_bytes_per_s=hardware.link.bytes_per_s,
        network_bytes_per_s=hardware.network.bytes_per_s,
        link=hardware.link,
        network=hardware.network,
        slowdown=hardware.collective_multiprocessors / (parts - hardware.collective_multiprocessors) if parts else 0.0,
        host_s=fitted.host_s,
        host_collective_s=_OPERATIONS_OF_A_COLLECTIVE * fitted.host_s,
        host_tensor_s=_OPERATIONS_OF_A_TENSOR * fitted.host_s,
        host_memory_bytes_per_s=hardware.host_memory_bytes_per_s / hardware.ranks_per_host,
        host_link_bytes_per_s=hardware.host_link_bytes_per_s,
    )
