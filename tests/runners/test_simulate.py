# SPDX-License-Identifier: Apache-2.0
"""The door from Python: what is given as objects runs, stops, goes on and is checked as a study."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import STUDY
from commands import run as command
from damage import contents
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fedplan as fp
from fedplan.data import make_task
from fedplan.federation.ledger.callbacks import EarlyStopping
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.ledger.records import RoundRecord
from fedplan.methods import METHODS, Method, method_by_name
from fedplan.methods.method import parse_recorded_method
from fedplan.run import run_study, simulate
from fedplan.studies.experiment import build_experiment, make_method
from fedplan.studies.run import read_run
from fedplan.studies.schema import ConfigError, read_study
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.named import digests


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.floors = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.roof = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for floor in self.floors:
            x = torch.tanh(floor(x))
        return self.roof(x)


def tower() -> Tower:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Tower()


PLAN = fp.parse(
    'chain(share(), keep(named("roof.*")), when(after(2), freeze(named("floors.0.*"))))'
)


def table(seed: int, rows: int = 12) -> torch.utils.data.TensorDataset:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


ROWS = {"north": table(1), "south": table(2, 9)}
ONE = fp.TrainConfig(rounds=1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])


def other_loss(model: nn.Module, batch: Any) -> Tensor:
    return 2 * loss(model, batch)


def right(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch["inputs"]).argmax(-1) == batch["labels"]).float().mean()}


def played(
    folder: Path | None = None,
    *,
    rounds: int = 4,
    lr: float = 0.05,
    tests: Any = None,
    validations: Any = None,
    **said: Any,
) -> fp.Run:
    """A run in `folder`; `tests` are the clients' own, and `options` are in `said` as they are."""
    names = {f.name for f in fields(fp.RunOptions)}
    options = {name: said.pop(name) for name in names & said.keys()}
    own = {"test": tests or {}, "validation": validations or {}}
    held_out = {name: {k: each[name] for k, each in own.items() if name in each} for name in ROWS}
    clients = {
        name: {"train": rows, **held_out[name]} if held_out[name] else rows
        for name, rows in ROWS.items()
    }
    usual: dict[str, Any] = {"test": table(3), "task": fp.CustomTask(metrics=right)}
    return simulate(
        said.pop("method", PLAN),
        said.pop("model", tower()),
        clients,
        said.pop("loss", loss),
        train=fp.TrainConfig(
            **{"rounds": rounds, "batch_size": 4, "lr": lr, **said.pop("train", {})}
        ),
        options=fp.RunOptions(folder=folder, **options),
        **{**usual, **said},
    )


def values(run: fp.Run) -> list[dict[str, str]]:
    models = [run.global_model(), *(run.personal_model(name) for name in ROWS)]
    return [digests(dict(model.named_parameters())) for model in models]


def global_digests(run: fp.Run) -> dict[str, str]:
    return digests(read_run(run.folder).global_state.values)


def test_objects_give_the_bits_of_the_study_that_says_the_same(here: Path) -> None:
    (here / "study.toml").write_text(STUDY)
    study = read_study(
        here / "study.toml", ["clients.dropout_fraction=0.0", "evaluate.attention_examples=0"]
    )
    told, experiment = run_study(study, here / "file"), build_experiment(study)
    shares = experiment.data
    given = simulate(
        make_method(study), experiment.model, shares.train, shares.task.loss,
        test=shares.common_test, train=study.train,
        participation=fp.ClientsConfig(fraction=study.clients.fraction),
        options=fp.RunOptions(folder=here / "objects", name=study.name, seed=study.seed),
    )  # fmt: skip
    assert global_digests(told) == global_digests(given)
    assert told.metrics[-1]["upload_bytes"] == given.metrics[-1]["upload_bytes"]


