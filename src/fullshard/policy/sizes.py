"""Parsing of sizes that users write."""

from __future__ import annotations

import re

from fullshard.errors import ConfigError

__all__ = ["parse_size"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str, name: str, of: str) -> int:
    """Return the size in bytes, given as a number or as a string such as "5GB".

    Args:
        size: The size.
        name: The name of the argument, for the error message.
        of: What has that size, for the error message.

    Raises:
        ConfigError: It is not a size, or it is less than 1.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]B)?\s*", str(size), re.IGNORECASE)
    try:
        nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(
            f"{name}={size!r} is not a size of {of}. Pass a number of bytes, or a string such as '500MB' or '5GB'."
        )
    return nbytes
