# SPDX-License-Identifier: Apache-2.0
"""Whatever is changed in a run's folder, verify names it: never a clean verdict, never a trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from commands import STUDY, run
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zoo import VISION

import fedplan as fp
from fedplan.audits import run as audit
from fedplan.audits.run import verify_run
from fedplan.errors import FedplanError
from fedplan.runners.simulation import Simulation
from fedplan.storage.journal import client_state_folder
from fedplan.studies.export import export_run
from fedplan.studies.schema import read_study

KINDS = {
    "plain": "",
    "client": """
[privacy]
unit = "client"
epsilon = 900.0
delta = 1e-5
clipping_norm = 1.0
noise_multiplier = 1.0
""",
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds that keeps, freezes and measures."""
    place = tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 3
    np.savez(
        place / "digits.npz",
        image_train=images[:45],
        digit_train=labels[:45],
        image_test=images[45:],
        digit_test=labels[45:],
    )
    (place / "study.toml").write_text(
        STUDY.replace('"digits.npz"', f'"{place}/digits.npz"')
        .replace("dropout_fraction = 0.1", "")
        .replace('partition = "dirichlet"\nalpha = 0.5', 'partition = "iid"')
        + KINDS[request.param]
    )
    Simulation(read_study(place / "study.toml"), place / "run").run()
    faults, said = verify_run(place / "run")
    assert not faults and "examples are unchanged" in said
    return place / "run"


