# SPDX-License-Identifier: Apache-2.0
"""What needs a package of an extra, asked where none of them is installed; run as a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedplan.errors import EXTRAS, MissingExtra

RUN = "run study.toml --output next --set "
COMMANDS = {
    "peft": RUN + "'model.adapter={type=\"lora\"}'",
    "cryptography": RUN + "aggregation.kind=secure",
    "dp_accounting": RUN + "'privacy={unit=\"client\",epsilon=8.0}' --set clients={fraction=0.5}",
    "cryptography  ": RUN + "'privacy={unit=\"client\",epsilon=8.0}' --set clients={}",
    "flwr": "new federation next --site north",
    "flwr ": "keys next",
    "flwr  ": "run study.toml --output next --runner flower",
    "ray": "run study.toml --output next --runner ray",
    **{
        name: f"{RUN}'evaluate.trackers=[\"{name}\"]'"
        for name in ("mlflow", "tensorboard", "wandb")
    },
    "cryptography ": "site inbox --site nowhere",
    "peft ": RUN + "'method={name=\"fedit\"}'",
}
"""Commands, by the package that each needs first."""


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """Calls from Python, by the package that each needs first."""
    import numpy as np
    import transformers as hf
    from silent_mistakes import played

    import fedplan as fp
    from fedplan.data.metric_functions import chrf, rouge_l
    from fedplan.data.metrics import Predictions
    from fedplan.data.tasks.kinds import make_task
    from fedplan.methods.method import Method
    from fedplan.models.values import quantization_config
    from fedplan.storage.encryption import Encryption
    from fedplan.training.loops import attach

    def trainer(model: Any, dataset: Any, trainable: Any) -> Any:
        return hf.Trainer(model, hf.TrainingArguments(output_dir=str(folder / "out")))

    def entities() -> None:
        tags = ("O", "B-pet")
        task = make_task("token-classification", columns="words", label="tags", labels=tags)
        one = np.array([0, 1])
        task.measure(Predictions(one, one, np.eye(2), np.zeros(2), np.array([2])))

    return {
        "bitsandbytes": lambda: quantization_config("nf4", Any),
        "accelerate": lambda: played(Method(fp.share(), loop=attach(trainer))),
        "cryptography": lambda: Encryption(bytes(32)),
        "rouge_score": lambda: rouge_l(["a"], ["b"]),
        "sacrebleu": lambda: chrf(["a"], ["b"]),
        "seqeval": entities,
    }


def main(folder: Path) -> None:
    """Print (package, exit code, message) of each command and call, as JSON."""
    for package in EXTRAS:
        sys.modules[package] = None  # type: ignore[assignment]
    from mistakes import asked

    found = [(name, *asked(folder, command)) for name, command in COMMANDS.items()]
    for name, call in calls(folder).items():
        try:
            call()
        except MissingExtra as error:
            found.append((name, error.exit_code, f"fedplan: {error}\n"))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
