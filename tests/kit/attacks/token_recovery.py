# SPDX-License-Identifier: Apache-2.0
"""Token recovery: how many of a client's tokens a server infers from each part of its update."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from attacks import victims
from attacks.inference import (
    row_norms,
    single_token_inputs,
    span_scores,
    top_scores_recall,
)
from fedplan import seeds
from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Kind, Param
from fedplan.privacy.accounting.accountant import DPSGDSteps, calibrate
from fedplan.privacy.dpsgd.fit import DPSGDConfig, dp_sgd
from fedplan.privacy.mechanisms.noise import NoiseStream
from fedplan.runners.local import Federation
from fedplan.tensors.accumulator import GRID
from fedplan.tensors.devices import fork_rng_state
from fedplan.training.fit import Fit, TrainArguments
from fedplan.training.optimizers import sgd

VOCABULARY, LENGTH, EXAMPLES, WIDTH, BLOCKS = 1000, 16, 7, 128, 4
"""Sizes of model and data. Fewer tokens per client than the width are the server's best case."""
CHANCE_RECALL = EXAMPLES * (LENGTH - 1) / (VOCABULARY - victims.FIRST_WORD)
"""Recall of random guesses."""
DELTA = 1e-5
"""Delta of the DP-SGD that is attacked."""
PARTS = tuple(map(Kind, ("embed", "query", "key", "value", "out", "mlp", "head", "prompt")))
"""Kinds of params that are attacked one by one."""
METHODS: dict[str, Method] = {
    "fedavg": method_by_name("fedavg"),
    "fedfrozen, stage one": method_by_name("fedfrozen", {"warmup": 1}),
    "fedfrozen A, stage two": method_by_name("fedfrozen", {"warmup": 0}),
    "fedfrozen B, stage two": method_by_name("fedfrozen", {"warmup": 0, "reading": "B"}),
    "safl, 2 of 4 blocks": method_by_name("safl", {"k": 2}),
}
PROMPT_METHODS: dict[str, Method] = {
    "pfeddc": method_by_name("pfeddc", {"text": 2, "vision": 2, "width": 16})
}
ONE_STEP, ONE_STEP_MASKED = "one step", "one step, masked"
"""Names of the server's best case, and of the same under secure aggregation."""
Change = Mapping[Param, Tensor]
"""A client's update minus the base, by param."""


@dataclass(frozen=True)
class TrainingSetup:
    """A way in which the attacked clients train: name, training config and dropout.

    epsilon: above 0, clients train by DP-SGD with noise for this epsilon at DELTA, in place of the
    method's own fit: `apply` makes such a method. The caller uses `train_arguments` and `dropout`.
    """

    name: str
    train_arguments: TrainArguments
    dropout: float = 0.0
    epsilon: float = 0.0

    def apply(self, method: Method) -> Method:
        """Return the method itself if `epsilon` is 0, else a copy that trains by DP-SGD."""
        steps = self.train_arguments.steps
        return train_by_dp_sgd(method, self.epsilon, steps, EXAMPLES) if self.epsilon else method


def train_by_dp_sgd(method: Method, epsilon: float, steps: int, examples: int) -> Method:
    """Return a copy of a method that trains by DP-SGD on all examples in each step.

    epsilon: at DELTA; infinite for clipping without noise. examples: the public number that sums of
    gradients are divided by. The copy has one client hook, in place of the method's own ones, with
    noise from a new random stream.
    """
    noise = 0.0
    if isfinite(epsilon):
        noise = calibrate(epsilon, DELTA, lambda noise: [DPSGDSteps(noise, 1.0, steps)])
    config = DPSGDConfig(1.0, noise, expected_batch_size=examples, sampling_rate=1.0, steps=steps)
    source = NoiseStream(os.urandom(32))
    fit = dp_sgd(config, noise=source.rounded_gaussian, uniform=source.uniform)

    def replace_fit(_: Fit) -> Fit:
        return fit

    return replace(method, client_hooks=(replace_fit,))


def training_setups(epsilon: float) -> tuple[TrainingSetup, ...]:
    """The three attacked setups: one step (the server's best case), ten steps, one DP-SGD step.

    epsilon: of the DP-SGD setup. Ten steps are by AdamW on small batches, with dropout.
    """
    step = TrainArguments(sgd(), lr=0.1, steps=1, batch_size=EXAMPLES)
    return (
        TrainingSetup(ONE_STEP, step),
        TrainingSetup("ten steps", TrainArguments(lr=1e-3, steps=10, batch_size=4), dropout=0.1),
        TrainingSetup("DP-SGD", step, epsilon=epsilon),
    )


