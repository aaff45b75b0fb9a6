"""Text for numbers with units."""


def in_bytes(nbytes: float) -> str:
    """Format a number of bytes with three digits and a decimal unit, such as 21.3 MB."""
    if abs(nbytes) < 999.5:
        return f"{nbytes:.0f} B"
    power = next(power for power in (1, 2, 3, 4) if abs(nbytes) < 999.5 * 1000**power or power == 4)
    return f"{nbytes / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
