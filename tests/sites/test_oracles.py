# SPDX-License-Identifier: Apache-2.0
"""Studies as questions: what a site answers to an offer does not depend on one of its rows."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sites
import torch
from PIL import Image
from sites import study_text, words_of
from studies import approvals_in, offered

from fedplan.data.tables import DataError, load_table, plain_cells
from fedplan.data.tasks.definition import Task
from fedplan.errors import FedplanError
from fedplan.federation.endpoint import HELLO
from fedplan.federation.ledger.faults import KINDS, read_faults
from fedplan.federation.messages import RequestRefused
from fedplan.runners.site_runtime import SiteRuntime
from fedplan.sites.approvals import APPROVALS_FILE, site_approvals
from fedplan.sites.doctor import check_site
from fedplan.sites.gateway import SiteGateway
from fedplan.sites.policy import Policy, policy_violations
from fedplan.storage.append_log import AppendLog
from fedplan.studies import federated_data
from fedplan.studies.experiment import outline_agreement
from fedplan.studies.schema import study_from_dict
from fedplan.tensors.serialization import pack_message, unpack_message

POLICY = """auto_approve = true
[limits]
rounds = 3
epsilon = 8.0
[require_privacy]
unit = "example"
epsilon = 8.0
"""
PRIVATE = 'unit = "example"\nepsilon = 4.0\nexamples_per_site = 24\n'
LABELS = ["a01", "a07", "b20", "c34", "hiv"]
ROWS = 24


def rows(target: dict[str, Any] | None, suffix: str) -> dict[str, list[Any]] | list[dict[str, Any]]:
    """A table of which the last row is the target, or is missing."""
    draw = np.random.default_rng(0)
    found: list[dict[str, Any]] = [
        {
            "image": draw.integers(0, 255, (8, 8), dtype=np.uint8),
            "diagnosis": LABELS[int(draw.integers(0, 4))],
            "ward": "x",
        }
        for _ in range(ROWS)
    ]
    if target is not None:
        found.append({**found[0], **target})
    return found if suffix == ".jsonl" else {k: [row[k] for row in found] for k in found[0]}


def gateway(folder: Path, target: dict[str, Any] | None, suffix: str = ".npz") -> SiteGateway:
    """A site that demands privacy and approves by rule."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text(POLICY)
    table, file = rows(target, suffix), folder / f"rows{suffix}"
    if isinstance(table, dict):
        np.savez(file, **{name: np.array(column) for name, column in table.items()})
    else:
        images = [
            each if isinstance(each := row["image"], list) else each.tolist() for row in table
        ]
        plain = [{**row, "image": image} for row, image in zip(table, images, strict=True)]
        plain = [{k: v for k, v in row.items() if v is not None} for row in plain]
        file.write_text("".join(json.dumps(row) + "\n" for row in plain))
    site, _ = words_of(folder, data=str(file))
    return SiteGateway(site, site_approvals(site))


def question(
    labels: list[str] = LABELS,
    column: str = "diagnosis",
    data: str = "",
    name: str = "s",
    privacy: str = PRIVATE,
) -> str:
    text = study_text(
        name=name,
        labels=json.dumps(labels),
        privacy=privacy,
        rounds=2,
        method='plan = "chain(freeze(), share(head))"',
        data=data,
    )
    return text.replace('label = "digit"', f'label = "{column}"')


def answer(desk: SiteGateway, text: str, run: str = sites.RUN) -> str:
    """The code of the answer to an offer, or "answered"."""
    message = pack_message({}, {"run": run, "study": tomllib.loads(text)})
    words = unpack_message(desk.answer(HELLO, message))[1]
    return next((f"{kind}: {words[kind]}" for kind in KINDS if kind in words), "answered")


