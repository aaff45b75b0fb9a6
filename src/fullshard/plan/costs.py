"""Seconds that the entries of a tape take on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.plan.hardware import Hardware
from fullshard.tape.tape import Allocation, Collective, Free, Operation

__all__ = ["Costs", "costs_of"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The speeds of a machine. Defaults are a host of 8 NVIDIA H100 SXM, each with a network card of its own.

    Peaks are those of NVIDIA's data sheet of the H100 SXM: 989e12 dense bf16 FLOP/s, 3.35e12 B/s of HBM3, and 900e9 B/s
    of NVLink both ways together, so 450e9 one way. A card of 400 Gb/s carries 50e9 B/s. The shares of these peaks that
    kernels reach (65 % and 80 %), the launch, the latency and the host's times are assumptions: of eager PyTorch an
    operation takes the host some 6 us. Ratios between two tapes depend on them little, seconds do.
    """

    flops_per_s: float = 0.65 * 989e12
    memory_bytes_per_s: float = 0.8 * 3.35e12
    launch_s: float = 2e-6  # of a lane, between two kernels
    latency_s: float = 20e-6  # of a collective
    ranks_per_host: int = 8
    link_bytes_per_s: float = 450e9  # of one rank to others of its host, one way
    network_bytes_per_s: float = 50e9  # of one rank to other hosts, one way
    host_s: float = 6e-6  # to ask for an operation or a collective
    host_mark_s: float = 1e-6  # to set a mark, or to let a lane wait for one
    host_memory_bytes_per_s: float = 20e9

    def note_memory(self, entry: Allocation | Free) -> None:
        """What is allocated and freed in between costs nothing of its own, but may make what comes next cost more."""

    def of_operation(self, operation: Operation) -> float:
        """Seconds that `operation` takes a lane of the accelerator."""
        return self.launch_s + max(operation.flops / self.flops_per_s, operation.nbytes / self.memory_bytes_per_s)

    def of_collective(self, collective: Collective) -> float:
        """Seconds that `collective` takes from when all ranks are there.

        With n ranks, L of them on each host, and a whole of S bytes, a ring has each rank take S (n - 1) / n from its
        neighbour. With as many rings as cards, S (n - L) / n of that come into each host over its L cards. The slower
        of the two counts; an all-reduce does it twice.
        """
        ranks = len(collective.ranks)
        if ranks < 2:
            return self.launch_s
        read, written = (sum(it.nbytes for it in those) for those in (collective.reads, collective.writes))
        whole = max(read, written)
        here = collective.ranks[0] // self.ranks_per_host
        on_host = sum(rank // self.ranks_per_host == here for rank in collective.ranks)
        within = whole * (ranks - 1) / ranks / self.link_bytes_per_s
        across = whole * (ranks - on_host) / ranks / (on_host * self.network_bytes_per_s)
        rounds = 2 if "reduce" in collective.name and "scatter" not in collective.name else 1
        return self.latency_s + rounds * max(within if on_host > 1 else 0.0, across)


def costs_of(hardware: Hardware, *, dtype: str = "bfloat16", ranks: int | None = None) -> Costs:
    """The costs of a tape on `hardware`, where matrix products are of `dtype`. Of a CPU they go with one tape, from its
    beginning; `ranks` of them share its cores, one for each if None.
    """
    if hardware.kind == "cpu":
        from fullshard.plan.cpu_costs import CpuCosts  # which is one of these

        return CpuCosts.of(hardware, dtype=dtype, ranks=ranks or hardware.ranks_per_host)
    fitted = hardware.fitted
    return Costs(
        flops_per_s=fitted.matmul_share * hardware.flops_per_s[dtype],
        memory_bytes_per_s=fitted.memory_share * hardware.memory_bytes_per_s,
        latency_s=hardware.base_s,
        ranks_per_host=hardware.ranks_per_host,
        link_bytes_per_s=hardware.link.bytes_per_s,
        network_bytes_per_s=hardware.network.bytes_per_s,
        host_s=fitted.host_s,
    )
