"""The types and sizes of the lines in a rank's file, which is untrusted input.

Lines that do not match are considered damaged. Readers rely on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fullshard.device.streams import STREAMS
from fullshard.disk.pace import Moved
from fullshard.report.run import COUNTERS, PARTS
from fullshard.report.steps import UnitCounts

_Check = Callable[[Any], bool]

_MOST = 1 << 62  # fits an int64, also when two are added
_MOST_RANKS = 1 << 20
_MOST_DIMS = 64
_TIERS = {"device", "cpu", "disk"}


def is_valid_line(line: Any) -> bool:
    """Return True if `line`, a JSON value, has the types and sizes of its kind. Lines of unknown kinds are valid."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    return _LINES.get(line["kind"], _is_any)(line)


def _is_any(value: Any) -> bool:
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any, least: int = 0, most: int = _MOST) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST <= value <= _MOST


def _is_finite(value: Any) -> bool:
    return _is_number(value) or (type(value) is float and math.isfinite(value))


def _maybe(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list(check: _Check, length: int | None = None) -> _Check:
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(check, value))


def _row(*checks: _Check) -> _Check:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _table(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _fields(needed: Mapping[str, _Check], optional: Mapping[str, _Check] | None = None, *, closed: bool) -> _Check:
    """Return a check for a dict with all `needed` keys. If `closed`, only these and `optional` keys are allowed."""
    known = {**needed, **(optional or {})}

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and needed.keys() <= value.keys()
            and (not closed or value.keys() <= known.keys())
            and all(check(value[name]) for name, check in known.items() if name in value)
        )

    return fits


_RANK = _fields(
    {"rank": _is_count, "host": _is_text, "device": _is_text, "cores": _is_count}, {"threads": _is_count}, closed=True
)
_START = _fields(
    {
        "rank": _RANK,
        "world": lambda value: _is_count(value, 1, _MOST_RANKS),
        "first_step": _is_count,
        "facts": _table(_is_text),
        "name": _is_text,
        "strategy": _is_text,
        "settings": _table(_is_text),
        "link_bytes_per_s": _maybe(_is_number),
        "limit": _maybe(_is_count),
    },
    closed=False,
)
_UNIT = _fields(
    {"fqn": _is_text, "nbytes": _is_count, "trains": _is_flag},
    {"param_dtype": _is_text, "reduce_dtype": _is_text},
    closed=True,
)
_SHARD = _fields(
    {
        "fqn": _is_text,
        "unit": _is_text,
        "shape": lambda value: _list(_is_count)(value) and len(value) <= _MOST_DIMS and math.prod(value) <= _MOST,
        "dtype": _is_text,
        "dim": _maybe(_is_count),
        "world": lambda value: _is_count(value, 1, _MOST_RANKS),
        "packed": _is_flag,
        "padding": _is_count,
    },
    closed=False,
)
_MODEL = _fields(
    {},
    {"units": _list(_UNIT), "shards": _list(_SHARD), "output_nbytes": _is_count, "offload": _list(_is_text)},
    closed=False,
)
_HELD = _fields({"nbytes": _is_count, "state": _is_text, "what": _is_text}, closed=True)
_PAIR = _list(_is_number, 2)


def _is_start(line: Any) -> bool:
    return _START(line) and bool(line["rank"]["rank"] < line["world"])


def _is_model(line: Any) -> bool:
    shards = line.get("shards", [])
    return (
        _MODEL(line)
        and sum(shard["world"] for shard in shards) <= 16 * _MOST_RANKS
        and all(shard["dim"] is None or shard["dim"] < len(shard["shape"]) for shard in shards)
    )


def _is_units(line: Any) -> bool:
    fits = _fields(
        {"steps": lambda value: _is_count(value, 1)},
        {
            "best_bytes_per_s": _is_number,
            "reports_input": _is_flag,
            "v": _table(_list(_is_number, len(UnitCounts.__slots__))),
            "waits": _table(_PAIR),
            "disks": _table(_list(_is_number, 1 + len(Moved.__dataclass_fields__))),
            "stored": _table(_table(_is_count)),
            "transferred": _list(_row(_is_tier, _is_text, _is_number, _is_number)),
        },
        closed=False,
    )
    return fits(line) and (not line.get("stored") or line["stored"].keys() == _TIERS)


def _is_tier(value: Any) -> bool:
    return _is_text(value) and value in _TIERS


def _is_spans(line: Any) -> bool:
    fits = _fields(
        {"n": _is_count, "names": _list(_is_text), "units": _list(_is_text), "v": _list(_is_any)}, closed=False
    )
    if not fits(line):
        return False
    sizes = (len(STREAMS), len(line["names"]), len(line["units"]))
    indices = [partial(_is_count, most=size - 1) for size in sizes]
    return _list(_row(*indices, _is_number, _is_number))(line["v"])


def _is_memory(line: Any) -> bool:
    moments = line.get("at_s")
    if not _list(_is_number)(moments) or not moments:
        return False
    counts = _list(_is_count, len(moments))
    return _fields(
        {
            "labels": _list(_is_text, len(moments)),
            "by_state": lambda value: bool(value) and _table(counts)(value),
            "peak": lambda value: _is_count(value, 0, len(moments) - 1),
            "largest": _list(_HELD),
            "predicted": _maybe(counts),
        },
        {"questions": _table(_PAIR)},
        closed=False,
    )(line)


_OPERATION = _row(_is_text, _is_text, _is_text, _is_text, _is_text, _is_count, _is_number)


_LINES: Mapping[str, _Check] = {
    "start": _is_start,
    "model": _is_model,
    "step": _fields(
        {
            "n": _is_count,
            "p": _list(_is_number, len(PARTS)),
            "b": _is_number,
            "s": _maybe(_is_number),
            "h": _is_count,
            "w": _is_number,
        },
        closed=False,
    ),
    "told": _fields({"n": _is_count, "v": _table(_maybe(_is_finite))}, closed=False),
    "counters": _fields({"n": _is_count, "v": _list(_maybe(_is_number), len(COUNTERS))}, closed=False),
    "units": _is_units,
    "spans": _is_spans,
    "memory": _is_memory,
    "operations": _fields({"n": _is_count, "v": _list(_OPERATION)}, closed=False),
    "what_ifs": _fields(
        {
            "v": _list(
                _fields(
                    {"change": _is_text, "step_s": _is_number, "gain_s": _is_number, "command": _is_text}, closed=True
                )
            )
        },
        closed=False,
    ),
    "out_of_memory": _fields(
        {
            "kind": _is_text,
            "rank": _is_count,
            "requested_bytes": _maybe(_is_count),
            "where": _is_text,
            "used_bytes": _is_count,
            "limit_bytes": _is_count,
            "by_state": _table(_is_count),
            "largest": _list(_HELD),
            "would_fit": _list(_is_text),
        },
        closed=True,
    ),
}
