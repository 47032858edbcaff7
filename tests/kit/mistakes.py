# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a person makes, as commands in a folder, and what each must be told."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from commands import STUDY, some_digits
from typer.testing import CliRunner

from fedplan.cli import app


@dataclass(frozen=True)
class Mistake:
    """What went wrong in a person's words, the command, and words that its message must have.

    They are the thing that is wrong, the value that it has, and the remedy.
    """

    what: str
    command: str
    says: tuple[str, ...]


def _set(what: str, change: str, *says: str) -> Mistake:
    """A field of a study that does not fit."""
    return Mistake(what, f"run study.toml --output next --set {shlex.quote(change)}", says)


MISTAKES = (
    Mistake(
        "A command is misspelt.", "rnu study.toml", ("No such command 'rnu'", "Did you mean 'run'")
    ),
    Mistake("An argument is missing.", "verify", ("Missing argument 'FOLDER'", "--help")),
    Mistake("An option is misspelt.", "run study.toml --ouput next", ("--ouput", "--output")),
    Mistake(
        "The study file is not there.", "run stduy.toml", ("stduy.toml", "did you mean study.toml?")
    ),
    Mistake(
        "The study file is no TOML.",
        "run broken.toml",
        ("broken.toml", "line 2"),
    ),
    Mistake(
        "A word of a plan is misspelt.",
        "explain vit-base-16 'chain(share(), frezze(head))'",
        ("'frezze'", "did you mean freeze?", "^"),
    ),
    Mistake(
        "A bracket of a plan is missing.",
        "explain vit-base-16 'chain(share(), keep(head)'",
        ("never closed", ") is missing", "^"),
    ),
    Mistake(
        "A plan speaks of a part that the model does not have.",
        "explain vit-base-16 'chain(share(), keep(prompt))'",
        ("prompt matches no parameter",),
    ),
    Mistake(
        "A plan keeps a head that is tied to the embeddings.",
        "explain gpt2 'chain(share(), keep(head))'",
        ("head", "tied to 'transformer.wte.weight'"),
    ),
    Mistake(
        "A model's short name is misspelt.",
        "explain vit-bse-16 'share()'",
        ("'vit-bse-16'", "did you mean vit-base-16"),
    ),
    Mistake(
        "A method's name is misspelt.", "methods fedperr", ("'fedperr'", "did you mean fedper?")
    ),
    _set("A field is misspelt.", "train.rouds=5", "train.rouds", "did you mean rounds?"),
    _set("A section is misspelt.", "trian.rounds=5", "trian", "did you mean train?"),
    _set("A number is given as a word.", "train.rounds=five", "train.rounds", "'five'", "integer"),
    _set("A change lacks its value.", "train.rounds", "'train.rounds'", "section.field=value"),
    _set("A method of the study is misspelt.", "method.name=fedperr", "fedperr", "fedper?"),
    _set(
        "A setting is not one of the method's.",
        "method={name='fedprox',settings={strength=0.1}}",
        *("fedprox", "'strength'", "mu"),
    ),
    _set("The table is not there.", "data.path=digit.npz", "digit.npz", "does not exist"),
    _set("The label's column is misspelt.", "task.label=digits", "'digits'", "digit"),
    _set(
        "The kind of task is misspelt.",
        "task.kind=image-clasification",
        *("'image-clasification'", "did you mean image-classification?"),
    ),
    _set(
        "There are more clients than rows.", "data.num_clients=100", "100 clients", "fewer clients"
    ),
    _set("The division is misspelt.", "data.partition=dirichelt", "'dirichelt'", "dirichlet?"),
    _set(
        "A share is above one.",
        "clients.fraction=2.0",
        "clients.fraction",
        "2",
        "less than or equal",
    ),
    _set(
        "The pictures have another size than the model takes.",
        "task.image_size=16",
        *("cannot use the examples", "16", "check [model] and [task]"),
    ),
    _set("The model's type is misspelt.", "model.type=vitt", "'vitt'", "did you mean vit?"),
    _set("The device is not there.", "device=cuda", "cuda", "auto"),
    _set("The device is set in a section.", "train.device=cuda", "device, at the top of the file"),
    _set("Of privacy only epsilon is set.", "privacy.epsilon=3.0", "privacy.unit", "'example'"),
    Mistake(
        "A model of the Hub was not downloaded, and the Hub may not be asked.",
        "explain hub:org/name 'share()'",
        ("'hub:org/name'", "HF_HUB_OFFLINE", "hf download org/name"),
    ),
    _set("The optimizer is misspelt.", "train.optimizer=adamx", "'adamx'", "did you mean adam"),
    _set(
        "A tracker is misspelt.",
        'evaluate.trackers=["wandbb"]',
        *("'wandbb'", "did you mean wandb?"),
    ),
    _set(
        "The column of clients has no name.", "data.partition=column", "partition_column is empty"
    ),
    _set("The label has no name.", "task.label=", "needs the column of its labels", "label of"),
    _set(
        "A word for the class weights is misspelt.",
        "task.class_weights=balancd",
        *("task.class_weights", "a valid dictionary or 'balanced'", "'balancd'"),
    ),
    _set(
        "Several labels are separated in a task with one.",
        "task.label_separator=;",
        *("label_separator is not used by image-classification", "leave it out"),
    ),
    _set("Images get a tokenizer.", "task.tokenizer=notok", "tokenizer is not used by image"),
    _set(
        "A prompt has no place for the label.",
        "task={kind='image-text',label='digit',prompt_template='hello'}",
        *("prompt_template is 'hello'", "put {}"),
    ),
    _set(
        "Classes per client are set for another division.",
        "data.classes_per_client=99",
        *("classes_per_client", 'partition = "pathological"', '"dirichlet"'),
    ),
    _set(
        "A filter names a value that no row has.",
        "data.filter={digit=[0, 7]}",
        *("digit = 7", "no row has that", "0, 1, 2"),
    ),
    Mistake(
        "A run to be resumed is not there.",
        "run --resume nothing",
        ("there is no run in nothing to resume", "done"),
    ),
    Mistake(
        "A score is named without the model that it is of.",
        "compare done --score accuracy",
        ("done has global.accuracy, personal.accuracy",),
    ),
    Mistake(
        "A run is exported with the key of a site.",
        "export done model --global --key nokey",
        ("--key decrypts a site's state", "leave it out"),
    ),
    Mistake(
        "The column of clients is misspelt.",
        "new study reviews.csv --model vit-tiny-16 --client ofice -o texts.toml",
        ("no column 'ofice'", "review, mood"),
    ),
    Mistake(
        "A new study has no folder.",
        "new study reviews.csv --model vit-tiny-16 -o nosuch/study.toml",
        ("nosuch/study.toml", "a folder that exists"),
    ),
    Mistake(
        "Clients are a column and a number.",
        "new study reviews.csv --model vit-tiny-16 --client mood --clients 5 -o texts.toml",
        ("'mood'", "--clients 5", "one of them"),
    ),
    Mistake(
        "A run is there already.",
        "run study.toml --output done",
        ("done holds a run", "--resume", "name another"),
    ),
    Mistake(
        "What is not a run is asked for its status.",
        "status nowhere",
        ("nowhere is not the folder of a run", "fedplan run --output"),
    ),
    Mistake(
        "A run that has ended is stopped.",
        "stop done",
        ("done is not running", "its state is: done"),
    ),
    Mistake(
        "A model is asked of a client that there is not.",
        "export done model --client nobody",
        ("'nobody'", "client-00"),
    ),
    Mistake(
        "A model is written over other files.",
        "export done full",
        ("full", "empty"),
    ),
    Mistake(
        "A time is said in words.",
        "logs done --since yesterday",
        ("'yesterday'", "10m"),
    ),
    Mistake(
        "Workers are asked of a runner that has none.",
        "run study.toml --output next --workers 4",
        ("workers", "does not apply to runner local", "use pool or ray"),
    ),
    Mistake(
        "The runner is misspelt.",
        "run study.toml --output next --runner pol",
        ("'pol'", "local, pool, ray or flower"),
    ),
    Mistake(
        "A study of texts is asked of a model of pictures.",
        "new study reviews.csv --model vit-tiny-16 -o texts.toml",
        ("'review'", "texts", "'vit-tiny-16'", "--input"),
    ),
    Mistake(
        "A table has neither texts nor pictures.",
        "new study numbers.csv --model vit-tiny-16 -o numbers.toml",
        ("numbers.csv", "looks like texts or images", "--input"),
    ),
    Mistake(
        "A study would be written over another.",
        "new study reviews.csv --model vit-tiny-16 -o study.toml",
        ("study.toml exists already", "--output"),
    ),
    Mistake(
        "A folder is no site's.",
        "site inbox --site nowhere",
        ("nowhere", "site.toml"),
    ),
)


