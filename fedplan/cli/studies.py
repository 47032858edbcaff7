# SPDX-License-Identifier: Apache-2.0
"""Commands about a study before it runs: new study, data and digest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.cli.console import (
    JsonOption,
    StudyArgument,
    app,
    command,
    command_group,
    print_errors,
    print_json,
    print_result,
)

new_commands = command_group("new", "Write a study file, or the folders of a federation.")


@command(
    new_commands,
    "new study reviews.csv --model ./model",
    "new study scans.parquet --model vit-base-16 --client hospital -o scans.toml",
)
def study_command(
    data: Annotated[
        str,
        typer.Argument(help="A dataset: .csv, .jsonl, .parquet, .npz, a folder, or hub:org/name."),
    ],
    model: Annotated[
        str, typer.Option(help="A model folder, hub:org/name, or a short name such as vit-base-16.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Study file to write.")] = Path(
        "study.toml"
    ),
    task: Annotated[
        str, typer.Option(help="Task of the model; default: inferred from the data.")
    ] = "",
    column: Annotated[
        str, typer.Option("--input", help="Column of texts or images; default: inferred.")
    ] = "",
    label: Annotated[str, typer.Option(help="Column of labels; default: inferred.")] = "",
    client: Annotated[
        str, typer.Option(help="Column that names the client of each example; default: inferred.")
    ] = "",
    clients: Annotated[
        int,
        typer.Option(help="Number of clients, if no column names them; 0: chosen by size.", min=0),
    ] = 0,
    method: Annotated[str, typer.Option(help="Name of a method: see fedplan methods.")] = "fedavg",
    as_json: JsonOption = False,
) -> None:
    """Inspect a dataset, and write a commented study file that is ready to run."""
    from fedplan.studies.starter import StudyOptions, new_study

    with print_errors():
        options = StudyOptions(task, column, label, client, clients, method)
        findings = new_study(data, model, output, options)
    end = f"Written. Inspect it: fedplan data {output}. Run it: fedplan run {output} --output run"
    print_result({"file": str(output), "findings": findings}, *findings, end, as_json=as_json)


@command(app, "data study.toml", "data study.toml --svg who.svg")
def data_command(
    study: StudyArgument,
    svg: Annotated[Path | None, typer.Option(help="Write a figure to this .svg file, too.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the data of each client: examples, labels, and how much the clients differ."""
    from fedplan.reports.client_data import data_distribution
    from fedplan.storage.files import SHARED, write_atomic

    with print_errors():
        distribution = data_distribution(study)
        if svg is not None:
            write_atomic(svg, distribution.figure().svg(alone=True), mode=SHARED)
    if as_json:
        return print_json(distribution.json())
    # Never cut a column: the table of clients must be complete.
    Console(width=max(Console().width, 100), highlight=False).print(distribution)
    if svg is not None:
        print(f"Written: {svg}")


@command(app, "digest study.toml")
def digest_command(study: StudyArgument, as_json: JsonOption = False) -> None:
    """Print the digest of the study's initial model, to be set as model.digest in the study."""
    from fedplan.studies.experiment import build_experiment
    from fedplan.studies.schema import read_study

    with print_errors():
        model_digest = build_experiment(read_study(study)).model_digest
    print_result({"digest": model_digest}, model_digest, as_json=as_json)
