# SPDX-License-Identifier: Apache-2.0
"""Statistics of sites: exact where shown, no small cell to be computed, and nothing unasked."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commands import run
from datasets import ClassLabel, Dataset, Features
from flwr.app import Context
from grids import InProcess
from rich.console import Console
from sites import PRIVATE, RUN, study_text
from studies import offered

from fedplan.data.column_statistics import (
    Column,
    CountRule,
    TableStatistics,
    join_cells,
    mismatches,
    statistics_from_json,
    table_statistics,
)
from fedplan.errors import FedplanError, StoreError
from fedplan.federation.ledger.egress import EGRESS_LOG, read_egress, read_replies
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.statistics import FederationStatistics, collect_statistics
from fedplan.runners.site import read_site
from fedplan.sites.approvals import APPROVALS_FILE, site_approvals
from fedplan.sites.compliance_report import compliance_page
from fedplan.sites.egress import read_egress_report
from fedplan.sites.gateway import SiteGateway
from fedplan.sites.policy import Policy, StatisticsPolicySection, read_policy
from fedplan.sites.review import review_study
from fedplan.studies.dictionary import dictionary
from fedplan.studies.schema import Study, parse_toml, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

COLUMNS = """
[statistics.columns.age]
type = "number"
unit = "years"
minimum = 0
maximum = 120
edges = [40, 65]
[statistics.columns.sex]
type = "category"
codes = ["f", "m"]
required = true
[statistics.columns.note]
type = "text"
edges = [2]
in_words = true
"""


def with_statistics(columns: str = COLUMNS, **said: Any) -> Study:
    """A study with a data dictionary."""
    text = study_text(**{"privacy": "", "rounds": 3, **said}) + columns
    return study_from_dict(parse_toml(text))


def rows(count: int = 60, **change: list[Any]) -> dict[str, list[Any]]:
    """Columns of a site that match the dictionary; `change` puts others."""
    ages = [20 + 2 * (row % 40) for row in range(count)]
    plain = {"age": ages, "sex": ["f", "m"] * (count // 2), "digit": [0, 1, 2] * (count // 3)}
    return {**plain, "note": ["a b c" if row % 2 else "a" for row in range(count)], **change}


def counted(columns: dict[str, list[Any]], rule: CountRule | None = None) -> TableStatistics:
    table = Dataset.from_dict(columns)
    return table_statistics(table, dictionary(with_statistics()), rule or CountRule())


def write_site(folder: Path, columns: dict[str, list[Any]], policy: str = "") -> Path:
    """A site with these rows, and a study file with the dictionary beside it."""
    folder.mkdir(parents=True)
    (folder / "site.toml").write_text('name = "north"\ndata = "rows.csv"\n')
    (folder / "policy.toml").write_text(policy)
    Dataset.from_dict(columns).to_csv(folder / "rows.csv", index=False)
    (folder / "study.toml").write_text(study_text(privacy="", rounds=3) + COLUMNS)
    return folder


@pytest.mark.parametrize("matching", ["", "0", "01", "012", "0123"])
@pytest.mark.parametrize("show_zeros", [False, True])
def test_no_small_cell_can_be_computed_by_one_who_knows_the_rule(
    show_zeros: bool, matching: str
) -> None:
    """Of all tables with one result, each joined cell has as many numbers as the rule promises."""
    rule, least = CountRule(3, show_zeros), int(show_zeros)
    for total in range(3, 10):
        tables = defaultdict[Any, list[tuple[int, ...]]](list)
        for counts in itertools.product(range(total + 1), repeat=4):
            if sum(counts) == total:
                ends = list(itertools.accumulate(counts, initial=0))
                cells = {str(i): range(*ends[i : i + 2]) for i in range(4)}
                groups, differs = join_cells(cells, range(total), rule, matching)
                tables[tuple(groups), differs].append(counts)
        for (groups, _), alike in tables.items():
            assert not {group.count for group in groups} & {1, 2, *range(1 - least)}
            possible = dict(zip("0123", map(set, zip(*alike, strict=True)), strict=True))
            for group in groups:
                if len(group.cells) == 1:
                    assert possible[group.cells[0]] == {group.count}
                else:
                    assert all(len(possible[cell]) >= 3 - least for cell in group.cells), groups
                    small = {least, 1, 2}
                    assert any(small <= possible[cell] for cell in group.cells), (groups, alike)


def test_counts_are_those_of_a_plain_count_and_small_ones_are_joined() -> None:
    told = counted(rows()).columns
    assert [(g.cells, g.count) for g in told["note"]] == [
        (("below 2",), 30),
        (("2 or more", "(missing)", "(other)"), 30),
    ]
    shown = counted(rows(), CountRule(show_zeros=True)).columns
    assert {g.cells: g.count for g in shown["digit"]} == {
        ("0",): 20,
        ("1",): 20,
        ("2",): 20,
        ("(other)",): 0,
        ("(missing)",): 0,
    }
    ages = rows()["age"]
    plain = [sum(a < 40 for a in ages), sum(40 <= a < 65 for a in ages), sum(a >= 65 for a in ages)]
    assert [g.count for g in shown["age"] if g.count] == plain


@pytest.mark.parametrize("sex", ["x", None])
def test_one_patient_changes_no_cell_that_is_shown_alone(sex: str | None) -> None:
    """A label with one patient looks like one with none, or with nine."""
    for few in (0, 1, 9):
        told = counted(rows(sex=["f"] * (60 - few) + [sex] * few)).columns["sex"]
        assert [(g.cells, g.count) for g in told] == [(("f", "m", "(other)", "(missing)"), 60)]


def test_a_person_with_many_rows_is_one() -> None:
    table = Dataset.from_dict({"sex": ["f"] * 50 + ["m"] * 50, "who": [*range(50), *[7] * 50]})
    columns = {"sex": Column("category", ("f", "m"))}
    told = table_statistics(table, columns, CountRule(person="who")).columns["sex"]
    assert [(g.cells, g.count) for g in told] == [(("f", "m", "(missing)", "(other)"), 100)]


@pytest.mark.parametrize("nobody", [[float("nan")] * 20, [" " * blanks for blanks in range(20)]])
def test_rows_without_a_person_are_of_one(nobody: list[Any]) -> None:
    ids = [type(nobody[0])(row) for row in range(40)]
    table = Dataset.from_dict({"sex": ["f"] * 40 + ["m"] * 20, "who": [*ids, *nobody]})
    columns = {"sex": Column("category", ("f", "m"))}
    told = table_statistics(table, columns, CountRule(person="who")).columns["sex"]
    assert [group.count for group in told] == [60], "20 rows of nobody are not 20 people"


def test_a_row_without_a_class_is_not_of_the_last_class() -> None:
    features = Features({"y": ClassLabel(names=["a", "b"])})
    table = Dataset.from_dict({"y": [0] * 20 + [1] * 20 + [-1] * 20}, features=features)
    columns = {"y": Column("category", ("a", "b"))}
    told = table_statistics(table, columns, CountRule(show_zeros=True)).columns["y"]
    assert [group.count for group in told] == [20, 20, 20, 0]


def test_counts_show_that_many_rows_differ_and_not_that_few_do() -> None:
    columns = dictionary(with_statistics())
    for ages, shown in (
        ([9_000] * 60, True),
        ([30] * 40 + [777] * 20, True),
        ([30] * 51 + [777] * 9, False),
        ([777] * 9 + [9_000] * 9, False),
        ([None] * 30 + [30] * 30, False),
    ):
        rows_of_site = {name: cells[: len(ages)] for name, cells in rows(age=ages).items()}
        for table in (counted(rows_of_site), counted(rows_of_site, CountRule(show_zeros=True))):
            assert ("age" in mismatches(columns, table)) is shown or len(ages) < 19, ages


WRONG: dict[str, tuple[dict[str, list[Any]], dict[str, list[str]]]] = {
    "units": ({"age": [9_000.5] * 60}, {"age": ["out of range"]}),
    "texts": ({"age": ["forty"] * 60}, {"age": ["no number"]}),
    "one": ({"age": [30] * 59 + [777]}, {"age": ["out of range"]}),
    "codes": ({"sex": ["weiblich"] * 60}, {"sex": ["another code"]}),
    "missing": ({"sex": ["f"] * 59 + [None]}, {"sex": ["no value"]}),
    "label": ({"digit": [7] * 60}, {"digit": ["another code"]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mismatch_is_named_by_column_and_kind_and_never_by_a_value(
    case: str, tmp_path: Path
) -> None:
    change, expected = WRONG[case]
    folder = write_site(tmp_path / "north", rows() | change)
    words = ("site", "statistics", str(folder / "study.toml"), "--site", str(folder))
    code, text = run(*words, "--json")
    assert (code, json.loads(text)["mismatches"]) == (1, expected)
    code, screen = run(*words)
    assert code == 1 and f"{next(iter(expected))}: {expected[next(iter(expected))][0]}" in screen
    for value in ("9000.5", "forty", "777", "weiblich"):
        assert value not in screen and value not in text


def test_a_site_that_matches_is_told_so_and_an_absent_column_is_named(tmp_path: Path) -> None:
    folder = write_site(tmp_path / "north", rows())
    words = ("site", "statistics", str(folder / "study.toml"), "--site", str(folder))
    code, screen = run(*words)
    assert code == 0 and "60 rows" in screen and "dictionary: none" in screen, screen
    assert "age, years" in screen and "some of these have fewer than 10" in screen
    columns = rows()
    del columns["age"]
    Dataset.from_dict(columns).to_csv(folder / "rows.csv", index=False)
    code, screen = run(*words)
    assert code == 1 and "age: no such column" in screen
    Dataset.from_dict({name: cells[:9] for name, cells in columns.items()}).to_csv(
        folder / "rows.csv", index=False
    )
    assert "north: fewer than 10 rows" in run(*words)[1]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ('type = "category"', "needs the list of its values"),
        ('type = "category"\nedge = [3]', "'edge': did you mean edges"),
        ('type = "number"\ncodes = ["a"]', "codes are for categories"),
        ('type = "category"\ncodes = ["a", "a"]', "'a' is listed twice"),
        ('type = "category"\ncodes = [1, "1"]', "'1' is listed twice"),
        ('type = "category"\ncodes = ["(other)"]', "is the name of another cell"),
        ('type = "category"\ncodes = ["\\u001b[2J"]', "printable"),
        ('type = "number"\nedges = [3, 3]', "3 follows 3"),
        ('type = "number"\nmaximum = 1\nedges = [3]', "1 follows 3"),
        ('type = "any"\nedges = [3]', "for numbers and texts"),
        ('type = "text"\nminimum = 3', "for numbers"),
        ('type = "number"\nin_words = true', "for texts"),
    ],
)
def test_a_dictionary_that_says_nothing_clear_is_refused(column: str, reason: str) -> None:
    with pytest.raises(FedplanError, match=reason):
        with_statistics(f"[statistics.columns.x]\n{column}")


def test_a_dictionary_needs_an_approval_of_its_own_and_changes_no_result() -> None:
    plain, first = offered(), with_statistics()
    assert with_statistics(method="plan = 'chain(share(), keep(head))'").digest == plain.digest
    assert "statistics" not in plain.model_dump(mode="json")
    assert study_from_dict(first.model_dump(mode="json")) == first, "as it comes over the network"
    assert first.full_digest != with_statistics(COLUMNS.replace("65", "66")).full_digest


def federated(columns: str = COLUMNS, **said: Any) -> Study:
    """The study with two sites, for which its server waits a second."""
    fields = with_statistics(columns, **said).model_dump(mode="json", exclude_none=True)
    fields["clients"]["names"] = ["north", "south"]
    fields["timeouts"] |= {"sites": 1.0, "poll_interval": 0.01}
    return study_from_dict(fields)


OPEN = "auto_approve = true\n[statistics]\n"


def gateway(folder: Path, columns: dict[str, list[Any]], policy: str = OPEN) -> SiteGateway:
    """A site of a folder's name with these rows."""
    site = read_site(write_site(folder, columns, policy)).model_copy(update={"name": folder.name})
    return SiteGateway(site, site_approvals(site))


