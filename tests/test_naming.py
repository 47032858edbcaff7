# SPDX-License-Identifier: Apache-2.0
"""Yours by name: found among ours, the process's, the installed and the importable, and told apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packages import METHOD, forget, install, on_path
from typer.testing import CliRunner

from fedplan.cli import app
from fedplan.data.metrics import METRIC_NAMES, metric_named
from fedplan.data.tasks import TASK_NAMES, task_class
from fedplan.errors import FedplanError
from fedplan.federation.trackers import TRACKER_NAMES
from fedplan.methods import METHODS, fedavg, method_named, register_method
from fedplan.methods.registry import (
    METHOD_NAMES,
    SERVER_OPTIMISER_NAMES,
    server_optimiser_named,
)
from fedplan.naming import Registry, UnknownName, allowing
from fedplan.studies.schema import ConfigError, Study, study_of
from fedplan.studies.stage import method_of
from fedplan.training.loops import LOOP_NAMES, loop_named
from fedplan.training.optimisers import OPTIMISER_NAMES, optimiser_named
from fedplan.training.probes import PROBE_NAMES, probe_named
from fedplan.training.wraps import WRAP_NAMES, wrap_named

CODE = (
    METHOD
    + """
import functools
import torch
from os import system
from fedplan.data.metrics import METRIC_NAMES, metric_named
from fedplan.data.tasks import Task
from fedplan.training import Done, attach, attention

looks = attention(rows=3)
nothing = 3


class Signs(torch.optim.SGD):
    pass


def halfway(share: float = 0.5):
    def move(old, mean, memory):
        return old + share * (mean - old), memory

    return move


def through(fit):
    def fitted(job):
        return fit(job)

    return fitted


def right(truth, guess):
    return float((truth == guess).mean())


def loop(job):
    return Done(loss=0.0, steps=0)


class Odd(Task):
    def prepare(self, table):
        raise NotImplementedError


