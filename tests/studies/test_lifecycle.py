# SPDX-License-Identifier: Apache-2.0
"""A run as a person lives with it: a start that fails, other folders, more rounds, data gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers as hf
from commands import STUDY, TIMES, run
from flwr.app import Context
from grids import InProcess
from zoo import VISION

from fedplan.federation import identity
from fedplan.federation.server import Server
from fedplan.methods.registry import METHODS
from fedplan.privacy.mechanisms import noise
from fedplan.runners.flower.apps import client_app, run_server
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime, site_study_folder
from fedplan.storage import locks
from fedplan.studies.schema import read_study
from fedplan.tensors.message import Message

PLAN = STUDY[STUDY.index("plan =") : STUDY.index("[train]")]
LABELS = next(line for line in STUDY.splitlines(keepends=True) if line.startswith("labels"))


@pytest.fixture(autouse=True)
def one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a run and its keys are drawn: all that differs between two runs of one study."""
    monkeypatch.setattr(identity, "token_hex", lambda count: "0" * 2 * count)
    fixed = SimpleNamespace(**{**vars(os), "urandom": lambda count: bytes(range(count))})
    monkeypatch.setattr(noise, "os", fixed)


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name not in TIMES)
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def text(out: str) -> str:
    return " ".join(out.split())


# A start that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_without_file_locks_is_refused_and_left_as_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Two runs there would interleave; a new one and one that goes on are told of the disk."""
    assert run("run", "study.toml", "--set", "train.rounds=1")[0] == 0
    before = files(here)

    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    mounts = here / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/data {here} nfs4 rw 0 0\n")
    monkeypatch.setattr(locks, "_MOUNTS", mounts)
    monkeypatch.setattr("fcntl.flock", flock)
    for words in (
        ["runs/tiny", "--resume", "--set", "train.rounds=3"],
        ["study.toml", "--output", "b"],
    ):
        status, out = run("run", *words)
        assert status == 2, out
        assert f"is on a disk without locks (nfs4 at {here}: {os.strerror(code)})" in text(out)
        assert "name a folder on a local disk, or mount this one with locks" in text(out)
    mounts.unlink()
    assert files(here) == before


