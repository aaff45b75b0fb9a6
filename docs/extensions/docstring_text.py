"""Turn docstrings of the source into reStructuredText.

Docstrings are written in Markdown, with sections in Google style: `name` is code, a fence or an indented block is an
example, and tables have pipes.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from public_names import links_by_name
from sphinx.application import Sphinx

SECTIONS = {"Args:", "Attributes:", "Raises:", "Returns:", "Yields:", "Note:", "Example:", "Examples:"}
CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?!`)(?=(\w?))")


def converted(text: str) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    lines = text.splitlines()
    found: list[str] = []
    prose: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        end = block_end(lines, number)
        if end == number:
            prose.append(line)
            number += 1
            continue
        margin = " " * indent(line)
        if not is_fence(line) and not line.lstrip().startswith("|"):  # an indented block follows this line
            prose.append(line)
            block = [f"{margin}::", "", *lines[number + 1 : end]]
        elif is_fence(line):
            inner = [f"   {item}" if item else "" for item in lines[number + 1 : end - 1]]
            block = [f"{margin}.. code-block:: {line.strip().strip('`') or 'text'}", "", *inner]
        else:
            block = [margin + item for item in table(lines[number:end])]
        found += [*code_as_literals(prose), "", *block, ""]
        prose = []
        number = end
    return found + code_as_literals(prose)


def block_end(lines: Sequence[str], start: int) -> int:
    """Return the end of the block that starts at a line, or `start` if the line is part of a paragraph."""
    line, later = lines[start], list(enumerate(lines))[start + 1 :]
    if is_fence(line):
        return next(number for number, other in later if is_fence(other)) + 1
    if line.lstrip().startswith("|"):
        return next((number for number, other in later if not other.lstrip().startswith("|")), len(lines))
    following = next((other for _, other in later[:2] if other.strip()), "")
    is_text = line.strip() and line.strip() not in SECTIONS
    if is_text and indent(following) >= indent(line) + 4 and (not later[0][1].strip() or line.rstrip().endswith(":")):
        return next((number for number, other in later if other.strip() and indent(other) <= indent(line)), len(lines))
    return start


def is_fence(line: str) -> bool:
    return line.lstrip().startswith("```")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def table(lines: Sequence[str]) -> list[str]:
    """Return the rows of a Markdown table as a `list-table`."""
    head, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in [head, *(row + [""] * (len(head) - len(row)) for row in body)]:
        cells = [code_as_literals([cell])[0] if cell else "" for cell in row]
        found += [f"   {'* -' if number == 0 else '  -'} {cell}".rstrip() for number, cell in enumerate(cells)]
    return found


def code_as_literals(lines: Sequence[str]) -> list[str]:
    return CODE.sub(linked, "\n".join(lines)).split("\n") if lines else []


def linked(code: re.Match[str]) -> str:
    """Return a link if the code is a public name, and literal text otherwise."""
    text = " ".join(code[1].split())
    target = links_by_name().get(text.removesuffix("()"))
    return (f":py:obj:`{text} <{target}>`" if target else f"``{text}``") + ("\\ " if code[2] else "")


def convert(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Convert the lines of a docstring in place, before the sections are read."""
    lines[:] = converted(inspect.cleandoc("\n".join(lines)))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert, priority=100)
    return {"parallel_read_safe": True}
