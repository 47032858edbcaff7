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
from fedplan.data.tasks.kinds import TASK_NAMES, task_class
from fedplan.errors import FedplanError
from fedplan.federation.ledger.callbacks import TRACKER_NAMES
from fedplan.methods import METHODS, fedavg, method_by_name, register_method
from fedplan.methods.registry import (
    METHOD_REGISTRY,
    SERVER_OPTIMIZER_REGISTRY,
    make_server_optimizer,
)
from fedplan.naming import Registry, UnknownName, allow_imports
from fedplan.studies.experiment import make_method
from fedplan.studies.schema import ConfigError, Study, study_from_dict
from fedplan.training.client_hooks import CLIENT_HOOK_NAMES, get_client_hook
from fedplan.training.loops import LOOP_NAMES, get_training_loop
from fedplan.training.optimizers import OPTIMIZER_NAMES, make_client_optimizer
from fedplan.training.probes import PROBE_NAMES, get_probe

CODE = (
    METHOD
    + """
import functools
import torch
from os import system
from fedplan.data import Task
from fedplan.training import FitResult, attach, attention_probe

looks = attention_probe(examples=3)
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
    return FitResult(loss=0.0, steps=0)


class Odd(Task):
    def prepare(self, table):
        raise NotImplementedError


half = functools.partial(mine, 0.25)
"""
)
NAMES: dict[str, tuple[Registry[Any], str, Any]] = {
    "fedplan.methods": (METHOD_REGISTRY, "mine", method_by_name),
    "fedplan.tasks": (TASK_NAMES, "Odd", task_class),
    "fedplan.probes": (PROBE_NAMES, "looks", get_probe),
    "fedplan.optimizers": (OPTIMIZER_NAMES, "Signs", make_client_optimizer),
    "fedplan.server_optimizers": (SERVER_OPTIMIZER_REGISTRY, "halfway", make_server_optimizer),
    "fedplan.client_hooks": (CLIENT_HOOK_NAMES, "through", get_client_hook),
    "fedplan.loops": (LOOP_NAMES, "loop", get_training_loop),
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
    return study_from_dict(STUDY | {"method": method})


@pytest.mark.parametrize("group", NAMES)
def test_a_package_offers_what_is_its_own_in_every_group(group: str, place: Path) -> None:
    names, what, take = NAMES[group]
    assert names.group == group
    install(place, "mypackage", CODE, offered())
    by_point, by_place = names.find("yours"), names.find(f"mypackage.mine:{what}")
    assert by_point.value is by_place.value
    assert (by_point.origin, by_place.origin) == ("mypackage 1.2", "mypackage.mine")
    assert names.origins()["yours"] == "mypackage 1.2"
    assert take is None or take("yours") is not None


@pytest.mark.parametrize("group", NAMES)
def test_two_packages_that_offer_one_name_are_both_named(group: str, place: Path) -> None:
    names, what, _ = NAMES[group]
    for package in ("mypackage", "other"):
        install(place, package, CODE, {group: {"yours": f"{package}.mine:{what}"}})
    with pytest.raises(UnknownName, match=r"mypackage 1\.2 and other 1\.2 both offer"):
        names.find("yours")
    assert names.origins()["yours"] == "mypackage 1.2 and other 1.2"


def test_what_is_ours_cannot_be_hidden(place: Path) -> None:
    install(place, "mypackage", CODE, {"fedplan.methods": {"fedavg": "mypackage.mine:mine"}})
    assert METHOD_REGISTRY.find("fedavg").value is fedavg
    assert METHOD_REGISTRY.origins()["fedavg"] == "fedplan"
    with pytest.raises(FedplanError, match="a method 'fedavg' already"):
        register_method("fedavg", lambda: fedavg())
    assert set(METHODS) <= set(METHOD_REGISTRY.origins())


def test_the_process_comes_before_the_installed(place: Path) -> None:
    install(place, "mypackage", CODE, offered())
    try:
        register_method("yours", fedavg)
        assert METHOD_REGISTRY.find("yours").value is fedavg
        assert METHOD_REGISTRY.find("yours").origin == "fedplan.methods.published"
    finally:
        METHOD_REGISTRY.registered.clear()
    assert METHOD_REGISTRY.find("yours").origin == "mypackage 1.2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedavgg", "there is no method 'fedavgg': did you mean fedavg"),
        ("zzz", "there is no method 'zzz': there are bitfit, .*entry point fedplan.methods"),
        ("mypackage.mine:nothing", "is 3, which is not callable"),
        ("mypackage.mine:gone", "'mypackage.mine:gone' cannot be imported: AttributeError"),
        ("nobody.here:mine", "cannot be imported: ModuleNotFoundError.*install its package"),
        ("mypackage/mine.py:mine", "there is no method"),
        ("../mypackage.mine:mine", "there is no method"),
        ("mypackage.mine:functools.partial", "there is no method"),
        ("mypackage.mine:Signs", "has no default for 'params'"),
        ("mypackage.mine:halfway", "returns a value of function, not a Method"),
    ],
)
def test_what_a_name_does_not_stand_for_is_said(name: str, words: str, place: Path) -> None:
    install(place, "mypackage", CODE)
    with pytest.raises(FedplanError, match=words):
        method_by_name(name)


