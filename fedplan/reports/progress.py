# SPDX-License-Identifier: Apache-2.0
"""Progress: a run as a person follows it, and stops it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedplan.federation.callbacks import Closed
from fedplan.reports.preview import state
from fedplan.reports.units import megabytes, millions
from fedplan.runners.simulation import Simulation
from fedplan.studies.continuation import require_free
from fedplan.studies.folder import study_in
from fedplan.studies.schema import ConfigError, Study, laid_over, placed, read_study, study_of


def follow(file: Path, changes: list[str], output: Path | None, *, resume: bool) -> None:
    """Run a study, or go on with one, and tell its rounds as they close."""
    study, folder = _opened(file, changes, output, resume=resume)
    console = Console(highlight=False)
    simulation = Simulation(study, folder)
    console.print(f"{_opening(simulation, folder)}\n\n[bold]{HEADING}[/bold]")
    bar = Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        shown = bar.add_task(
            "", total=study.train.rounds, completed=simulation.federation.world.round
        )

        try:
            for closed in simulation.rounds():
                bar.update(shown, completed=closed.round)
                console.print(_told(closed, simulation.federation.spent))
        except KeyboardInterrupt:
            done = simulation.federation.world.round
            again = f"fedplan run --resume {folder}"
            console.print(f"Stopped in round {done + 1}. Go on: {again}", markup=False)
            raise SystemExit(130) from None
    if simulation.stopped:
        console.print(
            f"Stopped after round {simulation.federation.world.round}: {simulation.stopped}.",
            markup=False,
        )
    if study.privacy is not None:
        console.print(state(folder).text(), markup=False, soft_wrap=True)
    console.print(f"Done. Check it: fedplan verify {folder}", markup=False)


def follow_flower(
    file: Path, changes: list[str], output: Path | None, *, resume: bool, server: Path
) -> None:
    """Carry a study to the sites of a federation, and tell its rounds as they close."""
    from fedplan.runners.flower.driver import drive
    from fedplan.runners.flower.link import link_in

    study, folder = _opened(file, changes, output, resume=resume)
    console = Console(highlight=False)

    def tell(closed: Closed) -> None:
        whole = closed.whole
        missing = ", ".join(f"{name} ({why})" for name, why in whole.rejected.items())
        loss = f"  loss {closed.row['loss']:.3f}" if "loss" in closed.row else ""
        found = closed.scores.get("sites", {})
        told = ((word, _score(found.get(word, {})).strip()) for word in ("world", "own"))
        scores = "".join(f"  {word} {score}" for word, score in told if score)
        console.print(
            f"round {closed.round:3d}{loss}{scores}  {len(whole.counted)} counted  "
            f"{megabytes(whole.up)} MB up  {megabytes(whole.down)} MB down"
            + (f"  not counted: {missing}" if missing else ""),
            markup=False,
        )

    console.print(f"{study.name}: study {study.whole[:12]}, in {folder}", markup=False)
    try:
        drive(link_in(server), study, folder, [tell])
    except KeyboardInterrupt:
        console.print("Stopped. Go on with it: the same command with --resume", markup=False)
        raise SystemExit(130) from None
    console.print(f"Done. Check it: fedplan verify {folder}", markup=False)


def _opened(
    file: Path, changes: list[str], output: Path | None, *, resume: bool
) -> tuple[Study, Path]:
    if file.is_dir():
        if not resume:
            raise ConfigError(f"{file} is a run: go on with it by --resume")
        if output is not None and output.resolve() != file.resolve():
            raise ConfigError(
                f"--output is {output}, and {file} goes on where it is: leave it out, or copy the "
                "run's folder and go on with the copy"
            )
        said = study_in(file).model_dump(mode="json")
        study, folder = placed(study_of(laid_over(said, changes)), file), file
    else:
        study = read_study(file, changes)
        folder = output or Path("runs") / study.name
    require_free(folder, study, resume=resume)
    return study, folder


def _opening(simulation: Simulation, folder: Path) -> str:
    agreement, rows = simulation.federation.agreement, simulation.shares.train
    sizes = sorted(len(held) for held in rows.values())
    return (
        f"[bold]{escape(simulation.study.name)}[/bold]  {escape(agreement.method.plan.text)}\n"
        f"{millions(sum(p.numel for p in agreement.params))} params, {len(rows)} clients with "
        f"{sizes[0]} to {sizes[-1]} rows, seed {simulation.study.seed}, in {escape(str(folder))}"
        + "".join(f"\n{escape(note)}" for note in simulation.shares.notes)
    )


HEADING = "round    loss  world   own ± spread   worst   MB up  MB down"
"""World: its score on the common test, or on rows that clients hold out. Own: each client's model on
its own rows, mean and worst."""


def _told(closed: Closed, spent: float | None) -> str:
    """One round in one line under the heading."""
    row, sites = closed.row, closed.scores.get("sites", {})
    own = closed.scores.get("personal") or sites.get("spread", {}).get("own")
    rejected = len(closed.whole.rejected)
    words = (
        f"{closed.round:5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        _score(closed.scores.get("world") or sites.get("world", {})),
        f"{own['mean']:.3f} ± {own['std']:.3f}  {own['worst']:.3f}" if own else " " * 20,
        f"{megabytes(closed.whole.up):>6}  {megabytes(closed.whole.down):>7}",
        f"  [yellow]{rejected} not counted[/yellow]" if rejected else "",
        f"  epsilon {spent:.3f}" if spent is not None else "",
    )
    return "  ".join(words)


KNOWN_BY = ("perplexity", "rmse", "f1_micro", "accuracy")
"""Of each kind of task, the score that it is known by; a line has no task."""


def _score(scores: Mapping[str, float]) -> str:
    """The one score that a task is known by."""
    found = [scores[name] for name in KNOWN_BY if name in scores]
    return f"{found[0]:5.3f}" if found else "     "
