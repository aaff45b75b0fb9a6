"""Output of a run: on a terminal, without one, and on silent ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fullshard.amounts import in_bytes
from fullshard.plan.ledger import Ledger
from fullshard.train.bytes_table import RunLedgers, bytes_table
from fullshard.train.progress import Display, Heading, Result, StepReport, display_for, duration, printable

FULLSHARD = Ledger(
    parameters=10**6, gradients=10**6, optimizer_state=2 * 10**6, gathered_peak=5 * 10**5, activations=10**6
)
DDP = Ledger(parameters=2 * 10**6, gradients=2 * 10**6, optimizer_state=4 * 10**6, gathered_peak=0, activations=10**6)
LEDGERS = RunLedgers(measured=FULLSHARD, formula=FULLSHARD, ddp=DDP)


def show_a_run(display: Display) -> None:
    out = Path("runs/x")
    display.start(
        Heading(
            strategy="zero3",
            ranks=2,
            device="cpu",
            parameters=1_500_000,
            training_bytes=10**7,
            validation_bytes=10**6,
            steps=20,
            out=out,
        )
    )
    display.set_memory(LEDGERS)
    for step in range(1, 21):
        display.advance(step)
        display.report(
            StepReport(step=step, loss=3 / step, bits_per_byte=4.3 / step, tokens_per_s=12_345, left_s=61 * (20 - step))
        )
    display.show_validation(20, 2.125)
    display.show_sample(20, b"def [bold]f\x1b[31m():\n\treturn \xff")
    display.close()
    display.show_result(
        Result(bits_per_byte=2.125, sample=b"end", seconds=247, ledgers=LEDGERS, strategy="zero3", out=out)
    )


def shown(*, terminal: bool, shows: bool = True) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    show_a_run(display_for(console, shows=shows))
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_loss_speed_time_and_memory(terminal: bool) -> None:
    text = shown(terminal=terminal)
    for words in ("1.50M parameters", "strategy zero3", "12.3k tokens/s", "0:00 left", "5.5 MB per rank (ddp 9 MB)"):
        assert words in text
    for words in ("0.215 bits/byte", "2.125 bits per byte after 4:07", "ddp by formula", "model.safetensors"):
        assert words in text


def test_display_without_terminal_prints_few_plain_lines() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step") and "loss" in line] == [
        "1/20",
        "20/20",
    ]


def test_display_on_other_ranks_prints_nothing() -> None:
    assert shown(terminal=True, shows=False) == ""


def test_samples_are_printed_without_control_characters() -> None:
    assert "[bold]f\N{REPLACEMENT CHARACTER}[31m():" in shown(terminal=False)
    assert (
        printable(b"a\tb\nc\rd\xff\0\x07") == "a\tb\nc" + "\N{REPLACEMENT CHARACTER}d" + 3 * "\N{REPLACEMENT CHARACTER}"
    )


def test_bytes_table_has_row_per_state_and_total() -> None:
    table = bytes_table(LEDGERS, "zero3")
    assert list(table.columns[0].cells) == [
        *("parameters", "gradients", "optimizer state", "gathered peak", "activations", "total")
    ]
    assert list(table.columns[3].cells)[-1] == in_bytes(DDP.total) == "9 MB"
    assert LEDGERS.as_dict()["measured"]["total"] == 5_500_000


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (21_340_000, "21.3 MB"),
        (999_600_000, "1 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_bytes_are_formatted_with_three_digits(count: int, words: str) -> None:
    assert in_bytes(count) == words


def test_durations_are_formatted_as_minutes_and_seconds() -> None:
    assert [duration(s) for s in (0, 59.6, 187, 3661)] == ["0:00", "1:00", "3:07", "1:01:01"]
