# SPDX-License-Identifier: Apache-2.0
"""Write digits.npz: 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1500], order[1500:]
    file = Path(__file__).parent / "digits.npz"
    np.savez(
        file,
        image_train=images[train],
        digit_train=digits.target[train],
        image_test=images[test],
        digit_test=digits.target[test],
    )
    print(f"Written: {file}")


if __name__ == "__main__":
    main()
