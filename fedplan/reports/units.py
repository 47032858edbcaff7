# SPDX-License-Identifier: Apache-2.0
"""Units: numbers as a person reads them."""

from __future__ import annotations


def millions(count: int) -> str:
    """A count in short: 85.8 M, 12.4 k, 512."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def megabytes(count: int) -> str:
    """Bytes in MB of a million, with no more digits than one reads."""
    return f"{count / 1e6:,.1f}" if count >= 10**5 else f"{count / 1e6:.3f}"


BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def byte_unit(most: float) -> tuple[float, str]:
    """What bytes are counted in where the most of them is so many."""
    return next((each for each in BYTES if most >= each[0]), (1.0, "bytes"))


def percent(share: float) -> str:
    """A share as 12.3 %."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """A time as 4 s, 12 min, 3 h 5 min or 2 d 4 h."""
    for size, word, less, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            whole, left = divmod(int(seconds), size)
            return f"{whole} {word} {left // less} {rest}"
    if seconds >= 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