def ask(site: SiteGateway, study: Study) -> dict[str, Any]:
    """What a site answers to a request of statistics."""
    message = pack_message({}, {"study": study.model_dump(mode="json")})
    return unpack_message(site.answer("statistics", message))[1]


def collect(study: Study, *sites: SiteGateway) -> FederationStatistics:
    by_name = {site.site.name: site for site in sites}

    def answer(context: Context, kind: str, message: Message) -> Message:
        return by_name[str(context.node_config["name"])].answer(kind, message)

    return collect_statistics(InProcess(client_app(answer), [{"name": n} for n in by_name]), study)


def test_a_dictionary_cannot_forge_the_screen(tmp_path: Path) -> None:
    folder = write_site(tmp_path / "north", {"[/x]": ["[bold]f"] * 60})
    codes = 'type = "category"\nunit = "[/]"\ncodes = ["[bold]f", "[conceal]m"]'
    text = f'{study_text(privacy="", rounds=3)}[statistics.columns."[/x]"]\n{codes}'
    (folder / "study.toml").write_text(text)
    words = ("site", "statistics", str(folder / "study.toml"), "--site", str(folder))
    screen = run(*words)[1]
    assert "[/x], [/]" in screen and "[bold]f, [conceal]m" in screen, screen


def test_sums_over_two_sites_are_those_of_the_pooled_rows(tmp_path: Path) -> None:
    policy = OPEN + "show_zeros = true\n"
    north, south = rows(), rows(120, age=[row % 99 for row in range(120)])
    sites = [gateway(tmp_path / "north", north, policy), gateway(tmp_path / "south", south, policy)]
    result = collect(federated(), *sites)
    pooled = {name: north[name] + south[name] for name in north}
    assert not result.missing and result.mismatches == {"north": {}, "south": {}}
    assert result.total == counted(pooled, CountRule(show_zeros=True))
    assert result.total.examples == 180
    assert all(len(group.cells) == 1 for c in result.total.columns.values() for group in c)
    for site in sites:
        entries = read_egress(site.state_folder)
        assert [(x["kind"], x["study"]) for x in entries] == [
            ("statistics", federated().full_digest)
        ]
        assert entries[0]["approver"] == "rule" and entries[0]["other_bytes"] > 100
        (record, account) = read_egress_report(site.state_folder)
        assert "statistics" in str(record.json()) and account.json()["epsilon_spent"] is None


