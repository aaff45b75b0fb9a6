"""The pages of the documentation, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, heading: str) -> str:
    """Return the text under `## heading`."""
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every table row in `text` but headings, without backticks."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    rules = [i for i, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    heads = {*rules, *(i - 1 for i in rules)}
    return [row for i, row in enumerate(cells) if i not in heads]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
