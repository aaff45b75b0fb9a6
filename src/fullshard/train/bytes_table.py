"""Bytes per rank by state: measured, by formula, and by formula under `ddp`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from rich.table import Table

from fullshard.amounts import in_bytes
from fullshard.plan.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class RunLedgers:
    """The memory of one rank: measured, by formula, and by formula under `ddp`."""

    measured: Ledger
    formula: Ledger
    ddp: Ledger  # by formula, for the same model and batch under ddp

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return bytes by column and state, each column with its total."""
        columns = {"measured": self.measured, "formula": self.formula, "ddp_formula": self.ddp}
        return {name: {**asdict(ledger), "total": ledger.total} for name, ledger in columns.items()}


def bytes_table(ledgers: RunLedgers, strategy: str) -> Table:
    """Return a table with one row per state and one for the total."""
    table = Table(title=f"Bytes per rank, strategy {strategy}")
    table.add_column("state")
    for heading in ("measured", "formula", "ddp by formula"):
        table.add_column(heading, justify="right")
    columns = (ledgers.measured, ledgers.formula, ledgers.ddp)
    for state in fields(Ledger):
        table.add_row(state.name.replace("_", " "), *(in_bytes(getattr(column, state.name)) for column in columns))
    table.add_section()
    table.add_row("total", *(in_bytes(column.total) for column in columns))
    return table