def test_sums_of_joined_cells_are_exact(tmp_path: Path) -> None:
    north, south = rows(sex=["f"] * 55 + ["m"] * 5), rows(120)
    sites = gateway(tmp_path / "north", north), gateway(tmp_path / "south", south)
    result = collect(federated(), *sites).json()
    assert result["total"]["columns"]["sex"] == [
        {"cells": ["f", "m", "(other)", "(missing)"], "count": 180}
    ]
    few = gateway(tmp_path / "east" / "south", {name: each[:9] for name, each in rows().items()})
    result = collect(federated(), sites[0], few)
    assert result.sites["south"].examples is None and result.total.examples == 60
    assert result.not_counted["age"] == ["south"]


def test_no_count_leaves_by_default_or_before_an_approval(tmp_path: Path) -> None:
    other = gateway(tmp_path / "east", rows())
    assert ask(other, federated())["refused"] == "statistics", "the study does not name it"
    closed = gateway(tmp_path / "north", rows(), "auto_approve = true")
    waiting = gateway(tmp_path / "south", rows(), "[statistics]")
    assert ask(closed, federated())["refused"] == "statistics"
    assert ask(waiting, federated())["refused"] == "not-approved"
    assert [x["code"] for x in read_egress(closed.state_folder)] == ["statistics"]
    assert "statistics" in collect(federated(), closed).missing["north"]
    site_approvals(waiting.site).approve(federated().full_digest)
    assert ask(waiting, federated())["statistics"]["examples"] == 60
    site_approvals(waiting.site).withdraw(federated().full_digest)
    assert ask(waiting, federated())["refused"] == "not-approved"


