# SPDX-License-Identifier: Apache-2.0
"""Format counts, bytes, shares and durations for people."""

from __future__ import annotations


def millions(count: int) -> str:
    """Return a count in short, with three digits: 85.8 M, 12.4 k, 512."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def megabytes(count: int) -> str:
    """Return bytes in MB (10^6), without the unit: 1,234.5, or 0.012 below 0.1."""
    return f"{count / 1e6:,.1f}" if count >= 10**5 else f"{count / 1e6:.3f}"


BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Units of bytes, largest first."""


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the unit for numbers of bytes up to `largest`: its size in bytes, and its name."""
    return next((unit for unit in BYTE_UNITS if largest >= unit[0]), (1.0, "bytes"))


def percent(share: float) -> str:
    """Return a share of 1 in percent: 12.3 %."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return seconds in short: 4.0 s, 12 s, 12 min, 3 h 5 min or 2 d 4 h."""
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            count, left = divmod(int(seconds), size)
            return f"{count} {name} {left // smaller} {smaller_name}"
    if seconds >= 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
