# SPDX-License-Identifier: Apache-2.0
"""Warnings: each silent mistake has one, with a remedy; good studies have none."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace as Like
from typing import Any

import pytest
from commands import run as typed
from silent_mistakes import (
    GOOD,
    KEEP_TOP,
    MISTAKES,
    STUDY,
    clients,
    net,
    played,
    rows,
    some_shades,
)

import fedplan as fp
from fedplan.audits.run import audit_run
from fedplan.errors import FedplanError
from fedplan.federation.ledger.status import STATUS
from fedplan.reports import run_warnings
from fedplan.reports.plan_warnings import PLAN_WARNINGS
from fedplan.reports.run_warnings import RESULT_WARNINGS
from fedplan.reports.status import run_snapshot
from fedplan.reports.study_warnings import DATA_WARNINGS
from fedplan.studies.schema import read_study

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
MEANINGS = PLAN_WARNINGS | DATA_WARNINGS | RESULT_WARNINGS
BY_DAY = 11
"""Good studies that are played by day."""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    some_shades(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def test_there_are_thirty_mistakes_and_twenty_good_studies() -> None:
    assert len({each.what for each in MISTAKES}) == len(MISTAKES) >= 30
    assert len(GOOD) >= 20
    assert MEANINGS.keys() - {each.code for each in MISTAKES} == {"unreadable"}


def test_each_silent_mistake_has_its_warning(tmp_path: Path) -> None:
    for each in MISTAKES:
        warnings = {warning.code: warning for warning in each.play(tmp_path).warnings}
        assert each.code in warnings, (each.what, list(warnings))
        assert warnings.keys() <= MEANINGS.keys()
        assert all(w.text.endswith(".") and w.remedy for w in warnings.values()), warnings


def test_the_page_lists_each_mistake_with_its_warning() -> None:
    for each in MISTAKES:
        row = f"| {each.what} | `{each.code}` | {MEANINGS[each.code]} |"
        assert row in PAGE, "python docs/troubleshooting.py"


def test_good_studies_have_no_warning(tmp_path: Path) -> None:
    for what in [*GOOD][:BY_DAY]:
        assert not GOOD[what](tmp_path).warnings, what


@pytest.mark.nightly
def test_all_other_good_studies_have_no_warning(tmp_path: Path) -> None:
    for what in [*GOOD][BY_DAY:]:
        assert not GOOD[what](tmp_path).warnings, what


def test_a_run_that_aggregated_nothing_has_failed_on_every_screen(study: Path) -> None:
    """Not done: the exit code, the status, the report's badge, the export and its card say so."""
    command = ("run", "study.toml", "--set", "train.lr=1e38", "--set", "train.optimizer=sgd")
    code, words = typed(*command, "--set", "train.rounds=1", "--output", "run")
    assert code == 1 and "Done." not in words
    assert "Failed: no update was aggregated in any round." in words
    assert "--set train.lr=0.001" in words, "a rate that trains"
    assert "failed" in typed("status", "run")[1]
    assert json.loads(typed("status", "run", "--json")[1])["state"] == "failed"
    lost = sum(row["download_bytes"] for row in fp.open_run("run").metrics)
    assert (
        f"{lost:,} downloaded by clients that were not aggregated"
        in audit_run(study / "run").summary
    )
    fp.open_run("run").report("page.html")
    assert '"state bad">failed<' in (study / "page.html").read_text()
    assert "This is no trained model" in typed("export", "run", "model")[1]
    card = (study / "model" / "README.md").read_text()
    assert "as in the initial model: no update changed it" in card and "and aggregated" not in card
    from_python = played(train={"lr": 1e38, "optimizer": "sgd"})
    assert run_snapshot(from_python.folder).state == "failed"


def test_warnings_stand_on_every_screen(study: Path) -> None:
    command = ("run", "study.toml", "--set", "method.plan=freeze()", "--set", "train.rounds=1")
    code, words = typed(*command, "--output", "run")
    assert code == 0 and words.count("Nothing is trained") == 2, "before the run, and after it"
    code, words = typed("status", "run")
    assert code == 0 and "Nothing is trained" in words
    assert json.loads(typed("status", "run", "--json")[1])["warnings"][0] == {
        "code": "nothing-trained",
        "text": "Nothing is trained: the plan chain(share(), freeze()) gives no param the role "
        "SHARE or KEEP.",
        "remedy": "Share or keep a part, as --set 'method.plan=share()'",
    }
    typed("report", "run", "-o", "report.html")
    page = (study / "report.html").read_text()
    assert "1 warning<" in page and "Nothing is trained" in page
    assert [each.code for each in fp.open_run("run").warnings] == ["nothing-trained"]
    code, words = typed(*command, "--output", "other", "--json")
    assert json.loads(words[words.index("{\n") :])["warnings"][0]["code"] == "nothing-trained"
    explained = json.loads(typed("explain", "study.toml", "--json")[1])
    assert explained["warnings"] == []


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_the_summary_of_a_run_is_what_its_folder_says(study: Path, late: float) -> None:
    """In a folder that was moved, too; without the summary, or an outdated one, the same."""
    changes = [f"clients.late_fraction={late}", "train.rounds=2"]
    typed("run", "study.toml", "--output", "run", *(f"--set={each}" for each in changes))
    (study / "run").rename(study / "moved")
    status = study / "moved" / STATUS
    fields = json.loads(status.read_text())
    assert run_snapshot("moved").warnings is not None
    written = json.loads(typed("status", "moved", "--json")[1])
    assert "{folder}" not in str(written["warnings"]) and bool(written["warnings"]) == bool(late)
    assert bool(late) == ("fedplan logs moved" in str(written["warnings"]))
    bare = {name: value for name, value in fields.items() if name not in ("warnings", "run_scores")}
    status.write_text(json.dumps(bare))
    assert run_snapshot("moved").warnings is None
    assert json.loads(typed("status", "moved", "--json")[1]) == written
    status.write_text(json.dumps(fields))
    for name in ("run.json", "study.json"):  # another run, or a study that was changed since
        content = (study / "moved" / name).read_text()
        (study / "moved" / name).write_text(content.replace(written["run"], "0" * 16) + " ")
        snapshot = None
        with suppress(FedplanError):
            snapshot = run_snapshot("moved")
        assert snapshot is None or snapshot.warnings is None
        (study / "moved" / name).write_text(content)
    assert run_snapshot("moved").warnings is not None


