"""The numbers of a run as CSV files, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.regular_files import replacing
from fullshard.report.run import PARTS, Finding, Run


def export(run: Run, findings: Sequence[Finding], folder: Path) -> list[Path]:
    """Write the numbers of `run` into `folder` as CSV files, and return their paths.

    Times are in seconds and sizes in bytes. Values that were not measured are empty. Each file replaces an older one
    atomically.

        steps.csv       a row for each step and rank: `step`, `rank`, `step_s`, each of `PARTS` with `_s`,
                        `waited_for_s`, `busy_s`, `held_bytes`, and the hardware counters by name
        training.csv    a row for each step: `step`, and the numbers that the loop has logged, such as `loss`
        units.csv       a row for each unit: the fields of `UnitTimes`
        operations.csv  a row for each of the slowest operations of one step: the fields of `OperationTime`
        causes.csv      a row for each cause of lost time or memory: the fields of `Finding`
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Iterable[Mapping[str, Any]]] = {
        "steps.csv": _steps(run),
        "training.csv": _training(run),
        "units.csv": (asdict(unit) for unit in run.units),
        "operations.csv": (asdict(operation) for operation in run.operations),
        "causes.csv": (asdict(finding) for finding in findings),
    }
    paths = []
    for name, rows in tables.items():
        written = list(rows)
        with replacing(folder / name) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(written[0]) if written else [])
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in written)
        paths.append(folder / name)
    return paths


def _steps(run: Run) -> Iterable[dict[str, Any]]:
    arrays: dict[str, NDArray[Any]] = {"step_s": run.step_s}
    arrays |= {f"{part}_s": run.parts_s[:, :, number] for number, part in enumerate(PARTS)}
    arrays |= {"waited_for_s": run.waited_for_s, "busy_s": run.busy_s, "held_bytes": run.held_bytes, **run.counters}
    for place, step in enumerate(run.steps):
        for index, facts in enumerate(run.ranks):
            values = {name: array[index, place] for name, array in arrays.items()}
            yield {"step": step, "rank": facts.rank, **values}


def _training(run: Run) -> Iterable[dict[str, Any]]:
    for place, step in enumerate(run.steps):
        yield {"step": step, **{name: values[place] for name, values in run.training.items()}}


def _cell(value: Any) -> Any:
    """Return `value` as a Python value; an empty string if it was not measured."""
    value = value.item() if isinstance(value, np.generic) else value
    return "" if value is None or value != value else value
