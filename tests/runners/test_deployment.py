# SPDX-License-Identifier: Apache-2.0
"""Real processes: whatever carries a study, and whatever is killed meanwhile, the bits are the same."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from commands import STUDY, run
from deployment import BIN, Deployment, free_ports, until_open
from proxy import Proxy

from fedplan.federation.endpoint import open_journal
from fedplan.federation.identity import is_run_id
from fedplan.runners.flower.keys import make_site_keys
from fedplan.runners.flower.supernode import FLOWER_ENVIRONMENT
from fedplan.runners.site_runtime import site_study_folder
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.encryption import Encryption
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.storage.store import Store
from fedplan.studies.schema import read_study
from fedplan.tensors.named import digests

SITES = [f"client-{number:02}" for number in range(3)]
PLANS = {
    "fedavg": 'name = "fedavg"',
    "fedper": 'name = "fedper"',
    "fedfrozen": 'name = "fedfrozen"\nsettings = { warmup = 2 }',
    "parts": """plan = 'chain(freeze(), by("ward", {"a": share(blocks(0))}, share(blocks(1))), keep(head))'""",
}
MORE = {"client-01": '[traits]\nward = "a"\n'}
OWN = 'plan = "chain(share(), when(after(1), freeze(query | key)), keep(head))"'
DATA = """split = "train"
test_split = "test"
partition = "dirichlet"
alpha = 0.5
num_clients = 3
"""


def rows_of(here: Path) -> dict[str, Path]:
    """A table of each site's rows, and one of all of them with a column that says whose they are."""
    with np.load(here / "digits.npz") as all_:
        image, digit = all_["image_train"], all_["digit_train"]
    whose = np.array([SITES[row % 3] for row in range(len(image))])
    np.savez(here / "all.npz", image=image, digit=digit, site=whose)
    for name in SITES:
        own = whose == name
        np.savez(here / f"{name}.npz", image=image[own], digit=digit[own])
    return {name: here / f"{name}.npz" for name in SITES}


def study_from_dict(
    here: Path, plan: str, *, name: str = "", rounds: int = 5, more: str = ""
) -> str:
    """The tiny study with a plan, a name and a length, of sites with rows of their own."""
    study = STUDY.replace(
        'path = "digits.npz"\n' + DATA,
        'partition = "column"\npartition_column = "site"\nnum_clients = 3\n',
    )
    names = f"names = {list(SITES)}\n{more}"
    study = study.replace(
        "dropout_fraction = 0.1", f'{names}\n[clients.traits.client-01]\nward = "a"'
    )
    study = study.replace("attention_examples = 4", "personal = false").replace(OWN, PLANS[plan])
    assert PLANS[plan] in study and "[data]\npartition" in study
    name = name or plan
    return study.replace("rounds = 3", f"rounds = {rounds}").replace('"tiny"', f'"{name}"')


def gathered(here: Path, study: str) -> str:
    """The same study where all rows are in one place."""
    return study.replace("[data]\n", f'[data]\npath = "{here}/all.npz"\n')


def whole(here: Path, study: str, name: str) -> Path:
    """The same study by the local runner."""
    (here / f"{name}.toml").write_text(gathered(here, study))
    code, told = run("run", str(here / f"{name}.toml"), "--output", str(here / "whole" / name))
    assert code == 0, told
    return here / "whole" / name


def _changed(folder: Path) -> float:
    return folder.stat().st_mtime


def homes(fed: Path, study: Path) -> dict[str, dict[str, str]]:
    """What each site of a deployment keeps, opened with its own key."""
    found = dict[str, dict[str, str]]()
    for name in SITES:
        key = fed / "sites" / name / "state.key"
        folder = site_study_folder(str(fed / "sites" / name / "state"), read_study(study), name)
        encryption = Encryption.from_file(key) if key.exists() else None
        run = max((each for each in folder.iterdir() if is_run_id(each.name)), key=_changed)
        found[name] = digests(open_journal(run, encryption).client_state()[0])
    return found


