"""The strategies and numbers of ranks to compare with the plain process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.errors import ConfigError
from fullshard.policy.strategy import ShardingStrategy, resolve_placements
from fullshard.testing.parity.parallel import NO_AXES, ParallelAxes

NOT_SHARDED = "none"  # the name for training without sharding


@dataclass(frozen=True)
class Case:
    """A strategy on a number of data-parallel ranks, in equal replicas. Other axes multiply the process count."""

    strategy: str
    ranks: int
    replicas: int
    axes: ParallelAxes = NO_AXES

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.ranks * self.axes.cp * self.axes.tp * self.axes.pp

    @property
    def shards(self) -> int:
        """Ranks on the shard axis, including those of context parallelism."""
        return self.ranks * self.axes.cp // self.replicas

    @property
    def has_two_axes(self) -> bool:
        """True if the strategy has a replicate axis."""
        return self.replicas > 1 if self.strategy == NOT_SHARDED else resolve_placements(self.strategy).replicated

    def mesh(self) -> DeviceMesh:
        """Return the mesh of all processes. Its axes are stages, tensor parallelism, replicas and shards."""
        alongside = {name: size for name, size in (("pp", self.axes.pp), ("tp", self.axes.tp)) if size > 1}
        return _mesh(**alongside, **({"replicate": self.replicas} if self.has_two_axes else {}), shard=self.shards)

    def data_mesh(self) -> DeviceMesh:
        """Return the mesh of data and context ranks, over which gradients are averaged."""
        data = self.ranks * self.axes.cp
        return _mesh(outer=self.world // data, data=data)["data"]

    def context_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that share one sequence."""
        return _mesh(outer=self.world // self.axes.cp, cp=self.axes.cp)["cp"]

    def expert_mesh(self) -> DeviceMesh:
        """Return the mesh of all processes, with the shard axis split into `efsdp` (same experts) and `ep` (others)."""
        outer, ep = self.axes.pp * self.axes.tp, self.axes.ep
        return _mesh(outer=outer, replicate=self.replicas, efsdp=self.shards // ep, ep=ep)

    def same_experts_mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks with the same experts."""
        outer, ep = self.axes.pp * self.axes.tp, self.axes.ep
        return _mesh(outer=outer, same=self.ranks * self.axes.cp // ep, ep=ep)["same"]

    def expert_norm_mesh(self) -> DeviceMesh:
        """Return the mesh of parts of experts, and the ranks that each part is sharded over."""
        ranks = self.expert_mesh().mesh.transpose(2, 3).clone(memory_format=torch.contiguous_format)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "replicate", "ep", "efsdp"))["ep", "efsdp"]

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        return (
            f"{self.strategy}, {ranks}"
            + (f" in {self.replicas} replicas" if self.replicas > 1 else "")
            + (f", with {self.axes}" if str(self.axes) else "")
        )


def cases_of(
    ranks: Sequence[int], strategies: Sequence[str] | None, replicas: int, axes: ParallelAxes = NO_AXES
) -> list[Case]:
    """Return the strategies for each number of ranks, grouped by mesh shape; all possible ones if None."""
    if not ranks or min(ranks) < 1:
        listed = ",".join(map(str, ranks)) or "nothing"
        raise ConfigError(f"ranks={listed}: at least one rank is needed.")
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: must be at least 1.")
    if strategies is not None and not strategies:
        raise ConfigError("strategies is empty: pass at least one.")
    names = [strategy.value for strategy in ShardingStrategy] if strategies is None else list(strategies)
    cases = []
    for world in dict.fromkeys(ranks):
        for name in dict.fromkeys(names):
            case = Case(name, world, replicas if resolve_placements(name).replicated else 1, axes)
            if world % case.replicas == 0:
                if case.shards % axes.ep:
                    raise ConfigError(
                        f"ep={axes.ep}: does not divide the {case.shards} ranks that parameters are sharded over "
                        f"under {name} on {world} data parallel ranks. Choose a size that does, or other strategies."
                    )
                cases.append(case)
            elif strategies is not None:
                raise ConfigError(
                    f"strategy {name} on {world} ranks: they cannot form {replicas} equal replicas. Set replicas to a "
                    f"number that divides {world}, or leave {name} or {world} ranks out."
                )
    return sorted(cases, key=lambda case: (list(ranks).index(case.ranks), case.replicas))


def _mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
