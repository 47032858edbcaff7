# SPDX-License-Identifier: Apache-2.0
"""A handler of worker processes that answers who it is."""

from __future__ import annotations

import os
from typing import Any


class Echo:
    """Replies to every message with its process."""

    def reply(self, message: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        return tensors, {"pid": os.getpid(), "message": message}