def changed(old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        assert old in STUDY
        Path("study.toml").write_text(STUDY.replace(old, new))

    return change


def without_rows() -> None:
    Path("digits.npz").rename("away.npz")


def garbage() -> None:
    Path("digits.npz").rename("away.npz")
    Path("digits.npz").write_bytes(b"PK\x03\x04 this is no archive")


def broken_weights() -> None:
    hf.ViTForImageClassification(hf.ViTConfig(**VISION)).save_pretrained("weights")
    Path("weights/model.safetensors").write_bytes(b"\x00" * 64)
    changed(STUDY[STUDY.index("type =") : STUDY.index("[task]")], 'path = "weights"\n')()


FAULTS: dict[str, Callable[[], None]] = {
    "no such column": changed('label = "digit"', 'label = "digits"'),
    "no such input": changed('input = "image"', 'input = "picture"'),
    "no such split": changed('split = "train"', 'split = "trains"'),
    "no rows": without_rows,
    "rows that are none": garbage,
    "a label too few": changed(LABELS, "labels = [0, 1]\n"),
    "no such type": changed('type = "vit"', 'type = "vitt"'),
    "settings that do not fit": changed("hidden_size = 16", "hidden_size = -1"),
    "a setting of another kind": changed("hidden_size = 16", 'hidden_size = "wide"'),
    "pictures of another size": changed("config = { image_size = 8", "config = { image_size = 16"),
    "no weights": changed(STUDY[STUDY.index("type =") : STUDY.index("[task]")], 'path = "w"\n'),
    "broken weights": broken_weights,
    "a plan of other parts": changed("keep(head)", "keep(prompt)"),
    "a best of more blocks": changed("keep(head)", "best(9)"),
    "no such phase": changed("[train]", "phases = { cold = 1 }\n[train]"),
    "no such method": changed(PLAN, 'name = "fedawg"\n'),
    "no such setting": changed(PLAN, 'name = "fedprox"\nsettings = { moo = 1 }\n'),
    "no such compression": changed("[train]", 'compression = "zip()"\n[train]'),
    "no such client": changed("[clients]", '[clients]\ntraits = { north = { a = "b" } }'),
    "no such model": changed("[model]", '[model]\ndigest = "00"'),
    "more clients than rows": changed("num_clients = 3", "num_clients = 300"),
    "an alpha of nothing": changed("alpha = 0.5", "alpha = 0.0"),
}  # fmt: skip


def mended() -> None:
    Path("study.toml").write_text(STUDY)
    if Path("away.npz").exists():
        Path("away.npz").replace("digits.npz")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_start_that_fails_leaves_no_folder_and_one_message(here: Path, fault: str) -> None:
    FAULTS[fault]()
    before = set(here.iterdir())
    code, out = run("run", "study.toml", "--output", "out")
    assert code == 2 and out.startswith("fedplan: "), out
    assert "study.toml cannot be read" not in text(out)  # it is the fault that is meant
    assert set(here.iterdir()) == before, fault


def test_a_mended_study_runs_by_the_same_command(here: Path) -> None:
    for fault in ("no such column", "rows that are none", "broken weights", "no such client"):
        FAULTS[fault]()
        assert run("run", "study.toml", "--output", "out")[0] == 2, fault
        mended()
    code, out = run("run", "study.toml", "--output", "out")
    assert code == 0, out
    assert run("run", "study.toml", "--output", "new")[0] == 0
    assert files(here / "out") == files(here / "new")


def test_a_start_that_dies_in_its_first_round_is_taken_over(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes and lines of the study as it was must not be those of the mended one."""

    def broken(self: Server, round_state: object, update: object, **more: object) -> None:
        del self, round_state, update
        raise KeyboardInterrupt

    calm = Server.take
    monkeypatch.setattr(Server, "take", broken)
    assert run("run", "study.toml", "--output", "out", "--set", "train.lr=0.5")[0] == 130
    assert any((here / "out/clients").rglob("*.json"))
    monkeypatch.setattr(Server, "take", calm)
    code, out = run("run", "study.toml", "--output", "out")
    assert code == 0, out
    assert run("run", "study.toml", "--output", "new")[0] == 0
    assert files(here / "out") == files(here / "new")


# More rounds ---------------------------------------------------------------------------------

EXTENDED = (
    "fedavg",
    "fedadam",
    "fedavgm",
    "scaffold",
    "feddyn",
    "ditto",
    "diloco",
    "fedfrozen",
    "fedper",
    "fedrep",
    "fedbabu",
    "safl",
    "fedprox",
)


@pytest.mark.parametrize("name", [name for name in EXTENDED if name in METHODS])
def test_rounds_can_be_added_and_every_bit_is_that_of_one_run(here: Path, name: str) -> None:
    settings = {"fedfrozen": "settings = { warmup = 2 }\n", "safl": "settings = { k = 1 }\n"}
    Path("study.toml").write_text(
        STUDY.replace(PLAN, f'name = "{name}"\n' + settings.get(name, ""))
    )
    steps = ["--set", "train.steps=2"]
    assert run("run", "study.toml", *steps, "--set", "train.rounds=4", "--output", "whole")[0] == 0
    for rounds in (1, 2, 4):
        more = ["--resume"] if rounds > 1 else []
        change = [*steps, "--set", f"train.rounds={rounds}", "--output", "parts"]
        code, out = run("run", "study.toml", *change, *more)
        assert code == 0, out
    assert files(here / "whole") == files(here / "parts")
    assert run("verify", "parts")[0] == 0


PLANS = (
    "chain(freeze(), when(after(2), share()))",
    "cycle(share(), share(head), freeze())",
    "chain(share(), when(after(1), cycle(freeze(), share(mlp))), when(after(3), keep(head)))",
)


@pytest.mark.parametrize("plan", PLANS)
def test_rounds_can_be_added_to_any_plan(here: Path, plan: str) -> None:
    """What the server's optimizer remembers must not hang on when the run was first to end."""
    Path("study.toml").write_text(
        STUDY.replace(PLAN, f'name = "fedadam"\nplan = "{plan}"\n').replace("epochs", "steps")
    )
    for output, counts in (("whole", (5,)), ("parts", (2, 3, 5))):
        for rounds in counts:
            change = ["--set", f"train.rounds={rounds}", "--set", "train.steps=1"]
            more = ["--resume"] if rounds != counts[0] else []
            assert run("run", "study.toml", *change, *more, "--output", output)[0] == 0
    assert files(here / "whole") == files(here / "parts")


def test_a_study_that_grew_by_nothing_is_verified(here: Path) -> None:
    """What changes no turn may change when there is no round left to commit it with."""
    assert run("run", "study.toml", "--set", "train.rounds=1", "--output", "a")[0] == 0
    change = ["--set", "evaluate.every=5", "--set", "train.rounds=1"]
    assert run("run", "--resume", "a", *change)[0] == 0
    assert run("verify", "a")[0] == 0


def test_a_runs_folder_takes_more_rounds_too(here: Path) -> None:
    assert run("run", "study.toml", "--set", "train.rounds=1", "--output", "a")[0] == 0
    assert run("run", "--resume", "a", "--set", "train.rounds=2")[0] == 0
    assert run("run", "study.toml", "--set", "train.rounds=2", "--output", "b")[0] == 0
    assert files(here / "a") == files(here / "b")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("train.lr=0.5", "train.lr"),
        ("seed=3", "seed"),
        ("data.alpha=0.9", "data.alpha"),
        ("method.compression=half", "method.compression"),
        ("model.config.hidden_size=32", "model.config.hidden_size"),
        ("clients.dropout_fraction=0.5", "clients.dropout_fraction"),
        ("train.rounds=1", "train.rounds"),
    ],
)
def test_no_other_change_goes_on_with_a_run(here: Path, change: str, field: str) -> None:
    assert run("run", "study.toml", "--output", "out", "--set", "train.rounds=2")[0] == 0
    before = files(here / "out")
    code, out = run("run", "study.toml", "--output", "out", "--resume", "--set", change)
    assert code == 2 and field in text(out), out
    assert files(here / "out") == before


