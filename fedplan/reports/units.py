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


def percent(share: float) -> str:
    """A share as 12.3 %."""
    return f"{100 * share:.1f} %"