def test_settings_are_checked_by_the_signature_of_whoever_wrote_it(place: Path) -> None:
    install(place, "mypackage", CODE)
    assert method_by_name("mypackage.mine:mine", {"strength": 1}).server_optimizer.lr == 1  # type: ignore[union-attr]
    for settings, words in (({"pull": 1.0}, "takes no 'pull'"), ({"strength": "x"}, "such as 0.5")):
        with pytest.raises(FedplanError, match=words):
            method_by_name("mypackage.mine:mine", settings)


def test_a_study_says_everything_by_name(place: Path) -> None:
    install(place, "mypackage", CODE, offered())
    said = study(
        plan="share()",
        probe="mypackage.mine:looks",
        loop="yours",
        client_hooks=["yours", "alternate"],
        server_optimizer="mypackage.mine:halfway",
        server_optimizer_settings={"share": 0.25},
    )
    made = make_method(said)
    module = __import__("mypackage.mine", fromlist=["mine"])
    assert (made.probe, made.loop) == (module.looks, module.loop)
    assert made.client_hooks == (module.through, get_client_hook("alternate"))
    assert made.server_optimizer(0.0, 1.0, {}) == (0.25, {})  # type: ignore[arg-type]
    assert study_from_dict(said.model_dump()).digest == said.digest
    for field, value in {
        "loop": "lop",
        "probe": "lok",
        "client_hooks": ["x"],
        "server_optimizer": "x",
    }.items():
        with pytest.raises(ConfigError, match=rf"method\.{field}.*: .*there is no") as raised:
            study(plan="share()", **{field: value})
        assert raised.value.code == "unknown-name"
    with pytest.raises(ConfigError, match="server_optimizer_settings need"):
        study(plan="share()", server_optimizer_settings={"lr": 1.0})


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
        {"train": {"optimizer": "mypackage.mine:Signs"}},
        {"method": {"name": "mypackage.mine:mine"}},
        {"method": {"plan": "share()", "probe": "mypackage.mine:looks"}},
        {"method": {"name": "safl", "settings": {"probe": "mypackage.mine:looks"}}},
        {"method": {"plan": "share()", "loop": "mypackage.mine:loop"}},
        {"method": {"plan": "share()", "client_hooks": ["mypackage.mine:through"]}},
        {"method": {"plan": "share()", "server_optimizer": "mypackage.mine:halfway"}},
        {"method": {"name": "fedavg", "base_method": {"name": "mypackage.mine:mine"}}},
    ]
    before = [study_from_dict(STUDY | each).digest for each in named]
    (place / "mypackage" / "beside.py").write_text("x = 1")
    after = [study_from_dict(STUDY | each).digest for each in named]
    assert not set(before) & set(after)
    assert study(name="fedavg").digest == study(name="fedavg").digest


def test_a_site_imports_what_is_offered_or_allowed_and_nothing_else(place: Path) -> None:
    install(place, "mypackage", CODE, {"fedplan.probes": {"looks": "mypackage.mine:looks"}})
    install(place, "plainly", "raise SystemExit('it was imported')\n")
    with allow_imports(()):
        # mypackage offers something to fedplan: its owner has installed it for that.
        assert method_by_name("mypackage.mine:mine")
        assert method_by_name("mypackage.mine:half")
        for name in ("plainly.mine:x", "os:system", "antigravity:x", "fedplan.cli:main"):
            with pytest.raises(UnknownName, match="does not let a study import"):
                METHOD_REGISTRY.find(name)
        # What a package only imports is not its own.
        with pytest.raises(UnknownName, match=r"is in .(posix|nt)., which this site"):
            METHOD_REGISTRY.find("mypackage.mine:system")
    install(place, "other", METHOD)
    with allow_imports(["other"]):
        assert method_by_name("other.mine:mine")
    assert isinstance(METHOD_REGISTRY.find("mypackage.mine:half").value, partial)


def test_the_command_lists_all_with_their_origin(place: Path) -> None:
    points = {"fedplan.methods": {"yours": "mypackage.mine:mine", "broken": "mypackage.gone:x"}}
    install(place, "mypackage", CODE, points)
    done = CliRunner().invoke(app, ["methods"])
    assert "yours, of mypackage 1.2\n    Mine: all share" in done.output
    assert "fedavg, of fedplan\n" in done.output
    assert "broken, of mypackage 1.2\n    the method 'broken' cannot be imported" in done.output
    one = CliRunner().invoke(app, ["methods", "mypackage.mine:mine"])
    assert "mypackage.mine:mine, of mypackage.mine\nMine" in one.output
    assert "strength = 0.5" in one.output and "server optimizer mean(lr=0.5)" in one.output
    assert CliRunner().invoke(app, ["methods", "fedavgg"]).exit_code == 2
