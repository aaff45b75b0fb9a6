"""Descriptions of machines: compute rates, memory and bandwidth of accelerators, with sources.

A description is a TOML file. Those in `plan/machines` are part of the package. `fullshard calibrate` writes one for the
machine it runs on. Users can write further ones; `like` names a description that provides all values they omit:

    like = "h100-80"
    name = "our cluster"
    ranks_per_host = 4

    [network]
    bytes_per_s = 25e9

Facts come from data sheets. The fractions that kernels reach are fitted, with at most three constants per accelerator.
They are in the table `fitted`, and all predictions based on them say so.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.regular_files import CONFIG_BYTES, UNPARSED, read_text

HERE = "here"  # the name of the machine that `fullshard calibrate` has measured


@dataclass(frozen=True, kw_only=True)
class Link:
    """The communication of one rank over one kind of link."""

    bytes_per_s: float  # the bus bandwidth of collectives per rank, in one direction
    step_s: float  # seconds per step of a collective's algorithm, in addition to its bytes
    # `step_s` with NCCL's LL protocol, whose messages carry a flag with every 4 bytes. 0 if it is not supported.
    ll_step_s: float = 0.0
    ll128_step_s: float = 0.0  # `step_s` with LL128, with a flag for every 120 bytes
    ll_bytes_per_s: float = 0.0  # the maximum bandwidth of LL. If 0, half of `bytes_per_s`


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """The fractions of the peak rate that attention kernels reach, counting the FLOPs that they execute."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Measured constants of an accelerator or of a core. At most three are fitted."""

    matmul_share: float  # the share of the peak rate that large matrix products reach within a step
    memory_share: float  # the share of the memory bandwidth that other kernels reach
    host_s: float  # host seconds to launch one operation


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of machine: hosts with `ranks_per_host` accelerators, or cores."""

    name: str
    kind: str  # "gpu" (any accelerator with streams) or "cpu"
    title: str  # the name for display
    memory_bytes: float  # the memory of one accelerator; for a CPU, the whole memory of a host
    # The dense peak by dtype ("float32", "bfloat16", "float16", "float8"), of one accelerator or core.
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float  # the memory bandwidth of one accelerator, reads and writes together; or of one core
    ranks_per_host: int  # the number of accelerators, or cores, per host
    base_s: float  # seconds of a collective before its first byte
    link: Link  # the link between ranks of a host
    network: Link  # the network between hosts, as the share of each rank
    host_link_bytes_per_s: float  # the bandwidth between an accelerator and its host's memory, in one direction
    host_memory_bytes: float
    fitted: Fitted
    sources: tuple[str, ...]  # the sources of the numbers, one sentence each
    # The rate at which the CPUs of a host read and write its memory together during the optimizer steps of all its
    # ranks.
    host_memory_bytes_per_s: float = 160e9
    # The number of units of an accelerator that each compute tiles of a matrix product (streaming multiprocessors,
    # compute units). 0 if products are not cut into tiles.
    multiprocessors: int = 0
    collective_multiprocessors: int = 0  # how many of them a running collective uses
    # The shares of kernels like FlashAttention. If None, attention is as fast as other matrix products.
    attention: AttentionRates | None = None
    # The tables by size of a measured machine: see `cpu_speeds.py` and `gpu_speeds.py`.
    measured: Mapping[str, Any] = field(default_factory=dict)

    def with_hosts_of(self, ranks: int) -> Hardware:
        """Return the same machine with a different number of ranks per host."""
        return replace(self, ranks_per_host=ranks)


_MACHINES = files("fullshard.plan") / "machines"
_PARTS = {"link": Link, "network": Link, "fitted": Fitted, "attention": AttentionRates}


def known_hardware() -> list[str]:
    """Return the names of the descriptions in the package."""
    return sorted(path.name.removesuffix(".toml") for path in _MACHINES.iterdir() if path.name.endswith(".toml"))


def hardware_named_like(device_name: str, memory_bytes: float) -> Hardware | None:
    """Return the description of an accelerator with this name and about this much memory, or None."""
    for name in known_hardware():
        found = hardware(name)
        if name.split("-")[0].upper() in device_name.upper() and abs(found.memory_bytes / memory_bytes - 1) < 0.1:
            return found
    return None


def here_path() -> Path:
    """Return the path of the description of this machine, in the user's configuration folder. It may not exist."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "fullshard" / "here.toml"


def hardware(name: str) -> Hardware:
    """Return the description with this name, in the TOML file at this path, or of this machine if it is `here`.

    Raises:
        ConfigError: There is none, or the file is not a valid description.
    """
    return _made(_read(name, visited=()), name)


def described(stated: Mapping[str, Any], name: str = HERE) -> Hardware:
    """Return the machine for a description that is not in a file."""
    return _made(_with_base(dict(stated), (name,)), name)


def _made(found: dict[str, Any], name: str) -> Hardware:
    needed = (
        each_field.name
        for each_field in fields(Hardware)
        if each_field.default is MISSING and each_field.default_factory is MISSING
    )
    missing = [item for item in needed if item not in found]
    if missing:
        raise ConfigError(
            f"{name}: lacks {', '.join(missing)}. Add the missing values, or name similar hardware: like = "
            f'"{known_hardware()[0]}"'
        )
    if wrong := next(_wrong(found), None):
        raise ConfigError(f"{name}: {wrong}. docs/plan.md shows a description.")
    parts = {part: kind(**found[part]) for part, kind in _PARTS.items() if found.get(part) is not None}
    return Hardware(**{**found, **parts, "sources": tuple(found["sources"])})


