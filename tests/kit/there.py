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
from fedplan.federation.turns import local
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.methods.registry import method_named
from fedplan.models.architectures import EAGER
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.tensors.devices import forked
from fedplan.tensors.named import nbytes
from fedplan.training.fit import Pace
from fedplan.training.optimisers import adamw, sgd

DUAL = "clip-dual"
STEADY = Pace(sgd(momentum=0.9), rate=1e-2, batch=2, steps=2, clip=1.0)
"""For real devices: a step of AdamW follows the sign of a gradient, however it is rounded."""
PACE = Pace(adamw(decay=0.1), rate=1e-2, batch=2, steps=2)
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}


def built(architecture: str, *, chance: bool = True) -> nn.Module:
    """A tiny model with eager attention; without chance, nothing is dropped out."""
    with forked(seed=0):
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
        each = self.made.world_values()
        values, resting = turns * nbytes(each), len(agreement.params) - len(each)
        # Who is asked what it would choose starts from the values once more.
        starts = 2 if agreement.method.together else 1
        # FedProx has the world's values beside the model's, and SCAFFOLD its controls.
        beside = values if any(w in " ".join(agreement.method.lines) for w in BESIDE) else 0
        batches = self._batches() - self.before
        # The losses of a turn, a checksum of what rests, and sums of each block for each row.
        sums = 64 * len(agreement.blocks) if agreement.chooses(Turn(1)) else 0
        numbers = turns * 8 * (PACE.steps * 2 + resting + sums)
        sent, fetched = self.backend.sent_bytes, self.backend.fetched_bytes
        assert sent <= starts * values + beside + batches, (where, "sent", sent, values, batches)
        assert fetched <= values + beside + numbers, (where, "fetched", fetched, values)

    def _batches(self) -> int:
        return sum(cast("Counted", client.rows).bytes for client in self.made.clients.values())


BESIDE = ("proximal", "controlled")


def dual_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    return nn.functional.cross_entropy(model(**inputs), batch["labels"])


def federation(
    method: str | Method,
    architecture: str,
    folder: Path,
    device: torch.device | None = None,
    pace: Pace = PACE,
    **said: Any,
) -> Federation:
    """Two clients and a method by name, on a device."""
    made = method if isinstance(method, Method) else method_named(method, SETTINGS.get(method))
    model = built(architecture, chance=pace is PACE)
    if made.adapt is not None:
        with forked(seed=0):
            model = made.adapt(model)
    rows = duals.pictures_of("a", "bb") if architecture == DUAL else few(architecture)
    folder.mkdir(parents=True, exist_ok=True)
    return Federation(
        said.pop("agreement", None) or Agreement("there", describe(model), made, pace),
        model,
        {name: Counted(each) for name, each in rows.items()},
        said.pop("loss", dual_loss if architecture == DUAL else loss),
        folder,
        rounds=4,
        replies=True,
        device=device,
        **said,
    )


def played(made: Federation, rounds: int = 2) -> Federation:
    for _ in range(rounds):
        tally = made.round()
        assert not tally.rejected, tally.rejected
        made.commit(tally)
    return made


def values_of(made: Federation) -> dict[str, Tensor]:
    """All that a federation has made: the world, and what each client keeps."""
    homes = {n: client.journal.home()[0] for n, client in made.clients.items()}
    kept = {f"{n}/{k}": v for n, home in homes.items() for k, v in home.items()}
    return {**made.world.values, **kept}


def one_turn(made: Federation) -> tuple[str, Any]:
    """The first client's turn of a fresh round, alone."""
    tally = made.server.begin()
    made.ask(tally)
    name = next(iter(tally.cohort))
    return name, lambda: local(made.agreement, made.clients[name], tally.cohort[name])