half = functools.partial(mine, 0.25)
"""
)
NAMES: dict[str, tuple[Registry[Any], str, Any]] = {
    "fedplan.methods": (METHOD_NAMES, "mine", method_named),
    "fedplan.tasks": (TASK_NAMES, "Odd", task_class),
    "fedplan.probes": (PROBE_NAMES, "looks", probe_named),
    "fedplan.optimisers": (OPTIMISER_NAMES, "Signs", optimiser_named),
    "fedplan.server_optimisers": (SERVER_OPTIMISER_NAMES, "halfway", server_optimiser_named),
    "fedplan.wraps": (WRAP_NAMES, "through", wrap_named),
    "fedplan.loops": (LOOP_NAMES, "loop", loop_named),
    "fedplan.trackers": (TRACKER_NAMES, "through", None),
    "fedplan.metrics": (METRIC_NAMES, "right", metric_named),
}
STUDY: dict[str, Any] = {
    "model": {"type": "vit"},
    "task": {"kind": "image-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield on_path(monkeypatch, tmp_path / "packages")
    forget("mypackage", "other", "plainly")


def offered() -> dict[str, dict[str, str]]:
    return {group: {"yours": f"mypackage.mine:{what}"} for group, (_, what, _) in NAMES.items()}


def study(**method: Any) -> Study:
    return study_of(STUDY | {"method": method})


@pytest.mark.parametrize("group", NAMES)
def test_a_package_offers_what_is_its_own_in_every_group(group: str, place: Path) -> None:
    names, what, take = NAMES[group]
    assert names.group == group
    install(place, "mypackage", CODE, offered())
    by_point, by_place = names.find("yours"), names.find(f"mypackage.mine:{what}")
    assert by_point.value is by_place.value
    assert (by_point.origin, by_place.origin) == ("mypackage 1.2", "mypackage.mine")
    assert names.names()["yours"] == "mypackage 1.2"
    assert take is None or take("yours") is not None


@pytest.mark.parametrize("group", NAMES)
def test_two_packages_that_offer_one_name_are_both_named(group: str, place: Path) -> None:
    names, what, _ = NAMES[group]
    for package in ("mypackage", "other"):
        install(place, package, CODE, {group: {"yours": f"{package}.mine:{what}"}})
    with pytest.raises(UnknownName, match=r"mypackage 1\.2 and other 1\.2 both offer"):
        names.find("yours")
    assert names.names()["yours"] == "mypackage 1.2 and other 1.2"


def test_what_is_ours_cannot_be_hidden(place: Path) -> None:
    install(place, "mypackage", CODE, {"fedplan.methods": {"fedavg": "mypackage.mine:mine"}})
    assert METHOD_NAMES.find("fedavg").value is fedavg
    assert METHOD_NAMES.names()["fedavg"] == "fedplan"
    with pytest.raises(FedplanError, match="a method 'fedavg' already"):
        register_method("fedavg", lambda: fedavg())
    assert set(METHODS) <= set(METHOD_NAMES.names())


def test_the_process_comes_before_the_installed(place: Path) -> None:
    install(place, "mypackage", CODE, offered())
    try:
        register_method("yours", fedavg)
        assert METHOD_NAMES.find("yours").value is fedavg
        assert METHOD_NAMES.find("yours").origin == "fedplan.methods.full"
    finally:
        METHOD_NAMES.registered.clear()
    assert METHOD_NAMES.find("yours").origin == "mypackage 1.2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedavgg", "there is no method 'fedavgg': did you mean fedavg"),
        ("zzz", "there is no method 'zzz': there are bitfit, .*entry point fedplan.methods"),
        ("mypackage.mine:nothing", "is 3: nothing can call it"),
        ("mypackage.mine:gone", "'mypackage.mine:gone' cannot be imported: AttributeError"),
        ("nobody.here:mine", "cannot be imported: ModuleNotFoundError.*install its package"),
        ("mypackage/mine.py:mine", "there is no method"),
        ("../mypackage.mine:mine", "there is no method"),
        ("mypackage.mine:functools.partial", "there is no method"),
        ("mypackage.mine:Signs", "has no default for 'params'"),
        ("mypackage.mine:halfway", "makes a value of function, and no Method"),
    ],
)
def test_what_a_name_does_not_stand_for_is_said(name: str, words: str, place: Path) -> None:
    install(place, "mypackage", CODE)
    with pytest.raises(FedplanError, match=words):
        method_named(name)


def test_settings_are_checked_by_the_signature_of_whoever_wrote_it(place: Path) -> None:
    install(place, "mypackage", CODE)
    assert method_named("mypackage.mine:mine", {"strength": 1}).server_optimiser.rate == 1  # type: ignore[union-attr]
    for settings, words in (({"pull": 1.0}, "takes no 'pull'"), ({"strength": "x"}, "such as 0.5")):
        with pytest.raises(FedplanError, match=words):
            method_named("mypackage.mine:mine", settings)


def test_a_study_says_everything_by_name(place: Path) -> None:
    install(place, "mypackage", CODE, offered())
    said = study(
        plan="share()",
        probe="mypackage.mine:looks",
        loop="yours",
        wraps=["yours", "alternate"],
        server_optimiser="mypackage.mine:halfway",
        server_settings={"share": 0.25},
    )
    made = method_of(said)
    module = __import__("mypackage.mine", fromlist=["mine"])
    assert (made.probe, made.loop) == (module.looks, module.loop)
    assert made.wraps == (module.through, wrap_named("alternate"))
    assert made.server_optimiser(0.0, 1.0, {}) == (0.25, {})  # type: ignore[arg-type]
    assert study_of(said.model_dump()).digest == said.digest
    for field, value in {
        "loop": "lop",
        "probe": "lok",
        "wraps": ["x"],
        "server_optimiser": "x",
    }.items():
        with pytest.raises(ConfigError, match=rf"method\.{field}.*: .*there is no") as raised:
            study(plan="share()", **{field: value})
        assert raised.value.code == "unknown-name"
    with pytest.raises(ConfigError, match="server_settings are those of"):
        study(plan="share()", server_settings={"rate": 1.0})


@pytest.mark.parametrize("changed", ["mine.py", "beside.py", "version"])
def test_one_name_and_other_code_is_another_study(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sites: what a function calls is seen too, in its own file and in one beside it."""
    found = list[str]()
    points = {"fedplan.methods": {"yours": "mypackage.mine:mine"}}
    for end in ("a", "b", "c"):
        with monkeypatch.context() as here:
            folder = on_path(here, tmp_path / end)
            other = end == "c"
            code = METHOD.replace("return strength", "return 2 * strength / 2 + 0.0")
            version = "1.3" if other and changed == "version" else "1.2"
            install(
                folder,
                "mypackage",
                code if other and changed == "mine.py" else METHOD,
                points,
                version,
            )
            (folder / "mypackage" / "beside.py").write_text(
                "x = 1" if changed == "beside.py" and other else ""
            )
            found.append(study(name="yours").digest)
            if changed != "version":
                assert study(name="mypackage.mine:mine").digest != found[-1]
            forget("mypackage")
    assert found[0] == found[1] != found[2]