def test_neither_time_nor_other_edges_give_a_difference(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows())
    first = ask(site, federated())
    changed = rows(61 + 2, sex=["m"] * 63, digit=[0] * 63)
    Dataset.from_dict(changed).to_csv(tmp_path / "north" / "rows.csv", index=False)
    assert ask(site, federated()) == first, "the data changed, and the answer did not"
    for old, new in (("[40, 65]", "[41, 65]"), ("maximum = 120", "maximum = 119")):
        assert ask(site, federated(COLUMNS.replace(old, new)))["refused"] == "other-statistics"
    assert ask(site, federated(data='split = "train"'))["refused"] == "other-statistics"
    assert ask(site, federated(labels="[0, 1]"))["refused"] == "other-statistics"
    more = ask(site, federated(f'{COLUMNS}[statistics.columns.image]\ntype = "any"\n'))
    assert more["statistics"]["absent"] == ["image"]
    assert more["statistics"]["columns"] == first["statistics"]["columns"]
    requests = [line["request"] for line in read_replies(site.state_folder / "account/examples")]
    assert len({*requests}) == 2
    (tmp_path / "north" / "rows.csv").unlink()
    assert ask(site, federated()) == first, "the data are gone, and the answer is the same"
    (site.state_folder / "statistics/examples.json").write_text('{"questions": {}}')
    assert "failed" in ask(site, federated()), "a damaged file is not a new start"


