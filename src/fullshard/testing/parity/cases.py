"""The strategies that are compared with the plain process, and the numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.errors import ConfigError
from fullshard.policy.strategy import ShardingStrategy, resolve_placements

__all__ = ["NOT_SHARDED", "Case", "cases_of"]

NOT_SHARDED = "none"  # in place of a strategy


@dataclass(frozen=True)
class Case:
    """A strategy on some ranks, of which `ranks / replicas` hold different parts; each stands for `tp` processes."""

    strategy: str
    ranks: int
    replicas: int
    tp: int = 1  # ranks of tensor parallelism that share the work of one

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.ranks * self.tp

    @property
    def shards(self) -> int:
        """Ranks on the shard axis."""
        return self.ranks // self.replicas

    @property
    def has_two_axes(self) -> bool:
        """True if the strategy has a replicate axis."""
        return resolve_placements(self.strategy).replicated

    def __str__(self) -> str:
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        return (
            f"{self.strategy}, {ranks}"
            + (f" in {self.replicas} replicas" if self.replicas > 1 else "")
            + (f", each of {self.tp} of tensor parallelism" if self.tp > 1 else "")
        )


def cases_of(ranks: Sequence[int], strategies: Sequence[str] | None, replicas: int, tp: int = 1) -> list[Case]:
    """The strategies on each of these numbers of ranks; all that fit, if None. Those of one mesh shape stand together.
    Each rank is `tp` processes.

    Raises:
        ConfigError: a strategy that is named is unknown or does not fit, or there is nothing to compare.
    """
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"ranks={_listed(ranks)}: at least one rank is needed.")
    if replicas < 1:
        raise ConfigError(f"replicas={replicas}: must be at least 1.")
    if tp < 1:
        raise ConfigError(f"tp={tp}: must be at least 1.")
    if strategies is not None and not strategies:
        raise ConfigError("strategies are empty: name at least one.")
    names = [strategy.value for strategy in ShardingStrategy] if strategies is None else list(strategies)
    cases = []
    for world in dict.fromkeys(ranks):
        for name in dict.fromkeys(names):
            case = Case(name, world, replicas if resolve_placements(name).replicated else 1, tp)
            if world % case.replicas == 0:
                cases.append(case)
            elif strategies is not None:
                raise ConfigError(
                    f"strategy {name} on {world} ranks: they cannot form {replicas} equal replicas. Set replicas to a "
                    f"number that divides {world}, or leave {name} or {world} ranks out."
                )
    return sorted(cases, key=lambda case: (list(ranks).index(case.ranks), case.replicas))


def _listed(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values) or "nothing"