def open_part(folder: Path) -> list[dict[str, object]]:
    """A ledger without the digests of what a client keeps: each site keys them by its own secret."""
    lines = read_json_lines(folder / "ledger.jsonl")
    for line in [each for whole in lines for each in (whole, *whole.get("missed", ()))]:
        for which in ("before", "after") if "roles" in line else ():
            marks = [line[which][i : i + 16] for i in range(0, len(line[which]), 16)]
            pairs = zip(marks, line["roles"], strict=True)
            line[which] = [mark if role in "SF" else role for mark, role in pairs]
    return lines


def require_same(out: Path, expected: Path) -> None:
    """A run has the world and the ledger of another, and both are in order."""
    assert open_part(out) == open_part(expected)
    one, other = (Store(folder / "global").read_newest() for folder in (out, expected))
    assert one is not None and other is not None
    assert digests(one.tensors) == digests(other.tensors)


def require_same_homes(fed: Path, here: Path, name: str) -> None:
    kept = homes(fed, here / f"{name}.toml")
    for site in SITES:
        assert kept[site] == digests(
            Journal(client_state_folder(here / "whole" / name, site)).client_state()[0]
        )


PYPROJECT = """[project]
name = "study"
version = "1.0.0"
description = "A study in Flower's own simulation."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedplan"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
folder = "run"
"""
APP = """from pathlib import Path
from fedplan.runners.flower.apps import study_client_app, study_server_app

STUDY = Path(__file__).parent / "study.toml"
client = study_client_app(STUDY)
server = study_server_app(STUDY)
"""


@pytest.fixture
def simulated(here: Path) -> Iterator[Callable[[str, str], Path]]:
    """Runs an app in Flower's own simulation; its SuperLink ends with the test."""
    home, (port,) = here / "flwr", free_ports(1)
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "sim"\n[superlink.sim]\naddress = ":local:"\n'
        "options.num-supernodes = 3\noptions.backend.client-resources.num-cpus = 1\n"
        "options.backend.init-args.num-cpus = 2\n"
    )
    env = {
        **os.environ,
        **FLOWER_ENVIRONMENT,
        "FLWR_HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port)}

    def simulate(study: str, name: str) -> Path:
        app, out = here / "app", here / "sim" / name
        app.mkdir(exist_ok=True)
        (app / "pyproject.toml").write_text(PYPROJECT)
        (app / "app.py").write_text(APP)
        (app / "study.toml").write_text(gathered(here, study))
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(app), "sim", "--stream", "--run-config", f'folder="{out}"'],
            cwd=here, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    yield simulate
    for place in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(home).encode() in (place / "environ").read_bytes()
            if mine and int(place.name) != os.getpid():
                os.kill(int(place.name), signal.SIGKILL)
        except OSError:
            pass


@pytest.mark.nightly  # by day the bits of real sites are those of test_no_code
@pytest.mark.parametrize(
    "plans",
    [["parts"], ["fedavg", "fedper", "fedfrozen"]],
    ids=["parts", "three methods"],
)
def test_one_process_and_three_sites_with_tls_have_the_same_bits(
    plans: list[str], here: Path
) -> None:
    with Deployment(here / "fed", SITES, rows_of(here), more=MORE) as deployed:
        for name in plans:
            study = study_from_dict(here, name, rounds=3)
            expected = whole(here, study, name)
            out = deployed.run(study, name)
            require_same(out, expected)
            require_same_homes(here / "fed", here, name)
            assert run("verify", str(out))[0] == 0
        code, told = run("egress", str(here / "fed/sites/client-01/state"))
    assert code == 0 and f"client-01 in {plans[0]}/0" in told and "accepted plan chain(" in told


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANS)
def test_one_process_and_flowers_simulation_have_the_same_bits(
    name: str, here: Path, simulated: Callable[[str, str], Path]
) -> None:
    rows_of(here)
    study = study_from_dict(here, name)
    require_same(simulated(study, name), whole(here, study, name))


