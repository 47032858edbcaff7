# SPDX-License-Identifier: Apache-2.0
"""The gate between two rounds: an engine waits there until the bench asks for more rounds."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any


class Gate:
    """One end of a line to the bench, which measures from each `go` to each `done`.

    An engine calls `ready` once, and `closed` after each round; both wait for the bench. After the
    last round it says how far its model has `moved` from the start, and the engine may end.
    """

    def __init__(self, place: str, rounds: int) -> None:
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(place)
        self.file = self.line.makefile("rw", encoding="utf-8")
        self.left, self.asked = rounds, 0

    def ready(self) -> None:
        """The engine stands, and has played nothing."""
        self._say({"ready": True})
        self._wait()

    def closed(self, told: Callable[[], dict[str, float]]) -> None:
        """A round is over; what `told` says is asked for after the last one."""
        self.left -= 1
        self.asked -= 1
        if not self.asked:
            self._say({"done": True})
            if self.left:
                self._wait()
            else:
                self._say({"told": told()})

    def _say(self, word: dict[str, Any]) -> None:
        self.file.write(json.dumps(word) + "\n")
        self.file.flush()

    def _wait(self) -> None:
        line = self.file.readline()
        if not line:  # the bench is gone, and nobody waits for an answer
            os._exit(1)
        self.asked = json.loads(line)["go"]
