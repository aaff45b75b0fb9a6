"""Functions of the user named on a command line as `package.module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.errors import ConfigError, near_matches


def function_named(spec: str, option: str) -> Callable[..., Any]:
    """Return the function, or other callable, named by `spec`. The current folder is on the search path."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{option} {spec}: expected a function as package.module:function or file.py:function.")
    module = _module_of_file(where, option) if where.endswith(".py") else _module(where, str(Path.cwd()), option)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{option} {spec}: there is no {name} in {where}.{near_matches(name, vars(module))}")
    if not callable(function):
        raise ConfigError(f"{option} {spec}: {name} is of type {type(function).__name__}, but must be a function.")
    return function  # type: ignore[no-any-return]  # `callable` narrows it to a callable without a return type


def _module_of_file(where: str, option: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"{option} {where}: the file does not exist. The path is relative to the current folder.")
    module = _module(path.stem, str(path.resolve().parent), option)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ConfigError(f"{option} {where}: another module is also named {path.stem}. Rename the file.")
    return module


def _module(name: str, folder: str, option: str) -> ModuleType:
    """Import the module. `folder` stays on the search path, because the ranks import the module by name too."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{option} {name}: no such module in {folder}, and none is installed.") from error
        raise ConfigError(f"{option} {name}: it imports {error.name}, which is not installed.") from error
    except Exception as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{option} {name}: importing it raises {type(error).__name__}: {line}") from error
