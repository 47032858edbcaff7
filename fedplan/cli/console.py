# SPDX-License-Identifier: Apache-2.0
"""The app that holds all commands, and what they share: options, registration, error messages."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from fedplan import __version__
from fedplan.errors import FedplanError

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A short name (vit-base-16), a folder, hub:org/name, or a manifest file (JSON)."
    ),
]
PlanArgument = Annotated[
    str, typer.Argument(help="A plan, in quotes: 'chain(share(), keep(head))'.")
]
StudyArgument = Annotated[Path, typer.Argument(help="A study file (TOML).")]
TaskOption = Annotated[
    str,
    typer.Option(help="Replace the head by that of this task: text-classification, causal-lm, ..."),
]
LabelsOption = Annotated[
    int, typer.Option(help="Number of labels of the head; 0: as in the model.", min=0)
]
DtypeOption = Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16, float16.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, one line for each event or status.")
]
SitesOption = Annotated[
    list[str] | None, typer.Option("--site", help="Name of a site; repeat for several.")
]


class Group(TyperGroup):
    """A command group that shows the help of arguments with every supported version of click.

    `attrs` are those of typer's group; use as `cls=` of a `typer.Typer`.
    """

    def __init__(self, **attrs: Any) -> None:
        # The standalone click package suggests similar commands itself; typer would repeat that.
        standalone_click = TyperGroup.__mro__[1].__module__.startswith("click.")
        attrs["suggest_commands"] = not standalone_click
        super().__init__(**attrs)
        # click 8.5 has its own `help` attribute of arguments, which hides that of older typers.
        # Newer typers bundle click, so this module must not import click itself.
        for each in (c for c in self.commands.values() if isinstance(c, TyperCommand)):
            hints = get_type_hints(unwrap(cast("Any", each.callback)), include_extras=True)
            for param in each.params:
                metadata = get_args(hints.get(param.name or ""))
                help_texts = [info.help for info in metadata if isinstance(info, ArgumentInfo)]
                if isinstance(param, TyperArgument) and help_texts:
                    param.help = help_texts[0]


app = typer.Typer(
    help="Federated fine-tuning of Transformers: plan which part each client trains and shares.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the `fedplan` command and exit with its status."""
    sys.exit(app())


def _print_version(requested: bool) -> None:
    """Print the version and exit, if --version was given."""
    if requested:
        print(f"fedplan {__version__}")
        raise typer.Exit


@app.callback()
def main_callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Federated fine-tuning of Transformers: plan which part each client trains and shares."""


def command_group(name: str, help_text: str) -> typer.Typer:
    """Add an empty group of commands to the app and return it; add commands by `command`."""
    group = typer.Typer(help=help_text, cls=Group, no_args_is_help=True)
    app.add_typer(group, name=name)
    return group


def command(
    group: typer.Typer, *examples: str, name: str = ""
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator that adds a function as a command of the app or a group, and returns it.

    The command is called `name`, by default the function's name without `_command` and with `-` for
    `_`. The help of the command ends in `examples`, each written as typed after `fedplan`.
    """
    title = "Example:" if len(examples) == 1 else "Examples:"
    epilog = "\n\n".join([title, *(f"fedplan {example}" for example in examples)])

    def add(function: CommandFunction) -> CommandFunction:
        own = cast("Any", function).__name__.removesuffix("_command").replace("_", "-")
        return group.command(name or own, epilog=epilog)(function)

    return add


def print_json(value: Any) -> None:
    """Print a value to stdout as one JSON document; NaN and infinite numbers become null."""
    typer.echo(json.dumps(replace_nonfinite(value), indent=1))


def print_lines(*lines: str) -> None:
    """Print lines to stdout as they are: not wrapped, and without markup."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    for line in lines:
        console.print(line, markup=False)


def print_result(value: Any, *lines: str, as_json: bool) -> None:
    """Print the lines, or with `as_json` the value as one JSON document."""
    if as_json:
        print_json(value)
    else:
        print_lines(*lines)


def replace_nonfinite(value: Any) -> Any:
    """Return a copy of a JSON-like value with None in place of NaN and infinite floats.

    In nested dicts and lists, keys become strings and tuples become lists.
    """
    if isinstance(value, Mapping):
        return {str(k): replace_nonfinite(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and not isfinite(value) else value


class _LossyFile(io.FileIO):
    """An open file whose output is dropped from the first error on, as when its reader is gone."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError:
            # The descriptor itself, which log handlers and workers also use.
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            return super().write(data)


@contextmanager
def outlive_viewer() -> Generator[None]:
    """Let the body go on without its output, if the reader of a pipe or the terminal is gone.

    Within the body stdout and stderr raise no error, and SIGHUP is ignored. Changes nothing for
    streams that are no open files, as in tests.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            try:
                stream.flush()
                raw = _LossyFile(stream.fileno(), "wb", closefd=False)
            except (OSError, AttributeError, ValueError):
                continue
            lossy = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True
            )
            stack.callback(setattr, sys, name, stream)
            stack.callback(lossy.flush)
            setattr(sys, name, lossy)
        if threading.current_thread() is threading.main_thread():
            stack.callback(
                signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)
            )
        yield


@contextmanager
def print_errors() -> Generator[None]:
    """Turn errors of the body into a red message on stderr and the exit status of the command.

    Raises typer.Exit with the error's `exit_code` for FedplanError, with 2 for OSError,
    RecursionError and MemoryError. BrokenPipeError and other errors pass through.
    """
    exit_code = FedplanError.exit_code
    try:
        yield
    except FedplanError as error:
        message, exit_code = str(error), error.exit_code
    except BrokenPipeError:
        raise  # the reader of a pipe has closed it: nobody would see a message
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror or error}"
    except RecursionError:
        message = "the input is nested too deep"
    except MemoryError:
        message = "there is not enough memory for this command"
    else:
        return
    Console(stderr=True, soft_wrap=True).print(f"fedplan: {message}", markup=False, style="red")
    raise typer.Exit(exit_code)