def test_strict_makes_them_errors(study: Path) -> None:
    code, words = typed("run", "study.toml", "--strict", "--set", "method.plan=freeze()")
    assert code == 2 and "nothing was run, because of nothing-trained" in words
    assert fp.open_run("runs/tiny").round == 0
    code, words = typed(
        *("run", "study.toml", "--strict", "--output", "late"),
        *("--set", "clients.late_fraction=1.0", "--set", "train.rounds=1"),
    )
    assert code == 1 and "Never aggregated" in words, words
    assert typed("run", "study.toml", "--strict", "--output", "good")[0] == 0


def test_strict_makes_them_errors_in_python(study: Path) -> None:
    file = study / "study.toml"
    with pytest.raises(FedplanError, match="nothing was run, because of nothing-trained"):
        fp.run_study(read_study(file, ["method.plan=freeze()"]), "frozen", strict=True)
    assert fp.open_run("frozen").round == 0
    late = read_study(file, ["clients.late_fraction=1.0", "train.rounds=1"])
    with pytest.raises(FedplanError, match=r"late is doubtful, because of .*never-aggregated"):
        fp.run_study(late, "late", strict=True)
    assert fp.open_run("late").round == 1


def test_client_level_privacy_tells_nothing_of_clients() -> None:
    run = played(
        KEEP_TOP,
        clients(4, test=5),
        test=rows(10, 9),
        privacy=fp.PrivacyConfig(unit="client", epsilon=1e6, noise_multiplier=0.01),
        participation=fp.ClientsConfig(fraction=0.5),
    )
    codes = [each.code for each in run.warnings]
    assert "few-test-examples" in codes  # of the common test set, which is public
    assert "site-" not in " ".join(map(str, run.warnings))
    clients_codes = {"few-client-test-examples", "client-never-drawn", "client-never-aggregated"}
    assert not {*codes} & clients_codes


@pytest.mark.parametrize(
    ("losses", "code"),
    [
        ({"a": (0.9, 0.7)}, ""),  # above the test loss of the starting model
        ({"a": (0.3, 0.25), "b": (0.9,)}, ""),  # b has its only turn in the last round
        ({"a": (0.3, 0.25), "b": (0.6, 0.9)}, "loss-grew"),
        ({"a": (0.3, 3.2, 0.3)}, "loss-exploded"),
        ({"a": (4.1,)}, "loss-exploded"),
    ],
)
def test_training_losses_are_compared_client_by_client(
    losses: dict[str, tuple[float, ...]], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_warnings, "read_initial_scores", lambda _: {"global.loss": 0.4})
    turns = [Like(client=name, loss=each, steps=1) for name in losses for each in losses[name]]
    facts: Any = Like(
        agreement=Like(guarantee=None, secagg=Like(active=False)),
        study=Like(train=Like(lr=0.1), data=Like(from_python=True), has_central_data=True),
        turns=(turns,),
        run=Like(folder=tmp_path),
    )
    assert [each.code for each in run_warnings._loss_warnings(facts)] == [code] * bool(code)


def test_a_run_without_any_score_says_so_and_one_with_pooled_tests_does_not() -> None:
    private = fp.PrivacyConfig(unit="client", epsilon=1e6, noise_multiplier=0.01)
    no_score = played(data={n: s["train"] for n, s in clients(4).items()}, privacy=private)
    assert "no-test-examples" in [each.code for each in no_score.warnings]
    pooled = played(data=clients(test=16), evaluate=fp.EvaluateConfig(personal=False))
    assert not pooled.warnings, "the global model is scored on 32 examples of both clients"


@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_verify_proves_that_trained_params_moved(kind: str) -> None:
    how = fp.AggregationConfig(kind=kind, threshold=2 * (kind == "secure"), min_contributors=2)
    plan = 'chain(share(), freeze(named("body*")))'
    audit = audit_run(played(plan, aggregation=how).folder)
    assert "frozen params were checked 8 times and none changed; all 2 trained" in audit.summary
    audit = audit_run(played(model=net(unused=True), aggregation=how).folder)
    assert audit.faults == () and audit.unmoved == ("unused.weight", "unused.bias")
    assert "of 6 trained params 2 never moved (unused.weight, unused.bias)" in audit.summary
    audit = audit_run(played("freeze()", aggregation=how).folder)
    assert "nothing was trained" in audit.summary and not audit.unmoved
