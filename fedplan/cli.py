# SPDX-License-Identifier: Apache-2.0
"""The command line: what a person asks of fedplan, each a short function."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.catalog import params_of
from fedplan.errors import FedplanError
from fedplan.explanation import explain as explained
from fedplan.explanation import parts_table
from fedplan.manifest import written
from fedplan.text import parse

app = typer.Typer(
    help="Say which part of a Transformer each client trains, shares and keeps, round by round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="A short name (vit-base-16), a folder, a hub id, or a manifest.")
]
PlanText = Annotated[str, typer.Argument(help="A plan, in quotes: 'chain(share(), keep(head))'.")]
Task = Annotated[str, typer.Option(help="Another head: text-classification, causal-lm, ...")]
Labels = Annotated[int, typer.Option(help="How many labels the head has.", min=0)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")]


@contextmanager
def told() -> Generator[None]:
    """An error of ours is a message for a person, not a trace."""
    try:
        yield
    except FedplanError as error:
        Console(stderr=True, soft_wrap=True).print(f"fedplan: {error}", markup=False, style="red")
        raise typer.Exit(2) from None


@app.command()
def parts(
    model: Model,
    task: Task = "",
    labels: Labels = 0,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """List the parts of a model: kinds, blocks and stacks, with their sizes."""
    with told():
        params = params_of(model, task=task, labels=labels, dtype=dtype)
    if as_json:
        print(written(params), end="")
    else:
        Console().print(parts_table(params))


@app.command()
def explain(
    model: Model,
    plan: PlanText,
    rounds: Annotated[int, typer.Option(help="How long the run is.", min=1)] = 100,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="When a phase is announced: frozen=20 is after round 20."),
    ] = None,
    task: Task = "",
    labels: Labels = 0,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Say what a plan will do with a model, before anything runs."""
    with told():
        said = parse(plan)
        phases = dict(map(_announced, phase or ()))
        params = params_of(model, task=task, labels=labels, dtype=dtype)
        explanation = explained(said, params, rounds=rounds, phases=phases)
    if as_json:
        print(json.dumps(explanation.json(), indent=1))
    else:
        Console().print(explanation)


@app.command()
def run(
    study: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: train.rounds=5.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the run is kept.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run.")] = False,
) -> None:
    """Run a study on this machine. Stop it at any moment: --resume goes on with the same bits."""
    from fedplan.progress import follow

    with told():
        follow(study, change or [], output, resume=resume)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Re-check a run: nothing frozen moved, nothing private left, the bytes are those explained."""
    from fedplan.audit import verify_run

    with told():
        faults, checked = verify_run(folder)
    for fault in faults[:20]:
        Console(stderr=True).print(fault, style="red", markup=False)
    if faults:
        raise typer.Exit(1)
    Console().print(checked, markup=False)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    output: Annotated[Path, typer.Argument(help="The folder to write, empty or new.")],
    client: Annotated[str, typer.Option(help="Whose model; without it, the world's.")] = "",
) -> None:
    """Write a model of a run as a folder that loads and predicts: safetensors and JSON."""
    from fedplan.export import export_run

    with told():
        how = export_run(folder, output, client)
    Console(soft_wrap=True).print(f"Written. Load it: {how}", markup=False, highlight=False)


@app.command()
def methods() -> None:
    """List the published methods, each with its plan."""
    from fedplan.methods import METHODS, method

    for name, make in METHODS.items():
        what = (make.__doc__ or "").splitlines()[0]
        Console().print(
            f"[bold]{name}[/bold]  {what}\n    {method(name).plan.text}", highlight=False
        )


@app.command()
def draw(
    model: Model,
    plan: PlanText,
    output: Annotated[Path, typer.Argument(help="A .svg, .png or .pdf file.")],
    task: Task = "",
    labels: Labels = 0,
) -> None:
    """Draw the parts of a model, coloured by their roles."""
    from fedplan.pictures import Picture
    from fedplan.pictures import draw as drawn

    with told():
        params = params_of(model, task=task, labels=labels)
        drawn([Picture(model, params, parse(plan))], output)


def _announced(text: str) -> tuple[str, int]:
    name, _, after = text.partition("=")
    if not name or not after.isdecimal():
        raise FedplanError(f"--phase takes NAME=ROUND, as in frozen=20, not {text!r}")
    return name, int(after)


def main() -> None:
    """The entry point of the `fedplan` command."""
    sys.exit(app())
