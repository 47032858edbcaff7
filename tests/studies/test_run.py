# SPDX-License-Identifier: Apache-2.0
"""A run is read as it was last committed, and its folder is left as it is: bytes and times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import STUDY
from often import AT_NIGHT

import fedplan
from fedplan.federation.ledger.records import RoundRecord
from fedplan.runners.simulation import Simulation
from fedplan.studies.export import export_run
from fedplan.studies.run import RunAdvanced, RunReader, read_consistently, read_run
from fedplan.studies.schema import ConfigError, Study, read_study
from fedplan.tensors.named import digests

PRIVATE = "epsilon = 900.0\ndelta = 1e-5\nclipping_norm = 1.0\nnoise_multiplier = 1.0\n"
METHODS = {
    "fedavg": "",
    "fedper": "",
    "client": f'[privacy]\nunit = "client"\n{PRIVATE}',
    "example": f'[privacy]\nunit = "example"\nexamples_per_site = 10\n{PRIVATE}',
}
NAMES = [*METHODS] if AT_NIGHT else ["client"]
HIDDEN = {"client", "example"}
STATES = ("ended", "between", "within", "killed")
"""A run that has ended; two that live, of which one has played a round and not committed it; and
one whose writer was killed in the middle of a line."""
TRIED = STATES if AT_NIGHT else ("within", "killed")
"""Those that are read: by day the two that another process could most easily get wrong."""

KILLED = """
import os, signal, sys
from pathlib import Path
from fedplan.runners.simulation import Simulation
from fedplan.storage.append_log import CommittedLog
from fedplan.studies.schema import read_study

simulation = Simulation(read_study(Path(sys.argv[1])), Path(sys.argv[2]))
federation = simulation.federation
federation.commit(federation.run_round(), {"score": 1.0})

def torn(self, lines):
    with self.file.open("ab") as out:
        out.write(b'{"kind": "turn", "ver')
    os.kill(os.getpid(), signal.SIGKILL)

CommittedLog.append = torn
federation.commit(federation.run_round(), {"score": 1.0})
"""

READ = """
import json, sys
from pathlib import Path
from commands import run
from fedplan.studies.run import RunReader, read_run
from fedplan.tensors.named import digests

found = {}
for folder in map(Path, sys.argv[2:]):
    out = Path(sys.argv[1], *folder.parts[-2:])
    said = {"verify": run("verify", str(folder)), "privacy": run("privacy", str(folder))}
    said["export"] = run("export", str(folder), str(out), "--global")
    said["own"] = run("export", str(folder), str(out / "own"), "--client", "client-01")
    one = read_run(folder)
    for name, each in vars(RunReader).items():
        if not name.startswith("_") and not callable(each) and name != "best_state":
            getattr(one, name)
    said["round"], said["global"] = one.round, digests(one.global_state.values)
    said["client"] = digests(one.client_state("client-01")[0])
    said["records"], said["metrics"] = len(one.records), len(one.metrics)
    found["/".join(folder.parts[-2:])] = said
try:
    Path(sys.argv[2], "x").touch()
    found["writable"] = True
    Path(sys.argv[2], "x").unlink()
except OSError:
    found["writable"] = False
