# SPDX-License-Identifier: Apache-2.0
"""The command line: what a person asks of fedplan, each a short function."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource
from rich.console import Console

from fedplan.console import (
    Dtype,
    Json,
    Labels,
    Model,
    PlanText,
    Sites,
    Task,
    told,
)
from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.models.catalog import params_of
from fedplan.models.schema import written
from fedplan.operation_commands import attach, logs, run, status, stop
from fedplan.report_commands import report
from fedplan.reports.asked import asked
from fedplan.reports.explanation import parts_table
from fedplan.reports.memory import Load
from fedplan.server_commands import server_commands
from fedplan.site_commands import site_commands
from fedplan.sweep_commands import compare, rehearse, sweep

app = typer.Typer(
    help="Say which part of a Transformer each client trains, shares and keeps, round by round.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
        print(json.dumps(explanation.json(), indent=1))
    else:
        Console().print(explanation)


@app.command()
def propose(
    model: Annotated[str, typer.Argument(help="A model type (granite), a folder or a hub id.")],
) -> None:
    """Propose an anatomy for a model type that has none, and judge it by behaviour."""
    from fedplan.models.behaviour.proposal import propose as proposed
    from fedplan.models.behaviour.proposal import report, small_copy

    with told():
        proposal = proposed(small_copy(model))
    for line in report(proposal):
        Console(soft_wrap=True, highlight=False).print(line, markup=False)
    raise typer.Exit(1 if proposal.faults else 0)


def _flags(context: typer.Context) -> list[str]:
    """The options that were typed, but for how the answer is to look."""
    typed = [
        each
        for each in context.command.params
        if context.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
    ]
    return [each.opts[0] for each in typed if each.name not in ("model", "as_json")]


def _explain_study(file: Path, *, as_json: bool) -> None:
    from fedplan.reports.preview import foretold

    with told():
        explanation, statement = foretold(file)
        if as_json:
            privacy = statement.json() if statement else None
            print(json.dumps({**explanation.json(), "privacy": privacy}, indent=1))
            return
        Console().print(explanation)
        if statement is not None:
            Console(soft_wrap=True, highlight=False).print("\n" + statement.text(), markup=False)


for command in (run, status, stop, attach, logs, report, sweep, compare, rehearse):
    app.command()(command)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Re-check a run: nothing frozen moved, nothing private left, the bytes are those explained."""
    from fedplan.audits.run import verify_run

    with told():
        faults, checked = verify_run(folder)
    for fault in faults[:20]:
        Console(stderr=True).print(fault, style="red", markup=False)
    if faults:
        raise typer.Exit(1)
    Console().print(checked, markup=False)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or of a site's experiment.")],
    output: Annotated[Path, typer.Argument(help="The folder to write, empty or new.")],
    client: Annotated[str, typer.Option(help="Whose model; without it, the world's.")] = "",
    key: Annotated[Path | None, typer.Option(help="At a site: what opens its home.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The best round, if it is kept.")] = False,
) -> None:
    """Write a model of a run as a folder that loads and predicts: safetensors and JSON."""
    from fedplan.studies.export import export_run

    with told():
        how = export_run(folder, output, client, key, adapter=adapter, best=best)
    Console(soft_wrap=True).print(f"Written. Load it: {how}", markup=False, highlight=False)


@app.command()
def privacy(
    place: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    as_json: Json = False,
) -> None:
    """Say what a study promises and will cost, or what a run has spent, and what is not covered."""
    from fedplan.reports.preview import stated

    with told():
        found = stated(place)
        if as_json:
            print(json.dumps(found.json(), indent=1))
        else:
            Console(soft_wrap=True, highlight=False).print(found.text(), markup=False)


@app.command()
def egress(
    folder: Annotated[Path, typer.Argument(help="A site's home.")],
    as_json: Json = False,
) -> None:
    """At a site: every byte that left it, by round and part, and the plan that it agreed to.

    The record is proved first: a chain that is broken is told, and nothing else is.
    """
    from fedplan.reports.egress import told_of
    from fedplan.storage.chain import BrokenChain

    with told():
        try:
            found = told_of(folder)
        except BrokenChain as error:
            words = f"fedplan: the record is broken: {error}"
            Console(stderr=True, soft_wrap=True).print(words, markup=False, style="red")
            raise typer.Exit(1) from error
    for each in found:
        if as_json:
            print(json.dumps(each.json()))
        else:
            # A table of bytes is read whole, or not at all.
            Console(width=max(Console().width, each.width)).print(each)


