# SPDX-License-Identifier: Apache-2.0
"""Write the params of each short name into the package: run after a change of the architectures."""

from __future__ import annotations

from fedplan.models.catalog import MANIFEST_FOLDER, SHORT_NAMES, manifest_json, meta_model
from fedplan.models.description import describe

if __name__ == "__main__":
    for name in SHORT_NAMES:
        (MANIFEST_FOLDER / f"{name}.json").write_text(manifest_json(describe(meta_model(name))))
