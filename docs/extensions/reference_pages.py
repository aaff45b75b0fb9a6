"""Write a page for each public object, one for each public module, and one for the command line, into `docs/api`."""

import inspect
import warnings
from argparse import Action, ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro
from docstring_text import code_as_literals
from public_names import documented, importable
from sphinx.application import Sphinx

from fullshard.cli import SUBCOMMANDS, usage
from fullshard.cli.completion import commands
from fullshard.command_line import Command


def titled(text: str) -> str:
    return underlined(text, "=")


def underlined(text: str, mark: str) -> str:
    return f"{text}\n{mark * len(text)}\n"


def object_page(name: str, thing: Any) -> str:
    """Return the page of one public object."""
    if inspect.ismodule(thing):
        return f"{titled(name)}\n.. automodule:: {name}\n   :members:\n"
    if inspect.isclass(thing):
        return f"{titled(name)}\n.. autoclass:: {name}\n   :members:\n   :show-inheritance:\n"
    if callable(thing) and not str(type(thing)).startswith("<class 'typing."):
        return f"{titled(name)}\n.. autofunction:: {name}\n"
    return f"{titled(name)}\n.. autodata:: {name}\n   :no-value:\n"


def summary(thing: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def module_page(name: str) -> str:
    """Return the page of a public module: its docstring, and a table of its names."""
    module = importable()[name]
    own = documented()
    targets = {id(thing): full for full, thing in own.items()}
    lines = [titled(name), f".. automodule:: {name}", "", ".. list-table::", "   :widths: 35 65", ""]
    for attribute in module.__all__:
        thing = getattr(module, attribute)
        full = f"{name}.{attribute}" if f"{name}.{attribute}" in own else targets[id(thing)]
        lines += [f"   * - :doc:`{attribute} <{full}>`", f"     - {code_as_literals([summary(thing)])[0]}"]
    return "\n".join([*lines, ""])


def option_lines(action: Action) -> list[str]:
    """Return the description of one option."""
    metavar = f" {action.metavar}" if isinstance(action.metavar, str) else ""
    names = ", ".join(f"{name}{metavar}" for name in action.option_strings)
    text = " ".join((action.help or "").split()).replace("%%", "%").replace("*", "\\*").replace("`", "``")
    return [f".. option:: {names}", "", f"   {text}", ""]


def command_page() -> str:
    """Return the page of the command line, which is made from the parsers."""
    lines = [
        titled("Command line"),
        "Find an option of a command on this page. Keys of a configuration file (``fullshard train --config FILE``, in "
        "YAML or TOML) are the same names without the leading dashes.",
        "",
        ".. code-block:: text",
        "",
        *(f"   {line}".rstrip() for line in usage().splitlines()),
        "",
    ]
    for name, command in commands().items():
        for each in command.values() if isinstance(command, dict) else [command]:
            lines += [underlined(each.usage, "-"), f".. program:: {each.prog}", "", each.description, ""]
            for group in parser_of(each)._action_groups:
                actions = [action for action in group._group_actions if "--help" not in action.option_strings]
                if actions and group.description:
                    lines += [f"**{group.description.replace('`', '')}**", ""]
                lines += [line for action in actions for line in option_lines(action)]
        if name == "train":
            lines += ["See also :doc:`../get_started`.", ""]
    lines += [underlined("fullshard completion SHELL", "-"), SUBCOMMANDS["completion"].does.capitalize() + ".", ""]
    return "\n".join(lines)


def parser_of(command: Command[Any]) -> ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other access to its parser
        return tyro.extras.get_parser(
            command.settings, prog=command.usage, description="", config=(tyro.conf.OmitArgPrefixes,)
        )


def pages() -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each page."""
    yield "command_line.rst", command_page()
    for name in importable():
        yield f"{name}.rst", module_page(name)
    for name, thing in documented().items():
        # Out of the sidebar, which every page holds in full: with these, the build would last four times as long.
        yield f"{name}.rst", f":orphan:\n\n{object_page(name, thing)}"


def write(app: Sphinx) -> None:
    """Write the pages that differ from those of the last build, and remove pages of names that are gone."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    texts = dict(pages())
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
