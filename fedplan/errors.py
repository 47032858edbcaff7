# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by fedplan, and the import of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Self


class FedplanError(Exception):
    """Base class of all errors that fedplan raises on purpose.

    `code` is an error code of `federation.ledger.faults`: a site sends only the code to the server,
    because the message may quote training data. `exit_code` is the exit status of a command that
    fails with this error: 2 for a mistake of the user, 1 for a failed check.
    """

    code = "internal"
    exit_code = 2

    def with_code(self, code: str) -> Self:
        """Set the error code of this instance, and return the instance."""
        self.code = code
        return self


class TextError(FedplanError):
    """A text that cannot be parsed or used, such as a plan.

    If `position` (an offset in the text `source`) is not None, two lines follow the message: the
    source line, cut to 76 characters, and a caret under the character. The attributes `message`,
    `source` and `position` are the arguments, unchanged.
    """

    def __init__(self, message: str, *, source: str = "", position: int | None = None) -> None:
        self.message, self.source, self.position = message, source, position
        if position is not None:
            start, end = source.rfind("\n", 0, position) + 1, source.find("\n", position)
            line, column = source[start : end if end >= 0 else len(source)], position - start
            if column > 60:
                line, column = "..." + line[column - 40 :], 43
            message += f"\n  {line[:76].replace(chr(9), ' ')}\n  {' ' * column}^"
        super().__init__(message)


class PlanError(TextError):
    """A plan that cannot be parsed, or cannot be applied to the model or the turn."""

    code = "plan"


class UnknownArchitecture(PlanError):
    """A plan names parts of a model without a layer map, or with a wrong one."""


class UnknownAdapter(FedplanError):
    """A peft adapter type that fedplan does not support, or an adapter that is not active."""

    code = "model"


class UnknownModel(FedplanError):
    """A model name that is neither a folder, nor a Hub id, nor a short name of fedplan."""

    code = "model"


class StoreError(FedplanError):
    """A checkpoint that cannot be written, or a folder without a readable checkpoint."""

    code = "disk"


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
