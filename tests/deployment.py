# SPDX-License-Identifier: Apache-2.0
"""A real federation on this machine: a SuperLink, SuperNodes, TLS and a key for each node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
PYPROJECT = """
[project]
name = "tiny"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedplan"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
folder = ""
"""
APP = """
from pathlib import Path
from fedplan.runners.flower.apps import client_of, server_of

STUDY = Path(__file__).parent / "study.toml"
client = client_of(STUDY)
server = server_of(STUDY)
"""
SERVER = """[req]
distinguished_name=name
prompt=no
[name]
CN=localhost
[ext]
subjectAltName=DNS:localhost,IP:127.0.0.1
extendedKeyUsage=serverAuth
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Deployment:
    """Processes that end with the test. `run` plays a study and waits for its end."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names, self.processes = folder, names, ExitStack()
        self.env = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}
        self.port = free_port()

    def __enter__(self) -> Deployment:
        try:
            self._keys()
            self._start()
        except BaseException:
            self.processes.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.close()

    def _keys(self) -> None:
        certs = self.folder / "certs"
        certs.mkdir(parents=True)
        (certs / "server.cnf").write_text(SERVER)
        for line in (
            "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 "
            "-subj /CN=fedplan-ca -addext basicConstraints=critical,CA:TRUE",
            "openssl req -new -newkey rsa:2048 -nodes -keyout server.key -out server.csr "
            "-config server.cnf",
            "openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial "
            "-out server.pem -days 2 -sha256 -extensions ext -extfile server.cnf",
        ):
            subprocess.run(line.split(), cwd=certs, check=True, capture_output=True)
        for name in self.names:
            key = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", name, "-C", ""]
            subprocess.run(key, cwd=certs, check=True)

    def _start(self) -> None:
        home = Path(self.env["FLWR_HOME"])
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.folder}/certs/ca.crt"\n'
        )
        self._process(
            "superlink",
            *f"flower-superlink --host 127.0.0.1 --port {self.port} --ssl-ca-certfile certs/ca.crt "
            "--ssl-certfile certs/server.pem --ssl-keyfile certs/server.key "
            "--enable-supernode-auth --database state.db "
            "--disable-runtime-dependency-installation".split(),
        )
        self._until_open(self.port)
        for name in self.names:
            self.command("flwr", "supernode", "register", f"certs/{name}.pub", "lab")
            config = f'name="{name}" home="{self.folder}/sites/{name}"'
            self._process(
                name,
                *f"flower-supernode --superlink 127.0.0.1:{self.port} "
                f"--root-certificates certs/ca.crt --auth-supernode-private-key certs/{name} "
                f"--host 127.0.0.1 --port {free_port()}".split(),
                "--node-config",
                config,
            )

    def _process(self, name: str, program: str, *args: str) -> None:
        log = self.processes.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / program), *args],
            cwd=self.folder, env=self.env, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.processes.callback(self._end, process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()

    def _until_open(self, port: int) -> None:
        until = time.monotonic() + 120
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if time.monotonic() > until:
                raise TimeoutError((self.folder / "superlink.log").read_text()[-3000:])
            time.sleep(0.3)

    def command(self, program: str, *args: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / program), *args],
            cwd=self.folder, env=self.env, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} {args}: {done.stdout}{done.stderr}")
        return done.stdout

    def run(self, study: str, *, seconds: float = 300.0) -> Path:
        """Play a study over the federation; the folder of its run."""
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        for name, text in (("pyproject.toml", PYPROJECT), ("app.py", APP), ("study.toml", study)):
            (app / name).write_text(text)
        out = self.folder / "run"
        self.command("flwr", "run", "app", "lab", "--run-config", f'folder="{out}"')
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            runs = json.loads(self.command("flwr", "list", "lab", "--format", "json"))["runs"]
            status = str(runs[0]["status"])
            if status.startswith("finished"):
                if "completed" not in status:
                    raise RuntimeError(f"{status}\n{self.logs()}")
                return out
            time.sleep(1)
        raise TimeoutError(self.logs())

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log"))