class Killer(threading.Thread):
    """Kills at random moments after each round, up to three victims, until it has done enough."""

    def __init__(self, deployed: Deployment, ledger: Path, victims: list[str], count: int) -> None:
        super().__init__(daemon=True)
        self.deployed, self.ledger, self.victims, self.count = deployed, ledger, victims, count
        self.random, self.done = random.Random(str(ledger)), list[str]()
        self.over = threading.Event()

    def run(self) -> None:
        last = 0
        while len(self.done) < self.count and not self.over.wait(0.2):
            if rounds_in(self.ledger) <= last:
                continue
            for victim in self.random.sample(self.victims, min(3, len(self.victims))):
                if not self.over.wait(self.random.uniform(0, 5)) and self.deployed.kill(victim):
                    self.done.append(victim)
            last = rounds_in(self.ledger)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victims", "count", "rounds"),
    [
        ([*SITES, *(f"node {name}" for name in SITES)], 20, 24),
        (["link"], 5, 14),
    ],
    ids=["sites", "superlink"],
)
def test_what_is_killed_does_not_change_a_bit(
    victims: list[str], count: int, rounds: int, here: Path
) -> None:
    study = study_from_dict(here, "fedper", rounds=rounds)
    rows, expected = rows_of(here), whole(here, study, "fedper")
    with Deployment(here / "fed", SITES, rows, more=MORE) as deployed:
        begun = deployed.begin(study, "run")
        killer = Killer(deployed, here / "fed/run/ledger.jsonl", victims, count)
        killer.start()
        out = deployed.finish(begun, "run", seconds=5400)
        killer.over.set()
        killer.join()
    require_same(out, expected)
    require_same_homes(here / "fed", here, "fedper")
    assert len(killer.done) >= count, killer.done


@pytest.mark.nightly
def test_a_server_that_is_killed_goes_on_when_it_is_started_again(here: Path) -> None:
    """Six times, at random moments: what drives a run is started again, as its unit does."""
    study = study_from_dict(here, "fedper", rounds=12)
    rows, draw = rows_of(here), random.Random(5)
    expected = whole(here, study, "fedper")
    with Deployment(here / "fed", SITES, rows, more=MORE) as deployed:
        for number in range(1, 7):
            begun = deployed.begin(study, "run", "--resume")
            until_round(here / "fed/run/ledger.jsonl", number)
            time.sleep(draw.uniform(0, 4))
            os.killpg(begun.pid, signal.SIGKILL)
            with begun:  # its pipe is closed
                begun.wait()
        out = deployed.run(study, "run", "--resume")
    require_same(out, expected)
    require_same_homes(here / "fed", here, "fedper")


@pytest.mark.nightly
def test_while_the_superlink_is_gone_a_run_says_so_and_stops_when_it_is_asked_to(
    here: Path,
) -> None:
    study = study_from_dict(here, "fedper", rounds=50)
    with Deployment(here / "fed", SITES, rows_of(here), more=MORE) as deployed:
        begun = deployed.begin(study, "run")
        until_round(here / "fed/run/ledger.jsonl", 1)
        deployed.stop("link")
        until = time.monotonic() + 90
        while "does not answer" not in (here / "fed/run/status.json").read_text():
            assert time.monotonic() < until
            time.sleep(1)
        assert run("stop", str(here / "fed/run"), "--now")[0] == 0
        said, _ = begun.communicate(timeout=90)
    assert '"stopped"' in (here / "fed/run/status.json").read_text(), said


def require_away(deployed: Deployment, port: int) -> None:
    """`fedplan status` and /health say that the SuperLink does not answer."""
    away = re.compile("the SuperLink does not answer since [0-9:]+ UTC; trying again")
    assert away.search(deployed.command("fedplan", "status", "run"))
    with pytest.raises(HTTPError) as told:
        urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    assert told.value.code == 503 and away.search(told.value.read().decode())