print(json.dumps(found))
"""

MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@dataclass
class Told:
    """What a process that may not write read of every run, and what was there before and after."""

    said: dict[str, Any]
    truth: dict[str, dict[str, Any]]
    before: dict[str, tuple[bytes, int]]
    after: dict[str, tuple[bytes, int]]
    refused: str


def study(place: Path, name: str) -> Study:
    """A study of three rounds in a file of its own."""
    place.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    np.savez(
        place / "digits.npz",
        image_train=draw.integers(0, 255, (45, 8, 8), dtype=np.uint8),
        digit_train=np.arange(45) % 3,
        image_test=draw.integers(0, 255, (15, 8, 8), dtype=np.uint8),
        digit_test=np.arange(15) % 3,
    )
    said = f'name = "{"fedavg" if name in HIDDEN else name}"\n'
    text = STUDY.replace(STUDY[STUDY.index("plan =") : STUDY.index("[train]")], said)
    text = text.replace('"digits.npz"', f'"{place}/digits.npz"').replace(
        "dropout_fraction = 0.1", ""
    )
    text = text.replace("batch_size = 8", "batch_size = 8\nsteps = 2")
    text = text.replace('partition = "dirichlet"\nalpha = 0.5', 'partition = "iid"') + METHODS[name]
    (place / f"{name}.toml").write_text(text)
    return read_study(place / f"{name}.toml")


def play(simulation: Simulation, rounds: int = 1) -> None:
    for _ in range(rounds):
        simulation.federation.commit(simulation.federation.run_round(), {"score": 1.0})


def truth(simulation: Simulation) -> dict[str, Any]:
    """What a run's own process knows of it."""
    federation = simulation.federation
    home = federation.clients["client-01"].journal.client_state()[0]
    number = federation.global_state.round
    values = digests(federation.global_state.values)
    return {"round": number, "global": values, "client": digests(home), "metrics": number}


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder: its bytes, and when it was last changed."""
    return {
        str(p.relative_to(folder)): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns)
        for p in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    place = tmp_path_factory.mktemp("runs")
    known, living = dict[str, dict[str, Any]](), list[Simulation]()
    for name in NAMES:
        made = study(place / "data", name)
        for state in sorted({*TRIED} - {"killed"}):
            simulation = Simulation(made, place / "runs" / name / state)
            play(simulation, 3 if state == "ended" else 1)
            known[f"{name}/{state}"] = truth(simulation)
            if state == "within":
                simulation.federation.run_round()
            if state != "ended":
                living.append(simulation)
        words = (str(place / "data" / f"{name}.toml"), str(place / "runs" / name / "killed"))
        ended = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        assert ended.returncode == -9
        known[f"{name}/killed"] = {"round": 1, "global": known[f"{name}/within"]["global"]}
    before = tree(place / "runs")
    said, refused = read_elsewhere(place)
    yield Told(said, known, before, tree(place / "runs"), refused)
    assert all(simulation.folder_lock for simulation in living)


def read_elsewhere(place: Path) -> tuple[dict[str, Any], str]:
    """Everything read by another process, from a mount that cannot be written if there may be."""
    runs = place / "runs"
    folders = [str(runs / name / state) for name in NAMES for state in TRIED]
    command = [sys.executable, "-c", READ, str(place / "models"), *folders]
    readonly = ["unshare", "-m", "sh", "-c", MOUNTED, str(runs)]
    tried = subprocess.run([*readonly, "true"], capture_output=True, text=True, check=False)
    refused = tried.stderr if tried.returncode else ""
    command = command if refused else [*readonly, *command]
    path = ":".join([*sys.path, str(Path(fedplan.__file__).parent.parent)])
    done = subprocess.run(
        ["env", f"PYTHONPATH={path}", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), refused


def test_a_run_is_read_as_it_was_committed_and_its_folder_left_as_it_was(told: Told) -> None:
    """One test, since what it looks at takes long to make, and two workers would make it twice."""
    for name in NAMES:
        for state in TRIED:
            require_as_committed(told, name, state)
    assert told.before == told.after and len(told.before) > 6 * len(NAMES) * len(TRIED)
    if told.refused:
        pytest.skip(f"no mount may be made here: {told.refused.strip()}")
    assert told.said["writable"] is False


def require_as_committed(told: Told, name: str, state: str) -> None:
    said, known = told.said[f"{name}/{state}"], told.truth[f"{name}/{state}"]
    code, out = said["verify"]
    # What a kill left behind the last line is told, and is all that there is to tell.
    assert code == (1 if state == "killed" else 0), out
    assert state != "killed" or (out.count("bytes after round 1") == 1 and "lost" not in out)
    assert said["export"][0] == 0, said["export"]
    assert said["own"][0] == 0 or "keeps nothing at clients" in said["own"][1], said["own"]
    code, out = said["privacy"]
    assert code == (0 if name in HIDDEN else 2) and ("Epsilon spent" in out) == (code == 0)
    # The noise of a private run is another in each: its secret is drawn.
    drawn = name in HIDDEN and state == "killed"
    same = {key: value for key, value in known.items() if not drawn or key == "round"}
    assert {key: said[key] for key in same} == same
    assert said["records"] == 4 * known["round"]


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    made = Simulation(study(tmp_path / "data", "fedper"), tmp_path / "run")
    play(made)
    return made


def test_a_run_is_one_snapshot_however_late_it_is_read(simulation: Simulation) -> None:
    known, run = truth(simulation), read_run(simulation.folder)
    play(simulation)
    assert run.round == 1 and len(run.records) == 4 and len(run.metrics) == 1
    assert digests(run.global_state.values) == known["global"] and run.global_state.round == 1
    assert digests(run.client_state("client-01")[0]) == known["client"]
    with pytest.raises(RunAdvanced, match="advanced from round 1 to 2"):
        run.require_current()


def test_what_is_no_longer_there_is_no_later_value(simulation: Simulation) -> None:
    run, read = read_run(simulation.folder), read_run(simulation.folder)
    known = read.global_state
    play(simulation, 2)
    with pytest.raises(RunAdvanced):
        _ = run.global_state
    with pytest.raises(RunAdvanced):
        run.client_state("client-01")
    assert read.global_state is known and len(run.records) == 4


def test_a_run_that_goes_on_is_looked_at_again(simulation: Simulation) -> None:
    looks = list[int]()

    def look(run: RunReader) -> int:
        looks.append(run.round)
        if len(looks) < 3:
            play(simulation)
        run.require_current()
        return run.round

    assert read_consistently(simulation.folder, look) == 3 and looks == [1, 2, 3]


def test_to_open_a_run_reads_no_values(simulation: Simulation) -> None:
    [file] = (simulation.folder / "global").glob("1.*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run = read_run(simulation.folder)
    assert [type(each) for each in run.records].count(RoundRecord) == 1
    with pytest.raises(fedplan.FedplanError, match="its digest differs"):
        _ = run.global_state


def test_a_run_without_a_round_is_its_study(tmp_path: Path) -> None:
    made = study(tmp_path / "data", "fedavg")
    simulation = Simulation(made, tmp_path / "run")
    run = read_run(simulation.folder)
    assert (run.round, run.records, run.metrics) == (0, [], []) and run.study.digest == made.digest
    assert run.clients == ["client-00", "client-01", "client-02"] and run.labels == ["0", "1", "2"]
    with pytest.raises(ConfigError, match="no committed round"):
        _ = run.global_state
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_run(tmp_path)
    fields = {"continues": "", **json.loads((tmp_path / "run/study.json").read_text())}
    (tmp_path / "run/study.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"another version of fedplan.*with the version that"):
        export_run(tmp_path / "run", tmp_path / "out", global_model=True)
