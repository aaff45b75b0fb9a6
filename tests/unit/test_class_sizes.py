"""Classes of the engine stay small enough to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fullshard

ENGINE = Path(fullshard.__file__).parent / "engine"
MOST_METHODS, MOST_LINES = 25, 350
# Larger classes, with their methods and lines. Remove an entry once its class is small; do not add any.
LARGER: dict[str, tuple[int, int]] = {}


def sizes() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the number of methods and the number of lines of each class of the engine."""
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                yield node.name, methods, (node.end_lineno or 0) - node.lineno + 1


def test_engine_classes_are_small():
    larger = {name: (n, lines) for name, n, lines in sizes() if n > MOST_METHODS or lines > MOST_LINES}
    assert larger.keys() == LARGER.keys()
    for name, (methods, lines) in larger.items():
        assert methods <= LARGER[name][0] and lines <= LARGER[name][1], name
