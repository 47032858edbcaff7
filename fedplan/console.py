# SPDX-License-Identifier: Apache-2.0
"""The console: options that several commands take, how commands are added, errors as messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from math import isfinite
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from fedplan.errors import FedplanError

Asked = TypeVar("Asked", bound=Callable[..., Any])

Model = Annotated[
    str, typer.Argument(help="A short name (vit-base-16), a folder, hub:org/name, or a manifest.")
]
PlanText = Annotated[str, typer.Argument(help="A plan, in quotes: 'chain(share(), keep(head))'.")]
Task = Annotated[str, typer.Option(help="Another head: text-classification, causal-lm, ...")]
Labels = Annotated[int, typer.Option(help="How many labels the head has.", min=0)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print JSON: a line for each thing that happens.")
]
Sites = Annotated[list[str] | None, typer.Option("--site", help="The name of a site; repeat it.")]


class Group(TyperGroup):
    """Commands whose arguments show their help.

    click 8.5 has a help of its own for arguments, and a typer that stands on it loses its own by
    that: so it is put back here, from where the command says it. A newer typer brings a click
    along, and nothing here may import the other one.
    """

    def __init__(self, **attrs: Any) -> None:
        # Where click stands by itself, it suggests commands too, and would say so twice.
        alone = TyperGroup.__mro__[1].__module__.startswith("click.")
        attrs["suggest_commands"] = not alone
        super().__init__(**attrs)
        for each in self.commands.values():
            if isinstance(each, TyperCommand):
                _put_back(each)


def _put_back(command: TyperCommand) -> None:
    hints = get_type_hints(unwrap(cast("Any", command.callback)), include_extras=True)
    for param in command.params:
        said = get_args(hints.get(param.name or ""))
        found = [each.help for each in said if isinstance(each, ArgumentInfo)]
        if isinstance(param, TyperArgument) and found:
            param.help = found[0]


def group(about: str) -> typer.Typer:
    """A group of commands, to be filled by `command`."""
    return typer.Typer(help=about, cls=Group, no_args_is_help=True)


def command(app: typer.Typer, *examples: str) -> Callable[[Asked], Asked]:
    """Add a command to an app; its help ends in examples, which are typed after `fedplan`."""
    first = "Example:" if len(examples) == 1 else "Examples:"
    return app.command(epilog="\n\n".join([first, *(f"fedplan {each}" for each in examples)]))


def print_json(value: Any) -> None:
    """Print one JSON document; a number that is none is null."""
    typer.echo(json.dumps(finite(value), indent=1))


def finite(value: Any) -> Any:
    """Plain values as JSON has them: without numbers that are none."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and not isfinite(value) else value


@contextmanager
def told() -> Generator[None]:
    """An error of ours, or of the files that were named, is a message for a person, not a trace."""
    code = FedplanError.exit
    try:
        yield
    except FedplanError as error:
        words, code = str(error), error.exit
    except BrokenPipeError:
        raise  # who reads has gone: there is nobody to tell
    except OSError as error:
        words = f"{error.filename or 'a file'}: {error.strerror or error}"
    except RecursionError:
        words = "what was read is nested too deep"
    except MemoryError:
        words = "there is not enough memory for what was asked"
    else:
        return
    Console(stderr=True, soft_wrap=True).print(f"fedplan: {words}", markup=False, style="red")
    raise typer.Exit(code)
