# SPDX-License-Identifier: Apache-2.0
"""The errors that fedplan raises on purpose: each names the thing, the value and the remedy."""

from __future__ import annotations

from typing import Self


class FedplanError(Exception):
    """Every error that fedplan raises on purpose.

    Its text may tell of rows. `code` is one of `codes.py`: all of it that may leave a site. A
    command ends in `exit`: 2, or 1 for what is a finding and no mistake of who asked.
    """

    code = "fault"
    exit = 2

    def coded(self, code: str) -> Self:
        """The same error with a code of its own."""
        self.code = code
        return self


class TextError(FedplanError):
    """What cannot be read or does not fit; `position` is the offset in `source`, if it was text."""

    def __init__(self, message: str, *, source: str = "", position: int | None = None) -> None:
        self.message, self.source, self.position = message, source, position
        super().__init__(message if position is None else f"{message}\n{self._pointer()}")

    def _pointer(self) -> str:
        """The line of the source in question, with a caret under the character."""
        position = self.position or 0
        start = self.source.rfind("\n", 0, position) + 1
        end = self.source.find("\n", position)
        line = self.source[start : end if end >= 0 else len(self.source)]
        column = position - start
        if column > 60:
            line, column = "..." + line[column - 40 :], 43
        return f"  {line[:76].replace(chr(9), ' ')}\n  {' ' * column}^"


class PlanError(TextError):
    """A plan that cannot be read, or does not fit the model or the turn."""

    code = "plan"


class UnknownArchitecture(PlanError):
    """A plan that speaks of parts which no anatomy of the model tells, or one that is wrong."""


class UnknownAdapter(FedplanError):
    """An adapter of peft that is not checked, or not in use. The message says what is."""

    code = "model"


class UnknownModel(FedplanError):
    """A model name that is neither a folder, nor a hub id, nor a short name."""

    code = "model"


class StoreError(FedplanError):
    """A generation that cannot be written, or a folder without one that can be read."""

    code = "disk"