CLIENTS = '[privacy]\nunit = "client"\nepsilon = 8.0\n'


def test_rounds_are_added_to_a_private_run_only_if_its_noise_was_said(here: Path) -> None:
    study = STUDY.replace("dropout_fraction = 0.1", "fraction = 0.9").replace(
        PLAN, 'name = "fedavg"\n'
    )
    for name, more, code in (("a", "", 2), ("b", "noise_multiplier = 20.0\n", 0)):
        Path("study.toml").write_text(study + CLIENTS + more)
        base = ["run", "study.toml", "--output", name]
        assert run(*base, "--set", "train.rounds=1")[0] == 0
        found, out = run(*base, "--set", "train.rounds=2", "--resume")
        assert found == code, out
        assert code == 0 or "privacy.noise_multiplier" in text(out)


# Other folders -------------------------------------------------------------------------------


def test_a_study_means_the_same_from_every_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run, stop, go on, verify, state, explain and export, each from a folder of its own."""
    (here / "lab/deep").mkdir(parents=True)
    (here / "digits.npz").rename(here / "lab/digits.npz")
    (here / "study.toml").rename(here / "lab/study.toml")
    hf.ViTModel(hf.ViTConfig(**{**VISION, "image_size": 8})).save_pretrained("lab/weights")
    said = (here / "lab/study.toml").read_text()
    kind = said[said.index("type =") : said.index("[task]")]
    (here / "lab/study.toml").write_text(said.replace(kind, 'path = "weights"\n'))
    found = list[tuple[object, ...]]()
    for number, place in enumerate((here, here / "lab", here / "lab/deep")):
        monkeypatch.chdir(place)
        study, out = os.path.relpath(here / "lab/study.toml"), os.path.relpath(here / f"o{number}")
        assert run("run", study, "--set", "train.rounds=1", "--output", out)[0] == 0
        monkeypatch.chdir("/")
        code, said = run("run", "--resume", str(here / f"o{number}"), "--set", "train.rounds=2")
        assert code == 0, said
        monkeypatch.chdir(here / "lab/deep" if number < 2 else here)
        where, model = os.path.relpath(here / f"o{number}"), os.path.relpath(here / f"m{number}")
        assert run("export", where, model, "--client", "client-00")[0] == 0
        explained = run("explain", os.path.relpath(here / "lab/study.toml"))
        digest = run("digest", os.path.relpath(here / "lab/study.toml"))
        verified = run("verify", where)
        assert explained[0] == digest[0] == verified[0] == 0, (explained, digest, verified)
        found.append(
            (explained, digest, verified, files(here / f"o{number}"), files(here / f"m{number}"))
        )
    assert found[0] == found[1] == found[2]


def test_a_place_may_change_on_resume(here: Path) -> None:
    assert run("run", "study.toml", "--output", "a", "--set", "train.rounds=1")[0] == 0
    Path("digits.npz").rename("moved.npz")
    assert run("run", "study.toml", "--output", "a", "--resume")[0] == 2
    moved = ["--set", "data.path=moved.npz"]
    assert run("run", "study.toml", "--output", "a", "--resume", *moved)[0] == 0
    assert json.loads(Path("a/study.json").read_text())["data"]["path"] == str(here / "moved.npz")
    assert run("verify", "a")[0] == 0


# Data that is gone ---------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["", "client-01"])
def test_export_does_not_need_the_rows(here: Path, client: str) -> None:
    """Nor their labels, where the study leaves it to the table to say them."""
    Path("study.toml").write_text(STUDY.replace(LABELS, ""))
    assert run("run", "study.toml")[0] == 0
    whose = ["--client", client] if client else ["--global"]
    assert run("export", "runs/tiny", "with", *whose)[0] == 0
    kept = files(here / "runs")
    Path("digits.npz").unlink()
    Path("study.toml").unlink()
    code, out = run("export", "runs/tiny", "without", *whose)
    assert code == 0, out
    assert files(here / "with") == files(here / "without")
    assert files(here / "runs") == kept
    assert run("export", "runs/tiny", "no", "--client", "../client-01")[0] == 2


def test_export_finds_texts_and_their_tokenizer_without_rows(here: Path) -> None:
    from test_export import towers

    towers(here)
    rows = [{"text": f"a {w} {n}", "kind": w} for w in ("cat", "dog") for n in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("study.toml").write_text(
        '[model]\npath = "ear"\n[task]\nkind = "text-classification"\nlabel = "kind"\n'
        '[data]\npath = "rows.jsonl"\nnum_clients = 2\n[method]\nname = "fedper"\n'
        "[train]\nrounds = 1\nsteps = 1\n"
    )
    code, out = run("run", "study.toml")
    assert code == 0, out
    assert run("export", "runs/study", "with", "--client", "client-00")[0] == 0
    Path("rows.jsonl").unlink()
    assert run("export", "runs/study", "without", "--client", "client-00")[0] == 0
    assert files(here / "with") == files(here / "without")
    assert {"tokenizer.json", "config.json"} <= files(here / "without").keys()


QUICK = "[timeouts]\npoll_interval = 0.01\nsites = 20.0\n"
SITES = ("client-00", "client-01", "client-02")


def sites_study(own: bool) -> str:
    """A study of sites: each brings its own table, or all divide one."""
    text = STUDY.replace("rounds = 3", "rounds = 2\nsteps = 1").replace("dropped = 0.1", "")
    text = text.replace("attention = 4", "personal = false")
    if own:
        data = text[text.index("[data]") : text.index("[method]")]
        text = text.replace(data, "").replace("[clients]", f"[clients]\nnames = {list(SITES)}")
    else:
        text = text.replace(LABELS, "")  # they are those of the table
    return text + QUICK


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_sites_export_does_not_need_its_rows(here: Path, own: bool, sealed: bool) -> None:
    """Over Flower's messages: the site's own model and the world's, before and after."""
    Path("study.toml").write_text(sites_study(own))
    Path("key").write_text("ab" * 32)
    Path("key").chmod(0o600)
    offices = dict[str, SiteRuntime]()
    for number, name in enumerate(SITES):
        said: dict[str, Any] = {
            "name": name,
            **({"encryption_key": str(here / "key")} if sealed else {}),
        }
        if own:
            shutil.copy("digits.npz", f"{name}.npz")
            table = dict(np.load(f"{name}.npz"))
            np.savez(f"{name}.npz", **{k.removesuffix("_train"): v[number::3] for k, v in table.items() if k.endswith("_train")})  # fmt: skip
            said["data"] = str(here / f"{name}.npz")
        site = Site(state=str(here / "states" / name), **said)
        offices[name] = SiteRuntime(site, read_study(here / "study.toml"))

    def answer(context: Context, kind: str, message: Message) -> Message:
        return offices[str(context.node_config["name"])].answer(kind, message)

    grid = InProcess(client_app(answer), [{"name": name} for name in SITES])
    run_server(grid, read_study(here / "study.toml"), here / "run")
    study = read_study(here / "study.toml")
    places = {name: site_study_folder(str(here / "states" / name), study, name) for name in SITES}
    key = ["--key", "key"] if sealed else []

    def exported(when: str) -> dict[str, dict[str, bytes]]:
        code, out = run("export", "run", f"{when}-global", "--global")
        assert code == 0, out
        for name, place in places.items():
            code, out = run("export", str(place), f"{when}-{name}", *key)
            assert code == 0, out
        return {name: files(here / f"{when}-{name}") for name in ("global", *SITES)}

    before = exported("with")
    for table in here.glob("*.npz"):
        table.unlink()
    Path("study.toml").unlink()
    assert exported("without") == before
    weights = [before[name]["model.safetensors"] for name in ("global", *SITES)]
    assert len(set(weights)) == 4  # each keeps a head of its own
    if sealed:
        assert run("export", str(places[SITES[0]]), "closed")[0] == 2


HIDING = {
    "secure": '[aggregation]\nkind = "secure"\nthreshold = 2\nmin_contributors = 2\n',
    "client": '[privacy]\nunit = "client"\nepsilon = 900.0\nnoise_multiplier = 2.0\n'
    "clipping_norm = 0.5\n",
    "example": '[privacy]\nunit = "example"\nepsilon = 8.0\nexamples_per_site = 12\n',
}


@pytest.mark.parametrize("hiding", HIDING)
def test_kept_optimizers_work_where_clients_are_hidden_but_not_with_dp_sgd(
    hiding: str, here: Path
) -> None:
    text = STUDY.replace(PLAN, 'name = "diloco"\n').replace("dropout_fraction = 0.1", "")
    text = text.replace("batch_size = 8", "batch_size = 4\nsteps = 2")
    Path("study.toml").write_text(text + HIDING[hiding])
    code, out = run("run", "study.toml", "--output", "out")
    if hiding == "example":
        assert code == 2 and "DP-SGD covers only the built-in one" in " ".join(out.split())
    else:
        assert code == 0 and run("verify", "out")[0] == 0
