# SPDX-License-Identifier: Apache-2.0
"""A real federation on this machine, made by `fedplan new` and kept running by its own scripts."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from fedplan.runners.flower.starter import new_federation
from fedplan.runners.flower.supernode import FLOWER_ENVIRONMENT

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, one after the other."""
    for first in random.sample(range(20000, 32000, count), 100):
        held = [socket.socket() for _ in range(count)]
        try:
            for place, each in enumerate(held):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("127.0.0.1", first + place))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for each in held:
                each.close()
    raise OSError("no free ports")


class Deployment:
    """A SuperLink, a proxy and sites, which end with the test.

    `data` is where each site's rows are; `more` are lines of its `site.toml`. Sites approve by rule,
    unless `approve` is false. `through` may stand between the sites and the proxy: it is given the
    port to reach, and says the one to use. A folder that exists is started as it is, with its `ports`.
    """

    def __init__(
        self,
        folder: Path,
        sites: list[str],
        data: Mapping[str, Path],
        *,
        insecure: bool = False,
        more: Mapping[str, str] | None = None,
        approve: bool = True,
        through: Callable[[int], int] | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        self.folder, self.sites, self.insecure = folder, sites, insecure
        self.kept = dict[str, subprocess.Popen[bytes]]()
        port, inner = ports or free_ports(2)
        self.port, self.inner = port, port if insecure else inner
        self.env = {**os.environ, **FLOWER_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        self.env |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
        self.is_new = not (folder / "server").exists()
        if not self.is_new:
            return
        new_federation(folder, sites, port=port, inner=inner, insecure=insecure)
        reached = through(port) if through is not None else port
        for name in sites:
            place = folder / "sites" / name
            said = (place / "site.toml").read_text().replace(f":{port}", f":{reached}")
            said = said.replace('data = "data"', f'data = "{data[name]}"')
            (place / "site.toml").write_text(said + "\n" + (more or {}).get(name, ""))
            if approve:
                policy = (place / "policy.toml").read_text()
                policy = policy.replace("auto_approve = false", "auto_approve = true")
                policy = policy.replace("metrics = []", 'metrics = ["loss", "accuracy"]')
                policy = policy.replace("min_examples = 20", "min_examples = 1")
                (place / "policy.toml").write_text(policy)

    def __enter__(self) -> Deployment:
        try:
            self.start_server()
            for name in self.sites:
                if self.is_new and not self.insecure:
                    self.command("fedplan", "site", "keys", "--site", f"sites/{name}")
                    self.command("fedplan", "server", "register", name, f"sites/{name}/node.pub")
                self.start_site(name)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start_server(self) -> None:
        self.keep("link", "server/link.sh")
        until_open(self.inner)
        if not self.insecure:
            self.keep("proxy", "server/proxy.sh")
            until_open(self.port)

    def start_site(self, name: str) -> None:
        self.keep(name, f"sites/{name}/serve.sh")

    def keep(self, name: str, *command: str, **env: str) -> None:
        """Start a script of the federation under its own supervisor."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.kept[name] = subprocess.Popen(
                ["./keep.sh", *command], cwd=self.folder, env={**self.env, **env},
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def stop(self, name: str) -> None:
        """End a script for good, and all that it started, as a power cut would."""
        kept = self.kept.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(kept.pid, signal.SIGKILL)
        kept.wait()
        for pid in (*self.pids(name), *self.pids(f"node {name}")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, what: str) -> list[int]:
        """The processes of link, proxy, run, a site (its executor) or `node SITE`."""
        if what == "proxy":
            # a worker of nginx outlives its master, and only its folder says whose it is
            where = str(self.folder / "server")
            return [p for p, line, cwd in _processes() if "nginx" in line and cwd == where]
        word, place = {
            "link": ("server link", self.folder / "server"),
            "run": ("run study.toml", self.folder),
        }.get(what, ("site serve", self.folder / "sites" / what.removeprefix("node ")))
        if what.startswith("node "):
            word = "flower-supernode"
        return [p for p, line, cwd in _processes() if word in line and cwd == str(place)]

    def kill(self, what: str) -> int:
        """SIGKILL what there is of it; how many there were."""
        pids = self.pids(what)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def end(self) -> None:
        for kept in self.kept.values():
            with suppress(ProcessLookupError):
                os.killpg(kept.pid, signal.SIGKILL)
            kept.wait()
        nodes = [f"node {name}" for name in self.sites]
        for _ in range(3):
            for what in (*self.sites, *nodes, "link", "proxy", "run"):
                self.kill(what)
            time.sleep(0.2)

    def command(self, program: str, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(BIN / program), *args],
            cwd=self.folder, env=self.env, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode and check:
            raise RuntimeError(f"{program} {args}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout + done.stderr

    def begin(self, study: str, out: str = "run", *more: str) -> subprocess.Popen[str]:
        """Hand in a study; the process of `fedplan run` that carries it."""
        (self.folder / "study.toml").write_text(study)
        words = ["run", "study.toml", "--runner", "flower", "--output", out, *more]
        return subprocess.Popen(
            [str(BIN / "fedplan"), *words], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, study: str, out: str = "run", *more: str, seconds: float = 600.0) -> Path:
        """Play a study over the federation; the folder of its run."""
        return self.finish(self.begin(study, out, *more), out, seconds=seconds)

    def finish(self, begun: subprocess.Popen[str], out: str, *, seconds: float = 600.0) -> Path:
        try:
            told, _ = begun.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(begun.pid, signal.SIGKILL)
            raise TimeoutError(f"{begun.communicate()[0]}\n{self.logs()}") from None
        if begun.returncode:
            raise RuntimeError(f"{told}\n{self.logs()}")
        return self.folder / out

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("sites/*/state/*.log")]
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')[-3000:]}" for p in files)


def _processes() -> Iterator[tuple[int, str, str]]:
    """Every process: its number, its command and the folder that it works in."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(place.name), line, os.readlink(place / "cwd")


def until_open(port: int, seconds: float = 120.0) -> None:
    """Wait until something listens at a port of this machine."""
    until = time.monotonic() + seconds
    while True:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > until:
            raise TimeoutError(f"nothing listens at {port}")
        time.sleep(0.2)