@dataclass(frozen=True)
class PartLeak:
    """Token recovery from one part (a kind of params) of the clients' updates.

    sent: whether any client sent the part (of text models: a weight matrix of the part).
    recovered: fraction of a client's tokens that were recovered, mean over clients; None if the
    part was not attacked. error: standard error of this mean.
    blocks: numbers of the attacked blocks: of each update, the first block with the part.
    """

    part: str
    sent: bool
    recovered: float | None = None
    error: float = 0.0
    blocks: tuple[int, ...] = ()

    @property
    def beyond(self) -> float | None:
        """Recall beyond chance: 0 is chance, 1 is every token; None if not attacked."""
        if self.recovered is None:
            return None
        return (self.recovered - CHANCE_RECALL) / (1 - CHANCE_RECALL)


@dataclass(frozen=True)
class UpdateLeak:
    """Token recovery from a method's updates, one entry of `parts` per kind of params in PARTS.

    setup: name of the training setup.
    """

    method: str
    setup: str
    parts: tuple[PartLeak, ...]


def attack_updates(clients: int, epsilon: float) -> Iterator[UpdateLeak]:
    """Train each method in each setup, attack the first round's updates, and yield the results.

    clients: number of clients; epsilon: of the DP-SGD setup. Trains while the iterator is consumed.
    If two or more clients all send the same params, one step is also attacked under secure
    aggregation.
    Prompt methods train on images, so their results only say which parts were sent.
    """
    texts = [
        victims.random_texts(i, EXAMPLES, vocabulary=VOCABULARY, length=LENGTH)
        for i in range(clients)
    ]
    images = [victims.random_images(i, EXAMPLES) for i in range(clients)]
    words = [victims.distinct_words(examples) for examples in texts]
    server = CuriousServer(make_text_model())
    for name, method in METHODS.items():
        for setup in training_setups(epsilon):
            model = make_text_model(setup.dropout)
            changes = first_round_changes(setup.apply(method), model, texts, setup.train_arguments)
            leaks = tuple(server.recover_tokens(part, changes, words) for part in PARTS)
            yield UpdateLeak(name, setup.name, leaks)
            is_same_set = len({frozenset(change) for change in changes}) == 1
            # One client alone cannot use secure aggregation.
            if setup.name == ONE_STEP and is_same_set and clients > 1:
                masked = masked_changes(changes)
                leaks = tuple(server.recover_tokens(part, masked, words) for part in PARTS)
                yield UpdateLeak(name, ONE_STEP_MASKED, leaks)
    for name, method in PROMPT_METHODS.items():
        for setup in training_setups(epsilon):
            model = victims.image_classifier()
            changes = first_round_changes(setup.apply(method), model, images, setup.train_arguments)
            sent = {param.kind for change in changes for param in change}
            leaks = tuple(PartLeak(part, part in sent) for part in PARTS)
            yield UpdateLeak(name, setup.name, leaks)


def make_text_model(dropout: float = 0.0) -> nn.Module:
    """The attacked text classifier, with random weights; only `dropout` differs between calls."""
    return victims.text_classifier(
        vocabulary=VOCABULARY,
        width=WIDTH,
        blocks=BLOCKS,
        length=LENGTH,
        spread=0.05,
        dropout=dropout,
    )


def first_round_changes(
    method: Method, model: nn.Module, data: Sequence[Examples], train_arguments: TrainArguments
) -> list[dict[Param, Tensor]]:
    """Train one round of a method; return each client's update minus the round's initial values.

    data: the examples of each client; results are in the same order. Uses a temporary folder.
    Changes `model`: `method.adapt`, if any, may change it or make another model of it, and the
    resulting model is trained in place.
    """
    if method.adapt is not None:
        with fork_rng_state(seed=seeds.seed("leaks", "adapt")):
            model = method.adapt(model)
    agreement = Agreement("leaks", describe(model), method, train_arguments)
    clients = {f"client-{i}": examples for i, examples in enumerate(data)}
    with TemporaryDirectory() as folder:
        federation = Federation(
            agreement,
            model,
            clients,
            victims.classification_loss,
            Path(folder),
            rounds=1,
            keep_replies=True,
        )
        round_state = federation.run_round()
        requests = {name: request.name for name, request in round_state.cohort.items()}
        replies = [federation.clients[name].journal.reply_for(requests[name]) for name in clients]
    start = federation.server.start
    return [
        {p: values[p.key] - start[p.key] for p in agreement.params if p.key in values}
        for values in (reply[0] for reply in replies if reply is not None)
    ]


