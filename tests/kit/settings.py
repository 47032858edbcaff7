# SPDX-License-Identifier: Apache-2.0
"""Settings: what methods are told so that models of two blocks and runs of two rounds show them."""

from __future__ import annotations

from typing import Any

PROMPTED = ("pfeddc", "promptfl", "local-prompts", "pfeddc-held")
"""Methods for models of pictures and texts."""
SETTINGS: dict[str, dict[str, Any]] = {
    "fedpart": {"depth": 2},
    "fedbabu": {"rounds": 1},
    "fedfrozen": {"warmup": 1},
    "safl": {"k": 1},
    "safl-frozen": {"k": 1, "warmup": 1},
    "fedper-safl": {"k": 1},
    "safl-lora": {"k": 1, "rank": 2},
    "feddpa": {"rank": 2, "own_rank": 2},
    "pfeddc-held": {"warmup": 1},
}
