# SPDX-License-Identifier: Apache-2.0
"""A site's endpoint in a run: answers the server's requests and logs all that leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import score_layers, train_round
from fedplan.federation.evaluation import evaluate_client, metrics_to_json
from fedplan.federation.identity import is_run_id
from fedplan.federation.ledger.egress import (
    AGREEMENT,
    EVALUATION,
    KEYS,
    LOW_ENTROPY_KINDS,
    SCORES,
    SHARES,
    SIGNATURE,
    UNMASKING,
    UPDATE,
    Authorization,
    EgressEntry,
    EgressLog,
    content_digest,
    error_entry,
)
from fedplan.federation.ledger.faults import FaultLog, error_fields
from fedplan.federation.ledger.records import ROLE_BY_LETTER
from fedplan.federation.messages import (
    Request,
    RequestRefused,
    block_scores_to_json,
    local_versions,
    read_request,
    read_run_id,
    update_message,
)
from fedplan.secagg.config import MASKED_INPUT_STEP, SECAGG_STEPS
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder, write_if_changed
from fedplan.storage.journal import Journal
from fedplan.storage.store import Store
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes, param_key
from fedplan.tensors.serialization import JSON, pack_message, unpack_message

if TYPE_CHECKING:
    from fedplan.federation.secure_client import SecAggClient

HELLO, POLL, TRAIN, EVALUATE = "hello", "poll", "train", "evaluate"
"""Kinds of requests; the steps of secure aggregation are further kinds."""
COMMITTED_ROUND, EVALUATED_ROUND = "committed_round", "evaluated_round"
"""Fields of a hello: the last round that the server has committed, and of which it has scores."""
RECEIVED = "received"
"""Folder in a site's run folder with the global values last received."""
STEP_KINDS: dict[str, str] = dict(
    zip(SECAGG_STEPS, (SHARES, UPDATE, SIGNATURE, UNMASKING), strict=True)
)
"""Kind in the egress log of the answer to each step of secure aggregation."""