def test_every_kind_of_name_is_in_the_digest_by_content(place: Path) -> None:
    install(place, "mypackage", CODE)
    named: list[dict[str, Any]] = [
        {"task": {"kind": "mypackage.mine:Odd", "label": "y"}},
        {"train": {"optimiser": "mypackage.mine:Signs"}},
        {"method": {"name": "mypackage.mine:mine"}},
        {"method": {"plan": "share()", "probe": "mypackage.mine:looks"}},
        {"method": {"name": "safl", "settings": {"probe": "mypackage.mine:looks"}}},
        {"method": {"plan": "share()", "loop": "mypackage.mine:loop"}},
        {"method": {"plan": "share()", "wraps": ["mypackage.mine:through"]}},
        {"method": {"plan": "share()", "server_optimiser": "mypackage.mine:halfway"}},
        {"method": {"name": "fedavg", "inside": {"name": "mypackage.mine:mine"}}},
    ]
    before = [study_of(STUDY | each).digest for each in named]
    (place / "mypackage" / "beside.py").write_text("x = 1")
    after = [study_of(STUDY | each).digest for each in named]
    assert not set(before) & set(after)
    assert study(name="fedavg").digest == study(name="fedavg").digest


def test_a_site_imports_what_is_offered_or_allowed_and_nothing_else(place: Path) -> None:
    install(place, "mypackage", CODE, {"fedplan.probes": {"looks": "mypackage.mine:looks"}})
    install(place, "plainly", "raise SystemExit('it was imported')\n")
    with allowing(()):
        # mypackage offers something to fedplan: its owner has installed it for that.
        assert method_named("mypackage.mine:mine")
        assert method_named("mypackage.mine:half")
        for name in ("plainly.mine:x", "os:system", "antigravity:x", "fedplan.cli:main"):
            with pytest.raises(UnknownName, match="does not let a study import"):
                METHOD_NAMES.find(name)
        # What a package only imports is not its own.
        with pytest.raises(UnknownName, match=r"is of .(posix|nt)., which this site"):
            METHOD_NAMES.find("mypackage.mine:system")
    install(place, "other", METHOD)
    with allowing(["other"]):
        assert method_named("other.mine:mine")
    assert isinstance(METHOD_NAMES.find("mypackage.mine:half").value, partial)


def test_the_command_lists_all_with_their_origin(place: Path) -> None:
    points = {"fedplan.methods": {"yours": "mypackage.mine:mine", "broken": "mypackage.gone:x"}}
    install(place, "mypackage", CODE, points)
    done = CliRunner().invoke(app, ["methods"])
    assert "yours, of mypackage 1.2\n    Mine: all share" in done.output
    assert "fedavg, of fedplan\n" in done.output
    assert "broken, of mypackage 1.2\n    the method 'broken' cannot be imported" in done.output
    one = CliRunner().invoke(app, ["methods", "mypackage.mine:mine"])
    assert "mypackage.mine:mine, of mypackage.mine\nMine" in one.output
    assert "strength = 0.5" in one.output and "server optimiser mean(rate=0.5)" in one.output
    assert CliRunner().invoke(app, ["methods", "fedavgg"]).exit_code == 2
