"""What is asked of a plan: a model, machines, and which ways of sharding are considered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fullshard.planner.candidates import STRATEGIES, Cluster, Program, programs, share_rows
from fullshard.planner.sketch import Sketch, sketch
from fullshard.planner.steps import MakeOptimizer
from fullshard.planner.subject import Subject

__all__ = ["Question", "with_cpu", "with_disk"]

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # where no global batch is given


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked for.

    Args:
        subject: the model.
        cluster: the machines.
        global_batch: rows that a step learns from on all ranks; None for any.
        strategies: those to consider.
        checkpointing: likewise.
        precisions: likewise.
        offload: whether the optimizer's state on the CPU or on a disk, and shards on the CPU, are considered even where
            something fits without.
        wires: encodings of gathers and of reductions, which change the numbers.
        max_norm: clips gradients, if given.
        make_optimizer: makes the optimizer of parameters; fused AdamW if None.
        most: programs that are simulated at most; 0 for all that may be the fastest.
        exhaustive: whether all that may fit are simulated, whatever they can reach.
        largest: whether those come first that take the least memory for a row, not those that are likely the fastest.
    """

    subject: Subject
    cluster: Cluster
    global_batch: int | None = None
    strategies: Sequence[str] = STRATEGIES
    checkpointing: Sequence[str] = ("none", "selective", "every-2", "every-1")
    precisions: Sequence[str] = ("bf16",)
    offload: bool = False
    wires: tuple[str | None, str | None] = (None, None)
    max_norm: float | None = 1.0
    make_optimizer: MakeOptimizer | None = None
    most: int = 8
    exhaustive: bool = False
    largest: bool = False

    def shapes(self) -> list[tuple[int, int]]:
        """Rows of a microbatch and microbatches of a step that may be chosen.

        Raises:
            ConfigError: the ranks cannot share the global batch.
        """
        if self.global_batch is None:
            return [(rows, 1) for rows in (_ROWS if self.subject.any_rows else (1,))]
        mine = self.global_batch // self.cluster.world
        rows = share_rows(self.global_batch, self.cluster.world)
        return [(each, mine // each) for each in rows if self.subject.any_rows or each == 1]

    def programs(self) -> list[Program]:
        """The programs to consider."""
        counts = [count for _, count in self.shapes()]
        if self.subject.make_sharded is not None:
            several = [False] * (1 in counts) + [True] * (max(counts) > 1)
            each = [Program(strategy="own", precision="own", accumulates=item) for item in several]
            return [*each, *(replace(item, syncs_each=True) for item in each if item.accumulates)]
        found = programs(
            self.cluster,
            strategies=self.strategies,
            checkpointing=self.checkpointing,
            precisions=self.precisions,
            offloads=(False, True) if self.offload else (False,),
            accumulates=[False] * (1 in counts) + [True] * (max(counts) > 1),
            wires=self.wires,
        )
        every = list(found)
        return every + (with_disk(every) if self.offload else [])

    def shapes_of(self, program: Program) -> list[tuple[int, int]]:
        """Those of `shapes` that are of `program`."""
        return [(rows, count) for rows, count in self.shapes() if (count > 1) == program.accumulates]

    def asked(self, program: Program) -> Sketch:
        """The sketch of `program`."""
        return sketch(self.subject, self.cluster, program, max_norm=self.max_norm, make_optimizer=self.make_optimizer)


def with_cpu(question: Question, programs: Iterable[Program]) -> list[Program]:
    """Those of `programs` that have all on the device, with as much of the optimizer's state on the CPU as is needed.

    None where the CPU computes, or where the user's function says where states are.
    """
    if question.cluster.hardware.kind == "cpu" or question.subject.make_sharded is not None:
        return []
    return [replace(program, cpu=1.0) for program in programs if not (program.offload or program.disk)]


def with_disk(programs: Iterable[Program]) -> list[Program]:
    """Those of `programs` that have all in memory, with as much on a disk as is needed."""
    return [replace(program, disk=1.0) for program in programs if not program.offload]