def test_a_run_that_is_started_before_its_superlink_waits_and_says_for_what(here: Path) -> None:
    """Nothing of the federation runs; an operator then stops the run, which has no open round."""
    fed, (port,) = Deployment(here / "fed", SITES, rows_of(here), insecure=True), free_ports(1)
    begun = fed.begin(study_from_dict(here, "fedper"), "run", "--metrics-port", str(port))
    until, status = time.monotonic() + 120, here / "fed/run/status.json"
    while not status.exists() or "does not answer" not in status.read_text():
        assert begun.poll() is None and time.monotonic() < until
        time.sleep(0.5)
    require_away(fed, port)
    fed.command("fedplan", "stop", "run")
    said, _ = begun.communicate(timeout=90)
    assert begun.returncode == 0 and '"stopped"' in status.read_text()
    assert re.search(rf"no SuperLink answers at \S+:{fed.port}: .* start it", said)


LEASE = 60.0
"""Seconds of silence after which a SuperLink takes the task of a run for lost."""


@pytest.mark.nightly
def test_a_superlink_that_is_away_for_longer_than_its_lease_costs_a_run_nothing(
    here: Path,
) -> None:
    """First a site is killed meanwhile, then the site and the driver, which is started again."""
    study = study_from_dict(here, "fedper", rounds=8)
    rows, expected = rows_of(here), whole(here, study, "fedper")
    ledger, (port,) = here / "fed/run/ledger.jsonl", free_ports(1)
    with Deployment(here / "fed", SITES, rows, more=MORE) as deployed:
        begun = deployed.begin(study, "run", "--metrics-port", str(port))
        until_round(ledger, 2)
        deployed.stop("link")
        time.sleep(LEASE / 2)
        deployed.kill("client-01")
        time.sleep(LEASE / 2 + 15)
        require_away(deployed, port)
        deployed.keep("link", "server/link.sh")
        until_round(ledger, 5, seconds=300)
        assert begun.poll() is None
        deployed.stop("link")
        os.killpg(begun.pid, signal.SIGKILL)
        with begun:  # its pipe is closed
            begun.wait()
        deployed.kill("client-02")
        time.sleep(LEASE + 15)
        deployed.keep("link", "server/link.sh")
        until_open(deployed.inner)
        out = deployed.run(study, "run", "--resume")
        log = (out / "log.jsonl").read_text()
    require_same(out, expected)
    require_same_homes(here / "fed", here, "fedper")
    assert "Flower has ended its run; another one is started" in log


@pytest.mark.nightly
def test_a_line_that_cuts_delays_and_corrupts_does_not_change_a_bit(here: Path) -> None:
    study = study_from_dict(here, "fedper", rounds=8)
    rows, expected = rows_of(here), whole(here, study, "fedper")
    proxies = list[Proxy]()

    def through(port: int) -> int:
        proxies.append(Proxy(port))
        return proxies[0].__enter__().port

    try:
        fed = Deployment(here / "fed", SITES, rows, more=MORE, through=through)
        with fed as deployed:
            begun = deployed.begin(study, "run")
            time.sleep(20)
            proxies[0].script(seed=3, period=4.0)
            time.sleep(120)
            proxies[0].calm()
            out = deployed.finish(begun, "run", seconds=1800)
    finally:
        for each in proxies:
            each.__exit__(None, None, None)
    require_same(out, expected)
    require_same_homes(here / "fed", here, "fedper")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["gone", "hung"])
