# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a run or a site afterwards: its proof, its models, what left and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Json, print_json, told


def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Json = False,
) -> None:
    """Re-check a run: nothing frozen moved, nothing private left, the bytes are those explained."""
    from fedplan.audits.run import verify_run

    with told():
        faults, checked = verify_run(folder)
    if as_json:
        print_json({"sound": not faults, "faults": list(faults), "checked": checked})
    else:
        for fault in faults[:20]:
            Console(stderr=True).print(fault, style="red", markup=False)
    if faults:
        raise typer.Exit(1)
    if not as_json:
        Console().print(checked, markup=False)


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of a site's experiment.")],
    output: Annotated[Path, typer.Argument(help="The folder to write, empty or new.")],
    client: Annotated[str, typer.Option(help="Whose model; without it, the world's.")] = "",
    key: Annotated[Path | None, typer.Option(help="At a site: what opens its home.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The best round, if it is kept.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model of a run as a folder that loads and predicts: safetensors and JSON."""
    from fedplan.studies.export import export_run

    with told():
        how = export_run(folder, output, client, key, adapter=adapter, best=best)
    if as_json:
        print_json({"folder": str(output), "load": how})
    else:
        Console(soft_wrap=True).print(f"Written. Load it: {how}", markup=False, highlight=False)


def privacy(
    place: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    as_json: Json = False,
) -> None:
    """Say what a study promises and will cost, or what a run has spent, and what is not covered."""
    from fedplan.reports.preview import stated

    with told():
        found = stated(place)
        if as_json:
            print_json(found.json())
        else:
            Console(soft_wrap=True, highlight=False).print(found.text(), markup=False)


def egress(
    folder: Annotated[Path, typer.Argument(help="A site's home.")],
    as_json: Json = False,
) -> None:
    """At a site: every byte that left it, by round and part, and the plan that it agreed to.

    The record is proved first: a chain that is broken is told, and nothing else is.
    """
    from fedplan.reports.egress import told_of

    with told():
        found = told_of(folder)
    if as_json:
        return print_json([each.json() for each in found])
    for each in found:
        # A table of bytes is read whole, or not at all.
        Console(width=max(Console().width, each.width)).print(each)


def faults(
    folder: Annotated[Path, typer.Argument(help="A site's home.")],
    key: Annotated[Path | None, typer.Option(help="What opens its home, if it is sealed.")] = None,
    as_json: Json = False,
) -> None:
    """At a site: what went wrong there, in full. Of all this only a code has left it."""
    from fedplan.federation.fault_log import read_faults
    from fedplan.storage.encryption import Encryption

    with told():
        found = list(read_faults(folder, Encryption.from_file(key) if key else None))
        if as_json:
            return print_json(found)
        for each in found:
            Console(soft_wrap=True, highlight=False).print(each, markup=False)


def attack(
    draws: Annotated[int, typer.Option(help="Releases of each world.", min=100)] = 50_000,
    clients: Annotated[int, typer.Option(help="Clients that are attacked.", min=2)] = 8,
    as_json: Json = False,
) -> None:
    """Attack tiny federations here and now: what leaks, and what privacy buys."""
    import os

    from fedplan.audits.attacks.leaks import attack as attacked

    with told(), Console(stderr=True).status("Attacking: this takes about a minute."):
        found = attacked(draws, clients, os.urandom(32))
    if as_json:
        print_json(found.json())
    else:
        Console(width=max(Console().width, found.width), highlight=False).print(found)
    if not found.sound:
        raise typer.Exit(1)
