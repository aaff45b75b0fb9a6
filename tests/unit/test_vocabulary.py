"""Names and sentences use the words of the field: see docs/glossary.md."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTEAD = {  # in names; words of public names are allowed in these alone
    "lane": "stream",
    "lanes": "streams",
    "wire": "transport, or encoding",
    "wires": "transports, or encodings",
    "home": "placement",
    "homes": "placements",
    "away": "offloaded",
    "rests": "is stored",
    "resting": "stored",
    "neighbor": "peer",
    "neighbors": "peers",
    "whereabouts": "progress",
    "portion": "chunk",
    "portions": "chunks",
    "stretch": "region",
    "stretches": "regions",
    "told": "reported",
    "said": "stated",
    "asked": "requested",
    "foretold": "predicted",
    "foresee": "predict",
    "foresight": "prediction",
    "mine": "local",
    "ours": "own",
    "theirs": "peer",
    "alike": "identical",
    "anew": "again",
    "apart": "separate",
    "beside": "alongside",
}
KEPT = {"gather_wire", "reduce_wire", "predict_beside", "home"}  # public names, and a method of pathlib
IN_PROSE = {"lane", "lanes", "whereabouts", "foretold", "foresight", "nobody", "whoever", "resting", "homes", "dear"}


def names(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", ["src", "benchmarks"])
def test_identifiers_use_field_vocabulary(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: write {INSTEAD[word]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in names(path)
        for word in re.split("_+", name.lower())
        if word in INSTEAD and name not in KEPT
    ]
    assert found == []


def test_prose_uses_field_vocabulary():
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in sorted(paths)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in re.findall(r"[a-z]+", line.lower())
        if word in IN_PROSE
    ]
    assert found == []


def test_class_names_are_unique():
    """Exceptions are classes that users import from several integrations under the libraries' names."""
    classes = Counter(
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in classes.items() if number > 1} == {"Accelerator", "ReportCallback"}
