# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a study before it runs: to write one, who holds what, which model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Json, print_json, told

StudyFile = Annotated[Path, typer.Argument(help="A study file (TOML).")]


def study(
    data: Annotated[
        str,
        typer.Argument(help="A table: .csv, .jsonl, .parquet, .npz, a folder, or hub:org/name."),
    ],
    model: Annotated[
        str, typer.Option(help="A folder with a model, hub:org/name, or vit-base-16 and the like.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "study.toml"
    ),
    task: Annotated[str, typer.Option(help="What the model is asked to do, if not as found.")] = "",
    column: Annotated[
        str, typer.Option("--input", help="The column of texts or pictures, if not as found.")
    ] = "",
    label: Annotated[str, typer.Option(help="The column of labels, if not as found.")] = "",
    client: Annotated[str, typer.Option(help="The column that names clients.")] = "",
    clients: Annotated[int, typer.Option(help="How many, where no column names them.", min=0)] = 0,
    method: Annotated[str, typer.Option(help="The method: see fedplan methods.")] = "fedavg",
    as_json: Json = False,
) -> None:
    """Look at a table, and write a commented study of it that is ready to run."""
    from fedplan.studies.starter import Wanted, new_study

    with told():
        wanted = Wanted(task, column, label, client, clients, method)
        found = new_study(data, model, output, wanted)
    if as_json:
        return print_json({"file": str(output), "found": found})
    for line in found:
        print(line)
    print(f"Written. Look at it: fedplan data {output}. Run it: fedplan run {output} --output run")


def data(
    study: StudyFile,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this .svg file too.")] = None,
    as_json: Json = False,
) -> None:
    """Draw who holds what: rows and labels of each client, and how unlike clients are."""
    from fedplan.reports.holdings import holdings_of
    from fedplan.storage.files import put_file

    with told():
        found = holdings_of(study)
        if svg is not None:
            put_file(svg, found.drawn().svg(alone=True))
    if as_json:
        return print_json(found.json())
    # A table of clients is read whole, or not at all.
    Console(width=max(Console().width, 100), highlight=False).print(found)
    if svg is not None:
        print(f"Drawn: {svg}")


def digest(study: StudyFile, as_json: Json = False) -> None:
    """Print the digest of the model that a study starts from, to pin as model.digest."""
    from fedplan.studies.schema import read_study
    from fedplan.studies.stage import stage_of

    with told():
        found = stage_of(read_study(study)).digest
    if as_json:
        return print_json({"digest": found})
    print(found)
