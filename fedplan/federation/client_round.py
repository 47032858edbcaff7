# SPDX-License-Identifier: Apache-2.0
"""A client's work in one round: it scores layers, and trains by its own copy of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    charge_answer,
    client_turn,
    join_bits,
    known_personal_bits,
    last_trained_round,
    load_start_values,
    make_probe_input,
    receive_request,
    received_digests,
    require_same_start,
)
from fedplan.federation.ledger.digests import combine_digests, keyed_digest, model_digest
from fedplan.federation.ledger.egress import Answer
from fedplan.federation.ledger.records import TurnRecord, join_digests, role_letters
from fedplan.federation.messages import Request, RequestRefused, Update, turn_digest
from fedplan.language.plan import Best, Role, Roles
from fedplan.language.predicates import Turn
from fedplan.language.resolution import candidate_blocks, permitted_roles
from fedplan.models.params import Block
from fedplan.models.values import (
    copy_buffers,
    get_values,
    require_unchanged_buffers,
    restore_buffers,
    set_values,
)
from fedplan.privacy.mechanisms.clipping import capped_weight
from fedplan.privacy.mechanisms.vote import make_ballot
from fedplan.storage.journal import Journal
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors, all_finite, nbytes, only_aux, same_bits, split_aux
from fedplan.training.fit import FitResult, Job
from fedplan.training.probes import is_data_independent, random_probe

WEIGHT, BASE, TURN = "weight_sent", "base_digests", "turn_digest"
"""Extra keys of a stored reply under secure aggregation, removed from the ledger's line: the
client's weight, digests of the values it started from, and the digest of the request's turn."""


def train_round(
    agreement: Agreement, client: Client, request: Request, *, copy: bool = True
) -> Update:
    """Train a client's model for one round by the plan of the agreement; return the update.

    If the journal has a stored reply to the request, that reply is returned and nothing is trained;
    the account is charged for the bytes. Otherwise the client's new state and the reply are
    committed to the journal, unless it is optional and there is no state. With `copy=False` the
    update may share memory with the model, and is valid until the client's next round. Raises
    RequestRefused or ClientStateMissing for an invalid request, OutdatedClientState if files are
    lost, RequestRefused for a limit of the account, PrivacyError for the privacy budget, and
    FedplanError if the training breaks the plan. Then the journal is not changed, but the client
    may have received values, changed its model, and charged account and budget.
    """
    with deterministic(client.setup.deterministic):
        reply = client.journal.reply_for(request.name)
        client_state, notes = client.state(request, "" if reply else request.name)
        receive_request(agreement, client, request, notes)
        if reply:
            values, line = reply
            answer = Answer("update", request.name, "", nbytes(values))
            charge_answer(client.privacy, answer)
        else:
            values, line = _train(agreement, client, request, client_state, notes, copy=copy)
    compressed, aux = split_aux(values, agreement.method.aux)
    line = dict(line)
    digest, weight = agreement.fingerprint, line.pop(WEIGHT, line["weight"])
    for key in (BASE, TURN):
        line.pop(key, None)
    return Update(client.name, request.name, digest, compressed, weight, line, aux)


def _train(
    agreement: Agreement,
    client: Client,
    request: Request,
    client_state: Tensors,
    notes: Mapping[str, Any],
    *,
    copy: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train the round of a new request by the agreement; commit the result to the client's journal.

    `client_state`, `notes`: values and notes in the journal. `copy`: whether tensors are copied out
    of the model. Returns the reply's tensors (compressed update and auxiliary tensors) and the
    ledger line. Raises RequestRefused if this round or a later one was trained before.
    """
    if (last := last_trained_round(notes)) >= request.turn.round:
        raise RequestRefused(
            f"{client.name} has trained round {last} of this run, and the request is for round "
            f"{request.turn.round}: the server has lost its state; restore a copy, or start "
            "another run"
        ).with_code("past-round")
    budget_guard, model = client.privacy.budget_guard, client.setup.model
    if budget_guard is not None:
        budget_guard.require_charge_count(notes.get("charges", 0))
    turn, buffers = client_turn(client, request), copy_buffers(model)
    secagg, method = agreement.secagg.active, agreement.method
    base_digests = received_digests(agreement, client, turn, client_state) if secagg else {}
    if request.base_digests:
        require_same_start(client, request, base_digests)  # before training stores anything
    before = load_start_values(agreement, client, turn, client_state)
    if agreement.selects_blocks(turn):
        scores = request.turn.scores
        if not method.joint_choice:
            scores = method.probe(make_probe_input(agreement, client, turn)) or scores
        turn = replace(turn, scores=scores)
    roles = agreement.resolved(turn)
    started = StartedTurn(agreement, client, request, turn, roles, before, client_state)
    try:
        result = started.fit()
        if client.privacy.contained_fault is not None:
            restore_buffers(model, buffers)  # an error would reveal that an example changed them
        require_unchanged_buffers(model, buffers)
    except BaseException:
        restore_buffers(model, buffers)  # a site's next turn would start from the changed ones
        raise
    after = get_values(model, agreement.trainable, copy=copy)
    old_digests = notes.get("digests", {})
    digests = started.param_digests(after, old_digests)
    compressed, weight = started.compress(after, digests[1])
    reply = {**compressed, **result.aux}
    line = started.ledger_line(digests, result, weight, nbytes(reply))
    personal = {p.key: after[p.key] for p in agreement.trainable if roles[p].is_personal}
    # Ledger lines that the server has not received yet, and params that became personal, by round.
    missed = [
        each for each in notes.get("ledger_lines", []) if each["round"] > request.last_update_round
    ]
    personal_bits = known_personal_bits(request, notes)
    if new_bits := agreement.personal_bits(turn) & ~join_bits(personal_bits):
        personal_bits |= {str(turn.round): hex(new_bits)}
    new_notes: dict[str, Any] = {
        "digests": {**old_digests, **{key: digests[1][key] for key in personal}},
        "ledger_lines": [*missed, line],
        "personal_bits": personal_bits,
    }
    if budget_guard is not None:
        new_notes["charges"] = len(budget_guard.budget.charges)
    line = line | {"missed": missed}
    if secagg:
        line |= {WEIGHT: weight, BASE: base_digests, TURN: turn_digest(request.turn)}
    replaced = personal.keys() | result.memory.keys()
    unchanged = {key: value for key, value in client_state.items() if key not in replaced}
    new_state = {**unchanged, **personal, **result.memory}
    if new_state or not client.journal.optional:
        client.journal.commit(request.name, new_state, new_notes, reply, line)
    return reply, line