WITHOUT = [label for label in LABELS if label != "hiv"]
QUESTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a label that one row has": (".npz", {"diagnosis": "hiv"}, question(WITHOUT)),
    "labels that no row has": (".npz", {"diagnosis": "hiv"}, question(["z98", "z99"])),
    "a cell without a label": (".jsonl", {"diagnosis": None}, question()),
    "a cell that is no image": (".jsonl", {"image": [[1, 2], [3]]}, question()),
    "a cell of another type": (".jsonl", {"diagnosis": 7}, question()),
    "a cell that is a list": (".jsonl", {"diagnosis": ["a01", "hiv"]}, question()),
    "a column that one row has": (".jsonl", {"drug": "hiv"}, question(["hiv"], "drug")),
    "a filter by a column with a gap": (
        ".jsonl",
        {"ward": None},
        question(data='filter = { ward = ["x", "y"] }'),
    ),
    "a filter by a column that one row has": (
        ".jsonl",
        {"drug": "hiv"},
        question(data='train_filter = { drug = "hiv" }'),
    ),
    "a split that one row has": (".jsonl", {"split": "test"}, question(data='split = "test"')),
}


def by_rule(study: Any) -> list[str]:
    """As if a person had approved of studies that select rows."""
    return []


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_row_decides_whether_a_study_is_answered(name: str, tmp_path: Path) -> None:
    suffix, target, study = QUESTIONS[name]
    with patch("fedplan.sites.approvals.example_filters", by_rule):
        seen = [
            answer(gateway(tmp_path / str(number), each, suffix), study)
            for number, each in enumerate((target, None))
        ]
    assert seen == ["answered", "answered"]


def test_the_oracle_of_labels_put_back_is_found(tmp_path: Path) -> None:
    """Studies that differ in a label tell, one by one, which labels a private table holds."""

    def raised(task: Any, table: Any) -> Any:
        raise FedplanError("as it was").with_code("data")

    with patch.object(federated_data, "_leave_out_unfit", raised):
        desk = gateway(tmp_path, {"diagnosis": "hiv"})
        labels = {
            gone: answer(
                desk, question([x for x in LABELS if x != gone], name=gone), f"{number:016x}"
            )
            for number, gone in enumerate(LABELS)
        }
        absent = answer(gateway(tmp_path / "other", None), question(WITHOUT))
    assert set(labels.values()) == {"failed: data"} and absent == "answered"


def test_what_is_left_out_is_counted_at_home_and_the_rest_is_trained_on(tmp_path: Path) -> None:
    desk = gateway(tmp_path, {"diagnosis": "hiv"})
    assert answer(desk, question(WITHOUT)) == "answered"
    runtime = desk._runtime  # pyright: ignore[reportPrivateUsage]
    assert runtime is not None
    assert len(runtime[1].experiment.data.train[sites.NAME]) == ROWS
    (fault,) = read_faults(desk.state_folder)
    assert f"1 of {ROWS + 1} rows do not fit the study and are left out" in fault
    (finding,) = [each for each in check_site(desk.site) if each.name == "data for s"]
    assert finding.state == "warn" and "1 of 25 rows" in finding.message


def test_a_row_without_a_class_is_not_of_the_last_class() -> None:
    names, labelled = ["a", "hiv"], federated_data._is_labelled  # pyright: ignore
    assert [labelled(cell, names, names) for cell in (0, 1, [0, 1], -1, [0, -1], 2)] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_a_missing_column_of_a_table_with_columns_is_refused(tmp_path: Path) -> None:
    assert answer(gateway(tmp_path, None), question(column="patient")) == "failed: data"


def test_without_privacy_the_error_says_what_is_wrong(tmp_path: Path) -> None:
    desk = gateway(tmp_path, {"diagnosis": "hiv"})
    (tmp_path / "policy.toml").write_text("auto_approve = true\n")
    assert answer(desk, question(WITHOUT, privacy="")) == "failed: data"
    assert "label 'hiv' in column 'diagnosis'" in read_faults(desk.state_folder)[-1]


# -------------------------------------------------------------------------- the budget


