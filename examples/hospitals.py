# SPDX-License-Identifier: Apache-2.0
"""Write data/north.npz, south.npz and east.npz: three sites that see different digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

MIX = {"north": (0, 1, 2, 3), "south": (3, 4, 5, 6), "east": (6, 7, 8, 9)}


def main() -> None:
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    Path("data").mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for site, usual in MIX.items():
        # Nine in ten are of the digits that the site usually sees.
        odds = np.where(np.isin(digits.target, usual), 9 / 4, 1 / 6)
        rows = draw.choice(len(images), 400, replace=False, p=odds / odds.sum())
        np.savez(f"data/{site}.npz", image=images[rows], digit=digits.target[rows])


if __name__ == "__main__":
    main()
