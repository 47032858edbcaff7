# SPDX-License-Identifier: Apache-2.0
"""The console: options that several commands take, and errors as messages for a person."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from fedplan.errors import FedplanError

Model = Annotated[
    str, typer.Argument(help="A short name (vit-base-16), a folder, hub:org/name, or a manifest.")
]
PlanText = Annotated[str, typer.Argument(help="A plan, in quotes: 'chain(share(), keep(head))'.")]
Task = Annotated[str, typer.Option(help="Another head: text-classification, causal-lm, ...")]
Labels = Annotated[int, typer.Option(help="How many labels the head has.", min=0)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")]
Sites = Annotated[list[str] | None, typer.Option("--site", help="The name of a site; repeat it.")]


@contextmanager
def told() -> Generator[None]:
    """An error of ours, or of the files that were named, is a message for a person, not a trace."""
    try:
        yield
    except FedplanError as error:
        words = str(error)
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
    raise typer.Exit(2)
