# SPDX-License-Identifier: Apache-2.0
"""A site's node: Flower's SuperNode, kept running, with an API of its own that only we may ask.

The node's API is open to every user of a machine. So its certificate and its secret are made anew
for each start, in a folder that only this user enters.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.flower.executor import Door
from fedplan.runners.flower.keys import make_keys
from fedplan.runners.site import Site

log = logging.getLogger("fedplan")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower calls home, looks for updates and installs what an app names, unless it is told not to."""
HERE = "127.0.0.1"
AGAIN = 5.0
"""Seconds until a node that ended is started again: for up to a minute it may be refused."""
DEAF = "handshake error detected"
"""What a SuperNode says before it is deaf and does not end."""


@contextmanager
def noded(site: Site, over: threading.Event) -> Generator[Door]:
    """The door of a site's node, which is kept running meanwhile."""
    with tempfile.TemporaryDirectory(prefix="fedplan-node-") as place:
        folder, port = Path(place), _free_port()
        make_keys(folder, [HERE], [])
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        door = Door(f"{HERE}:{port}", folder / "ca.crt", secret)
        keeper = threading.Thread(target=_kept, args=(site, folder, port, over), name="node")
        keeper.start()
        try:
            yield door
        finally:
            over.set()
            keeper.join()


def _kept(site: Site, folder: Path, port: int, over: threading.Event) -> None:
    """Start the node, and start it again when it ends or is deaf, until it is over."""
    while not over.is_set():
        node = _started(site, folder, port)
        watcher = threading.Thread(target=_watched, args=(node,), name="node-log", daemon=True)
        watcher.start()
        while node.poll() is None and not over.wait(0.2):
            pass
        if node.poll() is None:
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(10.0)
            node.kill()
        node.wait()
        if not over.is_set():
            log.warning("the node ended with %s; it starts again", node.returncode)
            over.wait(AGAIN)


def _started(site: Site, folder: Path, port: int) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "flower-supernode"), *_words(site, folder, port)]
    try:
        return subprocess.Popen(  # noqa: S603
            command,
            env={**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_dies_with_us,
        )
    except OSError as error:
        raise FedplanError(f"flower-supernode cannot be started: {error}") from error


def _words(site: Site, folder: Path, port: int) -> list[str]:
    server = site.server
    if server is None:
        raise FedplanError(f"the site {site.name!r} does not say its server: [server] address")
    own = ["--host", HERE, "--port", str(port), "--isolation", "process"]
    own += ["--ssl-certfile", str(folder / "server.crt"), "--ssl-keyfile", f"{folder}/server.key"]
    own += ["--ssl-ca-certfile", f"{folder}/ca.crt"]
    own += ["--superexec-auth-secret-file", f"{folder}/secret"]
    said = ["--superlink", server.address]
    said += ["--root-certificates", server.ca] if server.ca else ["--insecure"]
    return said + (["--auth-supernode-private-key", server.node] if server.node else []) + own


def _watched(node: subprocess.Popen[str]) -> None:
    """Pass on what a node says; after one broken handshake it is deaf, and ended to start again."""
    for line in node.stdout or ():
        sys.stderr.write(line)
        if DEAF in line:
            log.warning("the line to the server broke; the node starts again")
            threading.Timer(2.0, node.kill).start()  # it says why before that


def _dies_with_us() -> None:
    """Let a node end with the process that keeps it, however that ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind((HERE, 0))
        return tried.getsockname()[1]
