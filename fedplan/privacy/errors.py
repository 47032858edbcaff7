# SPDX-License-Identifier: Apache-2.0
"""The error of privacy, and the extra that some of it takes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedplan.errors import FedplanError

EXTRA = "fedplan[privacy]"


class PrivacyError(FedplanError):
    """What would break a promise of privacy, or cannot be accounted for."""

    code = "privacy"


def needed(module: str, purpose: str) -> Any:
    """A module of the extra, or an error that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise PrivacyError(f"{purpose} takes {package}: pip install '{EXTRA}'") from error