def test_a_site_that_is_away_or_hangs_does_not_hold_the_others(how: str, here: Path) -> None:
    study = study_from_dict(here, "fedper", rounds=6, more="min_updates = 2")
    study += "\n[timeouts]\nupdates = 25.0\nreconnect = 5.0\n"
    with Deployment(here / "fed", SITES, rows_of(here), more=MORE) as deployed:
        begun = deployed.begin(study, "run")
        ledger = here / "fed/run/ledger.jsonl"
        until_round(ledger, 1)
        if how == "gone":
            deployed.stop("client-01")
            until_round(ledger, 3)
            deployed.start_site("client-01")
        else:
            pids = deployed.pids("client-01")
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            until_round(ledger, 3)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        out = deployed.finish(begun, "run", seconds=900)
    rounds = [line for line in read_json_lines(out / "ledger.jsonl") if "changed" in line]
    missed = [line["round"] for line in rounds if "client-01" in line["rejected"]]
    assert len(rounds) == 6 and missed and missed[0] >= 2
    assert all(line["aggregated"].count("client-00") == 1 for line in rounds)
    code, told = run("verify", str(out))
    assert code == 0, told


def rounds_in(ledger: Path) -> int:
    return ledger.read_text().count('"changed"') if ledger.exists() else 0


def until_round(ledger: Path, number: int, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if rounds_in(ledger) >= number:
            return
        time.sleep(0.3)
    raise TimeoutError(f"round {number} did not come")


@pytest.mark.nightly
def test_masked_sums_of_three_sites_with_tls_have_the_bits_of_the_plain_sum(here: Path) -> None:
    masked = '\n[aggregation]\nkind = "secure"\nthreshold = 2\n'
    fed = Deployment(here / "fed", SITES, rows_of(here), more=MORE)
    give_peers(here / "fed")
    with fed as deployed:
        for name in ("fedavg", "fedper"):
            study = study_from_dict(here, name, rounds=2)
            expected = whole(here, study, name)
            out = deployed.run(study + masked, name)
            one, other = (Store(folder / "global").read_newest() for folder in (out, expected))
            assert one is not None and other is not None
            assert digests(one.tensors) == digests(other.tensors)
            require_same_homes(here / "fed", here, name)
            rounds = [
                line for line in read_json_lines(out / "ledger.jsonl") if line["kind"] == "round"
            ]
            assert [line["secagg"]["clients"] for line in rounds] == [SITES] * 2
            assert run("verify", str(out))[0] == 0
        code, told = run("egress", str(here / "fed/sites/client-01/state"))
    assert code == 0 and "uploads were masked" in told


@pytest.mark.nightly
def test_sites_that_hide_themselves_each_pay_for_a_round_and_can_read_it(here: Path) -> None:
    """Noise in shares between real nodes: no plain run has its bits, since nobody knows its noise."""
    said = """
[aggregation]
kind = "secure"
threshold = 3
[privacy]
unit = "client"
epsilon = 900.0
clipping_norm = 0.5
noise_multiplier = 1.0
"""
    fed = Deployment(here / "fed", SITES, rows_of(here))
    give_peers(here / "fed")
    with fed as deployed:
        out = deployed.run(study_from_dict(here, "fedavg", rounds=2) + said, "run")
        rounds = [line for line in read_json_lines(out / "ledger.jsonl") if line["kind"] == "round"]
        assert [line["secagg"]["clients"] for line in rounds] == [SITES] * 2
        assert not any(line["secagg"]["not_unmasked"] for line in rounds), "each sum was opened"
        assert run("verify", str(out))[0] == 0
        for name in SITES:
            code, told = run("egress", str(here / f"fed/sites/{name}/state"))
            assert code == 0 and "uploads were masked" in told and "epsilon" in told, told


def give_peers(fed: Path) -> None:
    """The keys of all sites in a folder, as each site would have them from hand to hand."""
    (fed / "peers").mkdir()
    for name in SITES:
        place = fed / "sites" / name
        make_site_keys(place)
        shutil.copy(place / "node.pub", fed / "peers" / f"{name}.pub")
        said = (place / "site.toml").read_text()
        (place / "site.toml").write_text(f'peer_keys = "{fed}/peers"\n{said}')