def test_the_callers_model_is_not_touched_and_what_is_taken_is_the_callers() -> None:
    model = tower()
    before = copy.deepcopy(model.state_dict())
    run = played(model=model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    taken = run.personal_model("north")
    with torch.no_grad():
        taken.roof.weight.zero_()
    assert run.personal_model("north").roof.weight.any()
    assert torch.equal(run.global_model().roof.weight, model.roof.weight), (
        "kept by each, so never moved"
    )


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(at: int, tmp_path: Path) -> None:
    """By an error in a callback, by asking for no more rounds, and in another process's objects."""
    whole = values(played(tmp_path / "whole"))

    def broken(closed: CommittedRound) -> None:
        if closed.round == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "broken", callbacks=[broken])
    assert fp.open_run(tmp_path / "broken").round == at
    again = played(tmp_path / "broken", resume=True)
    assert values(again) == whole
    waiting = played(tmp_path / "waits", start=False)
    for closed, _ in zip(waiting.rounds(), range(at), strict=False):
        assert closed.round == len(closed.metrics) <= at
    assert values(waiting.resume()) == whole
    faults, checked = fp.verify_run(tmp_path / "waits")
    assert not faults and "in-memory data" in checked


def test_rounds_can_be_added(tmp_path: Path) -> None:
    short = played(tmp_path / "short", rounds=2)
    assert values(short.resume(4)) == values(played(tmp_path / "long"))
    assert [row["round"] for row in short.metrics] == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="rounds can be added, but not removed"):
        short.resume(3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loss": other_loss}, "task.from_python"),
        (
            {"method": replace(Method(PLAN), compression=parse_codec("half()"))},
            "method.from_python",
        ),
        ({"lr": 0.06}, "train.lr"),
        ({"seed": 1}, "seed"),
        ({"model": nn.Sequential(nn.Linear(4, 4), tower())}, "model.from_python"),
    ],
)
def test_a_run_goes_on_with_the_same_objects_alone(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    played(tmp_path, rounds=2)
    with pytest.raises(ConfigError, match=why):
        played(tmp_path, resume=True, **change)


def test_a_run_goes_on_from_the_same_values_and_rows_alone(tmp_path: Path) -> None:
    played(tmp_path, rounds=2)
    other = tower()
    with torch.no_grad():
        other.roof.bias += 1
    with pytest.raises(fp.FedplanError, match="use the weights that it began with"):
        played(tmp_path, resume=True, model=other)
    given = {"north": ROWS["north"], "south": table(7, 9)}
    with pytest.raises(fp.FedplanError, match="other examples of south"):
        simulate(
            PLAN, tower(), given, loss, task=fp.CustomTask(metrics=right), test=table(3),
            train=fp.TrainConfig(rounds=4, batch_size=4, lr=0.05),
            options=fp.RunOptions(folder=tmp_path, resume=True),
        )  # fmt: skip


def test_early_stopping_stops_and_stays_stopped(tmp_path: Path) -> None:
    stop = EarlyStopping("validation.global.loss", patience=1, min_delta=10.0)
    run = played(tmp_path / "a", callbacks=[stop], validation=table(4))
    assert run.round == 2 and run.stopped.startswith("validation.global.loss has not")
    assert run.resume().round == 2, "what stopped it stops it again"
    assert run.resume(callbacks=[]).round == 4
    assert values(run) == values(played(tmp_path / "b")), "a run that waited is the same run"


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        fp.FedplanError, match=r"no round has a metric 'validation.global.f2'; use one of round"
    ):
        played(tmp_path, callbacks=[EarlyStopping("validation.global.f2")], validation=table(4))


def rows_of(seen: list[float]) -> CommittedRound:
    whole = RoundRecord(len(seen), "", (), {}, {}, {}, 0, 0)
    return CommittedRound(
        99, whole, (), {"x": 1}, Metrics({"m": each, "loss": -each} for each in seen)
    )


@pytest.mark.parametrize(
    ("seen", "least", "stops"),
    [
        ([1, 2, 3, 4], 0.0, False),
        ([1, 2, 2, 2], 0.0, True),
        ([3, 2, 4, 1], 0.0, False),
        ([1.0, 1.05, 1.08, 1.09], 0.1, True),
        ([1.0, 1.05, 1.11, 1.12], 0.1, False),
        ([1, float("nan"), float("nan")], 0.0, True),
        ([float("nan"), 1, 2], 0.0, False),
    ],
)
def test_when_it_is_time_to_stop(seen: list[float], least: float, stops: bool) -> None:
    for name, higher in (("m", True), ("loss", None)):
        stopping = EarlyStopping(name, 2, least, higher_is_better=higher)
        assert bool(stopping(rows_of(seen))) is stops
    with pytest.raises(fp.FedplanError, match="'m', and its direction is not known"):
        EarlyStopping("m", 2, least)(rows_of(seen))
    assert (
        EarlyStopping("m", 2, least, higher_is_better=False)(rows_of([-x for x in seen])) is None
        or stops
    )