def made(folder: Path) -> None:
    """A folder with a study, its table, two others, and a run that has ended."""
    some_digits(folder)
    (folder / "study.toml").write_text(STUDY)
    (folder / "broken.toml").write_text('name = "broken"\nseed = = 3\n')
    reviews = "".join(f"the cat sat on mat {n},{'good' if n % 2 else 'bad'}\n" for n in range(40))
    (folder / "reviews.csv").write_text("review,mood\n" + reviews)
    numbers = "".join(f"{n}.5,{n}.25\n" for n in range(40))
    (folder / "numbers.csv").write_text("width,height\n" + numbers)
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    code, words = asked(folder, "run study.toml --output done --set train.rounds=1")
    assert code == 0, words


def asked(folder: Path, command: str) -> tuple[int, str]:
    """How a command ends in a folder, and what it says to a person who made a mistake."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        done = CliRunner(env={"COLUMNS": "100"}).invoke(
            app, shlex.split(command), prog_name="fedplan"
        )
    finally:
        os.chdir(before)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.stderr or done.stdout


def message(words: str, folder: Path) -> str:
    """A message as a page tells it: without the frame around it, and without where it was."""
    told = words.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    lines = [line.rstrip() for line in told.splitlines() if not line.startswith("╰")]
    framed = [line.strip("│ ") if line.startswith("│") else line for line in lines]
    return "\n".join("Error:" if line.startswith("╭") else line for line in framed if line)
