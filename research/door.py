# SPDX-License-Identifier: Apache-2.0
"""Measure the memory of a SuperLink and its proxy under large requests without a registered key.

    python research/door.py 30 1000 >> research/results/door.txt

Starts the server of `fedplan new federation`, and prints the MB of its processes at the start and
after each number of posts (tests/kit/stranger.py). PYTHONPATH can name an earlier fedplan.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))

from deployment import Deployment
from stranger import memory, posts


def sizes(server: Deployment) -> str:
    """The MB of SuperLink and proxy, as text."""
    mb = {name: round(sum(map(memory, server.pids(name)))) for name in ("link", "proxy")}
    return f"SuperLink {mb['link']} MB, nginx {mb['proxy']} MB"


def main(counts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Deployment(Path(folder) / "fed", ["north"], {"north": Path("rows")})
        try:
            server.start_server()
            print(f"at first {sizes(server)}", flush=True)
            for count in counts:
                statuses = posts(server.port, server.folder / "ca.crt", count)
                print(f"after {count} posts {sizes(server)}, answers {dict(statuses)}", flush=True)
        finally:
            server.end()


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]])
