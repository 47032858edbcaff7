# SPDX-License-Identifier: Apache-2.0
"""Progress: a run as a person follows it, and stops it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedplan.config import ConfigError, Study, read_study
from fedplan.explanation import megabytes, millions
from fedplan.rounds import Tally
from fedplan.studies import Trial, read_run


def follow(file: Path, changes: list[str], output: Path | None, *, resume: bool) -> None:
    """Run a study, or go on with one, and tell its rounds as they close."""
    study, folder = _opened(file, changes, output, resume=resume)
    console = Console(highlight=False)
    trial = Trial(study, folder)
    console.print(_opening(trial, folder))
    bar = Progress(
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        shown = bar.add_task("", total=study.train.rounds, completed=trial.federation.world.round)

        def watch(trial: Trial, tally: Tally, scores: Mapping[str, Any]) -> None:
            bar.update(shown, completed=trial.federation.world.round)
            console.print(_told(trial, tally, scores))

        try:
            trial.run(watch)
        except KeyboardInterrupt:
            done = trial.federation.world.round
            console.print(f"Stopped in round {done + 1}. Go on: fedplan run --resume {folder}")
            raise SystemExit(130) from None
    console.print(f"Done. Check it: fedplan verify {folder}")


def _opened(
    file: Path, changes: list[str], output: Path | None, *, resume: bool
) -> tuple[Study, Path]:
    if file.is_dir():
        if not resume or changes:
            raise ConfigError(f"{file} is a run: go on with it by --resume, without --set")
        return read_run(file)[0], file
    study = read_study(file, changes)
    folder = output or Path("runs") / study.name
    begun = (folder / "study.json").exists()
    if begun and not resume:
        raise ConfigError(f"{folder} holds a run: go on with it by --resume, or name another")
    if begun and read_run(folder)[0] != study:
        raise ConfigError(f"{folder} holds a run of another study: name another folder")
    return study, folder


def _opening(trial: Trial, folder: Path) -> str:
    setup, rows = trial.federation.setup, trial.shares.train
    sizes = sorted(len(held) for held in rows.values())
    return (
        f"[bold]{trial.study.name}[/bold]  {setup.method.plan.text}\n"
        f"{millions(sum(p.numel for p in setup.params))} params, {len(rows)} clients with "
        f"{sizes[0]} to {sizes[-1]} rows, seed {trial.study.seed}, in {folder}"
    )


def _told(trial: Trial, tally: Tally, scores: Mapping[str, Any]) -> str:
    """One round in one line."""
    weights = sum(line["weight"] for line in tally.lines.values()) or 1
    loss = sum((line["loss"] or 0) * line["weight"] for line in tally.lines.values()) / weights
    up = sum(line["up"] for line in tally.lines.values())
    down = sum(line["down"] for line in tally.lines.values())
    words = [f"{trial.federation.world.round:4d}  loss {loss:.3f}"]
    for name in ("accuracy", "perplexity"):
        if name in scores.get("world", {}):
            words.append(f"{name} {scores['world'][name]:.3f}")
    if "personal" in scores:
        own = scores["personal"]
        words.append(f"own {own['mean']:.3f} ± {own['std']:.3f}, worst {own['worst_decile']:.3f}")
    words.append(f"up {megabytes(up)} down {megabytes(down)} MB")
    if tally.rejected:
        words.append(f"[yellow]{len(tally.rejected)} not counted[/yellow]")
    return "  ".join(words)