def test_a_changed_policy_gives_no_second_counts(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows(sex=["f"] * 48 + ["m"] * 12, who=[*range(20)] * 3))
    assert "statistics" in ask(site, federated())
    for change in ("min_count = 20", "show_zeros = true", 'person = "who"'):
        (tmp_path / "north" / "policy.toml").write_text(OPEN + change)
        assert ask(site, federated(name="other"))["refused"] == "other-statistics", change


def test_counts_that_fail_leave_the_site_able_to_answer(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows(), f'{OPEN}person = "nobody"')
    assert ask(site, federated())["failed"] == "data"
    (tmp_path / "north" / "policy.toml").write_text(OPEN)
    assert ask(site, federated())["statistics"]["examples"] == 60


def test_a_full_disk_lets_nothing_out_and_a_lost_log_is_noticed(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.egress, "append", Mock(side_effect=StoreError("no space is left")))
        assert ask(site, federated())["failed"] == "disk"
    assert read_replies(site.state_folder / "account/examples"), "charged, and nothing left"
    assert ask(site, federated())["statistics"]["examples"] == 60
    for name in (EGRESS_LOG, f"{EGRESS_LOG}.head"):
        (site.state_folder / name).unlink()
    site = SiteGateway(site.site, site.approver)
    assert ask(site, federated())["failed"] == "disk"


@pytest.mark.parametrize("hidden", [{}, {"hiv": "yes"}])
def test_no_single_row_of_a_json_file_makes_a_column(
    hidden: dict[str, str], tmp_path: Path
) -> None:
    site = gateway(tmp_path / "north", rows())
    (tmp_path / "north" / "site.toml").write_text('name = "north"\ndata = "rows.json"\n')
    lines = [{name: cells[row] for name, cells in rows().items()} for row in range(60)]
    (tmp_path / "north" / "rows.json").write_text(json.dumps([lines[0] | hidden, *lines[1:]]))
    site = SiteGateway(read_site(tmp_path / "north"), site.approver)
    told = ask(site, federated(f'{COLUMNS}[statistics.columns.hiv]\ntype = "any"\n'))["statistics"]
    assert told["absent"] == []
    assert told["columns"]["hiv"] == [{"cells": ["(present)", "(missing)"], "count": 60}]


def test_what_promises_noise_or_sums_is_refused_by_name(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows())
    for text, reason in (({"privacy": PRIVATE}, "no noise"), ({}, "secure aggregation")):
        tail = "" if text else '[aggregation]\nkind = "secure"\nthreshold = 2\n'
        study = federated(COLUMNS + tail, **text)
        assert ask(site, study)["refused"] == "statistics"
        with pytest.raises(FedplanError, match=reason):
            collect(study, site)
    assert ask(site, federated(""))["refused"] == "statistics"
    limited = gateway(tmp_path / "x" / "north", rows(), f"{OPEN}[limits]\nepsilon = 1.0")
    assert ask(limited, federated()).keys() & {"refused"}
    with pytest.raises(FedplanError, match="number of examples"):
        Policy(reveal_example_count=False, statistics=StatisticsPolicySection())


