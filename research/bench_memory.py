# SPDX-License-Identifier: Apache-2.0
"""The server's peak memory for a model of 100 MB, with 5 and with 50 clients, beside stock FedAvg.

Each figure is of a process of its own, in which the server's app runs on a grid that makes a
client's answer when it is pulled: what the process holds is the server's, and one client's at a
time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
ROUNDS = 2


def model() -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048,
        vocab_size=11500, num_labels=4,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def stock(count: int) -> None:
    from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
    from grids import InProcess

    app = ClientApp()

    @app.train()
    def train(envelope: FlowerMessage, context: Context) -> FlowerMessage:
        state = envelope.content["arrays"].to_torch_state_dict()
        state = {k: v + 1 if v.is_floating_point() else v for k, v in state.items()}
        said = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": said})
        return FlowerMessage(content, reply_to=envelope)

    grid = InProcess(app, [{} for _ in range(count)])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    arrays = ArrayRecord(model().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)


def ours(count: int) -> None:
    from flwr.app import Context
    from grids import InProcess

    from fedplan.federation.agreement import Agreement
    from fedplan.federation.messages import Update, read_request, update_message
    from fedplan.federation.participation import Timeouts
    from fedplan.federation.server import Server
    from fedplan.language.plan import share
    from fedplan.methods.method import Method
    from fedplan.models.description import describe
    from fedplan.models.values import get_values
    from fedplan.runners.flower.apps import client_app
    from fedplan.runners.flower.server import ServerLoop
    from fedplan.tensors.message import Message
    from fedplan.tensors.serialization import pack_message
    from fedplan.training.fit import TrainArguments

    built = model()
    agreement = Agreement("memory", describe(built), Method(share()), TrainArguments())
    names = [f"client-{number}" for number in range(count)]

    def answer(context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        if kind == "hello":
            fields = {"client": name, "agreement": agreement.fingerprint, "traits": {}}
            return pack_message({}, fields)
        down = read_request(message)
        values = {k: v + 1 for k, v in down.values.items()}
        line = {"round": down.turn.round, "client": name, "weight": 1, "steps": 1, "loss": 0.0}
        line |= {"upload_bytes": 0, "download_bytes": 0}
        return update_message(Update(name, down.name, agreement.fingerprint, values, 1, line))

    with tempfile.TemporaryDirectory() as folder:
        grid = InProcess(client_app(answer), [{"name": name} for name in names])
        server = Server(
            agreement, get_values(built, agreement.params), Path(folder), rounds=ROUNDS,
            roster={name: {} for name in names},
        )  # fmt: skip
        ServerLoop(grid, server, Timeouts(poll_interval=0.01)).run()


def main() -> None:
    from study import FACTS, LAB

    size = sum(p.numel() * p.element_size() for p in model().parameters()) / 1e6
    lines = [f"python research/bench_memory.py  {json.dumps(FACTS)}", f"a model of {size:.0f} MB"]
    for kind in ("ours", "stock"):
        peaks = dict[int, float]()
        for count in (5, 50):
            done = subprocess.run(
                [sys.executable, __file__, kind, str(count)], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            peaks[count] = float(done.stdout.split()[-1])
        told = {"ours": "fedplan", "stock": "stock FedAvg"}[kind]
        lines.append(
            f"{told:13} {peaks[5]:6.0f} MB at 5 clients, {peaks[50]:6.0f} MB at 50: "
            f"ratio {peaks[50] / peaks[5]:.2f}"
        )
        print(lines[-1], flush=True)
    (LAB / "results" / "bench_memory.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"ours": ours, "stock": stock}[sys.argv[1]](int(sys.argv[2]))
        sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}\n")
    else:
        main()
