# SPDX-License-Identifier: Apache-2.0
"""Studies: from a study file to a federation, its rounds, and what they scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedplan import streams
from fedplan.agreement import Setup
from fedplan.config import ConfigError, Study, study_of
from fedplan.description import describe
from fedplan.errors import FedplanError
from fedplan.evaluation import spread
from fedplan.examples import Prepared
from fedplan.fit import Pace
from fedplan.ledger import read_lines
from fedplan.manifest import read, written
from fedplan.method import Method
from fedplan.methods import method
from fedplan.rounds import Tally
from fedplan.runners.local import Attendance, Federation
from fedplan.state import put
from fedplan.tables import is_hub_id, labels_in, load, rows, values, where
from fedplan.tasks import Task, task
from fedplan.text import parse
from fedplan.wire import parse_wire

if TYPE_CHECKING:
    from datasets import Dataset

Watch = Callable[["Trial", Tally, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Shares:
    """The rows of each client, to train and to test on, and those of the common test."""

    train: dict[str, Prepared]
    own: dict[str, Prepared]
    test: Prepared
    task: Task


class Trial:
    """A study that runs in a folder, and goes on from where the folder says it stopped."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        torch.set_num_threads(study.threads)
        self.shares = _shares(study)
        made = method_of(study)
        model = _model(study, self.shares.task, made)
        setup = Setup(f"{study.name}/{study.seed}", describe(model), made, _pace(study))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.json").write_text(study.model_dump_json(indent=1))
        (folder / "manifest.json").write_text(written(setup.params))
        self.federation = Federation(
            setup,
            model,
            self.shares.train,
            self.shares.task.loss,
            folder,
            rounds=study.train.rounds,
            attendance=Attendance(**study.clients.model_dump()),
        )

    def run(self, watch: Watch) -> None:
        """Play every round that is left, committing each before the next."""
        while self.federation.world.round < self.study.train.rounds:
            tally = self.federation.round()
            number = self.federation.world.round
            last = number == self.study.train.rounds
            due = last or number % self.study.evaluate.every == 0
            scores = self.scores() if due else {}
            self.federation.commit(tally, scores)
            watch(self, tally, scores)

    def scores(self) -> dict[str, Any]:
        """How good the models are: the world on the common test, each client on its own rows."""
        model, evaluate = self.federation.model, self.study.evaluate
        trainable = self.federation.setup.trainable
        put(model, self.federation.world_values(), trainable)
        found: dict[str, Any] = {
            "world": self.shares.task.score(model, self.shares.test, batch_size=evaluate.batch)
        }
        if evaluate.personal and self.shares.own:
            found["clients"] = {name: self._personal(name) for name in self.shares.own}
            key = "f1" if self.study.task.kind == "token-classification" else "accuracy"
            found["personal"] = spread({n: s[key] for n, s in found["clients"].items() if key in s})
        return found

    def _personal(self, name: str) -> dict[str, float]:
        model = self.federation.model
        put(model, self.federation.personal_values(name), self.federation.setup.trainable)
        return self.shares.task.score(
            model, self.shares.own[name], batch_size=self.study.evaluate.batch
        )


def method_of(study: Study) -> Method:
    """The method that a study names, or its own plan."""
    said = study.method
    made = method(said.name, said.settings) if said.name else Method(parse(said.plan))
    return replace(made, wire=parse_wire(said.wire)) if said.wire else made


def read_run(folder: Path) -> tuple[Study, Setup, list[dict[str, Any]]]:
    """A run as its folder tells it: the study, the agreement, and the lines of its ledger."""
    try:
        study = study_of(json.loads((folder / "study.json").read_text()))
        params = read(folder / "manifest.json")
        lines = read_lines(folder / "ledger.jsonl")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from error
    setup = Setup(f"{study.name}/{study.seed}", params, method_of(study), _pace(study))
    return study, setup, lines


def _pace(study: Study) -> Pace:
    return Pace(**study.train.model_dump(exclude={"rounds"}))


def _shares(study: Study) -> Shares:
    from fedplan.data import Partition, divide, halve

    said, asked = study.data, study.task
    train, test = (
        _limited(_only(where(load(path, split=split), kept), said.only), limit, study.seed)
        for path, split, kept, limit in (
            (said.path, said.split, said.train, said.limit),
            (said.test_path or said.path, said.test_split, said.test, said.test_limit),
        )
    )
    labels = labels_in([train, test], asked.label) if asked.label else []
    made = task(
        asked.kind,
        columns=asked.input.split(),
        label=asked.label,
        labels=labels,
        model=study.model.path,
        tokenizer=asked.tokenizer,
        max_length=asked.max_length,
        image_size=asked.image_size,
    )
    partition = Partition(
        by=said.by,
        clients=said.clients,
        column=said.column,
        alpha=said.alpha,
        classes=said.classes,
        least=said.least,
    )
    held = divide(train, partition, seed=study.seed, label=asked.label)
    if said.own_test:
        split = {n: halve(t, share=1 - said.own_test, seed=study.seed) for n, t in held.items()}
    else:
        split = {n: (t, rows(t, [])) for n, t in held.items()}
    return Shares(
        train={n: made.prepare(first) for n, (first, _) in split.items()},
        own={n: made.prepare(second) for n, (_, second) in split.items() if len(second)},
        test=made.prepare(test),
        task=made,
    )


def _only(table: Dataset, only: Mapping[str, list[Any]]) -> Dataset:
    for column, kept in only.items():
        wanted = set(kept)
        table = rows(table, [i for i, v in enumerate(values(table, column)) if v in wanted])
    return table


def _limited(table: Dataset, limit: int, seed: int) -> Dataset:
    if not limit or limit >= len(table):
        return table
    order = torch.randperm(len(table), generator=streams.generator("limit", seed))
    return rows(table, sorted(order[:limit].tolist()))


def _model(study: Study, made: Task, chosen: Method) -> nn.Module:
    """The model that every site starts from: its fresh parts are drawn from the study's seed."""
    import transformers

    loader = getattr(transformers, made.model_class)
    labels = {"num_labels": len(made.labels)} if made.labels else {}
    said = study.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(streams.seed(study.name, "model", study.seed))
        if said.path:
            model = loader.from_pretrained(
                said.path,
                dtype=torch.float32,
                local_files_only=not is_hub_id(said.path),
                trust_remote_code=False,
                **labels,
                **said.settings,
            )
        else:
            try:
                config = transformers.AutoConfig.for_model(said.type, **said.settings, **labels)
            except ValueError as error:
                raise FedplanError(f"model.type: {error}") from error
            model = loader.from_config(config)
        return chosen.adapt(model) if chosen.adapt is not None else model
