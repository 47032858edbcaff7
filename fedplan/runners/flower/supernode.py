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
    """Keep the site's Flower SuperNode running during the body, and yield its Runtime API.

    A thread starts flower-supernode, and restarts it when it ends; the node connects to
    `site.server`. The body should end when `stop` is set; after the body `stop` is set, and the
    node is terminated. A node that cannot be started raises only in the thread.
    """
    with tempfile.TemporaryDirectory(prefix="fedplan-node-") as temporary:
        folder = Path(temporary)
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            port: int = probe.getsockname()[1]
        make_keys(folder, [HERE], [])
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        api = RuntimeApi(f"{HERE}:{port}", folder / "ca.crt", secret)
        arguments = (site, folder, port, stop)
        keeper = threading.Thread(target=_keep_running, args=arguments, name="node")
        keeper.start()
        try:
            yield api
        finally:
            stop.set()
            keeper.join()


def _keep_running(site: Site, folder: Path, port: int, stop: threading.Event) -> None:
    """Run the site's node, and restart it RESTART_DELAY after it ends, until `stop` is set.

    `folder` has the keys and secret of the node's Runtime API on `port` of this machine. Returns
    when the node has been terminated, or killed 10 s later.
    """
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
    """Start flower-supernode for a site, with the Runtime API on `port` and its keys in `folder`.

    The process ends with this one (on Linux). Raises FedplanError if the site has no server, or the
    program cannot be started.
    """
    if (server := site.server) is None:
        raise FedplanError(
            f"the site {site.name!r} has no server: set address under [server] in its site.toml"
        )
    command = [str(Path(sys.executable).parent / "flower-supernode"), "--superlink", server.address]
    command += ["--root-certificates", server.ca] if server.ca else ["--insecure"]
    command += ["--auth-supernode-private-key", server.node_key] if server.node_key else []
    command += ["--host", HERE, "--port", str(port), "--isolation", "process"]
    command += ["--ssl-certfile", f"{folder}/server.crt", "--ssl-keyfile", f"{folder}/server.key"]
    command += ["--ssl-ca-certfile", f"{folder}/ca.crt"]
    command += ["--superexec-auth-secret-file", f"{folder}/secret"]
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


def _watch_output(node: subprocess.Popen[str]) -> None:
    """Copy a node's output to stderr until it ends; kill the node 2 s after a handshake error."""
    for line in node.stdout or ():
        sys.stderr.write(line)
        if HANDSHAKE_ERROR in line:
            log.warning("the connection to the server broke; the node is restarted")
            threading.Timer(2.0, node.kill).start()  # it prints the reason first


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
