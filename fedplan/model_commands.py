# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a model, a plan and a method before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Dtype, Json, Labels, Model, PlanText, Task, print_json, told
from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.models.catalog import params_of
from fedplan.models.schema import written
from fedplan.reports.asked import asked
from fedplan.reports.explanation import parts_table
from fedplan.reports.memory import Load


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


def explain(
    context: typer.Context,
    model: Model,
    plan: PlanText = "",
    rounds: Annotated[int, typer.Option(help="How long the run is.", min=1)] = 100,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="When a phase is announced: frozen=20 is after round 20."),
    ] = None,
    task: Task = "",
    labels: Labels = 0,
    dtype: Dtype = "float32",
    method: Annotated[str, typer.Option(help="A published method instead of a plan.")] = "",
    setting: Annotated[
        list[str] | None, typer.Option(help="A setting of the method: with_head=false.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows a step: says the memory of a turn.", min=0)] = 0,
    length: Annotated[int, typer.Option(help="Tokens a row.", min=1)] = Load.length,
    optimiser: Annotated[str, typer.Option(help="adamw, sgd, momentum, ...")] = Load.optimiser,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Keep less.")] = False,
    quantised: Annotated[str, typer.Option(help="nf4, fp4 or int8: how blocks are held.")] = "",
    as_json: Json = False,
) -> None:
    """Say what a plan will do with a model, or a study with its own, before anything runs."""
    if model.endswith(".toml") and not plan:
        with told():
            if said := _flags(context):
                raise FedplanError(f"{model} is a study, and says it all: leave out {said[0]}")
        return _explain_study(Path(model), as_json=as_json)
    with told():
        if not batch and (checkpointing or quantised or optimiser != Load.optimiser):
            raise FedplanError("the memory of a turn is said of a batch: give --batch")
        explanation = asked(
            model,
            plan,
            method=method,
            settings=setting or (),
            rounds=rounds,
            phases=phase or (),
            task=task,
            labels=labels,
            dtype=dtype,
            load=Load(batch, length, optimiser, checkpointing, quantised) if batch else None,
        )
    if as_json:
        print_json(explanation.json())
    else:
        Console().print(explanation)


def _flags(context: typer.Context) -> list[str]:
    """The options that were typed, but for how the answer is to look."""
    sources = {
        each: context.get_parameter_source(each.name or "") for each in context.command.params
    }
    typed = [each for each, source in sources.items() if source and source.name == "COMMANDLINE"]
    return [each.opts[0] for each in typed if each.name not in ("model", "as_json")]


def _explain_study(file: Path, *, as_json: bool) -> None:
    from fedplan.reports.preview import foretold

    with told():
        explanation, statement = foretold(file)
        if as_json:
            privacy = statement.json() if statement else None
            return print_json({**explanation.json(), "privacy": privacy})
        Console().print(explanation)
        if statement is not None:
            Console(soft_wrap=True, highlight=False).print("\n" + statement.text(), markup=False)


def propose(
    model: Annotated[str, typer.Argument(help="A model type (granite), a folder or a hub id.")],
    as_json: Json = False,
) -> None:
    """Propose an anatomy for a model type that has none, and judge it by behaviour."""
    from fedplan.models.behaviour.proposal import propose as proposed
    from fedplan.models.behaviour.proposal import report, small_copy

    with told():
        proposal = proposed(small_copy(model))
    if as_json:
        print_json({"name": proposal.name, "anatomy": proposal.said, "faults": proposal.faults})
    else:
        for line in report(proposal):
            Console(soft_wrap=True, highlight=False).print(line, markup=False)
    raise typer.Exit(1 if proposal.faults else 0)


def draw(
    model: Model,
    plan: PlanText,
    output: Annotated[Path, typer.Argument(help="A .svg, .png or .pdf file.")],
    task: Task = "",
    labels: Labels = 0,
    as_json: Json = False,
) -> None:
    """Draw the parts of a model, coloured by their roles."""
    from fedplan.reports.figure import Figure
    from fedplan.reports.figure import draw as drawn

    with told():
        params = params_of(model, task=task, labels=labels)
        drawn([Figure(model, params, parse(plan))], output)
    if as_json:
        print_json({"file": str(output)})


def methods(
    name: Annotated[str, typer.Argument(help="One method, to be said in full.")] = "",
    as_json: Json = False,
) -> None:
    """List the methods that a study can name, each with its origin and its plan; or say one."""
    from fedplan.methods.registry import METHOD_NAMES, list_methods
    from fedplan.methods.sheets import sheet_of

    console = Console(soft_wrap=True, highlight=False)
    with told():
        if as_json:
            found = [sheet_of(each).json() for each in ([name] if name else METHOD_NAMES.names())]
            return print_json(found[0] if name else found)
        for first, *more in [sheet_of(name).lines] if name else list_methods():
            console.print(first, style="bold", markup=False)
            for line in more:
                console.print(line, markup=False)