def masked_changes(changes: Sequence[Change]) -> list[dict[Param, Tensor]]:
    """Mask changes by the secure aggregation protocol, and read the masked inputs as changes.

    The result is the server's view of each client: uniformly random numbers. Needs two or more
    changes, all of the same params. Stops the protocol before anything is unmasked.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedplan.secagg.client import ProtocolClient
    from fedplan.secagg.crypto import node_public_key
    from fedplan.secagg.masks import GroupVector
    from fedplan.secagg.progress import MemoryProgressStore
    from fedplan.secagg.server import ProtocolServer
    from fedplan.secagg.terms import Slot, Terms, group_slots

    slots = tuple(Slot(param.key, param.numel) for param in changes[0])
    names = [f"client-{number:04}" for number in range(len(changes))]
    terms = Terms("leaks", "", "", 1, "", len(names) // 2 + 1, 2, slots)
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    directory = {name: node_public_key(key) for name, key in keys.items()}
    clients = {
        name: ProtocolClient(name, keys[name], directory, MemoryProgressStore()) for name in names
    }
    server, masked = ProtocolServer(terms, directory), list[dict[Param, Tensor]]()
    for client in clients.values():
        server.accept_advert(client.advertise_keys(terms, [slot.name for slot in slots]))
    for client in clients.values():
        server.accept_shares(client.share_secrets(server.roster()))
    (group,) = group_slots(terms, {name: [slot.name for slot in slots] for name in names})
    for name, change in zip(names, changes, strict=True):
        # The weighted change in whole steps of the grid, as 64-bit words.
        steps = {p.key: v.double().flatten() * (EXAMPLES / GRID) for p, v in change.items()}
        integers = {key: v.round().to(torch.int64).numpy() for key, v in steps.items()}
        numbers = {key: v.view(np.uint64) for key, v in integers.items()}
        message = clients[name].mask_input(server.shares_for(name), numbers, EXAMPLES)
        words = GroupVector.from_bytes(group, message.vectors[group.name]).numbers(group)
        signed = {p: torch.from_numpy(words[p.key].view(np.int64).copy()) for p in change}
        masked.append(
            {p: (v.double() * (GRID / EXAMPLES)).view(p.shape) for p, v in signed.items()}
        )
    return masked


class CuriousServer:
    """An honest but curious server that knows the model and infers tokens from clients' changes.

    model: made by `make_text_model`; inputs of the model's layers are computed once and cached.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._words = torch.arange(victims.FIRST_WORD, VOCABULARY)
        self._inputs: dict[str, Tensor] = {}

    def recover_tokens(
        self, part: Kind, changes: Sequence[Change], words: Sequence[set[int]]
    ) -> PartLeak:
        """Guess each client's tokens from one part of the client's change; return the recall.

        words: the true tokens of each client, in the order of `changes`; the server guesses as many
        tokens as the client has. Of the part, the matrix of the first block that was sent is
        attacked (of embeddings, the token table); clients that did not send one are left out.
        """
        recalls, blocks = list[float](), set[int]()
        for change, true_words in zip(changes, words, strict=True):
            matrices = [p for p in change if p.kind is part and len(p.shape) == 2]
            if part is Kind.EMBED:
                matrices = [p for p in matrices if p.shape[0] == VOCABULARY]
            if matrices:
                param = min(matrices, key=lambda p: p.block or 0)
                scores = self._scores(param, change[param])
                indices = {word - victims.FIRST_WORD for word in true_words}
                recalls.append(top_scores_recall(scores, indices))
                blocks |= {param.block or 0}
        if not recalls:
            return PartLeak(part, sent=False)
        error = stdev(recalls) / sqrt(len(recalls)) if len(recalls) > 1 else 0.0
        return PartLeak(part, True, fmean(recalls), error, tuple(sorted(blocks)))

    def _scores(self, param: Param, change: Tensor) -> Tensor:
        """Score each token from FIRST_WORD on: high if the token explains the change of a param.

        The score is the norm of the token's row of embeddings; of other params, the highest
        `span_scores` over the positions of a text.
        """
        if param.kind is Kind.EMBED:
            return row_norms(change)[self._words]
        layer = param.name.rpartition(".")[0]
        if layer not in self._inputs:
            self._inputs |= single_token_inputs(self._model, [layer], self._words, LENGTH)
        return span_scores(change, self._inputs[layer]).amax(0)
