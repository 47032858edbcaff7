# SPDX-License-Identifier: Apache-2.0
"""QLoRA: the same shops, on a base of four bits; only the adapter is trained and travels."""

from pathlib import Path

import fedplan as fp

folder = str(Path(__file__).parent / "chat")  # examples/chat.py writes it
study = fp.Study(
    name="qlora",
    model={
        "path": folder,
        "quantised": "nf4",
        "adapter": {"type": "lora", "target": "query | value | mlp", "r": 8},
    },
    task={"kind": "instruction", "input": "prompt response", "max_length": 64},
    data={"path": f"{folder}/rows.jsonl", "by": "column", "column": "shop", "clients": 3},
    method={"plan": "chain(freeze(), share(adapter))"},
    train={"rounds": 3, "rate": 1e-2, "batch": 12, "epochs": 4},
)
run = fp.run_study(study)
print(run.metrics.to_pandas()[["round", "loss", "up", "down"]])
print(fp.verify_run(run.folder)[1])
