# SPDX-License-Identifier: Apache-2.0
"""Write the params of each short name into the package: run after a change of the architectures."""

from __future__ import annotations

from fedplan.models.catalog import MANIFESTS, SHORT, skeleton
from fedplan.models.description import describe
from fedplan.models.schema import written

if __name__ == "__main__":
    for name in SHORT:
        (MANIFESTS / f"{name}.json").write_text(written(describe(skeleton(name))))
