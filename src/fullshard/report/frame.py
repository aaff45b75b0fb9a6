"""Self-contained pages: style, theme and charts, and the format of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from fullshard.amounts import in_bytes
from fullshard.versions import versions


def framed(template: str, known: Mapping[str, Any], drawn: Mapping[str, Any]) -> str:
    """Render a page.

    Args:
        template: The name of a file in the assets that extends `frame.html`.
        known: The variables of the template, including those of `stamped`.
        drawn: The data of the charts as JSON values, by the names in `page.js`.
    """
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(_asset),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        coded=_coded, time=_time, size=_size, percent=_percent, rate=_rate, number=_number, many=_many
    )
    return environment.get_template(template).render(
        known,
        data=htmlsafe_json_dumps(drawn, allow_nan=False, separators=(",", ":")),
        style=_asset("page.css"),
        theme=_asset("theme.js"),
        script=_asset("page.js"),
        charts=_asset("echarts.min.js"),
    )


def stamped() -> dict[str, str]:
    """Return the current time and the version of this package."""
    return {
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "fullshard": versions()["fullshard"],
    }


def _asset(name: str) -> str:
    return files("fullshard.report").joinpath("assets", name).read_text(encoding="utf-8")


def _coded(text: str) -> Markup:
    """Return the text with everything between backticks as code."""
    pieces = escape(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if at % 2 else piece for at, piece in enumerate(pieces)
    )


_NONE = "\u2013"  # shown for a value that was not measured


def _time(seconds: float | None) -> str:
    """Format seconds with three digits and a unit, as in 41.2 ms."""
    if seconds is None:
        return _NONE
    size = abs(seconds)
    if size == 0:
        return "0"
    if size >= 120:
        return f"{seconds / 60:,.1f} min"
    if size >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def _size(nbytes: float | None) -> str:
    return _NONE if nbytes is None else in_bytes(nbytes)


def _percent(share: float | None) -> str:
    if share is None:
        return _NONE
    return "< 1\u00a0%" if 0 < share < 0.005 else f"{share * 100:.0f}\u00a0%"


def _rate(gb_s: float | None) -> str:
    return _NONE if gb_s is None else f"{_size(gb_s * 1e9)}/s"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
