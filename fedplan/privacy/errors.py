# SPDX-License-Identifier: Apache-2.0
"""PrivacyError, and the import of modules of the optional extra `fedplan[privacy]`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedplan.errors import FedplanError

EXTRA = "fedplan[privacy]"
"""The pip requirement that installs cryptography and dp-accounting."""


class PrivacyError(FedplanError):
    """A setting, value or file breaks a privacy guarantee, or its cost cannot be accounted for."""

    code = "privacy"


def import_extra(module: str, purpose: str) -> Any:
    """Import and return an optional module, such as "dp_accounting.rdp".

    Raises a PrivacyError "`purpose` needs PACKAGE: pip install ..." if the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise PrivacyError(f"{purpose} needs {package}: pip install '{EXTRA}'") from error
