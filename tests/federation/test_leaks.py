# SPDX-License-Identifier: Apache-2.0
"""What a client keeps is in no message up or down: not its start, not what it became, not by accident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duals
import pytest
import torch
import zoo
from canaries import Hit, hits, plant
from clients import few, loss
from torch import Tensor

from fedplan.data.examples import Loss
from fedplan.federation.agreement import Agreement
from fedplan.federation.rounds import RoundState
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Param
from fedplan.models.values import get_values, set_values
from fedplan.runners.local import Federation
from fedplan.tensors.serialization import pack
from fedplan.training.fit import Fit, FitResult, Job, TrainArguments
from fedplan.training.optimizers import adamw

PACE = TrainArguments(adamw(weight_decay=0.1), lr=1e-2, batch_size=2, steps=2)
ROUNDS = 4
KEPT: dict[str, dict[str, int]] = {
    "fedper": {},
    "fedrep": {},
    "fedbn": {},
    "lg-fedavg": {},
    "fedbabu": {"rounds": 2},
    "fedsa-lora": {},
    "fedper-safl": {"k": 1},
    "local-only": {},
    "pfeddc": {},
    "pfeddc-held": {"warmup": 2},
    "local-prompts": {},
}


class Wiretap:
    """Plays a federation and keeps every byte that goes either way, and all that was private."""

    def __init__(self, made: Method, folder: Path, *, prompted: bool) -> None:
        torch.manual_seed(0)
        model = duals.build("clip") if prompted else zoo.build("bert")
        model = made.adapt(model) if made.adapt else model
        rows = duals.pictures_of("ann", "berta") if prompted else few("bert")
        score: Loss = duals.ASKED.loss if prompted else loss
        agreement = Agreement("leaks", describe(model), made, PACE)
        set_values(model, plant(get_values(model, agreement.params), seed=0), agreement.params)
        self.federation = Federation(
            agreement, model, rows, score, folder, rounds=ROUNDS, keep_replies=True
        )
        self.messages, self.private = list[bytes](), dict[str, Tensor]()
        for number in range(ROUNDS):
            self._note(f"before round {number + 1}")
            round_state = self.federation.run_round()
            self._tap(round_state)
            self.federation.commit(round_state)
        self._note("in the end")

    def _tap(self, round_state: RoundState) -> None:
        for client, down in round_state.cohort.items():
            answered = self.federation.clients[client].journal.reply_for(down.name)
            assert answered is not None
            self.messages += [pack(down.values, {}), pack(answered[0], {})]

    def _note(self, when: str) -> None:
        for name in self.federation.clients:
            home, _ = self.federation.clients[name].journal.client_state()
            own = {k: v for k, v in home.items() if "#" not in k}
            for key, value in (own or get_values(self.federation.model, self._own())).items():
                self.private[f"{name}'s {key} {when}"] = value.clone()

    def _own(self) -> list[Param]:
        exchanged = {p.key for p in self.federation.agreement.exchanged}
        return [p for p in self.federation.agreement.trainable if p.key not in exchanged]

    def hits(self) -> list[Hit]:
        """Pieces of private tensors that some message holds."""
        return hits(self.private, self.messages)


@pytest.mark.parametrize("name", KEPT)
def test_nothing_private_is_in_any_message(name: str, tmp_path: Path) -> None:
    prompted = "prompts" in name or "pfeddc" in name
    tap = Wiretap(method_by_name(name, KEPT[name]), tmp_path, prompted=prompted)
    assert len(tap.private) > 2 * ROUNDS
    assert len(tap.messages) == 4 * ROUNDS
    assert not tap.hits()


def test_nothing_private_is_in_any_message_after_a_part_was_shared(tmp_path: Path) -> None:
    made = Method(parse("chain(share(), when(after(2), keep(head)))"))
    tap = Wiretap(made, tmp_path, prompted=False)
    assert len(tap.private) > 2 * ROUNDS
    assert not tap.hits()


def test_a_method_that_leaks_on_purpose_is_caught(tmp_path: Path) -> None:
    def leaky(fit: Fit) -> Fit:
        def leaking(job: Job) -> FitResult:
            done = fit(job)
            kept, *_ = (
                p for p, role in job.roles.items() if role.is_personal and "weight" in p.name
            )
            home = get_values(job.model, [kept])[kept.key]
            shared = [p for p, role in job.roles.items() if role.value == "share"]
            smuggled = {p.key + "#leak": home if i == 0 else torch.zeros(1)
                        for i, p in enumerate(shared)}  # fmt: skip
            return replace(done, aux=smuggled)

        return leaking

    made = replace(method_by_name("fedper"), client_hooks=(leaky,), aux=("leak",))
    tap = Wiretap(made, tmp_path, prompted=False)
    assert tap.hits()
