# SPDX-License-Identifier: Apache-2.0
"""QLoRA: the same shops, on a base of four bits; only the adapter is trained and travels."""

from pathlib import Path

import fedplan as fp

folder = str(Path(__file__).parent / "chat")  # examples/chat.py writes it
adapter = {"type": "lora", "target": "query | value | mlp", "r": 8}
by_shop = {"partition": "column", "partition_column": "shop", "num_clients": 3}
study = fp.Study(
    name="qlora",
    model={"path": folder, "quantization": "nf4", "adapter": adapter},
    task={"kind": "instruction", "input": "prompt response", "max_length": 64},
    data={"path": f"{folder}/rows.jsonl", **by_shop},
    method={"plan": "chain(freeze(), share(adapter))"},
    train={"rounds": 3, "lr": 1e-2, "batch_size": 12, "epochs": 4},
)
run = fp.run_study(study)
print(run.metrics.to_pandas()[["round", "loss", "upload_bytes", "download_bytes"]])
print(fp.verify_run(run.folder)[1])