class Endpoint:
    """A site (client with local files) in one run; turns the server's messages into replies.

    Independent of the transport: call `answer` for each message, one at a time. `site`: the client.
    `folder`: the site's folder of the study; the attribute `folder` is the run's subfolder
    (`site_run_folder`), where the global values last received are stored. Both are created, and
    each gets a file AGREEMENT with the settings. `egress`: log of everything that leaves, default
    in `folder`. `faults`: error log, default in `folder`; `site` reports errors of private work
    there, and answers all the same. `authorization`: study, server and
    approver, logged with each reply; callers may replace the attribute. `secagg_client`: the site's
    side of secure aggregation; None refuses requests that need one.
    """

    def __init__(
        self,
        agreement: Agreement,
        site: Client,
        folder: Path,
        *,
        faults: FaultLog | None = None,
        egress: EgressLog | None = None,
        authorization: Authorization | None = None,
        secagg_client: SecAggClient | None = None,
    ) -> None:
        self.agreement, self.site = agreement, site
        self.folder = site_run_folder(folder, agreement.run)
        self.secagg_client = secagg_client
        self.egress = egress or EgressLog(folder)
        self.authorization = authorization or Authorization()
        self.faults = faults or FaultLog(folder, site.journal.encryption)
        site.privacy = replace(site.privacy, report_fault=self.faults.append)
        self.received_store, self._checkpoint = self._open_store(), 0
        method, account = agreement.method, site.privacy.account
        guard = site.privacy.guard
        votes = guard is not None and guard.guarantee.vote_noise_multiplier
        fields = {
            "site": site.name,
            "experiment": agreement.experiment,
            "plan": method.plan.text,
            "model": agreement.start,
            "fingerprint": agreement.fingerprint,
            "compression": method.compression.text,
            "traits": site.traits,
            "limits": asdict(account.limits) if account else {},
            "account": str(account.folder.absolute()) if account else "",
            "run": agreement.run,
            "prefix": agreement.request_prefix,
            **({"peers": secagg_client.peer_key_digests} if secagg_client is not None else {}),
            # Votes are charged; other scores of a private study need no examples.
            **({"votes": True} if votes else {}),
        }
        for path in (folder, self.folder):
            make_folder(path)
            write_if_changed(path / AGREEMENT, json.dumps(fields, indent=1))
        self._kinds = {p.key: str(p.kind) for p in agreement.params}

    def answer(self, kind: str, message: Message) -> Message:
        """Handle a message of the server and return the reply, after logging the reply.

        `kind`: HELLO, POLL, TRAIN, EVALUATE or a step of SECAGG_STEPS. An Exception is not raised:
        the fault log gets the traceback, and the reply has only the error code.
        """
        handlers = {step: partial(self._secagg_step, step) for step in SECAGG_STEPS}
        handlers |= {HELLO: self._hello, POLL: self._poll}
        handlers |= {TRAIN: self._train, EVALUATE: self._evaluate}
        try:
            if kind not in handlers:
                raise RequestRefused(
                    f"{self.site.name} does not know the request {kind[:40]!r}"
                ).with_code("unknown-request")
            self._load_received()
            return handlers[kind](message)
        except Exception as error:
            code, agreed = self.faults.append(error), self.agreement
            answer = pack_message({}, {**error_fields(code)})
            entry = error_entry(
                code, answer, site=self.site.name, experiment=agreed.experiment, run=agreed.run
            )
            with suppress(FedplanError):  # the server gets the code, if the log is damaged
                self.egress.append(entry, self.authorization)
            return answer

    def _hello(self, message: Message) -> Message:
        """Reply to a hello message with what identifies the site and its agreement.

        That is the site's name, traits and package versions, the agreement's fingerprint, initial
        model and run, the head of the egress log, and under secure aggregation the site's public
        key; secrets of secure aggregation are erased up to the committed round in the message. If
        the agreement has a run id, raises RequestRefused if the message has another one, and
        SerializationError if the message has none.
        """
        fields: dict[str, JSON] = {
            "client": self.site.name,
            "agreement": self.agreement.fingerprint,
            "start": self.agreement.start,
            "run": self.agreement.run,
            "traits": dict(self.site.traits),
            "egress_head": self.egress.head.sha256,
            "versions": dict(local_versions()),
        }
        if self.agreement.run and (run := read_run_id(message)) != self.agreement.run:
            raise RequestRefused(
                f"{self.site.name} is in run {self.agreement.run}, not in {run}"
            ).with_code("another-study")
        if self.agreement.secagg.active:
            fields["node_key"] = self._require_secagg_client().public_key.hex()
            progress = unpack_message(Message(message.header))[1]
            self._erase_secrets(progress.get(COMMITTED_ROUND), progress.get(EVALUATED_ROUND))
        return self._log_answer(Message(pack_message({}, fields).header), HELLO, None, {})

    def _poll(self, message: Message) -> Message:
        """Score the layers for a request message; reply with the scores.

        Under secure aggregation the reply is a key advert, and the scores follow masked.
        """
        request, before = read_request(message), self.site.received_versions
        self._erase_secrets(request.turn.round - 1, request.turn.round - 1)
        scores = score_layers(self.agreement, self.site, request)
        self._store_received(before)
        if self.agreement.secagg.active:
            advert = self._require_secagg_client().advertise_scoring(request, scores)
            return self._log_answer(pack_message({}, {"advert": advert}), KEYS, request, {})
        answer = pack_message({}, {"scores": block_scores_to_json(scores)})
        return self._log_answer(answer, SCORES, request, {})

    def _train(self, message: Message) -> Message:
        """Train the round of a request message; reply with the update.

        Under secure aggregation the reply is the ledger line and a key advert, without values.
        """
        request, before = read_request(message), self.site.received_versions
        self._erase_secrets(request.turn.round - 1, request.turn.round - 1)
        update = train_round(self.agreement, self.site, request, copy=False)
        self._store_received(before)
        if self.agreement.secagg.active:
            advert = self._require_secagg_client().advertise_round(request, update)
            record = replace(update, values={}, aux={}, weight=1)
            return self._log_answer(update_message(record, advert), KEYS, request, {})
        parts = dict[str, int]()
        for key, value in {**update.values, **update.aux}.items():
            kind = self._kinds[param_key(key)]
            parts[kind] = parts.get(kind, 0) + nbytes({key: value})
        return self._log_answer(update_message(update), UPDATE, request, parts)

    def _erase_secrets(self, committed: object, evaluated: object) -> None:
        """Erase the secrets of secure aggregation up to the round that the server has committed.

        Those of evaluations up to the round `evaluated`, of which the server has the scores.
        Anything but whole numbers is ignored.
        """
        if self.secagg_client is not None and type(committed) is int:
            self.secagg_client.erase_until(committed, evaluated if type(evaluated) is int else 0)

    def _require_secagg_client(self) -> SecAggClient:
        """Return `secagg_client`; raise RequestRefused if None."""
        if self.secagg_client is None:
            raise RequestRefused(
                f"{self.site.name} takes no part in secure aggregation: its site.toml has no "
                "peer_keys"
            ).with_code("peer-keys")
        return self.secagg_client

    def _secagg_step(self, step: str, message: Message) -> Message:
        """Reply to a message of one step of secure aggregation (one of SECAGG_STEPS).

        In the egress log only masked inputs count as bytes of values. Raises RequestRefused for
        another run, and if the site takes no part in secure aggregation.
        """
        secagg_client = self._require_secagg_client()
        if read_run_id(message) != self.agreement.run:
            raise RequestRefused(f"{self.site.name} is in another run").with_code("another-study")
        summed, parts = secagg_client.sum_kind(message), dict[str, int]()
        answer = secagg_client.answer(step, message)
        is_input = step == MASKED_INPUT_STEP
        for param in secagg_client.shared_params if is_input and summed == "round" else ():
            kind = self._kinds[param.key]
            parts[kind] = parts.get(kind, 0) + self.agreement.upload_bytes(param)
        input_kinds = {"scoring": SCORES, "evaluation": EVALUATION}
        kind = input_kinds.get(summed, STEP_KINDS[step]) if is_input else STEP_KINDS[step]
        return self._log_answer(answer, kind, None, parts, secagg_client.round_and_sites(summed))

    def _evaluate(self, message: Message) -> Message:
        """Answer with the metrics of the global and the personal model, or with score counts.

        Under secure aggregation the reply is a key advert, and the counts follow masked.
        """
        request, before = read_request(message), self.site.received_versions
        scores = evaluate_client(self.agreement, self.site, request)
        self._store_received(before)
        if isinstance(scores, list) and self.agreement.secagg.active:
            advert = self._require_secagg_client().advertise_evaluation(request, scores)
            return self._log_answer(pack_message({}, {"advert": advert}), KEYS, request, {})
        fields: dict[str, JSON]
        if isinstance(scores, list):
            fields = {"counts": [*scores]}
        else:
            fields = {"scores": metrics_to_json(scores)}
        return self._log_answer(pack_message({}, fields), EVALUATION, request, {})

    def _log_answer(
        self,
        answer: Message,
        kind: str,
        request: Request | None,
        parts: Mapping[str, int],
        sum_sites: tuple[int, tuple[str, ...]] | None = None,
    ) -> Message:
        """Append `answer`, a reply, to the egress log, then return the same reply.

        `kind`: kind of log entry. `request`: the server's request, None if the message was no
        Request. `parts`: bytes of values by kind of param. `sum_sites`: under secure aggregation,
        the round and the sites of the sum. Raises StoreError if the log cannot be written.
        """
        upload = sum(parts.values())
        key = self.site.digest_key if kind in LOW_ENTROPY_KINDS else b""
        entry = EgressEntry(
            kind,
            self.site.name,
            self.agreement.experiment,
            self.agreement.run,
            content=content_digest(answer, key),
            upload_bytes=upload,
            other_bytes=answer.nbytes - upload,
            parts=dict(parts),
        )
        if request is not None:
            turn, name = request.turn, request.name
            entry = replace(entry, request=name, round=turn.round, phase=turn.phase)
            entry = replace(entry, download_bytes=request.nbytes)
        if sum_sites is not None:
            number, clients = sum_sites
            name = self.agreement.request_name(number, self.site.name)
            entry = replace(entry, request=name, round=number, clients=clients)
        self.egress.append(entry, self.authorization)
        return answer

    def _load_received(self) -> None:
        """Load the global values last received into the client, if the disk has newer ones.

        Damaged files are deleted, and the client then has no values, so that the server sends all
        values again. Raises StoreError, and deletes nothing, if the encryption key is wrong.
        """
        if max(self.received_store.numbers(), default=0) == self._checkpoint:
            return
        try:
            checkpoint = self.received_store.read_newest()
        except StoreError:
            self.site.journal.client_state()  # raises if the key is wrong: then nothing is deleted
            shutil.rmtree(self.folder / RECEIVED)
            self.received_store, checkpoint = self._open_store(), None
        self._checkpoint = checkpoint.number if checkpoint else 0
        self.site.received = checkpoint.tensors if checkpoint else {}
        self.site.received_versions = dict(checkpoint.meta["versions"]) if checkpoint else {}

    def _open_store(self) -> Store:
        return Store(self.folder / RECEIVED, keep=1, encryption=self.site.journal.encryption)

    def _store_received(self, before: Mapping[str, int]) -> None:
        """Write the received global values to disk, if their versions differ from `before`."""
        versions = self.site.received_versions
        if versions != before:
            self._checkpoint = max(self.received_store.numbers(), default=0) + 1
            meta = {"versions": versions}
            self.received_store.write(self.site.received, meta, number=self._checkpoint)