@pytest.fixture(autouse=True)
def without_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are checked by a test of their own: to read them takes most of the time."""

    def gone(*_: object) -> None:
        raise FedplanError("the data is not here")

    if "rows" not in request.node.name:
        monkeypatch.setattr(audit, "load_federated_data", gone)


def files(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    records = {"data.json", "environment.jsonl", "environment.jsonl.head", "initial_scores.json"}
    assert records <= {p.name for p in found}
    return found


def accused(copy: Path, file: Path) -> bool:
    """Whether verify finds a fault, and speaks of the file or of whose it is."""
    try:
        faults, _ = verify_run(copy)
    except FedplanError as error:
        faults = [str(error)]
    names = [
        file.name,
        str(file),
        *(part for part in file.parts[:-1] if part not in (".", "clients")),
    ]
    return any(name in fault for fault in faults for name in names)


def mutations(content: bytes, name: str) -> Iterator[tuple[str, bytes | None]]:
    yield "removed", None
    yield "emptied", b""
    yield "longer", content + (content.splitlines(keepends=True) or [b"x"])[-1]
    yield "shorter", content[:-1]
    for place in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        yield f"byte {place}", flipped(content, place)
    if name.endswith(".jsonl"):
        lines = content.splitlines(keepends=True)
        for i in range(len(lines)):
            yield f"line {i} removed", b"".join(lines[:i] + lines[i + 1 :])
            yield f"line {i} twice", b"".join(lines[: i + 1] + lines[i:])
            yield f"line {i} {{}}", b"".join([*lines[:i], b"{}\n", *lines[i + 1 :]])
            if i and lines[i] != lines[i - 1]:
                swapped = [*lines[: i - 1], lines[i], lines[i - 1], *lines[i + 1 :]]
                yield f"line {i} swapped", b"".join(swapped)


def flipped(content: bytes, place: int, bit: int = 0) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_every_change_of_every_file_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    tried = 0
    for file in files(folder):
        name, content = file.relative_to(folder), file.read_bytes()
        for what, changed in mutations(content, file.name):
            if changed is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(changed)
            assert accused(copy, name), (str(name), what)
            (copy / name).write_bytes(content)
            (copy / name).chmod(file.stat().st_mode)
            tried += 1
    assert tried > 150 and verify_run(copy)[0] == []


@given(st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_bit_of_any_file_is_named(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = folder.parent / "bits"
    if not copy.exists():
        shutil.copytree(folder, copy)
    file = data.draw(st.sampled_from(files(folder)))
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    name = file.relative_to(folder)
    (copy / name).write_bytes(flipped(content, place, data.draw(st.integers(0, 7))))
    try:
        assert accused(copy, name)
    finally:
        (copy / name).write_bytes(content)


@pytest.mark.parametrize(
    "place", ["global", "clients", str(client_state_folder(Path(), "client-01"))]
)
def test_a_removed_folder_is_named(folder: Path, place: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / place)
    assert accused(tmp_path / "run", Path(place) / "x") or accused(
        tmp_path / "run", client_state_folder(Path(), "client-01") / "x"
    )


def test_the_records_and_the_stored_model_of_a_python_run_are_bound(tmp_path: Path) -> None:
    pixels = torch.zeros(6, 3, 16, 16).tolist()
    rows = Dataset.from_dict({"pixel_values": pixels, "labels": [0, 1] * 3}).with_format("torch")
    played = fp.simulate(
        fp.methods.fedit(),
        hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=2)),
        {"north": {"train": rows, "test": rows}},
        train=fp.TrainConfig(rounds=1, batch_size=3),
        options=fp.RunOptions(folder=tmp_path / "run"),
    )
    folder = played.folder
    names = {str(p.relative_to(folder)) for p in folder.glob("model/**/*") if p.is_file()}
    assert names >= {"model/model.json", "model/config.json", "model/values.safetensors"}
    assert "model/adapters/default/adapter_config.json" in names
    for name in [*names, "data.json", "initial_scores.json"]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(flipped(content, len(content) // 2))
        assert any(name in fault for fault in verify_run(folder)[0]), name
        if name in names:
            with pytest.raises(FedplanError, match="restore it from a backup"):
                export_run(folder, tmp_path / "out")
        (folder / name).write_bytes(content)
    (folder / "model/added.json").write_text("{}")
    assert verify_run(folder)[0] == ["model/added.json was not written by the run"]
    (folder / "model/added.json").unlink()
    # a resume leaves an edited record accused, or writes it anew
    for name in ("initial_scores.json", "environment.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(flipped(content, len(content) // 2))
        with suppress(FedplanError):
            played.resume(2)
        assert any(name in fault for fault in verify_run(folder)[0]), name
        (folder / name).write_bytes(content)
    (folder / "data.json").write_text("{}")
    played.resume(3)
    assert verify_run(folder)[0] == []


def test_homes_of_two_clients_swapped_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    one, other = (client_state_folder(tmp_path / "run", f"client-0{i}") for i in (1, 2))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    faults, _ = verify_run(tmp_path / "run")
    assert {"client-01", "client-02"} == {fault.partition("'")[0] for fault in faults}


def test_other_rows_are_named_and_not_gone_on_with(folder: Path, tmp_path: Path) -> None:
    rows = folder.parent / "digits.npz"
    content, held = rows.read_bytes(), dict(np.load(rows))
    shutil.copytree(folder, tmp_path / "run")
    study = read_study(folder.parent / "study.toml")
    try:
        np.savez(rows, **(held | {"image_train": 255 - held["image_train"]}))
        faults, _ = verify_run(tmp_path / "run")
        assert faults and all("the examples of" in fault for fault in faults)
        with pytest.raises(FedplanError, match="on other examples of client-00"):
            Simulation(study, tmp_path / "run")
        rows.unlink()
        faults, said = verify_run(tmp_path / "run")
        assert not faults and "examples were not checked" in said
    finally:
        rows.write_bytes(content)


def test_a_world_that_is_lost_is_not_begun_again_beside_its_homes(
    folder: Path, tmp_path: Path
) -> None:
    study = read_study(folder.parent / "study.toml")
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/global")
    with pytest.raises(FedplanError, match="server has lost its"):
        Simulation(study, tmp_path / "run").federation.run_round()


def test_files_of_another_run_are_named(folder: Path, tmp_path: Path) -> None:
    study = read_study(folder.parent / "study.toml")
    Simulation(study, tmp_path / "other").run()
    for name in ("run.json", "ledger.jsonl", "global", "clients"):
        copy = tmp_path / f"with-{name}"
        shutil.copytree(folder, copy)
        place = copy / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        source = tmp_path / "other" / name
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
        same = source.is_file() and source.read_bytes() == (folder / name).read_bytes()
        try:
            faults, _ = verify_run(copy)
        except FedplanError as error:
            faults = [str(error)]
        assert faults or same, name


def test_a_fault_is_told_by_the_command(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run/ledger.jsonl").write_text("{}\n")
    code, out = run("verify", str(tmp_path / "run"))
    assert code == 1 and "ledger.jsonl differs from its content at round 3" in out


def test_a_key_that_others_may_read_is_a_fault_and_hides_no_other(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    keys = sorted(copy.rglob("key"))
    for key in keys:
        key.chmod(0o644)
    faults, _ = verify_run(copy)
    assert sum("others may read" in fault for fault in faults) == len(keys)
