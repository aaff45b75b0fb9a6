"""The input of a plan: a model, machines, and the strategies to consider."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fullshard.planner.candidates import STRATEGIES, Cluster, Program, checkpointed, programs, share_rows, units_of
from fullshard.planner.sketch import Sketch, sketch
from fullshard.planner.steps import MakeOptimizer
from fullshard.planner.subject import Subject

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # without a global batch


@dataclass(frozen=True, kw_only=True)
class Question:
    """The input of the search."""

    subject: Subject  # the model
    cluster: Cluster  # the machines
    global_batch: int | None = None  # the rows per step over all ranks; None for any number
    strategies: Sequence[str] = STRATEGIES  # the strategies to consider
    checkpointing: Sequence[str] = ("none", "selective", "every-2", "every-1")  # the checkpointing options to consider
    precisions: Sequence[str] = ("bf16",)  # the precisions to consider
    # Whether to consider optimizer states on the CPU or on disk, and shards on the CPU, even if something fits without
    # them.
    offload: bool = False
    # Encodings of all-gathers and of reductions, which change results.
    encodings: tuple[str | None, str | None] = (None, None)
    compiled: bool = False  # whether each block is compiled with `torch.compile`
    max_norm: float | None = 1.0  # the norm to clip gradients to, if given
    make_optimizer: MakeOptimizer | None = None  # creates the optimizer from parameters. If None, fused AdamW
    most: int = 8  # the maximum number of programs to simulate; 0 for all that may be the fastest
    exhaustive: bool = False  # whether to simulate all programs that may fit, even if they cannot be the fastest
    # Whether to start with the programs that need least memory per row, instead of the likely fastest.
    largest: bool = False

    def shapes(self) -> list[tuple[int, int]]:
        """Return the possible pairs of rows per microbatch and microbatches per step."""
        if self.global_batch is None:
            return [(rows, 1) for rows in (_ROWS if self.subject.any_rows else (1,))]
        local = self.global_batch // self.cluster.world
        rows = share_rows(self.global_batch, self.cluster.world)
        return [(each, local // each) for each in rows if self.subject.any_rows or each == 1]

    @cached_property
    def blocks(self) -> int:
        """The number of units below the root; 0 if the user's function shards the model."""
        return 0 if self.subject.model is None else len(units_of(self.subject.model))

    @property
    def distinct_checkpointing(self) -> list[str]:
        """The checkpointing options, except for those that checkpoint the same blocks as an earlier one."""
        blocks = range(self.blocks)
        found: dict[tuple[int, bool], str] = {}
        for kept in self.checkpointing:
            chosen = len(checkpointed(blocks, kept))
            found.setdefault((chosen, kept == "selective" and chosen > 0), kept)
        return list(found.values())

    @property
    def _distinct_strategies(self) -> list[str]:
        """The strategies; without blocks, those that differ only in the resharding of blocks are listed once."""
        equal = {} if self.blocks else {"zero3": "zero2", "hsdp": "hsdp_zero2"}
        return [strategy for strategy in self.strategies if equal.get(strategy) not in self.strategies]

    @cached_property
    def _shard_hosts(self) -> Sequence[int]:
        """The numbers of hosts to shard over under hsdp: 1, and the first powers of two that are likely to fit.

        These are the first with which parameters, gradients and two moments take less than the usable memory, and less
        than half of it. Only whole replicas are considered, and at least two of them.
        """
        assert self.subject.model is not None
        params = [(param.nbytes, param.requires_grad) for param in self.subject.model.parameters()]
        states = sum(nbytes * (4 if is_trained else 1) for nbytes, is_trained in params)
        hosts = self.cluster.hosts
        known = [2**n for n in range(hosts.bit_length()) if 2 ** (n + 1) <= hosts and hosts % 2**n == 0]
        chosen = {1}
        for share in (1.0, 0.5):
            enough = (n for n in known if states <= share * self.cluster.usable_bytes * n * self.cluster.per_host)
            chosen.add(next(enough, 1))
        return sorted(chosen)

    def programs(self) -> list[Program]:
        """Return the programs to consider."""
        counts = [count for _, count in self.shapes()]
        if self.subject.make_sharded is not None:
            several = [False] * (1 in counts) + [True] * (max(counts) > 1)
            each = [Program(strategy="own", precision="own", accumulates=item) for item in several]
            return [*each, *(replace(item, syncs_each=True) for item in each if item.accumulates)]
        found = programs(
            self.cluster,
            strategies=self._distinct_strategies,
            checkpointing=self.distinct_checkpointing,
            precisions=self.precisions,
            offloads=(False, True) if self.offload else (False,),
            accumulates=[False] * (1 in counts) + [True] * (max(counts) > 1),
            encodings=self.encodings,
        )
        every = [
            replace(program, compiled=self.compiled, shard_hosts=hosts)
            for program in found
            for hosts in (self._shard_hosts if program.is_replicated else (1,))
        ]
        return every + (with_disk(every) if self.offload else [])

    def shapes_of(self, program: Program) -> list[tuple[int, int]]:
        """Return the entries of `shapes` that match `program`."""
        return [(rows, count) for rows, count in self.shapes() if (count > 1) == program.accumulates]

    def requested(self, program: Program) -> Sketch:
        """Return the sketch of `program`."""
        return sketch(self.subject, self.cluster, program, max_norm=self.max_norm, make_optimizer=self.make_optimizer)


def with_cpu(question: Question, programs: Iterable[Program]) -> list[Program]:
    """Return the programs without offload, changed to keep as much of the optimizer state on the CPU as necessary.

    There are none when computing on the CPU, or if the user's function places the states.
    """
    if question.cluster.hardware.kind == "cpu" or question.subject.make_sharded is not None:
        return []
    return [replace(program, cpu=1.0) for program in programs if not (program.offload or program.disk)]


def with_disk(programs: Iterable[Program]) -> list[Program]:
    """Return the programs with all states in memory, changed to keep as much on disk as necessary."""
    return [replace(program, disk=1.0) for program in programs if not program.offload]