ROWS_OF: dict[str, Callable[[torch.utils.data.TensorDataset], Any]] = {
    "torch": lambda rows: rows,
    "list": lambda rows: [rows[i] for i in range(len(rows))],
    "datasets": lambda rows: Dataset.from_dict(
        {"inputs": rows.tensors[0].tolist(), "labels": rows.tensors[1].tolist()}
    ).with_format("torch"),
    "examples": lambda rows: Batched(*rows.tensors),
}


class Batched:
    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


@pytest.mark.parametrize("kind", ROWS_OF)
def test_rows_of_every_kind_train_alike(kind: str) -> None:
    given = {name: ROWS_OF[kind](rows) for name, rows in ROWS.items()}
    train = fp.TrainConfig(rounds=2, batch_size=4, lr=0.05)
    run = simulate(PLAN, tower(), given, loss, train=train)
    alike = simulate(PLAN, tower(), ROWS, loss, train=train)
    assert values(run) == values(alike)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([1.0, 2.0], "give `collate`"),
        ([("a", 1), ("b", 0)], "give `collate`"),
        (Endless(), "no length"),
    ],
)
def test_rows_that_make_no_batch_are_refused(rows: Any, why: str) -> None:
    with pytest.raises(fp.FedplanError, match=why):
        simulate(PLAN, tower(), {"north": rows}, loss, train=ONE)


def test_a_folder_of_objects_says_how_to_go_on(tmp_path: Path) -> None:
    run = played(tmp_path / "run", rounds=1)
    for build in (
        lambda: run_study(run.study, run.folder, resume=True),
        lambda: build_experiment(run.study),
    ):
        with pytest.raises(ConfigError, match=r"fedplan\.simulate\(.*folder=\.\.\., resume"):
            build()
    with pytest.raises(ConfigError, match="holds a run"):
        played(tmp_path / "run", rounds=1)


@pytest.mark.parametrize("wire", ["", "pipe(delta(), half())"])
def test_a_told_method_agrees_with_itself(wire: str) -> None:
    for name in METHODS:
        method = method_by_name(name)
        if wire and method.lora_aggregation.is_separate:  # an exact rule takes no lossy wire
            method = replace(method, compression=parse_codec(wire))
        told = parse_recorded_method(method.lines)
        assert told.lines == method.lines and told.plan == method.plan
        assert told.lora_aggregation.text == method.lora_aggregation.text
        assert told.compression.text == method.compression.text
        for word in ("aux", "joint_choice", "absent", "equal_weights", "own_copy"):
            assert getattr(told, word) == getattr(method, word), (name, word)
        with pytest.raises(fp.FedplanError, match="pass it again"):
            _ = told.fit


def test_each_round_that_is_told_keeps_its_own_row() -> None:
    told = list(played(start=False).rounds())
    assert [(c.round, c.row["round"], len(c.metrics)) for c in told] == [
        (n, n, n) for n in (1, 2, 3, 4)
    ]


def test_a_run_that_is_resumed_within_its_rounds_ends_once(tmp_path: Path) -> None:
    run = played(tmp_path, start=False)
    playing = run.rounds()
    next(playing)
    run.resume()
    assert list(playing) == [] and run.round == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"evaluate": fp.EvaluateConfig(metrics=["accuracy"])}, "compute them in your own `metrics`"),
        ({"task": make_task("text-classification", columns="x", label="y", labels="ab")}, "give a task, or a loss"),
        ({"task": fp.CustomTask(metrics=right, primary="f2", higher_is_better=True), "tests": {"north": table(5)}}, "primary is 'f2', but the metrics are loss, "),
        ({"callbacks": [EarlyStopping("global.loss")]}, "a test that decides when to stop is no test; use validation.global.loss"),
        ({"callbacks": [EarlyStopping("validation.global.loss")]}, "does not measure it: set data.validation_fraction"),
        ({"evaluate": fp.EvaluateConfig(keep_best="global")}, "no validation scores of that model"),
        ({"validation": {"north": table(4)}}, "validation is a mapping"),
        ({"callbacks": [None]}, "give a list of functions"),
        ({"method": "fedavg"}, "give a plan"),
        ({"evaluate": {"every": 2}}, r"evaluate is \{'every': 2\}: give fp.EvaluateConfig\(...\)"),
        ({"participation": fp.ClientsConfig(names=["north"])}, "the clients are those with data"),
        ({"test": [(torch.zeros(9), 1)]}, "the examples of the common test set: RuntimeError"),
        ({"loss": lambda model, batch: model(batch["inputs"])}, "it must be one number"),
    ],
)  # fmt: skip
def test_what_is_given_is_heard_or_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(fp.FedplanError, match=why):
        played(**change)


