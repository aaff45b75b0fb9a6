"""Sizes as users write them."""

from __future__ import annotations

import re

from fullshard.errors import ConfigError

__all__ = ["parse_size"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str, name: str, of: str) -> int:
    """Bytes, of a number or of words such as "5GB".

    Args:
        size: the words.
        name: of the argument, for a message.
        of: what has that size, likewise.

    Raises:
        ConfigError: it is neither, or below 1.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]B)?\s*", str(size), re.IGNORECASE)
    try:
        nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"{name}={size!r} is no size of {of}. Pass bytes, or words such as '500MB' or '5GB'.")
    return nbytes