@dataclass(frozen=True)
class StartedTurn:
    """A turn that a client has started, with all that its reply is computed from.

    `turn`: the request's turn with the client's own traits, and with scores if the plan needs them.
    `roles`: resolved roles of the turn. `before`: start values of the agreement's trainable params,
    with the personal ones. `client_state`: values in the client's journal, with the memory of
    client hooks.
    """

    agreement: Agreement
    client: Client
    request: Request
    turn: Turn
    roles: Roles
    before: Tensors
    client_state: Tensors

    @property
    def content(self) -> str:
        """The SHA-256, in hex, of all inputs of the reply, to tell a repeated reply from another.

        "" if the client has neither a guard of example-level DP nor an account. Read before
        training. Covers the agreement, round and phase, the client's name, traits and examples, the
        roles, and the model's structure, config and buffers. Does not read the params in the model;
        their values are those of `before` and the initial values of all other params. Also covers
        the received auxiliary tensors and the memory of client hooks.
        """
        client, turn = self.client, self.turn
        if client.privacy.guard is None and client.privacy.account is None:
            return ""
        # Full digests: the server chooses the values, and must not find two values with one digest,
        # whose answers would share their noise.
        aux, memory = only_aux(client.received), only_aux(self.client_state)
        study = [self.agreement.experiment, self.agreement.text]
        request = [turn.round, turn.phase, client.name, client.traits, role_letters(self.roles)]
        data = [client.examples_digest(), len(client.examples), model_digest(client.setup.model)]
        full_digest, initial = client.setup.digests.full_digest, client.setup.initial.digests
        frozen = {key: digest for key, digest in initial.items() if key not in self.before}
        tensors = (self.before, aux, memory)
        digests = [{k: full_digest(v) for k, v in each.items()} for each in tensors]
        return combine_digests(study, request, data, [frozen, *digests])

    def fit(self) -> FitResult:
        """Charge the client's account, then train the client's model in place.

        Trains by DP-SGD under example-level DP, which also charges the privacy budget; else by the
        fit of the agreement's method. At a site with a privacy budget, an error of training is
        logged, and the result is that of a client without examples. Raises PrivacyError if the
        privacy budget does not allow the turn, RequestRefused if the account's limits do not; both
        before any training.
        """
        agreement, client, turn = self.agreement, self.client, self.turn
        name, content = self.request.name, self.content
        setup, privacy = client.setup, client.privacy
        if privacy.guard is not None:
            privacy.guard.require_affordable_turn(turn.round, name, content)
        if privacy.noise_guard is not None:
            privacy.noise_guard.require_affordable_round(turn.round, name)
        if privacy.account is not None:
            charge_answer(privacy, Answer("update", name, content, self.planned_upload))
        cached = agreement.train_arguments.cache_activations
        job = Job(
            model=setup.model,
            roles=self.roles,
            examples=client.examples,
            loss=setup.loss,
            train_arguments=agreement.train_arguments,
            seed=seeds.seed(agreement.experiment, "fit", turn.round, client.name),
            start=self.before,
            aux=only_aux(client.received),
            memory=only_aux(self.client_state),
            traits=client.traits,
            round=turn.round,
            activation_cache=setup.activation_cache,
            examples_digest=client.examples_digest() if cached else "",
            client=client.name,
        )
        trial, report_fault = setup.trial_examples, privacy.contained_fault
        if privacy.guard is not None:
            private_fit = privacy.guard.make_fit(
                turn.round, name, content, trial=trial, report_fault=report_fault
            )
            return private_fit(job)
        fit = agreement.method.fit
        try:
            return (setup.spread(fit) if setup.spread else fit)(job)
        except Exception as error:
            if report_fault is None:
                raise
            report_fault(error)
            # Its share of the sum is noise alone.
            set_values(setup.model, self.before, agreement.trainable)
            return FitResult(loss=nan, steps=0)

    @property
    def planned_upload(self) -> int:
        """Bytes of the params that the client sends in the turn, by the plan."""
        sent = self.agreement.sent_params(self.request.turn, self.roles)
        return sum(map(self.agreement.upload_bytes, sent))

    def param_digests(
        self, after: Tensors, stored: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests of all params by key: (before the turn, after the turn).

        `after`: values after training. `stored`: digests of personal values in the journal, taken
        for params with a personal role. Under distributed DP the new digest of a trained personal
        param ends with the round's number, so that it always differs. Raises FedplanError if a
        param changed without a trained role.
        """
        agreement, setup, before = self.agreement, self.client.setup, self.before
        old, new = dict(setup.initial.short_digests), dict(setup.initial.short_digests)
        digest = setup.digests.short_digest
        for p in agreement.trainable:
            key, role = p.key, self.roles[p]
            if before[key] is not setup.start.get(key):
                is_stored = role.is_personal and key in stored
                old[key] = stored[key] if is_stored else digest(before[key])
            new[key] = digest(after[key]) if role.is_trained else old[key]
            if agreement.distributed_dp and role.is_trained and role.is_personal:
                # Always another digest: an unchanged one would reveal a client without examples.
                new[key] += f" {self.turn.round}"
            if not role.is_trained and not same_bits(before[key], after[key]):
                raise FedplanError(
                    f"{key} is {role.name} and changed: the fit broke the plan"
                ).with_code("training")
        for p in setup.initial.changed_params(setup.model, agreement.frozen):
            raise FedplanError(
                f"{p.key} is trained by no turn of the plan, and changed: a training loop may "
                "change only trainable_params.parameters()"
            )
        return old, new

    def compress(self, after: Tensors, digests: dict[str, str]) -> tuple[dict[str, Tensor], int]:
        """Return (compressed values of the params with role SHARE, weight of the client).

        `after`: values after training. The weight is the number of examples, or 1 under the
        agreement's differential privacy or equal weights. If the guarantee has a `max_weight`, a
        cap, changes are scaled by the number of examples, at most the cap, divided by the cap.
        Changes `digests`: a param with a sent value other than the trained one gets the digest of
        the sent value. Under the agreement's distributed DP an update that is not finite is
        replaced by an unchanged one.
        """
        agreement, client, before = self.agreement, self.client, self.before
        guarantee = agreement.guarantee
        trained = {p.key: after[p.key] for p in agreement.trainable if self.roles[p] is Role.SHARE}
        changes = (value - before[key] for key, value in trained.items())
        if agreement.distributed_dp and not all(map(all_finite, changes)):
            trained = {key: before[key] for key in trained}  # so that divergence is not revealed
        weight = 1 if guarantee or agreement.equal_weights else len(client.examples)
        if guarantee is not None and guarantee.max_weight:
            fraction = capped_weight(len(client.examples), guarantee.max_weight)
            trained = {k: torch.lerp(before[k], value, fraction) for k, value in trained.items()}
        generator = seeds.generator(agreement.experiment, "wire", self.turn.round, client.name)
        base = {key: before[key] for key in trained}
        compressed = agreement.method.compression.encode(trained, base, generator)
        sent = agreement.method.compression.decode(compressed, base)
        # Digests of the trained values would reveal what compression or the weight removed.
        changed = {k: v for k, v in sent.items() if v.data_ptr() != after[k].data_ptr()}
        digests.update({k: client.setup.digests.short_digest(v) for k, v in changed.items()})
        return compressed, weight

    def ledger_line(
        self,
        digests: tuple[dict[str, str], dict[str, str]],
        result: FitResult,
        weight: int,
        upload: int,
    ) -> dict[str, Any]:
        """Return the ledger line (JSON of a TurnRecord) of the trained turn.

        `digests`: result of `param_digests`; digests of personal params are written as keyed
        hashes, so that a change shows, but a value cannot be guessed. `result`: steps and loss.
        `upload`: bytes of the reply. Under the agreement's differential privacy or secure
        aggregation no number depends on the examples: steps as configured, no loss. Under secure
        aggregation also the weight is 1, the upload is the planned one, and the digests of shared
        params after training are keyed hashes that include the round's number. Raises FedplanError
        as `_scores_of_choice`.
        """
        agreement, client, turn, roles = self.agreement, self.client, self.turn, self.roles
        masked = agreement.secagg.active
        personal = {p.key for p in roles if roles[p].is_personal}
        shared = {p.key for p in roles if masked and roles[p] is Role.SHARE}
        old, new = digests
        # Unkeyed, a server could test a guess of a value by sending it as the next global value.
        new = {k: f"{digest} {turn.round}" if k in shared else digest for k, digest in new.items()}
        before, after = (
            {
                p.key: keyed_digest(client.digest_key, p.key, by_key[p.key])
                if p.key in keyed
                else by_key[p.key]
                for p in roles
            }
            for by_key, keyed in ((old, personal), (new, personal | shared))
        )
        private, scores = masked or agreement.guarantee is not None, turn.scores or {}
        if masked:
            scores, upload = _scores_of_choice(agreement, turn, roles), self.planned_upload
        shows_loss = isfinite(result.loss) and not private and not client.privacy.hide_loss
        return TurnRecord(
            round=turn.round,
            client=client.name,
            phase=turn.phase,
            traits=client.traits,
            roles=role_letters(roles),
            before=join_digests(agreement.params, before),
            after=join_digests(agreement.params, after),
            download_bytes=sum(agreement.download_bytes[key] for key in self.request.versions),
            upload_bytes=upload,
            weight=1 if masked else weight,
            steps=agreement.train_arguments.steps if private else result.steps,
            loss=result.loss if shows_loss else None,
            scores=tuple((b.stack, b.number, s) for b, s in scores.items()) if scores else None,
            full=self.request.full,
        ).json()


def _scores_of_choice(agreement: Agreement, turn: Turn, roles: Roles) -> dict[Block, float]:
    """Return block scores that choose the same blocks as the turn's scores, and reveal no more.

    Each block's new score is the number of `best(k)` steps, among the plan's active steps in the
    turn, that choose the block. Joint scores are returned as they are; {} without scores. Raises
    FedplanError if the new scores give the params other roles than `roles`, which is possible if
    the plan has several `best` steps.
    """
    scores = turn.scores or {}
    if not scores or agreement.method.joint_choice:
        return dict(scores)
    steps = [s for s in agreement.method.plan.active_steps(turn) if isinstance(s, Best)]
    candidates = [candidate_blocks(step, agreement.params) for step in steps]
    ballots = [
        make_ballot({block: scores[block] for block in blocks}, step.count)
        for step, blocks in zip(steps, candidates, strict=True)
    ]
    counts = {block: float(sum(block in ballot for ballot in ballots)) for block in scores}
    if agreement.resolved(replace(turn, scores=counts)) != roles:
        raise FedplanError(
            "the chosen blocks cannot be reported without their scores, which secure aggregation "
            "must not reveal: use one best(...), or choose together"
        ).with_code("plan")
    return counts


def keep_rejected_turn(journal: Journal, update: Update) -> None:
    """Store the ledger line of an update that the server rejected, for the client's next update.

    Only an optional journal needs it: any other one has the line already.
    """
    if journal.optional:
        line = update.ledger_line
        lines: list[Any] = [*line["missed"], {**line, "missed": []}]
        journal.commit(update.request_name, {}, {"ledger_lines": lines}, {}, {})


def score_layers(agreement: Agreement, client: Client, request: Request) -> Mapping[Block, float]:
    """Return a score of each block for a joint choice of layers, or votes on blocks in a DP vote.

    Scores are those of the agreement's probe. Votes are 1 for the `max_k` blocks of the highest
    scores, else 0; under example-level DP the noisy number of examples that vote for the block.
    Stores the global values of the request at the client, loads start values into the model, and
    charges the client's account; a vote under example-level DP also the privacy budget. The start
    values have no personal ones if the client's policy forbids to evaluate the personal model.
    Raises RequestRefused if this round has no joint choice of layers, if differential privacy
    covers no scores in this round, or for a limit of the account; PrivacyError if the budget does
    not allow the vote; and as `receive_request`.
    """
    guarantee, method = agreement.guarantee, agreement.method
    votes = guarantee is not None and bool(guarantee.vote_noise_multiplier)
    with deterministic(client.setup.deterministic):
        state, notes = client.state(request, request.name)
        receive_request(agreement, client, request, notes)
        turn = client_turn(client, request)
        if guarantee is not None and votes:
            allowed = guarantee.is_voting_round(turn.round)
        else:
            private = guarantee is not None and not is_data_independent(method.probe)
            allowed = agreement.selects_blocks(turn) and not private
        if not method.joint_choice or not allowed:
            raise RequestRefused(
                f"{client.name} was asked for layer scores in round {turn.round}, where its plan "
                "makes no joint choice or no privacy budget covers it"
            ).with_code("no-scoring")
        # Many scores reveal personal values, as metrics do.
        personal = state if client.privacy.metric_policy.personal else {}
        start = load_start_values(agreement, client, turn, personal)
        probe_input = make_probe_input(agreement, client, turn)
        roles = permitted_roles(method.plan, agreement.params, turn)
        content = StartedTurn(agreement, client, request, turn, roles, start, state).content
        guard = client.privacy.guard
        if guard is not None and votes:
            guard.require_affordable_round(turn.round, request.name)
        answer = Answer("scores", request.name, content, 8 * len(agreement.blocks))
        probe, max_k = method.probe, agreement.max_k
        charge_answer(client.privacy, answer, without_data=is_data_independent(probe))
        if not votes:
            return probe(probe_input)
        if guard is not None:
            report_fault = client.privacy.contained_fault
            return guard.release_votes(
                probe_input, probe, max_k, request.name, content, report_fault
            )
        # A client without examples votes at random, so that this is not revealed.
        block_scores = (probe if len(client.examples) else random_probe)(probe_input)
        chosen = make_ballot(block_scores, max_k)
        return {block: float(block in chosen) for block in probe_input.blocks}
