# SPDX-License-Identifier: Apache-2.0
"""Whatever a study, a site or a client is called, nothing is written but in the folder meant."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from commands import STUDY, run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from often import often

from fedplan.errors import FedplanError
from fedplan.runners.site_runtime import site_study_folder
from fedplan.storage.files import safe_folder_name
from fedplan.storage.journal import client_state_folder
from fedplan.studies.schema import ConfigError, study_from_dict

ODD = (
    "..",
    ".",
    "",
    " ",
    "../evil",
    "../../evil",
    "/tmp/evil",
    "a/b",
    "a\\b",
    "a\x00b",
    "~",
    "~root",
    "$HOME",
    "con",
    "NUL.txt",
    "-rf",
    ".hidden",
    "a.",
    "x" * 300,
    "é" * 120,
    "n\u043erth",
    "\uff41\uff42\uff43",
    "a\nb",
    "a\u202eb",
    "%2E%2E",
    "%",
    "*",
    "a b",
)
NAMES = st.one_of(st.sampled_from(ODD), st.text(max_size=30))


def below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@settings(max_examples=often(500))
@given(st.lists(NAMES, unique=True, max_size=6))
@example(list(ODD))
def test_each_name_makes_one_folder_of_its_own(names: list[str]) -> None:
    made = [safe_folder_name(name) for name in names]
    assert len(set(made)) == len(made)
    for name in made:
        assert Path("a", name).name == name and Path("a", name).parent == Path("a")
        assert name not in ("", ".", "..") and name.isascii() and name.isprintable()
        assert len(name) <= 200 and os.path.normpath(f"a/{name}") == f"a/{name}"


@settings(max_examples=50)
@given(NAMES)
def test_a_study_is_called_by_what_every_system_takes_for_a_folder(name: str) -> None:
    """Or it is refused with the remedy, before anything is written."""
    with TemporaryDirectory() as place:
        base = Path(place, "deep/base")
        base.mkdir(parents=True)
        quoted = json.dumps(name)
        (base / "study.toml").write_text(STUDY.replace('"tiny"', quoted), errors="surrogatepass")
        before = below(Path(place))
        code, out = run("run", str(base / "study.toml"))
        assert code == 2  # where the name is good, there are no rows
        assert below(Path(place)) == before
        if safe_folder_name(name) != name or len(name) > 64 or not name.strip(". -"):
            assert "name" in out or "cannot be read" in out, out


@settings(max_examples=often(200))
@given(NAMES, NAMES, st.integers(0, 9))
def test_a_sites_folders_lie_in_its_home(study: str, site: str, seed: int) -> None:
    base = study_from_dict(
        {
            "model": {"type": "vit"},
            "task": {"kind": "image-classification", "label": "y"},
            "data": {"path": "rows.parquet"},
            "method": {"name": "fedavg"},
        }
    )
    # a site is called by a value of a column too, which no schema sees
    found = site_study_folder(
        "/home/site", base.model_copy(update={"name": study, "seed": seed}), site
    )
    assert os.path.normpath(found) == str(found)
    assert found.parent.parent == Path("/home/site")
    assert client_state_folder(Path("/run"), site).parents[2] == Path("/run/clients")


@pytest.mark.parametrize(
    "names",
    [
        [""],
        [" a"],
        ["a\x00"],
        ["a\nb"],
        ["x" * 201],
        ["a", "a"],
        ["north", "\uff4eorth"],
        ["A", "a"],
    ],
)
def test_sites_that_cannot_be_told_apart_are_refused(names: list[str]) -> None:
    said = {
        "model": {"type": "vit"},
        "task": {"kind": "image-classification", "label": "y", "labels": [0, 1]},
        "clients": {"names": names},
        "method": {"name": "fedavg"},
    }
    with pytest.raises(ConfigError, match=r"clients\.names"):
        study_from_dict(said)


TEXTS = '[model]\npath = "ear"\n[task]\nkind = "text-classification"\nlabel = "kind"\n'
HOW = '[data]\npath = "rows.csv"\npartition = "column"\npartition_column = "who"\nnum_clients = 0\nmin_examples = 1\n'
METHOD = '[method]\nname = "fedper"\n[train]\nrounds = 1\nsteps = 1\n'


def test_clients_of_any_name_stay_in_the_runs_folder(here: Path) -> None:
    """From a column of a table to every file that is made: runs, homes, exports."""
    from test_export import towers

    towers(here)
    odd = ["..", ".", "../evil", "/tmp/evil", "a\nb", "-rf", "x" * 300, "é" * 120, "%2E%2E", "~"]
    with Path("rows.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "kind", "who"])
        out.writerows([f"a {kind}", kind, name] for name in odd for kind in ("cat", "dog") * 2)
    Path("study.toml").write_text(TEXTS + HOW + METHOD)
    before = below(here.parent)
    code, said = run("run", "study.toml", "--output", "out")
    assert code == 0, said
    inside = str((here / "out").relative_to(here.parent))
    assert all(path.startswith(inside) for path in below(here.parent) - before)
    homes = {path.name for path in Path("out/clients").glob("??/??/*")}
    assert homes == {safe_folder_name(name) for name in odd}
    code, said = run("verify", "out")
    assert code == 0, said
    for name in ("..", "x" * 300):
        before = below(here.parent)
        code, said = run("export", "out", f"model{len(name)}", "--client", name)
        assert code == 0, said
        fresh = below(here.parent) - before
        assert fresh and all(f"model{len(name)}" in path for path in fresh)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES)
def test_new_federations_and_keys_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    from fedplan.runners.flower.starter import new_federation

    with TemporaryDirectory(dir=tmp_path) as place:
        base = Path(place, "deep/fed")
        try:
            new_federation(base, [name], keys=False)
        except FedplanError as error:
            assert "called" in str(error)
            assert below(Path(place)) == set()
        else:
            assert (base / "sites" / name).is_dir()
            assert {path.split("/")[0] for path in below(Path(place))} == {"deep"}
            assert {path.split("/")[1] for path in below(Path(place)) if "/" in path} == {"fed"}
