"""`check_parity`: a comparison of plain with sharded training, and a report of the differences."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.testing.parity.cases import NOT_SHARDED, Case, cases_of
from fullshard.testing.parity.difference import Tolerance
from fullshard.testing.parity.parallel import Parallelism
from fullshard.testing.parity.plain import train_plain
from fullshard.testing.parity.recipe import Loss, MakeOptimizer, Recipe
from fullshard.testing.parity.report import ParityReport, ParityRow
from fullshard.testing.parity.sharded import train_sharded
from fullshard.testing.parity.trace import Trace
from fullshard.testing.parity.unsharded import train_unsharded
from fullshard.testing.ranks import RanksFailed, run_ranks
from fullshard.wrap import AutoWrapPolicy


def check_parity(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    loss: Loss | None = None,
    *,
    rows: int = 2,
    ranks: int | Sequence[int] = (2, 3, 4),
    strategies: Sequence[str] | None = None,
    replicas: int = 2,
    auto_wrap_policy: AutoWrapPolicy | None = None,
    steps: int = 5,
    accumulate: int | None = None,
    reduce_each: bool = False,
    optimizer: str | MakeOptimizer = "adamw",
    lr: float | None = None,
    clip: float = 1.0,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    timeout: float = 600.0,
    parallelism: Parallelism | None = None,
) -> ParityReport:
    """Compare training under each strategy with one plain process on the same data, and return the report.

    All processes run on this machine's CPUs and import functions by name, so functions must be at the top level of a
    file. The plain process does the work of all ranks, in rank order, in plain PyTorch without sharding. By default all
    bits must be identical. The engine guarantees this on gloo for any number of ranks and any dtype.

    Args:
        make_model: Returns the model. The random generators of Python, NumPy and torch are seeded, so each process gets
            the same values.
        make_batch: `make_batch(rows)` returns one microbatch with that many rows, as for `fullshard plan`. The random
            generators are seeded for each microbatch. Two other forms are accepted: `make_batch()`, and
            `make_batch(number)`, which returns microbatch number 0, 1, 2, ..., always the same for the same number. The
            size must not depend on the number. Each rank computes its own microbatches; plain training computes all of
            them. A dict is passed to the model as keyword arguments, a tuple or list as positional arguments, and any
            other value as the only argument.
        loss: `loss(model, batch)` returns one number. If None, the loss is the model's output, or its `.loss`.
        rows: The rows of a microbatch, for `make_batch(rows)`.
        ranks: The number of ranks, or several such numbers.
        strategies: The names of strategies. If None, all that fit each number of ranks.
        replicas: For hybrid strategies, the number of ranks with the same shards.
        auto_wrap_policy: Selects the submodules that become units. If None, those with at least a tenth of the
            parameters.
        steps: The number of optimizer steps.
        accumulate: Microbatches per rank and step. If None, one, or the number of stages of a pipeline.
        reduce_each: Whether gradients are reduced after each microbatch, instead of after the last one of a step.
        optimizer: `"adamw"`, `"sgd"` (with momentum), or a function that returns an optimizer for the model.
        lr: The learning rate. If None, a default for the optimizer.
        clip: The maximum norm of the full gradient; 0 disables clipping.
        dtype: The dtype of compute and gathers. If None, that of the parameters.
        reduce_dtype: The dtype of reductions. If None, float32 if `dtype` is given.
        seed: The seed of all random numbers.
        atol: The absolute tolerance for an element.
        rtol: The relative tolerance for an element.
        timeout: The time limit per strategy in seconds.
        parallelism: Other parallelisms. If they change the order of sums, strategies are compared bit for bit with
            unsharded training on the same ranks. The first row then compares that training with the plain process, up
            to rounding.

    Raises:
        ConfigError: An argument is invalid, a function returns an unsupported value, or values of plain training are
            not finite.
        RanksFailed: Plain training fails.

    Example:
        ```python
        def test_my_model_trains_sharded_as_it_does_plain():
            check_parity(make_model, make_batch, ranks=2).raise_if_different()
        ```
    """
    recipe = Recipe(
        make_model=make_model,
        make_batch=make_batch,
        loss=loss,
        rows=rows,
        steps=steps,
        accumulate=accumulate,
        reduce_each=reduce_each,
        optimizer=optimizer,
        lr=lr,
        clip=clip,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        auto_wrap_policy=auto_wrap_policy,
        seed=seed,
        parallelism=parallelism or Parallelism(),
    )
    tolerance = Tolerance(atol, rtol)
    cases = cases_of((ranks,) if isinstance(ranks, int) else ranks, strategies, replicas, recipe.parallelism)
    return ParityReport(tuple(rows_of(recipe, cases, tolerance, timeout)), tolerance)


def rows_of(recipe: Recipe, cases: Sequence[Case], tolerance: Tolerance, timeout: float) -> Iterator[ParityRow]:
    """Yield the rows of a report, each as soon as its strategy has trained. For the arguments see `check_parity`.

    Raises:
        ConfigError: A function of the user returns an unsupported value.
        RanksFailed: Plain training fails.
    """
    for (ranks, replicas), group in groupby(cases, key=lambda case: (case.ranks, case.replicas)):
        with tempfile.TemporaryDirectory(prefix="fullshard-parity-") as folder:
            trace, identical = Trace(Path(folder)), list(group)
            _train_unsharded(1, train_plain, recipe, ranks, ranks // replicas, trace, timeout=timeout)
            if identical[0].axes.rounds:
                axes = replace(identical[0].axes, pp=1)
                bare = replace(identical[0], strategy=NOT_SHARDED, axes=axes)
                plain, trace = trace, Trace(Path(folder, "bare"))
                trace.folder.mkdir()
                compared = _train_unsharded(bare.world, train_unsharded, recipe, bare, trace, plain, timeout=timeout)
                yield ParityRow.of(bare, compared)
            for case in identical:
                try:
                    compared = run_ranks(case.world, train_sharded, recipe, case, trace, tolerance, timeout=timeout)
                except RanksFailed as failed:
                    cause = next(iter(failed.failures.values()), None)  # None if ranks did not end in time
                    message = f"{cause.kind}: {cause.message}\n{cause.traceback}".rstrip() if cause else str(failed)
                    yield ParityRow.failed(case, message)
                else:
                    yield ParityRow.of(case, compared)


def _train_unsharded(world: int, train: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    try:
        return run_ranks(world, train, *args, timeout=timeout)
    except RanksFailed as failed:
        for failure in failed.failures.values():
            if failure.kind == f"{ConfigError.__module__}.{ConfigError.__qualname__}":
                raise ConfigError(failure.message) from failed
        raise
