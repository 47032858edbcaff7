# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by fedplan, texts of others in them, and imports of optional packages."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self


def first_line(error: Exception) -> str:
    """Return the first line of an error of other code, at most 300 characters; else its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def printable(text: str) -> str:
    """Return a text of others with U+FFFD for each character that is not printable.

    Line breaks would forge lines of a log, escape sequences would control a terminal, and XML
    forbids some characters.
    """
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


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
    source line, cut to 76 characters and made printable, and a caret under the character. The
    attributes `message`, `source` and `position` are the arguments, unchanged.
    """

    def __init__(self, message: str, *, source: str = "", position: int | None = None) -> None:
        self.message, self.source, self.position = message, source, position
        if position is not None:
            start, end = source.rfind("\n", 0, position) + 1, source.find("\n", position)
            line, column = source[start : end if end >= 0 else len(source)], position - start
            if column > 60:
                line, column = "..." + line[column - 40 :], 43
            line = printable(line[:76].replace("\t", " "))
            message += f"\n  {line}\n  {' ' * column}^"
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


class PrivacyError(FedplanError):
    """A setting, value or file breaks a privacy guarantee, or its cost cannot be accounted for."""

    code = "privacy"


class MissingExtra(FedplanError):
    """A package of an extra is not installed; the message has the pip command."""

    code = "settings"


EXTRAS = {
    "accelerate": "trainer",
    "bitsandbytes": "quantized",
    "cryptography": "privacy",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "mlflow": "mlflow",
    "peft": "lora",
    "ray": "ray",
    "rouge_score": "text",
    "sacrebleu": "text",
    "seqeval": "tokens",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""The extra of fedplan that installs a package, by the package's module."""


def require_extra(package: str, purpose: str) -> None:
    """Raise MissingExtra if a package of EXTRAS is not installed, and do not import it.

    The message is "`purpose` needs PACKAGE, which is not installed: pip install ...".
    """
    if find_spec(package) is None:
        raise MissingExtra(
            f"{purpose} needs {package.replace('_', '-')}, which is not installed: "
            f"pip install 'fedplan[{EXTRAS[package]}]'"
        )


@contextmanager
def needs_extra(purpose: str) -> Generator[None]:
    """Context manager of imports: a missing package of EXTRAS raises MissingExtra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            require_extra(package, purpose)
        raise


def import_extra(module: str, purpose: str) -> Any:
    """Import and return an optional module, as "dp_accounting.rdp"; errors as `needs_extra`."""
    with needs_extra(purpose):
        return import_module(module)