@app.command()
def faults(
    folder: Annotated[Path, typer.Argument(help="A site's home.")],
    key: Annotated[Path | None, typer.Option(help="What opens its home, if it is sealed.")] = None,
) -> None:
    """At a site: what went wrong there, in full. Of all this only a code has left it."""
    from fedplan.federation.fault_log import read_faults
    from fedplan.storage.encryption import Encryption

    with told():
        for each in read_faults(folder, Encryption.from_file(key) if key else None):
            Console(soft_wrap=True, highlight=False).print(each, markup=False)


@app.command()
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
        print(json.dumps(found.json(), indent=1))
    else:
        Console(width=max(Console().width, found.width), highlight=False).print(found)
    if not found.sound:
        raise typer.Exit(1)


@app.command()
def digest(
    study: Annotated[Path, typer.Argument(help="A study file (TOML).")],
) -> None:
    """Print the digest of the model that a study starts from, to pin as model.digest."""
    from fedplan.studies.schema import read_study
    from fedplan.studies.stage import stage_of

    with told():
        print(stage_of(read_study(study)).digest)


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="One method, to be said in full.")] = "",
) -> None:
    """List the methods that a study can name, each with its origin and its plan; or say one."""
    from fedplan.methods.registry import about_method, list_methods

    with told():
        for first, *more in [about_method(name)] if name else list_methods():
            Console(soft_wrap=True).print(first, style="bold", markup=False, highlight=False)
            for line in more:
                Console(soft_wrap=True).print(line, markup=False, highlight=False)


@app.command()
def draw(
    model: Model,
    plan: PlanText,
    output: Annotated[Path, typer.Argument(help="A .svg, .png or .pdf file.")],
    task: Task = "",
    labels: Labels = 0,
) -> None:
    """Draw the parts of a model, coloured by their roles."""
    from fedplan.reports.figure import Figure
    from fedplan.reports.figure import draw as drawn

    with told():
        params = params_of(model, task=task, labels=labels)
        drawn([Figure(model, params, parse(plan))], output)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="The folder of the keys, or of a federation.")],
    host: Annotated[
        list[str] | None, typer.Option(help="How sites reach the server: a name or an address.")
    ] = None,
    site: Sites = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate lasts.")] = 365,
) -> None:
    """Make the keys that a federation lacks. Nothing is overwritten: call it again to add sites."""
    with told():
        from fedplan.runners.flower.keys import make_keys

        for path in make_keys(folder, host or [], site or [], days):
            print(path)


new = typer.Typer(help="Write a folder to start from.", no_args_is_help=True)
app.add_typer(new, name="new")
app.add_typer(server_commands, name="server")
app.add_typer(site_commands, name="site")


@new.command()
def federation(
    folder: Annotated[Path, typer.Argument(help="The folder to write, empty or new.")],
    site: Sites = None,
    host: Annotated[str, typer.Option(help="How sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="Where they reach it.")] = 9100,
    inner: Annotated[int, typer.Option(help="The SuperLink's own port; 0 is the next.")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="On this machine alone, without TLS and keys.")
    ] = False,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Without keys: bring yours.")] = False,
) -> None:
    """Write all that a federation of real sites is started from. Its README says what to do."""
    with told():
        from fedplan.runners.flower.starter import new_federation

        new_federation(
            folder,
            site or [],
            host=host,
            port=port,
            inner=inner,
            insecure=insecure,
            keys=not no_keys,
        )
    Console(soft_wrap=True).print(f"Written. Go on with {folder / 'README.md'}", highlight=False)


@new.command()
def site(
    name: Annotated[str, typer.Argument(help="The name of the site.")],
    federation: Annotated[Path, typer.Option(help="The folder of the federation.")] = Path(),
) -> None:
    """Write the folder of one more site of a federation."""
    with told():
        from fedplan.runners.flower.starter import new_site

        new_site(federation, name)
    print(f"Written. Bring {federation / 'sites' / name} to the site; its README says the rest.")


def main() -> None:
    """The entry point of the `fedplan` command."""
    sys.exit(app())
