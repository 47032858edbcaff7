# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by fedplan; each message names the thing, its value and the remedy."""

from __future__ import annotations

from typing import Self


class FedplanError(Exception):
    """Base class of all errors that fedplan raises on purpose.

    `code`: an error code of `federation.error_codes`. A site sends only the code to the server,
    because the message may quote training data.
    `exit_code`: exit status of a command that fails with this error: 2 for a mistake of the user,
    1 for a failed check.
    """

    code = "fault"
    exit_code = 2

    def with_code(self, code: str) -> Self:
        """Set the error code of this instance, and return the instance."""
        self.code = code
        return self


class TextError(FedplanError):
    """A text that cannot be parsed or used.

    `position` is the offset of the error in `source`; if it is not None, the message ends with the
    source line and a caret under that character.
    """

    def __init__(self, message: str, *, source: str = "", position: int | None = None) -> None:
        self.message, self.source, self.position = message, source, position
        super().__init__(message if position is None else f"{message}\n{self._pointer()}")

    def _pointer(self) -> str:
        """Return the source line at `position`, cut to 76 characters, and a line with a caret."""
        position = self.position or 0
        start = self.source.rfind("\n", 0, position) + 1
        end = self.source.find("\n", position)
        line = self.source[start : end if end >= 0 else len(self.source)]
        column = position - start
        if column > 60:
            line, column = "..." + line[column - 40 :], 43
        return f"  {line[:76].replace(chr(9), ' ')}\n  {' ' * column}^"


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
