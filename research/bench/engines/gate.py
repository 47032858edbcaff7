# SPDX-License-Identifier: Apache-2.0
"""The gate between rounds: an engine waits there until the benchmark asks for more rounds."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any


class Gate:
    """The engine's end of a connection to the benchmark, which measures from `go` to `done`.

    An engine calls `ready` once, and `closed` after each round; both wait for the benchmark. After
    the last round it sends how far its model has `moved` from the start, and may end.
    """

    def __init__(self, place: str, rounds: int) -> None:
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(place)
        self.file = self.line.makefile("rw", encoding="utf-8")
        self.left, self.asked = rounds, 0

    def ready(self) -> None:
        """Report that the engine is ready, before its first round."""
        self._send({"ready": True})
        self._wait()

    def closed(self, told: Callable[[], dict[str, float]]) -> None:
        """Report the end of a round, and after the last round the result of `told`."""
        self.left -= 1
        self.asked -= 1
        if not self.asked:
            self._send({"done": True})
            if self.left:
                self._wait()
            else:
                self._send({"told": told()})

    def _send(self, message: dict[str, Any]) -> None:
        self.file.write(json.dumps(message) + "\n")
        self.file.flush()

    def _wait(self) -> None:
        line = self.file.readline()
        if not line:  # the benchmark has ended
            os._exit(1)
        self.asked = json.loads(line)["go"]