def site_run_folder(folder: Path, run: str) -> Path:
    """Return the subfolder of a run in a site's folder of a study; `folder` itself if run is ""."""
    return folder / run if run else folder


def only_run_folder(folder: Path) -> Path:
    """Return the only run folder in a site's folder of a study; `folder` itself if there is none.

    Raises FedplanError if there are several runs, and OSError if `folder` does not exist.
    """
    runs = [path for path in sorted(folder.iterdir()) if is_run_id(path.name)]
    if len(runs) > 1:
        names = ", ".join(map(str, runs))
        raise FedplanError(f"{folder} holds {len(runs)} runs: name one of {names}")
    return runs[0] if runs else folder


def open_journal(
    folder: Path, encryption: Encryption | None = None, *, reading: bool = False
) -> Journal:
    """Open the journal (stored values and replies) of a site's run folder; `reading`: read-only."""
    return Journal(folder / "state", keep_replies=True, encryption=encryption, read_only=reading)


def read_personal_model(
    agreement: Agreement, folder: Path, key: Path | None = None
) -> dict[str, Tensor]:
    """Return a site's personal model from disk: values of the agreement's trainable params, by key.

    Params that were personal in the last round have the client's own value, others the global value
    last received; params with neither are left out. `folder`: the site's run folder. `key`: file
    with the site's encryption key, if encrypted. Raises StoreError if no round is stored.
    """
    encryption = Encryption.from_file(key) if key is not None else None
    client_state, notes = open_journal(folder, encryption, reading=True).client_state()
    if not notes:
        raise StoreError(f"{folder / 'state'} holds no turn of this run: restore a copy of it")
    received = Store(folder / RECEIVED, keep=1, encryption=encryption, read_only=True).read_newest()
    letters = notes["ledger_lines"][-1]["roles"]
    personal = {
        p.key
        for p, letter in zip(agreement.params, letters, strict=False)
        if ROLE_BY_LETTER[letter].is_personal
    }
    stored = {key: value for key, value in client_state.items() if key in personal}
    values = (received.tensors if received else {}) | stored
    trainable = {p.key for p in agreement.trainable}
    return {key: value for key, value in values.items() if key in trainable}
