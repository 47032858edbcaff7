# SPDX-License-Identifier: Apache-2.0
"""What a doctor finds at a site: each fault by its name, with its remedy, and nothing is changed."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from commands import run
from sites import write_rows
from studies import approvals_in, offered

import fedplan.sites.doctor as doctor
from fedplan.errors import FedplanError
from fedplan.runners.flower import supernode
from fedplan.runners.flower.keys import make_keys, make_site_keys
from fedplan.runners.site import read_site
from fedplan.sites.doctor import Finding, check_site
from fedplan.storage.locks import acquire_folder_lock

is_key_registered = supernode.is_key_registered
"""The function itself: the site of these tests has another in its place."""
SITE = """
name = "north"
data = "rows.npz"
encryption_key = "state.key"
[server]
address = "localhost:{port}"
ca = "ca.crt"
node_key = "node"
"""


class Server:
    """A server that shows its certificate and says a time."""

    def __init__(self, keys: Path) -> None:
        self.off, seen = timedelta(), self
        self.paths = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.paths.append(self.path)
                self.send_response_only(403)
                self.send_header("Date", format_datetime(datetime.now(UTC) + seen.off, usegmt=True))
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ["localhost"], [], days=90)
    return folder


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    made = Server(keys)
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def site(tmp_path: Path, keys: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site that is well, if its server is one that knows it."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    (tmp_path / "site.toml").write_text(SITE.format(port=server.port))
    (tmp_path / "policy.toml").touch()
    (tmp_path / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    make_site_keys(tmp_path)
    write_rows(tmp_path / "rows.npz")
    monkeypatch.setattr("fedplan.runners.flower.supernode.is_key_registered", lambda _: True)
    return tmp_path


def found(site: Path) -> dict[str, Finding]:
    return {each.name: each for each in check_site(read_site(site))}


def faults(site: Path) -> dict[str, Finding]:
    return {name: each for name, each in found(site).items() if each.state != "ok"}


def test_a_site_that_is_well_has_no_fault_and_is_left_as_it_is(site: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in site.rglob("*")}
    assert not faults(site)
    assert found(site)["server"].message.endswith("valid for 89 days")
    assert {file: file.stat().st_mtime_ns for file in site.rglob("*")} == before
    code, out = run("site", "doctor", "--site", str(site))
    assert code == 0 and "This site can take part." in out


def test_keys_that_others_read_are_told(site: Path) -> None:
    (site / "node").chmod(0o640)
    (site / "state.key").unlink()
    told = faults(site)
    assert {name: each.state for name, each in told.items()} == {
        "key state.key": "fail", "key node": "fail",
    }  # fmt: skip
    assert "chmod 600" in told["key node"].remedy
    assert told["key state.key"].remedy == "run `fedplan site keys`"
    code, out = run("site", "doctor", "--json", "--site", str(site))
    assert code == 1
    said = json.loads(out)
    assert [each["name"] for each in said if each["state"] == "fail"] == [
        "key state.key",
        "key node",
    ]


def test_a_server_that_is_another_is_told(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_keys(other, ["localhost"], [])
    (site / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    (told,) = faults(site).values()
    assert (told.name, told.state) == ("server", "fail") and "certificate" in told.message
    assert "ca.crt" in told.remedy


def test_a_server_by_another_name_is_told(site: Path, server: Server) -> None:
    text = (site / "site.toml").read_text()
    # Its certificate names localhost, and this machine's own addresses.
    (site / "site.toml").write_text(text.replace("localhost", "127.0.0.2"))
    (told,) = faults(site).values()
    assert (told.name, told.state) == ("server", "fail")


def test_a_server_that_is_not_there_is_told(site: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (site / "site.toml").write_text(SITE.format(port=free.getsockname()[1]))
        (told,) = faults(site).values()
    assert told.state == "fail" and "running" in told.remedy


@pytest.mark.parametrize(
    ("seconds", "state"), [(0, "ok"), (4.5, "warn"), (-60, "fail"), (3600, "fail")]
)
def test_a_clock_that_is_off_is_told(
    site: Path, server: Server, seconds: float, state: str
) -> None:
    server.off = timedelta(seconds=seconds)
    clock = found(site)["clock"]
    assert clock.state == state, clock
    if abs(seconds) > 2:
        assert ("behind" if seconds > 0 else "ahead") in clock.message


def test_a_certificate_that_ends_soon_is_told(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FEW_DAYS", 100)
    (told,) = faults(site).values()
    assert (told.name, told.state) == ("server", "warn") and "renew" in told.remedy


def test_a_key_that_the_server_does_not_know_is_told(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedplan.runners.flower.supernode.is_key_registered", lambda _: False)
    (told,) = faults(site).values()
    assert (told.name, told.state) == ("registered", "fail")
    assert "fedplan server register north node.pub" in told.remedy


def test_a_proxy_without_its_server_is_told_in_words_and_not_as_a_page(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = httpx.Response(502, text="<html><title>502 Bad Gateway</title></html>")

    def refused(*_: object) -> None:
        raise httpx.HTTPStatusError("", request=httpx.Request("POST", "https://x"), response=page)

    monkeypatch.setattr(supernode.internals.FleetHttpClient, "ActivateNode", refused)
    there = read_site(site).server
    assert there is not None
    with pytest.raises(FedplanError, match="not the SuperLink behind it") as told:
        is_key_registered(there)
    assert "html" not in str(told.value)


def test_what_goes_by_a_proxy_is_asked_by_it(
    site: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tunnel() as tunnel:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{tunnel.port}")
        told = faults(site)
        assert list(told) == ["proxy"] and told["proxy"].state == "warn"
        assert tunnel.asked == [f"CONNECT localhost:{server.port}"]
        assert "secret" not in told["proxy"].message + told["proxy"].remedy
        monkeypatch.setenv("NO_PROXY", "localhost")
        assert not faults(site) and len(tunnel.asked) == 1


class Tunnel:
    """A proxy that opens a line to whoever is asked for."""

    def __init__(self) -> None:
        self.asked, self.socket = list[str](), socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                line = self.socket.accept()[0]
                head = line.recv(65536).decode()
                self.asked.append(" ".join(head.split()[:2]))
                host, _, port = head.split()[1].rpartition(":")
                there = socket.create_connection((host, int(port)))
                line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for one, other in ((line, there), (there, line)):
                    threading.Thread(target=_pour, args=(one, other), daemon=True).start()


def _pour(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while piece := one.recv(65536):
            other.sendall(piece)
        other.close()


def test_rows_are_tried_by_each_study_that_is_approved(site: Path) -> None:
    assert "no study is approved" in found(site)["data"].message
    approvals = approvals_in(site)
    good, strange = offered(name="good"), offered(name="strange", labels="[0, 1]")
    for study in (good, strange, offered(name="waits", labels="[0, 1]")):
        approvals.record_offer(study)
    approvals.approve(good.full_digest)
    approvals.approve(strange.full_digest)
    told = found(site)
    assert told["data for good"].message == "24 examples to train on"
    assert "label '2' in column 'digit'" in told["data for strange"].message
    assert "data for waits" not in told and "data" not in told
    (site / "rows.npz").unlink()
    assert faults(site)["data"].message.endswith("does not exist")


def test_a_site_that_is_none_of_the_clients_is_told(site: Path) -> None:
    approvals, study = approvals_in(site), offered(name="theirs")
    study = study.model_copy(
        update={"clients": study.clients.model_copy(update={"names": ["west"]})}
    )
    approvals.record_offer(study)
    approvals.approve(study.full_digest)
    assert "north is not one of the study's clients" in faults(site)["data for theirs"].message


def test_a_home_that_others_enter_is_told(site: Path) -> None:
    home = site / "state"
    home.mkdir(mode=0o755)
    assert faults(site)["state"].remedy == f"chmod 700 {home}"
    home.chmod(0o700)
    claim = acquire_folder_lock(home)
    assert not faults(site)
    del claim


def test_a_full_disk_and_a_device_that_is_not_here_are_told(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text('device = "cuda:7"\n' + text)
    (site / "policy.toml").write_text("never_share = 3\n")
    monkeypatch.setattr(doctor, "LITTLE_SPACE", 2**60)
    told = faults(site)
    assert {name: each.state for name, each in told.items()} == {
        "policy": "fail", "disk": "warn", "device": "fail",
    }  # fmt: skip
    monkeypatch.setattr(doctor, "NO_SPACE", 2**60)
    assert faults(site)["disk"].state == "fail"