def _wrong(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in a description."""
    if found["kind"] not in ("gpu", "cpu"):
        yield f'kind = "{found["kind"]}": unknown, take "gpu" or "cpu"'
    for part in (*_PARTS, "flops_per_s"):
        stated = found.get(part)
        if stated is not None and not isinstance(stated, Mapping):
            yield f"{part} = {stated}: is a table, so write [{part}] and its values below it"
        elif part in _PARTS and stated is not None:
            known = {each_field.name: each_field.default is MISSING for each_field in fields(_PARTS[part])}
            if unknown := stated.keys() - known.keys():
                yield f"[{part}] {min(unknown)}: unknown, a {part} has {', '.join(known)}"
            if missing := [item for item, needed in known.items() if needed and item not in stated]:
                yield f"[{part}] lacks {', '.join(missing)}"
    for text in ("name", "title", "sources"):
        listed = found[text] if text == "sources" and isinstance(found[text], list | tuple) else [found[text]]
        if not all(isinstance(item, str) for item in listed):
            yield f"{text} = {found[text]!r}: must be text"
    for figure, number in _figures(found):
        unit, least, most = _allowed(figure)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not (is_number and (least <= number <= most or (number == 0 and figure.endswith("ll_bytes_per_s")))) or (
            unit.startswith("a whole") and number != int(number)
        ):
            yield f"{figure} = {number!r}: must be {unit} from {least:g} to {most:g}"
    if missing := [dtype for dtype in ("float32", "bfloat16") if dtype not in found["flops_per_s"]]:
        yield f"[flops_per_s] lacks {', '.join(missing)}"
    parts, busy = found.get("multiprocessors", 0), found.get("collective_multiprocessors", 0)
    if parts and busy >= parts:
        yield f"collective_multiprocessors = {busy}: must be less than multiprocessors = {parts}"


def _allowed(figure: str) -> tuple[str, float, float]:
    """Return the kind of a number, such as a number of bytes, and its smallest and largest allowed values."""
    if figure.startswith("flops_per_s."):
        return "a number of FLOP/s", 1e6, 1e21
    return next(allowed for ending, allowed in _ALLOWED.items() if figure.endswith(ending))


_SHARE = "a share such as 0.6,", 1e-4, 10.0  # of an assumed peak, which can be exceeded
_ALLOWED = {
    "bytes_per_s": ("a number of bytes per second", 1e3, 1e18),
    "memory_bytes": ("a number of bytes", 1e6, 1e18),
    "ranks_per_host": ("a whole number of ranks", 1, 1e5),
    "multiprocessors": ("a whole number of units", 0, 1e5),
    "matmul_share": _SHARE,
    "memory_share": _SHARE,
    "forward": _SHARE,
    "backward": _SHARE,
    "_s": ("a number of seconds", 0.0, 10.0),
}
"""The kind of number and the minimum and maximum for names with each suffix."""


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if name in (*_PARTS, "flops_per_s") and isinstance(value, Mapping):
            yield from ((f"{name}.{figure}", number) for figure, number in value.items())
        elif name not in ("name", "kind", "title", "sources", "measured", *_PARTS):
            yield name, value


def _read(name: str, visited: tuple[str, ...]) -> dict[str, Any]:
    """Read a description, merged with the descriptions that its `like` names."""
    if name in visited:
        raise ConfigError(f"{name}: refers to itself by `like` ({' -> '.join((*visited, name))}). Remove one `like`.")
    if name in known_hardware():
        text = (_MACHINES / f"{name}.toml").read_text()
    elif name == HERE:
        if not here_path().exists():
            raise ConfigError(
                f"{name}: {here_path()} does not exist yet. Run `fullshard calibrate` to measure this machine, or "
                "choose other hardware, such as h100-80."
            )
        text = _text_of(here_path())
    elif name.endswith(".toml") and os.path.exists(name):  # `exists` returns False for a name that is too long
        text = _text_of(Path(name))
    else:
        raise ConfigError(
            f"{name}: is neither known hardware nor a file. Expected one of {', '.join(known_hardware())}, `here` for "
            "this machine, or the path of a TOML file."
        )
    try:
        stated = tomllib.loads(text)
        repr(stated)  # raises for a hexadecimal number that is too long for messages
    except UNPARSED as error:
        raise ConfigError(f"{name}: not valid TOML: {error}.") from error
    return _with_base(stated, (*visited, name))


def _text_of(path: Path) -> str:
    try:
        return read_text(path, limit=CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Pass a TOML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a TOML file: {error}.") from error


def _with_base(stated: dict[str, Any], visited: tuple[str, ...]) -> dict[str, Any]:
    """Return a description completed by the description that its `like` names."""
    base: dict[str, Any] = _read(str(like), visited) if (like := stated.pop("like", None)) else {}
    unknown = sorted(stated.keys() - {field.name for field in fields(Hardware)})
    if unknown:
        raise ConfigError(f"{visited[-1]}: {', '.join(unknown)}: unknown. docs/plan.md shows a description.")
    for key, value in stated.items():
        inherited = base.get(key)
        base[key] = {**inherited, **value} if isinstance(value, dict) and isinstance(inherited, dict) else value
    return base
