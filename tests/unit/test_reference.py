"""The API reference is complete: every public name has a page, and a docstring for its arguments and errors."""

from __future__ import annotations

import ast
import builtins
import enum
import inspect
import pickle
import pkgutil
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from functools import cache
from typing import Any

from pages import ROOT, page
from test_exports import DOCUMENTED

import fullshard.errors
import fullshard.testing

sys.path.append(str(ROOT / "docs" / "extensions"))
from public_names import MODULES, documented, importable, methods

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Note):$", re.MULTILINE)
ENTRY = re.compile(r"^    \*{0,2}([\w.]+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: ", re.MULTILINE)
MADE_BY = re.compile(r"Created by\s+`")


def sections(doc: str) -> dict[str, str]:
    """Return the text under each heading of a docstring in Google style."""
    parts = SECTION.split(doc)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(doc: str, *headings: str) -> set[str]:
    """Return the names that the sections describe."""
    texts = [text for heading, text in sections(doc).items() if heading in headings]
    return {name.strip(" *") for text in texts for names in ENTRY.findall(text) for name in names.split(",")}


def parameters(thing: Any) -> list[str]:
    try:
        found = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in found if name not in ("self", "cls") and not name.startswith("_")]


def is_own(cls: type, name: str) -> bool:
    """Return False if a class of another library has the method, whose documentation describes it."""
    return not any(
        name in vars(base)
        for base in cls.__mro__[1:]
        if not base.__module__.startswith("fullshard") and base is not object
    )


def things() -> Iterator[tuple[str, Any, str]]:
    """Yield each public function, class and method with its docstring."""
    for name, thing in documented().items():
        if inspect.isclass(thing):
            yield name, thing, inspect.getdoc(thing) or ""
            for attribute, method in methods(thing):
                if is_own(thing, attribute):
                    yield f"{name}.{attribute}", method, inspect.getdoc(method) or ""
        elif inspect.isroutine(thing):
            yield name, thing, inspect.getdoc(thing) or ""


def undescribed(thing: Any, doc: str) -> list[str]:
    """Return the parameters that a docstring does not describe."""
    if inspect.isclass(thing):
        if issubclass(thing, BaseException | enum.Enum) or MADE_BY.search(doc):
            return []
        maker = next(cls for cls in thing.__mro__ if "__init__" in vars(cls))
        if not maker.__module__.startswith("fullshard") and maker is not object:
            return []  # a constructor of another library, which describes its arguments
        doc += "\n" + (inspect.getdoc(thing.__init__) or "")
    named = entries(doc, "Args", "Attributes")
    return [name for name in parameters(thing) if name not in named]


@cache
def error_names() -> set[str]:
    return set(fullshard.errors.__all__)


def raised_in(function: Any) -> set[str]:
    """Return the exceptions of this library that the body of a function raises itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {ast.unparse(call.func) for call in calls} & error_names()


def test_reference_modules_match_public_modules():
    assert set(MODULES) == set(DOCUMENTED)
    assert list(importable()) == MODULES
    for name in MODULES:
        assert f"[`{name}`](../src/" in page("docs/reference.md")
        assert f"\napi/{name}\n" in page("docs/reference.md")


def test_every_public_name_has_reference_page():
    pages = {id(thing) for thing in documented().values()}
    for module, names in DOCUMENTED.items():
        missing = [name for name in names if id(getattr(importable()[module], name)) not in pages]
        assert missing == [], module


def test_docstrings_describe_all_arguments():
    found = {name: undescribed(thing, doc) for name, thing, doc in things()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_docstrings_describe_only_existing_arguments():
    found = {}
    for name, thing, doc in things():
        if not inspect.isclass(thing):
            found[name] = entries(doc, "Args") - set(inspect.signature(thing).parameters)
    assert {name: unknown for name, unknown in found.items() if unknown} == {}


def test_docstrings_describe_raised_errors():
    found = {}
    for name, thing, doc in things():
        if not inspect.isclass(thing):
            found[name] = raised_in(thing) - entries(doc, "Raises")
    assert {name: missing for name, missing in found.items() if missing} == {}


def missing_members(text: str) -> list[str]:
    """Return the names `Class.attribute` in a docstring whose class is public but does not have the attribute."""
    classes = {name.rpartition(".")[2]: thing for name, thing in documented().items() if inspect.isclass(thing)}
    found = re.findall(r"`(\w+)\.(\w+)[`(]", text)
    return [f"{owner}.{name}" for owner, name in found if owner in classes and not has_member(classes[owner], name)]


def has_member(cls: type, name: str) -> bool:
    return hasattr(cls, name) or name in {
        field for base in cls.__mro__ for field in vars(base).get("__annotations__", {})
    }


def missing_names(text: str) -> list[str]:
    """Return the names `fullshard.x.y` in a text that cannot be imported."""
    return [name for name in re.findall(r"`(fullshard(?:\.\w+)+)", text) if not can_resolve(name)]


def can_resolve(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_docstring_references_resolve():
    found = {name: missing_members(doc) + missing_names(doc) for name, _, doc in things()}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert missing_members("see `Offload.nothing` and `FSDPModule.unshard`") == ["Offload.nothing"]
    assert missing_names("see `fullshard.nothing` and `fullshard.wrap.wrap`") == ["fullshard.nothing"]


def test_names_in_pages_can_be_imported():
    """Loggers are named after modules, so logger names can be imported as well."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"]
    found = {path.name: missing_names(path.read_text()) for path in pages}
    assert {name: missing for name, missing in found.items() if missing} == {}


def rows_of_errors() -> dict[str, list[list[str]]]:
    """Return the rows of docs/errors.md for each class, with the backticks of its messages."""
    parts = re.split(r"^## (\w+)\n", page("docs/errors.md"), flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: [line.strip("|").split("|") for line in body.splitlines() if line.startswith("| `")]
        for name, body in bodies.items()
    }


def test_errors_page_lists_every_error_class():
    classes = {name for name in error_names() if name != "FullshardError"} | {"RanksFailed"}
    assert set(rows_of_errors()) == classes | {"FullshardError"}
    listed = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| `(\w+)` \|", page("docs/errors.md"), re.MULTILINE)
    assert {name for name, _ in listed} == classes
    for name, builtin in listed:
        cls = getattr(fullshard.errors, name, None) or fullshard.testing.RanksFailed
        assert issubclass(cls, getattr(builtins, builtin)), name


def test_tracebacks_end_with_link_to_errors_page():
    for name in error_names():
        error = getattr(fullshard.errors, name)("text")
        assert str(error) == "text"
        assert traceback.format_exception(error)[-1] == f"See docs/errors.md#{name.lower()}\n"
        assert f"\n## {name}\n" in page("docs/errors.md")
        assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    class_of_a_user = type("OwnError", (fullshard.errors.ConfigError,), {})
    assert class_of_a_user("text").__notes__ == ["See docs/errors.md#configerror"]


@cache
def texts_of_the_source() -> str:
    """Return all string literals of the package, one per line; an expression in an f-string is replaced by "…"."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(item.value if isinstance(item, ast.Constant) else "…" for item in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_exist_in_source():
    quoted = [text for rows in rows_of_errors().values() for row in rows for text in re.findall(r"`([^`]+)`", row[0])]
    assert len(quoted) > 45
    assert [text for text in quoted if text not in texts_of_the_source()] == []
