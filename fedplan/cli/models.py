# SPDX-License-Identifier: Apache-2.0
"""Commands about a model, a plan or a method: parts, explain, propose, draw and methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.cli.console import (
    DtypeOption,
    JsonOption,
    LabelsOption,
    ModelArgument,
    PlanArgument,
    TaskOption,
    app,
    command,
    print_errors,
    print_json,
    print_lines,
    print_result,
)
from fedplan.errors import FedplanError
from fedplan.reports.memory import TrainingStep


@command(app, "parts vit-base-16")
def parts_command(
    model: ModelArgument,
    task: TaskOption = "",
    labels: LabelsOption = 0,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """List the parts of a model: kinds of layers, blocks and stacks, with their sizes."""
    from fedplan.models.catalog import manifest_json, params_of
    from fedplan.reports.explanation import parts_table

    with print_errors():
        params = params_of(model, task=task, labels=labels, dtype=dtype)
    if as_json:
        print(manifest_json(params), end="")
    else:
        Console().print(parts_table(params))


@command(
    app,
    "explain vit-base-16 'chain(share(), keep(head))'",
    "explain bert-base --method fedfrozen --setting warmup=5",
    "explain study.toml",
)
def explain_command(
    context: typer.Context,
    model: ModelArgument,
    plan: PlanArgument = "",
    rounds: Annotated[int, typer.Option(help="Number of rounds of the run.", min=1)] = 100,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="Start of a phase: frozen=20 means after round 20; repeatable."),
    ] = None,
    task: TaskOption = "",
    labels: LabelsOption = 0,
    dtype: DtypeOption = "float32",
    method: Annotated[str, typer.Option(help="Explain a published method instead of a plan.")] = "",
    setting: Annotated[
        list[str] | None, typer.Option(help="A setting of the method: with_head=false; repeatable.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Batch size; if given, estimate the training memory.", min=0)
    ] = 0,
    max_length: Annotated[
        int, typer.Option(help="Tokens per example, for the memory estimate.", min=1)
    ] = TrainingStep.sequence_length,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer, for the memory estimate: adamw, sgd, momentum, ...")
    ] = TrainingStep.optimizer,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Use gradient checkpointing, for the memory estimate."
        ),
    ] = False,
    quantization: Annotated[
        str,
        typer.Option(help="Quantization of the blocks, for the memory estimate: nf4, fp4, int8."),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Explain a plan or method on a model, or a study file, before a run.

    Prints the role of each part, the bytes sent, and with --batch-size the training memory.
    """
    if model.endswith(".toml") and not plan:
        with print_errors():
            for param in context.command.params:
                source = context.get_parameter_source(param.name or "")
                typed = source is not None and source.name == "COMMANDLINE"
                if typed and param.name not in ("model", "as_json"):
                    raise FedplanError(
                        f"{model} is a study file, which has its own settings: leave out "
                        f"{param.opts[0]}"
                    )
            from fedplan.reports.study_explanation import explain_study

            explanation, statement = explain_study(Path(model))
            if as_json:
                privacy = statement.json() if statement else None
                return print_json({**explanation.json(), "privacy": privacy})
            Console().print(explanation)
            if statement is not None:
                print_lines("\n" + statement.text())
            return
    from fedplan.reports.explanation import explain_plan

    with print_errors():
        if not batch_size and (
            gradient_checkpointing or quantization or optimizer != TrainingStep.optimizer
        ):
            raise FedplanError("the memory estimate needs a batch size: add --batch-size")
        explanation = explain_plan(
            model,
            plan,
            method=method,
            settings=setting or (),
            rounds=rounds,
            phases=phase or (),
            task=task,
            labels=labels,
            dtype=dtype,
            step=TrainingStep(
                batch_size, max_length, optimizer, gradient_checkpointing, quantization
            )
            if batch_size
            else None,
        )
    if as_json:
        print_json(explanation.json())
    else:
        Console().print(explanation)


@command(app, "propose granite")
def propose_command(
    model: Annotated[
        str, typer.Argument(help="A model type (granite), a folder, or hub:org/name.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Propose a layer map for a model type that fedplan does not know, and test it.

    The test runs a small random model of the type. The exit code is 1 if a layer does not behave as
    proposed.
    """
    from fedplan.models.proposal import proposal_report, propose_layer_map, small_model_like

    with print_errors():
        proposal = propose_layer_map(small_model_like(model))
    value = {"name": proposal.name, "layer_map": proposal.settings, "faults": proposal.faults}
    print_result(value, *proposal_report(proposal), as_json=as_json)
    raise typer.Exit(1 if proposal.faults else 0)


@command(app, "draw vit-base-16 'chain(share(), keep(head))' roles.svg")
def draw_command(
    model: ModelArgument,
    plan: PlanArgument,
    output: Annotated[Path, typer.Argument(help="Image file to write: .svg, .png or .pdf.")],
    task: TaskOption = "",
    labels: LabelsOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Draw the parts of a model, colored by their roles under a plan."""
    from fedplan.language.parser import parse
    from fedplan.models.catalog import params_of
    from fedplan.reports.role_figure import RoleFigure, draw_roles

    with print_errors():
        params = params_of(model, task=task, labels=labels)
        draw_roles([RoleFigure(model, params, parse(plan))], output)
    if as_json:
        print_json({"file": str(output)})


@command(app, "methods", "methods fedper")
def methods_command(
    name: Annotated[str, typer.Argument(help="Show this method in detail.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the methods that a study can name, with their origin and plan; or describe one."""
    from fedplan.methods.registry import METHOD_REGISTRY, list_methods, method_info

    console = Console(soft_wrap=True, highlight=False)
    with print_errors():
        if as_json:
            names = [name] if name else METHOD_REGISTRY.origins()
            infos = [method_info(each).json() for each in names]
            return print_json(infos[0] if name else infos)
        for title, *lines in [method_info(name).lines] if name else list_methods():
            console.print(title, style="bold", markup=False)
            for line in lines:
                console.print(line, markup=False)
