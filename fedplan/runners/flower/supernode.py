# SPDX-License-Identifier: Apache-2.0
"""A site's Flower SuperNode, kept running, with a Runtime API that only this process may use.

The API is open to all users of a machine. So its certificate and secret are made for each start, in
a folder that only this user can enter.
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
from fedplan.runners.flower.keys import make_keys
from fedplan.runners.flower.superexec import RuntimeApi
from fedplan.runners.site import Site

log = logging.getLogger("fedplan")
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Turns off Flower's telemetry, update check, and installation of apps' dependencies."""
HERE = "127.0.0.1"
RESTART_DELAY = 5.0
"""Seconds before an ended node is restarted; the server may refuse it for up to a minute."""
HANDSHAKE_ERROR = "handshake error detected"
"""Output of a SuperNode that then receives nothing more, and does not end."""


@contextmanager
def run_supernode(site: Site, stop: threading.Event) -> Generator[RuntimeApi]:
    """Keep a site's SuperNode running during the body, and yield its Runtime API.

    At the end `stop` is set, and the node is terminated.
    """
    with tempfile.TemporaryDirectory(prefix="fedplan-node-") as temporary:
        folder, port = Path(temporary), _free_port()
        make_keys(folder, [HERE], [])
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        api = RuntimeApi(f"{HERE}:{port}", folder / "ca.crt", secret)
        keeper = threading.Thread(
            target=_keep_running, args=(site, folder, port, stop), name="node"
        )
        keeper.start()
        try:
            yield api
        finally:
            stop.set()
            keeper.join()


def _keep_running(site: Site, folder: Path, port: int, stop: threading.Event) -> None:
    """Start the node, and restart it whenever it ends, until `stop` is set."""
    while not stop.is_set():
        node = _start_node(site, folder, port)
        watcher = threading.Thread(target=_watch_output, args=(node,), name="node-log", daemon=True)
        watcher.start()
        while node.poll() is None and not stop.wait(0.2):
            pass
        if node.poll() is None:
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(10.0)
            node.kill()
        node.wait()
        if not stop.is_set():
            log.warning("the node ended with %s; it is restarted", node.returncode)
            stop.wait(RESTART_DELAY)


def _start_node(site: Site, folder: Path, port: int) -> subprocess.Popen[str]:
    """Start flower-supernode, which ends with this process; FedplanError if that fails."""
    command = [
        str(Path(sys.executable).parent / "flower-supernode"),
        *_arguments(site, folder, port),
    ]
    try:
        return subprocess.Popen(  # noqa: S603
            command,
            env={**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise FedplanError(f"flower-supernode cannot be started: {error}") from error


def _arguments(site: Site, folder: Path, port: int) -> list[str]:
    """Return the command line arguments of flower-supernode."""
    server = site.server
    if server is None:
        raise FedplanError(
            f"the site {site.name!r} has no server: set address under [server] in its site.toml"
        )
    local = ["--host", HERE, "--port", str(port), "--isolation", "process"]
    local += ["--ssl-certfile", str(folder / "server.crt"), "--ssl-keyfile", f"{folder}/server.key"]
    local += ["--ssl-ca-certfile", f"{folder}/ca.crt"]
    local += ["--superexec-auth-secret-file", f"{folder}/secret"]
    remote = ["--superlink", server.address]
    remote += ["--root-certificates", server.ca] if server.ca else ["--insecure"]
    return (
        remote
        + (["--auth-supernode-private-key", server.node_key] if server.node_key else [])
        + local
    )


def _watch_output(node: subprocess.Popen[str]) -> None:
    """Copy a node's output to stderr; kill it 2 s after a handshake error, to be restarted."""
    for line in node.stdout or ():
        sys.stderr.write(line)
        if HANDSHAKE_ERROR in line:
            log.warning("the connection to the server broke; the node is restarted")
            threading.Timer(2.0, node.kill).start()  # it prints the reason first


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]
