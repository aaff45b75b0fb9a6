"""Coordination of ranks that save or load together. An error on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.comm.routes import collectives_of
from fullshard.errors import CheckpointError, RankMismatchError
from fullshard.liveness.rank_progress import here
from fullshard.tape.recorder import Origin, Phase

T = TypeVar("T")


@dataclass(frozen=True)
class _Failed:
    """The error of an action, in serialized form."""

    message: str


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of `group`. If None, the ranks of the default group, or only this process if there is no such group."""

    group: dist.ProcessGroup | None = None

    @property
    def index(self) -> int:
        """The index of this rank."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def leads(self) -> bool:
        """True on the rank that acts for all ranks."""
        return self.index == 0

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called `name`, which then communicates over another group."""
        if self.group is not None and self.world > 1:
            collectives_of(self.group).barrier(name, origin=Origin("", Phase.IDLE))

    def do(self, doing: str, action: Callable[[], T]) -> T:
        """Call `action` on every rank, and return its result on this rank.

        Raises:
            CheckpointError: It failed on some rank. The same error is raised on every rank.
        """
        results: list[T] = []
        self.share(doing, lambda: results.append(action()))
        return results[0]

    def once(self, doing: str, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on every rank.

        Raises:
            CheckpointError: It failed on the first rank. The same error is raised on every rank.
        """
        return self.share(doing, lambda: action() if self.leads else None)[0]  # type: ignore[return-value]  # 0 leads

    def share(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank, and return the results of all ranks, in rank order."""
        outcome: T | _Failed
        cause: BaseException | None = None
        try:
            outcome = action()
        except Exception as error:
            outcome, cause = _Failed(reported_by(error)), error
        outcomes: list[Any] = [outcome]
        if self.world > 1:
            outcomes *= self.world
            try:
                if self.group is not None and self.group is dist.group.WORLD:  # then ranks compare their calls
                    origin, name = Origin("", Phase.IDLE), doing.split(maxsplit=1)[0]  # paths differ
                    outcomes = collectives_of(self.group).gather_objects(outcome, origin=origin, name=name)
                else:
                    with here.waiting(f"all_gather_object when {doing.partition(' to ')[0]}"):  # paths differ
                        dist.all_gather_object(outcomes, outcome, group=self.group)
            except RankMismatchError:
                raise
            except RuntimeError as error:
                raise failure_of_group(doing, error) from error
        failed = {rank: outcome.message for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failed)}
        if failed:
            raise failure_of_some(doing, failed, len(outcomes)) from cause
        return outcomes

    def check_same(self, doing: str, values: Mapping[str, str]) -> None:
        """Raise on every rank if ranks have different `values`.

        Raises:
            CheckpointError: It names the first value that differs.
        """
        digests = self.share(doing, lambda: sha256(repr(list(values.items())).encode()).digest())
        odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if odd is None:
            return
        each = self.share(doing, lambda: list(values.items()) if self.index in (0, odd) else [])
        pairs = zip_longest(each[0], each[odd], fillvalue=("no further one", ""))
        first, other = next((first, other) for first, other in pairs if first != other)
        raise CheckpointError(
            f"{doing}: ranks differ: {' '.join(first).strip()} on rank 0, but {' '.join(other).strip()} on rank "
            f"{odd}. Use the same model and the same arguments on every rank."
        )


def default_ranks() -> GroupRanks:
    """Return the ranks of the default process group, or only this process if there is no such group."""
    return GroupRanks(dist.group.WORLD if dist.is_initialized() else None)


def reported_by(error: BaseException) -> str:
    """Return the message of `error` for other ranks."""
    text = str(error).strip()
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def failure_of_group(doing: str, error: BaseException) -> CheckpointError:
    """Return the error for a failed collective."""
    return CheckpointError(
        f"{doing}: another rank has ended or does not answer ({reported_by(error)}). End the processes and start again."
    )


def failure_of_some(doing: str, failed: Mapping[int, str], world: int) -> CheckpointError:
    """Return the error for failures on some ranks. It omits rank numbers if all ranks failed in the same way."""
    if len(failed) == world and len(set(failed.values())) == 1:
        return CheckpointError(f"{doing}: {failed[0]}")
    by_message: dict[str, list[int]] = {}
    for rank, message in failed.items():
        by_message.setdefault(message, []).append(rank)
    failures = "; ".join(f"{_named(ranks)}: {message}" for message, ranks in by_message.items())
    return CheckpointError(f"{doing}: {failures}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