@pytest.mark.parametrize(
    "lie",
    [
        None,
        [],
        {"examples": -1, "columns": {}, "absent": ["age", "sex", "note", "digit"]},
        {"examples": 9, "columns": {}, "absent": []},
        {"examples": 9, "columns": {"age": [{"cells": ["x"], "count": 3}]}, "absent": []},
        {"examples": True, "columns": {}, "absent": ["age", "sex", "note", "digit"]},
    ],
)
def test_an_answer_that_is_none_is_the_fault_of_its_site(lie: Any) -> None:
    with pytest.raises(FedplanError, match="statistics"):
        statistics_from_json(dictionary(with_statistics()), lie)


def test_an_approver_reads_of_the_counts(tmp_path: Path) -> None:
    policy = read_policy(write_site(tmp_path / "north", rows(), OPEN) / "policy.toml")
    assert any("each count is of 10 rows or more." in line for line in policy.summary_lines())
    told = review_study(federated(), policy=policy).disclosures
    assert any("counts of 10 rows or more: age, sex, note, digit" in line for line in told)
    assert f"the counts of age, in years: {', '.join(AGES)}" in told
    for study, of_site in ((federated(), Policy()), (federated(privacy=PRIVATE), policy)):
        assert not any("counts of" in x for x in review_study(study, policy=of_site).disclosures)
    screen = io.StringIO()
    Console(file=screen, width=200).print(review_study(federated(), policy=policy))
    assert "Columns image, digit, age, sex, note." in screen.getvalue()
    required = review_study(federated(f"[statistics]\nrequire = true\n{COLUMNS}"), policy=policy)
    assert "whether these counts show a difference" in required.disclosures[-1]


AGES = ["0 to 40", "40 to 65", "65 to 120", "(missing)", "below 0", "above 120", "(other)"]


def test_the_record_of_a_site_that_sent_only_counts(tmp_path: Path) -> None:
    site = gateway(tmp_path / "north", rows())
    ask(site, federated())
    page = compliance_page(site.state_folder)
    assert not page.faults and "federation, statistics before training" in page.html()
    assert "1 sets of counts" in page.html() and "agreed to nothing" not in page.html()
    site_approvals(site.site).withdraw(federated().full_digest)
    assert not compliance_page(site.state_folder).faults, "they left before"
    for name in (APPROVALS_FILE, f"{APPROVALS_FILE}.head"):
        (site.state_folder / name).unlink()
    (fault,) = compliance_page(site.state_folder).faults
    assert "counts left, approved by rule according to the log" in fault


def test_the_servers_file_of_counts_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = collect(federated(), gateway(tmp_path / "north", rows()))
    for name, value in (
        ("statistics.statistics_on_superlink", result),
        ("superlink.read_superlink", None),
    ):
        monkeypatch.setattr(f"fedplan.runners.flower.{name}", lambda *_, value=value: value)
    output = tmp_path / "statistics.json"
    code, screen = run("statistics", str(tmp_path / "north/study.toml"), "-o", str(output))
    assert code == 1 and "south: no counts: not connected" in screen
    assert output.stat().st_mode & 0o777 == 0o600


def test_a_study_may_require_that_the_data_match(tmp_path: Path) -> None:
    text = f"[statistics]\nrequire = true\n{COLUMNS}"
    study = federated(text)
    hello = pack_message({}, {"run": RUN, "study": study.model_dump(mode="json")})
    few = gateway(tmp_path / "few" / "north", rows(age=[30] * 59 + [777]))
    many = gateway(tmp_path / "many" / "north", rows(age=[30] * 40 + [777] * 20))
    closed = gateway(tmp_path / "closed" / "north", rows(), "auto_approve = true")
    train = pack_message({}, {"run": RUN, "round": 1})
    assert unpack_message(many.answer("hello", hello))[1]["refused"] == "dictionary"
    assert unpack_message(many.answer("train", train))[1]["refused"] == "unknown-run"
    codes = [unpack_message(x.answer("hello", hello))[1] for x in (few, many, closed)]
    assert codes[0].get("refused") != "dictionary", "one row is not shown to the server"
    assert [code["refused"] for code in codes[1:]] == ["dictionary", "statistics"]
    with pytest.raises(FedplanError, match=r"statistics.require: .* no noise"):
        federated(text, privacy=PRIVATE)
