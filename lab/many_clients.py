# SPDX-License-Identifier: Apache-2.0
"""What very many clients cost a server: begin, take, end and commit, checkpoint and reopening.

A server with a ViT of 72 small tensors (12 k values) is played by hand: each client's update is a copy of one that is
worked out once a round, so that what is measured is the server and nothing else. Each row is a
process of its own. Times are CPU seconds of one thread. `python lab/many_clients.py` writes
lab/results/many-clients.json; `python lab/many_clients.py ASKED REGISTERED ROUNDS` one row.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from study import FACTS
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import Request, Update
from fedplan.federation.participation import Participation
from fedplan.federation.record import VERSION, joined
from fedplan.federation.server import Server
from fedplan.federation.world import WORLD
from fedplan.methods.registry import method_named
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.tensors.named import digests
from fedplan.training.fit import Pace

OUT = Path(__file__).parent / "results" / "many-clients.json"
ROWS = ((100, 100, 8), (1_000, 1_000, 2), (10_000, 10_000, 1), (20_000, 20_000, 1))
REGISTERED = (10_000, 1_000_000, 3)
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES: dict[str, Any] = {"intermediate_size": 32, "image_size": 8, "patch_size": 4}

T = TypeVar("T")


def timed(spent: dict[str, float], what: str, call: Callable[[], T]) -> T:
    """What a call gives; the CPU seconds that it took are added."""
    began = time.process_time()
    found = call()
    spent[what] = spent.get(what, 0.0) + time.process_time() - began
    return found


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Fake:
    """The answers of a round: every client has the same values to send, each a copy of them."""

    def __init__(self, server: Server) -> None:
        self.server, self.agreement = server, server.agreement
        drawn = torch.Generator().manual_seed(server.world.round)
        self.values = {
            key: value + 1e-3 * torch.randn(value.shape, generator=drawn)
            for key, value in server.world.values.items()
        }
        self.before = joined(self.agreement.params, digests(server.world.values))
        self.after = joined(self.agreement.params, digests(self.values))

    def answer(self, request: Request) -> Update:
        """What a client hands back."""
        values: dict[str, Tensor] = {key: value.clone() for key, value in self.values.items()}
        params, sizes = self.agreement.params, self.agreement.sizes
        line: dict[str, Any] = {
            **{"kind": "turn", "version": VERSION, "round": request.turn.round},
            **{
                "client": request.turn.client,
                "phase": "",
                "traits": {},
                "roles": "S" * len(params),
            },
            **{"before": self.before, "after": self.after, "weight": 10, "steps": 4, "loss": 1.5},
            **{"down": sum(sizes[key] for key in request.versions), "scores": None, "anew": False},
            **{"up": sum(v.nbytes for v in values.values()), "missed": []},
        }
        return Update(request.turn.client, request.name, request.agreed, values, 10, line)


def served(asked: int, registered: int, folder: Path, rounds: int) -> Server:
    """A server of so many registered clients."""
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SHAPE, **SIZES))
    agreement = Agreement("many", describe(model), method_named("fedavg"), Pace(steps=4))
    return Server(
        agreement,
        take(model, agreement.params),
        folder,
        rounds=rounds,
        roster={f"client-{i:07}": {} for i in range(registered)},
        participation=Participation(share=asked / registered),
    )


def play(server: Server, spent: dict[str, float]) -> tuple[int, float]:
    """Play a round by hand; the most bytes in memory, and those that a client more takes."""
    tally, fake = timed(spent, "begin", server.begin), Fake(server)
    first, began = len(tally.cohort) // 10, 0
    for number, request in enumerate(list(tally.cohort.values())):
        update = fake.answer(request)
        timed(spent, "take", partial(server.take, tally, update))
        began = resident() if number == first else began
    assert len(tally.counted) == len(tally.cohort), list(tally.rejected.items())[:1]
    most = resident()
    timed(spent, "end", partial(server.end, tally))
    timed(spent, "commit", partial(server.commit, tally))
    return most, (most - began) / (len(tally.cohort) - first)


def row(asked: int, registered: int, rounds: int, folder: Path) -> dict[str, Any]:
    """What so many clients cost, a round and a client."""
    torch.set_num_threads(1)
    spent = dict[str, float]()
    server = timed(spent, "open", partial(served, asked, registered, folder, rounds))
    most, each = max(play(server, spent) for _ in range(rounds))
    world, values = server.world, sum(v.nbytes for v in server.world.values.values())
    del server
    opened = dict[str, float]()
    again = timed(opened, "open", partial(served, asked, registered, folder, rounds))
    assert len(timed(opened, "history", lambda: again.history)) == rounds
    tensors = next((folder / WORLD).glob(f"{rounds}.*.safetensors")).stat().st_size
    ledger = sum(file.stat().st_size for file in folder.glob("ledger*.jsonl"))
    turns = asked * rounds
    return {
        **{"asked": asked, "registered": registered, "rounds": rounds, "heard": len(world.met)},
        **{f"{what} ms a client": round(1e3 * spent[what] / turns, 4) for what in PARTS},
        "kB a client of a round in memory": round(each / 1e3, 2),
        "resident MB": round(most / 1e6, 1),
        "checkpoint bytes beside values": tensors - values,
        "manifest bytes": (folder / WORLD / f"{rounds}.json").stat().st_size,
        "ledger bytes a turn": round(ledger / turns),
        **{f"{what} s": round(spent[what] / rounds, 3) for what in ("begin", "end", "commit")},
        "open s": round(spent["open"], 3),
        "reopen s": round(opened["open"], 3),
        "history s": round(opened["history"], 3),
    }


PARTS = ("begin", "take", "end", "commit")


def main() -> None:
    if len(sys.argv) == 4:
        asked, registered, rounds = map(int, sys.argv[1:])
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(row(asked, registered, rounds, Path(folder))))
        return
    rows = list[dict[str, Any]]()
    for numbers in (*ROWS, REGISTERED):
        command = [sys.executable, __file__, *map(str, numbers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        said = {"command": "python lab/many_clients.py", "facts": FACTS, "rows": rows}
        OUT.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
