"""What a comparison came to, as values, as a table and as JSON."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.difference import NO_DIFFERENCE, Compared, Difference, Finding, Kind, Tolerance

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ParityReport", "ParityRow"]

_WIDTH = 120  # of the table, where it is not a terminal that shows it


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """How a strategy on some ranks differs from the plain process: the largest difference of each kind."""

    strategy: str
    ranks: int
    replicas: int  # how many of the ranks hold the same parts
    loss: Difference = NO_DIFFERENCE
    gradient_norm: Difference = NO_DIFFERENCE
    gradient: Difference = NO_DIFFERENCE
    parameter: Difference = NO_DIFFERENCE
    first: Finding | None = None  # what differs first: a parameter, where one does
    failure: str = ""  # what the ranks said, if they could not train at all

    @classmethod
    def of(cls, case: Case, ranks: Sequence[Compared]) -> ParityRow:
        """The row of what all ranks have compared."""
        worst = dict.fromkeys(Kind, NO_DIFFERENCE)
        for compared in ranks:
            worst = {kind: worst[kind] | compared.differences[kind] for kind in Kind}
        return cls(
            strategy=case.strategy,
            ranks=case.ranks,
            replicas=case.replicas,
            loss=worst[Kind.LOSS],
            gradient_norm=worst[Kind.GRADIENT_NORM],
            gradient=worst[Kind.GRADIENT],
            parameter=worst[Kind.PARAMETER],
            first=Finding.first(compared.first for compared in ranks if compared.first is not None),
        )

    @classmethod
    def failed(cls, case: Case, failure: str) -> ParityRow:
        """The row of ranks that could not train."""
        return cls(strategy=case.strategy, ranks=case.ranks, replicas=case.replicas, failure=failure)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """That of each kind, in the order of `Kind`."""
        return (self.loss, self.gradient_norm, self.gradient, self.parameter)

    @property
    def is_bit_for_bit(self) -> bool:
        """Whether not a bit differs."""
        return not self.failure and all(difference.is_bit_for_bit for difference in self.differences)

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return not self.failure and all(difference.is_tolerated for difference in self.differences)

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        name = f"{self.strategy}, {self.replicas} replicas" if self.replicas > 1 else self.strategy
        if self.failure:
            return [name, str(self.ranks), *("-" for _ in Kind), "failed", "see below"]
        numbers = [_number(difference.largest) for difference in self.differences]
        verdict = "yes" if self.is_bit_for_bit else "tolerated" if self.is_equal else "no"
        return [name, str(self.ranks), *numbers, verdict, "" if self.first is None else str(self.first)]

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON: differences as numbers, `"inf"` where there is none."""
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "replicas": self.replicas,
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
    """The rows of a comparison. `str` gives the table."""

    rows: tuple[ParityRow, ...]
    tolerance: Tolerance

    @property
    def is_equal(self) -> bool:
        """Whether no row differs by more than the tolerance."""
        return all(row.is_equal for row in self.rows)

    @property
    def is_bit_for_bit(self) -> bool:
        """Whether no row differs in a bit."""
        return all(row.is_bit_for_bit for row in self.rows)

    def raise_if_different(self) -> None:
        """Nothing, if `is_equal`; otherwise raises `AssertionError` with the table."""
        if not self.is_equal:
            raise AssertionError(f"sharded training differs from plain training:\n{self}")

    def table(self) -> Table:
        """The rows, for rich to print."""
        from rich import box
        from rich.table import Table

        table = Table(title="Largest difference from the plain process", box=box.SIMPLE_HEAD)
        table.add_column("strategy")
        for heading in ("ranks", *(kind.value for kind in Kind)):
            table.add_column(heading, justify="right")
        table.add_column("same bits")
        table.add_column("first difference", overflow="fold")
        for row in self.rows:
            table.add_row(*row.cells)
        return table

    @property
    def failures(self) -> str:
        """What ranks said that could not train; empty if all could."""
        said = (f"{row.strategy} on {row.ranks} ranks: {row.failure}" for row in self.rows if row.failure)
        return "\n\n".join(said)

    @property
    def verdict(self) -> str:
        """The sum of it all in a line."""
        different = [row for row in self.rows if not row.is_equal]
        if different:
            return f"{len(different)} of {len(self.rows)} differ from the plain process."
        if self.is_bit_for_bit:
            return f"All {len(self.rows)} agree with the plain process bit for bit."
        limits = f"atol {self.tolerance.atol:g} and rtol {self.tolerance.rtol:g}"
        return f"All {len(self.rows)} agree with the plain process within {limits}."

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "equal": self.is_equal,
            "bit_for_bit": self.is_bit_for_bit,
            "atol": self.tolerance.atol,
            "rtol": self.tolerance.rtol,
            "rows": [row.as_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=_WIDTH)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(part for part in (captured.get().rstrip(), self.failures, self.verdict) if part)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"
