"""The result of a comparison, as values, as a table and as JSON."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from fullshard.testing.parity.cases import NOT_SHARDED, Case
from fullshard.testing.parity.difference import NO_DIFFERENCE, Compared, Difference, Kind, ParityFinding, Tolerance
from fullshard.testing.parity.parallel import NO_AXES, ParallelAxes

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 120  # of the table, without a terminal


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """The maximum differences, by kind, of a strategy on some ranks from the plain process.

    Args:
        strategy: The name of the strategy.
        ranks: The number of ranks.
        replicas: The number of ranks that hold the same shards.
        axes: The sizes of the axes of other parallelisms.
        loss: The maximum difference of losses.
        gradient: The maximum difference of gradients before clipping.
        gradient_norm: The maximum difference of gradient norms.
        parameter: The maximum difference of parameters after a step.
        first: The first difference, preferably of a parameter; None if there is none.
        failure: The message of the ranks if they could not train; empty otherwise.
    """

    strategy: str
    ranks: int
    replicas: int
    axes: ParallelAxes = NO_AXES
    loss: Difference = NO_DIFFERENCE
    gradient: Difference = NO_DIFFERENCE
    gradient_norm: Difference = NO_DIFFERENCE
    parameter: Difference = NO_DIFFERENCE
    first: ParityFinding | None = None
    failure: str = ""

    @classmethod
    def of(cls, case: Case, ranks: Sequence[Compared]) -> ParityRow:
        """Return the row of all ranks' comparisons.

        Args:
            case: The strategy and the ranks.
            ranks: The comparison of each rank.
        """
        worst: dict[str, Any] = {
            kind.name.lower(): reduce(or_, (compared.differences[kind] for compared in ranks), NO_DIFFERENCE)
            for kind in Kind
        }
        first = ParityFinding.first(compared.first for compared in ranks if compared.first is not None)
        return cls(
            strategy=case.strategy, ranks=case.ranks, replicas=case.replicas, axes=case.axes, first=first, **worst
        )

    @classmethod
    def failed(cls, case: Case, failure: str) -> ParityRow:
        """Return the row of ranks that could not train.

        Args:
            case: The strategy and the ranks.
            failure: The message of the ranks.
        """
        return cls(strategy=case.strategy, ranks=case.ranks, replicas=case.replicas, axes=case.axes, failure=failure)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences in the order of `Kind`."""
        return (self.loss, self.gradient, self.gradient_norm, self.parameter)

    @property
    def is_bit_for_bit(self) -> bool:
        """True if all bits are identical."""
        return not self.failure and all(difference.is_bit_for_bit for difference in self.differences)

    @property
    def is_equal(self) -> bool:
        """True if no difference exceeds the tolerance."""
        return not self.failure and all(difference.is_tolerated for difference in self.differences)

    @property
    def cells(self) -> list[str]:
        """The cells of this row of the table."""
        numbers = [f"{difference.largest:.2g}" for difference in self.differences]
        ranks = str(self.ranks) if self.replicas == 1 else f"{self.replicas} x {self.ranks // self.replicas}"
        ranks += f", {self.axes}" if str(self.axes) else ""
        shown = ["-" for _ in numbers] if self.failure else numbers
        return [self.strategy, ranks, *shown, self._verdict, self._first]

    @property
    def title(self) -> str:
        """The name of the row: its strategy and ranks."""
        return str(Case(self.strategy, self.ranks, self.replicas, self.axes))

    @property
    def _verdict(self) -> str:
        if self.failure:
            return "failed"
        return "yes" if self.is_bit_for_bit else "tolerated" if self.is_equal else "no"

    @property
    def _first(self) -> str:
        return "see below" if self.failure else "" if self.first is None else str(self.first)

    def __str__(self) -> str:
        stated = {"yes": "the same bits", "tolerated": "within the tolerance", "no": f"differs: {self._first}"}
        return f"{self.title}: {stated.get(self._verdict, self._verdict)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON: differences are numbers, or `"inf"` if not finite."""
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "replicas": self.replicas,
            **self.axes.sizes,
            **{
                kind.name.lower(): difference.largest if math.isfinite(difference.largest) else "inf"
                for kind, difference in zip(Kind, self.differences, strict=True)
            },
            "bit_for_bit": self.is_bit_for_bit,
            "equal": self.is_equal,
            "first": None if self.first is None else self.first.as_dict(),
            "failure": self.failure,
        }


@dataclass(frozen=True)
class ParityReport:
    """The rows of a comparison. `str` gives the table.

    Args:
        rows: The rows, one per strategy and number of ranks.
        tolerance: The largest differences that count as equal.
    """

    rows: tuple[ParityRow, ...]
    tolerance: Tolerance

    @property
    def is_equal(self) -> bool:
        """True if no row differs by more than the tolerance."""
        return all(row.is_equal for row in self.rows)

    @property
    def is_bit_for_bit(self) -> bool:
        """True if all rows are bitwise identical."""
        return all(row.is_bit_for_bit for row in self.rows)

    def raise_if_different(self) -> None:
        """Raise `AssertionError` with the table, unless `is_equal` is True."""
        if not self.is_equal:
            raise AssertionError(f"sharded training differs from plain training:\n{self}")

    def table(self) -> Table:
        """Return the table for rich."""
        from rich import box
        from rich.table import Table

        title = "Largest difference from the plain process"
        table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column("strategy", no_wrap=True)
        for heading in ("ranks", *(kind.value.removeprefix("gradient ") for kind in Kind)):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("same bits", no_wrap=True)
        table.add_column("first difference", overflow="fold")
        for row in self.rows:
            table.add_row(*row.cells)
        return table

    @property
    def stated(self) -> str:
        """The messages of ranks that could not train, and the verdict in one line."""
        titles: dict[str, list[str]] = {}
        for row in self.rows:
            if row.failure:
                titles.setdefault(row.failure, []).append(row.title)
        failures = [f"{'; '.join(rows)}: {failure}\n" for failure, rows in titles.items()]
        return "\n".join([*failures, self._verdict])

    @property
    def _verdict(self) -> str:
        different = [row for row in self.rows if not row.is_equal]
        if different:
            return f"{len(different)} of {len(self.rows)} do not agree with the plain process."
        sharded = [row for row in self.rows if row.strategy != NOT_SHARDED]
        if len(sharded) < len(self.rows) and all(row.is_bit_for_bit for row in sharded):
            return (
                f"All {len(sharded)} agree bit for bit with unsharded training on the same ranks. The first step of "
                "that training agrees with the plain process within rounding, since it sums in a different order."
            )
        if self.is_bit_for_bit:
            return f"All {len(self.rows)} agree with the plain process bit for bit."
        limits = f"atol {self.tolerance.atol:g} and rtol {self.tolerance.rtol:g}"
        return f"All {len(self.rows)} agree with the plain process within {limits}."

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "equal": self.is_equal,
            "bit_for_bit": self.is_bit_for_bit,
            "atol": self.tolerance.atol,
            "rtol": self.tolerance.rtol,
            "rows": [row.as_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, emoji=False)
        with console.capture() as captured:
            console.print(self.table())
        return f"{captured.get().rstrip()}\n{self.stated}"
