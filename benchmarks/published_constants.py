"""How errors of predicted GPU times change with each constant of the cost model.

    python benchmarks/published_constants.py

Nothing is measured, and no GPU is needed. Each constant is multiplied by 0.8 and by 1.2, while the others keep the
values of the machine descriptions in `src/fullshard/plan/machines`. The result is the mean error and the bias of four
sets of published steps: those of `benchmarks/published.py`, without the rows that calibrate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`

from benchmarks.published import (
    LLAMA_3_8B,
    REDUCE_DTYPES,
    TITAN_ROWS,
    Row,
    Steps,
    as_in_2023,
    ibm_runs,
    mpt_rows,
    predicted,
    vtrain_ends,
    vtrain_runs,
)
from benchmarks.published_llama import llama_tape
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.fusion import fused
from fullshard.plan.hardware import hardware
from fullshard.plan.prediction import steps_of
from fullshard.plan.timeline import lay_out
from fullshard.tape.tape import Entry


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the cost model, or several that have one source."""

    title: str
    fields: tuple[str, ...]  # of `Costs`, or of a dataclass within it, as in "link.step_s"
    source: str

    def scaled(self, costs: Costs, factor: float) -> Costs:
        """Return `costs` with this constant multiplied by `factor`."""
        for path in self.fields:
            costs = _scaled(costs, path, factor)
        return costs


def _scaled(owner: Any, path: str, factor: float) -> Any:
    name, _, rest = path.partition(".")
    value = getattr(owner, name)
    if value is None:
        return owner
    return replace(owner, **{name: _scaled(value, rest, factor) if rest else _times(value, factor)})


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: factor * item for key, item in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: factor * getattr(value, item.name) for item in fields(value)})
    return factor * value


_FITTED = "fitted on the 22 MosaicML rows of 8 GPUs and sequences of 2048"
_NCCL = "NCCL's tuning constants, as mirrored by torch/distributed/_tools"
CONSTANTS = (
    Constant(title="matmul_share", fields=("flops_per_s", "flops_by_dtype"), source=_FITTED),
    Constant(title="memory_share", fields=("memory_bytes_per_s",), source=_FITTED),
    Constant(title="attention", fields=("attention",), source="papers of FlashAttention 2 and 3"),
    Constant(title="launch_s", fields=("launch_s",), source="assumed"),
    Constant(
        title="host_s",
        fields=("host_s", "host_collective_s", "host_tensor_s"),
        source="an eager launch of PyTorch, assumed; fitted on the rows of 2 GPUs for vTrain",
    ),
    Constant(
        title="operations per collective and per tensor",
        fields=("host_collective_s", "host_tensor_s"),
        source="two eager steps of GPT-2 on an H200 (`plan/costs.py`)",
    ),
    Constant(title="host_mark_s", fields=("host_mark_s",), source="assumed"),
    Constant(title="base_s", fields=("latency_s",), source=_NCCL),
    Constant(
        title="steps of links",
        fields=tuple(
            f"{link}.{name}" for link in ("link", "network") for name in ("step_s", "ll_step_s", "ll128_step_s")
        ),
        source=_NCCL,
    ),
    Constant(title="link bandwidth", fields=("link_bytes_per_s", "link.ll_bytes_per_s"), source=_NCCL),
    Constant(title="network bandwidth", fields=("network_bytes_per_s",), source="the network cards of the runs"),
    Constant(title="slowdown", fields=("slowdown",), source="NCCL's number of channels"),
)

FACTORS = 0.8, 1.2

Change = Callable[[Costs], Costs]


class Published:
    """The four sets, each a function from a change of costs to relative errors of tokens per second."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._mpt = [row for row in mpt_rows(REDUCE_DTYPES) if not row.calibrates]
        self._vtrain = [run for run in vtrain_runs() if run.task.world == 4]
        self._ibm = list(ibm_runs())
        self._titan = [_titan_step(world, how) for world, how, *_ in TITAN_ROWS]
        a100 = hardware("a100-80")
        host_s = json.loads((Path(__file__).parent / "results" / "published.json").read_text())["vtrain"]["host_s"]
        self._vtrain_costs = costs_of(replace(a100, fitted=replace(a100.fitted, host_s=host_s)), dtype="float16")

    def errors(self, change: Change) -> Iterator[tuple[str, list[float]]]:
        """Yield the name of each set and its errors."""
        of_gpu = {gpu: change(costs_of(as_in_2023(gpu))) for gpu in {row.gpu for row in self._mpt}}
        yield "mpt", [self._of_mpt(row, of_gpu[row.gpu]) for row in self._mpt]
        yield "titan", list(self._of_titan(change))
        yield "ibm", [run.predicted(change(costs_of(run.machine))) / run.published - 1 for run in self._ibm]
        end_of = vtrain_ends(change(self._vtrain_costs))
        yield "vtrain", [run.measured_s / run.seconds(end_of) - 1 for run in self._vtrain]

    def _of_mpt(self, row: Row, costs: Costs) -> float:
        return predicted(row, self._steps, costs) / row.measured - 1

    def _of_titan(self, change: Change) -> Iterator[float]:
        costs = change(costs_of(hardware("h100hbm2e-96")))
        for (_, _, published, _), step in zip(TITAN_ROWS, self._titan, strict=True):
            yield LLAMA_3_8B.batch * LLAMA_3_8B.seq / lay_out(step, costs).end / published - 1


def _titan_step(world: int, how: str) -> list[Entry]:
    entries = llama_tape(LLAMA_3_8B, world, float8="float8" in how).entries
    step = entries[steps_of(entries)[-1] :]
    return list(fused(step)) if how != "eager" else list(step)


class Summary(NamedTuple):
    """Errors of a set in per cent."""

    mean: float
    bias: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} {self.bias:+.1f}"


def _summary(errors: list[float]) -> Summary:
    return Summary(round(100 * statistics.fmean(map(abs, errors)), 2), round(100 * statistics.fmean(errors), 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    start = time.perf_counter()
    sets = Published()
    unchanged = {name: _summary(errors) for name, errors in sets.errors(lambda costs: costs)}
    table = Table("constant", *(f"{name}, times {factor}" for name in unchanged for factor in FACTORS))
    table.add_row("unchanged", *(str(item) for item in unchanged.values() for _ in FACTORS))
    found = []
    for constant in CONSTANTS:
        scaled = {
            factor: {name: _summary(errors) for name, errors in sets.errors(partial(constant.scaled, factor=factor))}
            for factor in FACTORS
        }
        table.add_row(constant.title, *(str(scaled[factor][name]) for name in unchanged for factor in FACTORS))
        found.append({"constant": constant.title, "source": constant.source, "scaled": scaled})
    Console(emoji=False, width=160).print(table)
    print("each cell: mean error and bias in per cent")
    path = args.results / "published_constants.json"
    path.write_text(
        json.dumps({"unchanged": unchanged, "constants": found, "torch": torch.__version__}, indent=1) + "\n"
    )
    print(f"-- {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