SELECTIONS: dict[str, Callable[[int], str]] = {
    "labels": lambda n: question(LABELS[: 3 + n]),
    "a filter": lambda n: question(
        data=f"filter = {{ diagnosis = {json.dumps(LABELS[: 3 + n])} }}"
    ),
    "rows held out": lambda n: question().replace(
        "holdout_fraction = 0.0", f"holdout_fraction = 0.{n}"
    ),
    "another name": lambda n: question(name=f"s{n}"),
    "another seed": lambda n: question().replace("seed = 0", f"seed = {n}"),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_study_that_selects_other_rows_spends_from_the_same_budget(
    selection: str, tmp_path: Path
) -> None:
    sites.write_rows(
        tmp_path / "rows.npz", diagnosis=np.array(LABELS)[np.arange(ROWS) % len(LABELS)]
    )
    site, limits = words_of(tmp_path)
    for number in range(2):
        study = study_from_dict(tomllib.loads(SELECTIONS[selection](number)))
        endpoint = SiteRuntime(site, study, limits).endpoint(f"{number:016x}")
        tensors, words = sites.asked(endpoint, sites.world_of(endpoint))
        assert tensors, words
    assert sites.charges(tmp_path) == 2
    guard = endpoint.site.privacy.guard
    assert guard is not None and guard.budget.epsilon_spent() > 1.2 * guard.epsilon_spent


# ------------------------------------------------------------------------ many offers


def test_offers_are_counted_and_limited(tmp_path: Path) -> None:
    approvals = approvals_in(tmp_path, "[limits]\nstudies_per_day = 3\n")
    studies = [offered(name=f"s{number}") for number in range(5)]

    def code(study: Any) -> str:
        with pytest.raises(RequestRefused) as caught:
            approvals.require_approval(study)
        return caught.value.code

    codes = [code(study) for study in studies]
    assert codes == ["not-approved"] * 3 + ["too-many-studies"] * 2
    assert code(studies[0]) == "not-approved", "a study that is known is no new question"
    again = approvals_in(tmp_path, "[limits]\nstudies_per_day = 3\n")
    with pytest.raises(RequestRefused, match=r"limits\.studies_per_day"):
        again.require_approval(offered(name="restarted"))
    assert len(AppendLog(tmp_path / "state" / APPROVALS_FILE, chained=True).read()) == 3
    assert approvals_in(tmp_path).policy.limits.studies_per_day == 100


def test_a_policy_that_requires_privacy_refuses_ghost_clipping() -> None:
    study = offered("share()", privacy=PRIVATE + "ghost_clipping = true\n")
    required = {"unit": "example", "epsilon": 8.0}
    agreement = outline_agreement(study)

    def violations(**more: Any) -> list[str]:
        policy = Policy.model_validate({"require_privacy": {**required, **more}})
        return policy_violations(policy, study, agreement)

    assert any("ghost_clipping" in each for each in violations())
    assert violations(allow_ghost_clipping=True) == []


@pytest.mark.parametrize("target", [None, {"digit": 1}, {"digit": "oops"}, {"digit": [2]}, {}])
def test_no_row_of_a_json_file_decides_which_others_are_used(
    target: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Half of the labels are texts and half numbers: one more decided which half was used."""
    images = np.random.default_rng(0).integers(0, 255, (9, 8, 8)).tolist()
    found = [{"image": images[i], "digit": "1" if i < 4 else 1} for i in range(8)]
    found += [] if target is None else [{"image": images[8], **target}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    examples: Any = sites.site_of(
        tmp_path, study_text(), data=str(tmp_path / "rows.jsonl")
    ).site.examples
    used = {int(each) for each in examples.pixels[:, 0, 0, 0]}
    assert {image[0][0] for image in images[:8]} <= used
    assert len(examples) == (9 if target == {"digit": 1} else 8)


def test_a_model_is_tried_on_the_same_examples_whatever_the_table(tmp_path: Path) -> None:
    trials = list[Any]()
    for seed, count in ((0, 24), (1, 3)):
        (folder := tmp_path / str(seed)).mkdir()
        sites.write_rows(folder / "rows.npz", seed=seed, count=count)
        examples = sites.site_of(folder, study_text()).site.setup.trial_examples
        assert examples is not None
        trials.append(examples.batch(torch.arange(len(examples))))
    assert trials[0].keys() == trials[1].keys()
    assert all(torch.equal(trials[0][name], trials[1][name]) for name in trials[0])


@pytest.mark.parametrize("on", [False, True])
def test_a_model_is_tried_with_the_operations_that_train_it(on: bool, tmp_path: Path) -> None:
    """Some operations of GPUs are not deterministic: such a model is refused unless it is on."""
    seen, real = set[bool](), Task.loss

    def loss(self: Task, model: Any, batch: Any) -> Any:
        seen.add(torch.are_deterministic_algorithms_enabled())
        return real(self, model, batch)

    with patch.object(Task, "loss", loss):
        sites.site_of(tmp_path, f"deterministic = {json.dumps(on)}\n" + study_text())
    assert seen == {on}


CELLS = [1, "1", 0.5, [2], {"a": None}, True, None, math.nan, [math.inf], 10**30, [[[3]]], "x"]


@pytest.mark.parametrize("gone", range(len(CELLS)))
def test_every_cell_of_json_files_keeps_its_own_type(gone: int, tmp_path: Path) -> None:
    """With and without any one cell, the others are the same, in a file and in a folder."""

    def cells(rows: list[int]) -> dict[int, Any]:
        lines = [json.dumps({"cell": CELLS[each], "row": each}) + "\n" for each in rows]
        (tmp_path / "folder").mkdir(exist_ok=True)
        for name, part in {"all": lines, "folder/a": lines[::2], "folder/b": lines[1::2]}.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(part))
        tables = [
            load_table(str(tmp_path / name), allow_empty=True) for name in ("all.jsonl", "folder")
        ]
        one, two = (
            dict(zip(plain_cells(each, "row"), plain_cells(each, "cell"), strict=True))
            for each in tables
        )
        assert one == two
        return one

    every, numbers = cells([*range(len(CELLS))]), [*range(len(CELLS))]
    known = {each: CELLS[each] for each in numbers if each not in (7, 8, 9)}  # no JSON, or too big
    assert {**every, **known} == every and every[7] is None and every[8] is None
    assert {**every, **cells([each for each in numbers if each != gone])} == every


def test_a_folder_of_json_files_and_others_is_refused_with_privacy(tmp_path: Path) -> None:
    """One row of the first would decide whether its column can be joined to that of the others."""
    (tmp_path / "a.jsonl").write_text('{"cell": "x"}\n')
    (tmp_path / "b.csv").write_text("cell\ny\n")
    assert load_table(str(tmp_path))["cell"][:] == ["x", "y"]
    with pytest.raises(DataError, match="convert the files to one format"):
        load_table(str(tmp_path), allow_empty=True)


@pytest.mark.parametrize("odd", [{}, {"ward": 1}])
def test_a_folder_of_json_files_answers_as_a_file_does(odd: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    found = [{"image": [[1] * 8] * 8, "digit": 1, **odd}, {"image": [[2] * 8] * 8, "digit": 1}]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    desk = sites.make_gateway(tmp_path, data=str(tmp_path / "data"))
    assert answer(desk, study_text(data="filter = { ward = [1] }")) == "answered"


def image_gateway(folder: Path, image: bytes) -> SiteGateway:
    """A site with a table of two images."""
    import datasets

    folder.mkdir(exist_ok=True)
    cells = [{"bytes": image, "path": None}] * 2
    features = datasets.Features({"image": datasets.Image(), "digit": datasets.Value("int64")})
    table: Any = datasets.Dataset.from_dict({"image": cells, "digit": [0, 1]}, features=features)
    table.to_parquet(str(folder / "rows.parquet"))
    return sites.make_gateway(folder, data=str(folder / "rows.parquet"))


@pytest.mark.parametrize("data", ["filter = { image = [1] }", "train_filter = { image = 1 }"])
def test_a_filter_on_images_reads_none(data: str, tmp_path: Path) -> None:
    assert answer(image_gateway(tmp_path, b"broken"), study_text(data=data)) == "answered"


def test_labels_are_not_separated_in_a_column_of_images(tmp_path: Path) -> None:
    """Decoding one that is broken would fail, and tell that it is there."""
    png = BytesIO()
    Image.new("L", (8, 8)).save(png, "png")
    study = study_text().replace('label = "digit"', 'label = "image"\nlabel_separator = ";"')
    study = study.replace('"image-classification"', '"image-multi-label"')
    for number, image in enumerate((b"broken", png.getvalue())):
        desk = image_gateway(tmp_path / str(number), image)
        assert answer(desk, study) == "failed: data"
        assert "label_separator is for a column of texts" in read_faults(desk.state_folder)[-1]
