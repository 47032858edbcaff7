# SPDX-License-Identifier: Apache-2.0
"""What very many clients cost a server: begin, take, end and commit, checkpoint and reopening.

A server with a ViT of 72 small tensors (12 k values) is played by hand: each client's update is a
copy of one that is worked out once a round, so that what is measured is the server and nothing
else. Of a large round 500 updates, spread evenly over it, go through `take`; of the others the
record is read and kept, as `take` does it, and nothing is added. So late ones are seen, and a row
takes minutes. Each row is a process of its own. Times are CPU seconds of one thread.

`python research/many_clients.py` writes research/results/many-clients.json; with ASKED REGISTERED ROUNDS TAKEN
it prints one row, in which so many a round go through `take`.
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
from fedplan.federation.identity import GLOBAL_FOLDER
from fedplan.federation.ledger.records import VERSION, join_digests, read_turn
from fedplan.federation.messages import Request, Update
from fedplan.federation.participation import Participation
from fedplan.federation.server import Server
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

OUT = Path(__file__).parent / "results" / "many-clients.json"
ROWS = (
    (100, 100, 4, 1000),
    (1_000, 1_000, 1, 500),
    (10_000, 10_000, 1, 500),
    (20_000, 20_000, 1, 500),
    (10_000, 1_000_000, 3, 150),
)
"""Clients that are asked at once, those registered, rounds, and how many a round are taken."""
SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES: dict[str, Any] = {"intermediate_size": 32, "image_size": 8, "patch_size": 4}
PARTS = ("begin", "end", "commit")

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
        drawn = torch.Generator().manual_seed(server.global_state.round)
        self.values = {
            key: value + 1e-3 * torch.randn(value.shape, generator=drawn)
            for key, value in server.global_state.values.items()
        }
        self.up = sum(value.nbytes for value in self.values.values())
        self.before = join_digests(self.agreement.params, digests(server.global_state.values))
        self.after = join_digests(self.agreement.params, digests(self.values))

    def line(self, request: Request) -> dict[str, Any]:
        """What a client says of its turn, as a message brings it: texts of its own."""
        sizes, roles = self.agreement.download_bytes, "S" * len(self.agreement.params)
        said: dict[str, Any] = {
            **{"kind": "turn", "version": VERSION, "round": request.turn.round},
            **{"client": request.turn.client, "phase": "", "traits": {}, "roles": roles},
            **{"before": self.before, "after": self.after, "weight": 10, "steps": 4, "loss": 1.5},
            **{"download_bytes": sum(sizes[key] for key in request.versions), "scores": None},
            **{"upload_bytes": self.up, "full": False, "missed": []},
        }
        return json.loads(json.dumps(said))

    def update(self, request: Request, line: dict[str, Any]) -> Update:
        """What a client hands back."""
        values: dict[str, Tensor] = {key: value.clone() for key, value in self.values.items()}
        return Update(request.turn.client, request.name, request.agreement_digest, values, 10, line)


def served(asked: int, registered: int, folder: Path, rounds: int) -> Server:
    """A server of so many registered clients."""
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SHAPE, **SIZES))
    agreement = Agreement(
        "many", describe(model), method_by_name("fedavg"), TrainArguments(steps=4)
    )
    return Server(
        agreement,
        get_values(model, agreement.params),
        folder,
        rounds=rounds,
        roster={f"client-{i:07}": {} for i in range(registered)},
        participation=Participation(fraction=asked / registered),
    )


def play(server: Server, spent: dict[str, float], taken: int) -> tuple[int, float]:
    """Play a round by hand; the most bytes in memory, and those that a client more takes."""
    round_state, fake = timed(spent, "begin", server.begin_round), Fake(server)
    first, began, step = len(round_state.cohort) // 10, 0, max(1, len(round_state.cohort) // taken)
    for number, request in enumerate(list(round_state.cohort.values())):
        line = fake.line(request)
        if number % step == 0:
            timed(spent, "take", partial(server.take, round_state, fake.update(request, line)))
            spent["taken"] = spent.get("taken", 0) + 1
        else:
            round_state.records[request.turn.client] = read_turn(line)
            round_state.responded.append(request.turn.client)
            round_state.aggregated.append(request.turn.client)
        began = resident() if number == first else began
    assert len(round_state.aggregated) == len(round_state.cohort), list(
        round_state.rejected.items()
    )[:1]
    most = resident()
    timed(spent, "end", partial(server.close_round, round_state))
    timed(spent, "commit", partial(server.commit, round_state))
    return most, (most - began) / (len(round_state.cohort) - first)


def row(asked: int, registered: int, rounds: int, taken: int, folder: Path) -> dict[str, Any]:
    """What so many clients cost, a round and a client."""
    torch.set_num_threads(1)
    spent = dict[str, float]()
    server = timed(spent, "open", partial(served, asked, registered, folder, rounds))
    most, each = max(play(server, spent, taken) for _ in range(rounds))
    global_state, values = (
        server.global_state,
        sum(v.nbytes for v in server.global_state.values.values()),
    )
    del server
    opened = dict[str, float]()
    again = timed(opened, "open", partial(served, asked, registered, folder, rounds))
    assert len(timed(opened, "history", lambda: again.history)) == rounds
    tensors = next((folder / GLOBAL_FOLDER).glob(f"{rounds}.*.safetensors")).stat().st_size
    ledger = sum(file.stat().st_size for file in folder.glob("ledger*.jsonl"))
    turns = asked * rounds
    return {
        **{
            "asked": asked,
            "registered": registered,
            "rounds": rounds,
            "heard": len(global_state.client_sync),
        },
        "take ms a client": round(1e3 * spent["take"] / spent["taken"], 3),
        **{f"{what} ms a client": round(1e3 * spent[what] / turns, 4) for what in PARTS},
        "taken": int(spent["taken"]),
        "kB a client of a round in memory": round(each / 1e3, 2),
        "resident MB": round(most / 1e6, 1),
        "checkpoint bytes beside values": tensors - values,
        "manifest bytes": (folder / GLOBAL_FOLDER / f"{rounds}.json").stat().st_size,
        "ledger bytes a turn": round(ledger / turns),
        **{f"{what} s": round(spent[what] / rounds, 3) for what in PARTS},
        "open s": round(spent["open"], 3),
        "reopen s": round(opened["open"], 3),
        "history s": round(opened["history"], 3),
    }


def main() -> None:
    if len(sys.argv) == 5:
        asked, registered, rounds, taken = map(int, sys.argv[1:])
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(row(asked, registered, rounds, taken, Path(folder))))
        return
    rows = list[dict[str, Any]]()
    for numbers in ROWS:
        command = [sys.executable, __file__, *map(str, numbers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        said = {"command": "python research/many_clients.py", "facts": FACTS, "rows": rows}
        OUT.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
