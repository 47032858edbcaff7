# SPDX-License-Identifier: Apache-2.0
"""A federation on a device: tiny models, rows that count their bytes, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import duals
import torch
import transformers as hf
import zoo
from clients import few, loss
from second_device import device as backend
from settings import SETTINGS
from torch import Tensor, nn

from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.language.predicates import Turn
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.architectures import EAGER
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.tensors.devices import fork_rng_state
from fedplan.tensors.named import nbytes
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import adamw, sgd

DUAL = "clip-dual"
STEADY = TrainArguments(sgd(momentum=0.9), lr=1e-2, batch_size=2, steps=2, max_grad_norm=1.0)
"""For real devices: a step of AdamW follows the sign of a gradient, however it is rounded."""
PACE = TrainArguments(adamw(weight_decay=0.1), lr=1e-2, batch_size=2, steps=2)
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}


def built(architecture: str, *, chance: bool = True) -> nn.Module:
    """A tiny model with eager attention; without chance, nothing is dropped out."""
    with fork_rng_state(seed=0):
        if architecture == DUAL:
            model: Any = duals.build("clip")
        elif architecture == "gpt2":
            # With a head of its own, so that methods may speak of it.
            ends = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **ends))
        else:
            model = zoo.build(architecture)
    for module in model.modules():
        if getattr(getattr(module, "config", None), EAGER, None) is not None:
            setattr(module.config, EAGER, "eager")
        if isinstance(module, nn.Dropout) and not chance:
            module.p = 0.0
    return model.eval()


@dataclass
class Counted:
    """Rows that count the bytes of all batches that were made of them."""

    rows: Examples
    bytes: int = 0
    batches: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        made = dict(self.rows.batch(indices))
        self.bytes += nbytes(made)
        self.batches += 1
        self.shapes += [tuple(each.shape) for each in made.values()]
        return made


class Moves:
    """What a round moves to the second device and from it, and what it may."""

    def __init__(self, made: Federation) -> None:
        self.made, self.backend = made, backend()
        self.backend.forget()
        self.before = self._batches()

    def require_bounded(self, where: str = "") -> None:
        """Each value once each way, and each batch once; beside them numbers alone."""
        agreement, turns = self.made.agreement, len(self.made.clients)
        each = self.made.global_values()
        values, resting = turns * nbytes(each), len(agreement.params) - len(each)
        # Who is asked what it would choose starts from the values once more.
        starts = 2 if agreement.method.joint_choice else 1
        # FedProx has the world's values beside the model's, and SCAFFOLD its controls.
        beside = values if any(w in " ".join(agreement.method.lines) for w in BESIDE) else 0
        batches = self._batches() - self.before
        # The losses of a turn, a checksum of what rests, and sums of each block for each row.
        sums = 64 * len(agreement.blocks) if agreement.selects_blocks(Turn(1)) else 0
        numbers = turns * 8 * (PACE.steps * 2 + resting + sums)
        sent, fetched = self.backend.sent_bytes, self.backend.fetched_bytes
        assert sent <= starts * values + beside + batches, (where, "sent", sent, values, batches)
        assert fetched <= values + beside + numbers, (where, "fetched", fetched, values)

    def _batches(self) -> int:
        return sum(cast("Counted", client.examples).bytes for client in self.made.clients.values())


BESIDE = ("proximal", "controlled")


def dual_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    return nn.functional.cross_entropy(model(**inputs), batch["labels"])


def federation(
    method: str | Method,
    architecture: str,
    folder: Path,
    device: torch.device | None = None,
    train_arguments: TrainArguments = PACE,
    **said: Any,
) -> Federation:
    """Two clients and a method by name, on a device."""
    made = method if isinstance(method, Method) else method_by_name(method, SETTINGS.get(method))
    model = built(architecture, chance=train_arguments is PACE)
    if made.adapt is not None:
        with fork_rng_state(seed=0):
            model = made.adapt(model)
    rows = duals.pictures_of("a", "bb") if architecture == DUAL else few(architecture)
    folder.mkdir(parents=True, exist_ok=True)
    return Federation(
        said.pop("agreement", None) or Agreement("there", describe(model), made, train_arguments),
        model,
        {name: Counted(each) for name, each in rows.items()},
        said.pop("loss", dual_loss if architecture == DUAL else loss),
        folder,
        rounds=4,
        keep_replies=True,
        device=device,
        **said,
    )


def played(made: Federation, rounds: int = 2) -> Federation:
    for _ in range(rounds):
        round_state = made.run_round()
        assert not round_state.rejected, round_state.rejected
        made.commit(round_state)
    return made


def values_of(made: Federation) -> dict[str, Tensor]:
    """All that a federation has made: the world, and what each client keeps."""
    homes = {n: client.journal.client_state()[0] for n, client in made.clients.items()}
    kept = {f"{n}/{k}": v for n, home in homes.items() for k, v in home.items()}
    return {**made.global_state.values, **kept}


def one_turn(made: Federation) -> tuple[str, Any]:
    """The first client's turn of a fresh round, alone."""
    round_state = made.server.begin_round()
    made.poll_clients(round_state)
    name = next(iter(round_state.cohort))
    return name, lambda: train_round(made.agreement, made.clients[name], round_state.cohort[name])