@pytest.mark.parametrize("rounds", [0, 4.0, "5"])
def test_a_number_of_rounds_that_is_none_harms_no_run(rounds: Any, tmp_path: Path) -> None:
    run = played(tmp_path, rounds=2)
    with pytest.raises(ConfigError, match=r"train\.rounds"):
        run.resume(rounds)
    assert not fp.verify_run(tmp_path)[0]


MODULE = """
import torch


class Small(torch.nn.Linear):
    def forward(self, x):
        return super().forward({})
"""


def test_the_code_of_a_model_is_part_of_the_run(tmp_path: Path) -> None:
    """Of one name, and with the same params: another way forward."""
    told = list[str]()
    for number, way in enumerate(("x", "2 * x")):
        file = tmp_path / str(number) / "small.py"
        file.parent.mkdir()
        file.write_text(MODULE.format(way))
        spec = importlib.util.spec_from_file_location("small", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules["small"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        told.append(simulate(fp.share(), module.Small(4, 2), ROWS, loss, train=ONE).study.digest)
    assert told[0] != told[1]


PRIVATE = fp.PrivacyConfig(unit="client", epsilon=50.0, noise_multiplier=1.0)


@pytest.mark.parametrize("metric", ["aggregated", "loss", "personal.loss", "upload_bytes"])
def test_no_run_stops_by_what_is_hidden(metric: str) -> None:
    stop = EarlyStopping(metric)
    with pytest.raises(fp.FedplanError, match="depends on private data"):
        played(privacy=PRIVATE, tests={"north": table(5)}, callbacks=[stop])


def test_personal_scores_are_better_in_the_direction_of_their_task() -> None:
    own = dict.fromkeys(ROWS, table(5))
    metric = "validation.personal.loss"
    falling = played(validations=own, callbacks=[EarlyStopping(metric, patience=1)]).metrics
    assert [row[metric] for row in falling] == sorted(
        (row[metric] for row in falling), reverse=True
    ) and len(falling) == 4  # fmt: skip


def test_nothing_is_chosen_on_validation_examples_of_clients_that_are_hidden() -> None:
    with pytest.raises(ConfigError, match="give a common, public validation set"):
        played(privacy=PRIVATE, validations={"north": table(5)})


def test_a_told_method_is_never_run(here: Path) -> None:
    lines = list(method_by_name("scaffold").lines)
    with pytest.raises(ConfigError, match=r"set by fedplan\.simulate only"):
        read_study(here / "study.toml", [f"method={{from_python = {lines}}}"])


def test_privacy_by_example_hides_one_row_from_python_too(tmp_path: Path) -> None:
    from chat import tiny_chat

    model, folder = tiny_chat(tmp_path / "chat"), tmp_path / "run"
    rows = Dataset.from_dict({"text": ["The sky is blue and the grass is green. " * 6] * 6})
    goal = make_task("causal-lm", columns="text", model=model, max_length=8)
    words: dict[str, Any] = {
        "train": fp.TrainConfig(rounds=1, steps=1, batch_size=2),
        "privacy": fp.PrivacyConfig(
            unit="example", epsilon=50.0, noise_multiplier=1.0, examples_per_site=6
        ),
        "options": fp.RunOptions(folder=folder, start=False),
    }
    made = AutoModelForCausalLM.from_pretrained(model)
    run = simulate(fp.share(), made, {"north": rows}, task=goal, **words)
    assert run.simulation and len(run.simulation.data.train["north"]) == len(rows)
    packed = make_task("instruction", columns=["prompt", "response"], model=model, packing=True)
    with pytest.raises(fp.FedplanError, match="packing joins several rows in one example"):
        simulate(fp.share(), made, {"north": rows}, task=packed, **words)


def test_a_client_without_rows_takes_no_step() -> None:
    run = simulate(PLAN, tower(), {**ROWS, "empty": []}, loss, train=ONE)
    assert run.round == 1


def test_a_run_whose_rounds_are_left_ends_in_silence(tmp_path: Path) -> None:
    program = f"""
import fedplan as fp, torch
rows = {{"a": [{{"x": torch.zeros(3), "y": torch.zeros(1)}}]}}
loss = lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean()
run = fp.simulate(fp.share(), torch.nn.Linear(3, 1), rows, loss, train=fp.TrainConfig(rounds=3),
                  options=fp.RunOptions(start=False, folder={str(tmp_path / "run")!r}))
rounds = run.rounds()
print(next(rounds).round)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
    assert (
        "the iterator over its rounds was closed" in (tmp_path / "run" / "status.json").read_text()
    )


def test_a_run_of_files_gives_its_models_and_its_report_however_it_is_had(here: Path) -> None:
    """The object of `run_study` and that of `open_run` are of one kind, with the same bits."""
    (here / "study.toml").write_text(STUDY)
    run = run_study(read_study(here / "study.toml", ["train.rounds=2"]), here / "run")
    opened = fp.open_run(here / "run")
    assert type(opened) is type(run) and opened.metrics == run.metrics
    assert opened.ledger == run.ledger and opened.study == run.study and opened.round == 2
    for client in ("", run.clients[0]):
        models = [r.personal_model(client) if client else r.global_model() for r in (run, opened)]
        assert digests(dict(models[0].named_parameters())) == digests(
            dict(models[1].named_parameters())
        )
    assert "Learning curves" in opened.report(here / "report.html").read_text()
    with pytest.raises(ConfigError, match="there is no client 'nobody'"):
        opened.personal_model("nobody")
    del run
    assert opened.resume(3).round == 3 and len(opened.metrics) == 3


def test_a_run_of_objects_has_a_report_and_its_model_in_its_folder(tmp_path: Path) -> None:
    run = played(tmp_path / "run", rounds=1, tests={"north": table(5)})
    assert "Learning curves" in run.report(tmp_path / "report.html").read_text()
    opened, values = fp.open_run(run.folder), run.global_values()
    assert all(torch.equal(values[name], each) for name, each in opened.global_values().items())
    assert values.keys() == opened.personal_values("north").keys()
    shutil.rmtree(run.folder / "model")
    with pytest.raises(ConfigError, match=r"model\.json is lost"):
        opened.global_values()


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("rounds", r"train=fp.TrainConfig\(rounds=...\)"),
        ("fraction", r"participation=fp.ClientsConfig\(fraction=...\)"),
        ("client_tests", r'clients=\{"north": \{"train": ..., "test": ...\}\}'),
        ("run", r"options=fp.RunOptions\(start=False\)"),
        ("workers", "fp.run_study"),
        ("wrong", "'wrong'$"),
    ],
)
def test_a_word_that_belongs_elsewhere_is_told_its_place(word: str, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        simulate(PLAN, tower(), ROWS, loss, **{word: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{"test": table(1)}, {"train": table(1), "valid": table(2)}])
def test_a_clients_examples_are_to_train_and_to_test(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"clients\['north'\] is a mapping with"):
        simulate(PLAN, tower(), {"north": data}, loss)


def test_a_damaged_run_is_repaired_with_its_objects(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    played(folder, rounds=3)
    whole = contents(folder)
    for pattern in ("clients/**/3.json", "clients/**/3.*.safetensors", "global/3.json"):
        next(folder.glob(pattern)).unlink()
    code, screen = command("verify", "--repair", str(folder))
    assert code != 0 and "RunOptions(folder=..., resume=True, repair=True)" in " ".join(
        screen.split()
    )
    played(folder, rounds=3, resume=True, repair=True)
    assert contents(folder) == whole
