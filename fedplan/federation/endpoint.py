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
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import train_round
from fedplan.federation.compatibility import local_versions
from fedplan.federation.egress_log import (
    AGREEMENT,
    CONSENT,
    EVALUATION,
    KEYS,
    LOW_ENTROPY_KINDS,
    SCORES,
    SHARES,
    UNMASKING,
    UPDATE,
    Authorization,
    EgressEntry,
    EgressLog,
    content_digest,
    error_entry,
)
from fedplan.federation.error_codes import error_fields
from fedplan.federation.evaluation import evaluate_client, metrics_to_json
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.identity import is_run_id
from fedplan.federation.layer_scoring import score_layers
from fedplan.federation.messages import (
    Request,
    RequestRefused,
    Update,
    block_scores_to_json,
    read_request,
    read_run_id,
    update_message,
)
from fedplan.federation.record import ROLE_BY_LETTER
from fedplan.federation.secagg_config import MASKED_INPUT_STEP, SECAGG_STEPS
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import write_if_changed
from fedplan.storage.journal import Journal
from fedplan.storage.store import Store
from fedplan.tensors.aux_tensors import param_key
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes
from fedplan.tensors.serialization import JSON, pack_message

if TYPE_CHECKING:
    from fedplan.federation.secagg_client import SecAggClient

HELLO, POLL, TRAIN, EVALUATE = "hello", "poll", "train", "evaluate"
"""Kinds of requests; the steps of secure aggregation are further kinds."""
STEP_KINDS: dict[str, str] = dict(
    zip(SECAGG_STEPS, (SHARES, UPDATE, CONSENT, UNMASKING), strict=True)
)
"""Kind in the egress log of the answer to each step of secure aggregation."""


class Endpoint:
    """A site in one run: answers requests of the server, independent of the transport.

    `folder`: the run's folder at the site (`site_run_folder`), with the client's state and the
    global values last received. `egress`: log of everything that leaves, of all runs.
    `faults`: error log. `authorization`: logged with each answer; callers may replace it.
    `secagg_client`: the site's side of secure aggregation; None if it takes no part.
    Creates the folders and writes the agreement file.
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
        self.egress, self.authorization = (
            egress or EgressLog(folder),
            authorization or Authorization(),
        )
        self.faults = faults or FaultLog(folder, site.journal.encryption)
        self.received_store, self._checkpoint = self._open_store(), 0
        for path in (folder, self.folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_if_changed(path / AGREEMENT, json.dumps(self._agreement_fields(), indent=1))
        self._kinds = {p.key: str(p.kind) for p in agreement.params}

    def answer(self, kind: str, message: Message) -> Message:
        """Answer a request; an error gives an answer with its code, and is logged here in full."""
        handlers = {HELLO: self._hello, POLL: self._poll, TRAIN: self._train}
        handlers |= {EVALUATE: self._evaluate}
        handlers |= {step: partial(self._secagg_step, step) for step in SECAGG_STEPS}
        try:
            if kind not in handlers:
                raise RequestRefused(
                    f"{self.site.name} does not know the request {kind[:40]!r}"
                ).with_code("request")
            self._load_received()
            return handlers[kind](message)
        except Exception as error:
            return self._error_answer(self.faults.append(error))

    def _error_answer(self, code: str) -> Message:
        """Log and return an answer with an error code; a failed log write does not block it."""
        answer = pack_message({}, {**error_fields(code)})
        agreed = self.agreement
        entry = error_entry(
            code, answer, site=self.site.name, experiment=agreed.experiment, run=agreed.run
        )
        with suppress(FedplanError):
            self.egress.append(entry, self.authorization)
        return answer

    def _hello(self, message: Message) -> Message:
        """Answer a hello with the site's name, traits, versions and digests of the agreement.

        Raises RequestRefused if the hello is of another run.
        """
        fields: dict[str, JSON] = {
            "client": self.site.name,
            "agreed": self.agreement.fingerprint,
            "start": self.agreement.start,
            "run": self.agreement.run,
            "traits": dict(self.site.traits),
            "record": self.egress.head.sha256,
            "versions": dict(local_versions()),
        }
        if self.agreement.run and (run := read_run_id(message)) != self.agreement.run:
            raise RequestRefused(
                f"{self.site.name} is in run {self.agreement.run}, not in {run}"
            ).with_code("another-study")
        if self.agreement.secagg.active:
            fields["node"] = self._require_secagg_client().public_key.hex()
        return self._log_answer(Message(pack_message({}, fields).header), HELLO, None, {})

    def _poll(self, message: Message) -> Message:
        """Answer a poll with layer scores, or with a key advert under secure aggregation."""
        request, before = read_request(message), self.site.received_versions
        scores = score_layers(self.agreement, self.site, request)
        self._store_received(before)
        if self.agreement.secagg.active:
            advert = self._require_secagg_client().advertise_scoring(request, scores)
            return self._log_answer(pack_message({}, {"advert": advert}), KEYS, request, {})
        answer = pack_message({}, {"scores": block_scores_to_json(scores)})
        return self._log_answer(answer, SCORES, request, {})

    def _train(self, message: Message) -> Message:
        """Train a round and answer with the update, or with its record and a key advert."""
        request, before = read_request(message), self.site.received_versions
        update = train_round(self.agreement, self.site, request, copy=False)
        self._store_received(before)
        if self.agreement.secagg.active:
            advert = self._require_secagg_client().advertise_round(request, update)
            record = replace(update, values={}, aux={}, weight=1)
            return self._log_answer(update_message(record, advert), KEYS, request, {})
        parts = self._bytes_by_kind(update)
        return self._log_answer(update_message(update), UPDATE, request, parts)

    def _require_secagg_client(self) -> SecAggClient:
        """Return the site's secure aggregation client; raise RequestRefused if it has none."""
        if self.secagg_client is None:
            raise RequestRefused(
                f"{self.site.name} takes no part in secure aggregation: its site.toml names no "
                "peers"
            ).with_code("peers")
        return self.secagg_client

    def _secagg_step(self, step: str, message: Message) -> Message:
        """Answer a step of secure aggregation; only masked inputs count as bytes of values."""
        secagg_client = self._require_secagg_client()
        if read_run_id(message) != self.agreement.run:
            raise RequestRefused(f"{self.site.name} is in another run").with_code("another-study")
        scoring, parts = secagg_client.is_scoring_message(message), dict[str, int]()
        answer = secagg_client.answer(step, message)
        is_input = step == MASKED_INPUT_STEP
        for param in secagg_client.shared_params if is_input and not scoring else ():
            kind = self._kinds[param.key]
            parts[kind] = parts.get(kind, 0) + self.agreement.upload_bytes(param)
        kind = SCORES if is_input and scoring else STEP_KINDS[step]
        sum_sites = secagg_client.round_and_sites(scoring=scoring)
        return self._log_answer(answer, kind, None, parts, sum_sites)

    def _evaluate(self, message: Message) -> Message:
        """Answer with the metrics of the global and the personal model."""
        request, before = read_request(message), self.site.received_versions
        scores = evaluate_client(self.agreement, self.site, request)
        self._store_received(before)
        answer = pack_message({}, {"scores": metrics_to_json(scores)})
        return self._log_answer(answer, EVALUATION, request, {})

    def _bytes_by_kind(self, update: Update) -> dict[str, int]:
        """Return the bytes of an update by kind of param."""
        totals = dict[str, int]()
        for key, value in {**update.values, **update.aux}.items():
            kind = self._kinds[param_key(key)]
            totals[kind] = totals.get(kind, 0) + nbytes({key: value})
        return totals

    def _log_answer(
        self,
        answer: Message,
        kind: str,
        request: Request | None,
        parts: Mapping[str, int],
        sum_sites: tuple[int, tuple[str, ...]] | None = None,
    ) -> Message:
        """Append an answer to the egress log, then return it.

        `parts`: bytes of values by kind of param. `sum_sites`: of secure aggregation, the round and
        the sites of the sum.
        """
        upload = sum(parts.values())
        key = self.site.digest_key if kind in LOW_ENTROPY_KINDS else b""
        entry = EgressEntry(
            kind,
            self.site.name,
            self.agreement.experiment,
            self.agreement.run,
            content=content_digest(answer, key),
            up=upload,
            other_bytes=answer.nbytes - upload,
            parts=dict(parts),
        )
        if request is not None:
            turn, down = request.turn, request.nbytes
            entry = replace(
                entry, request=request.name, round=turn.round, phase=turn.phase, down=down
            )
        if sum_sites is not None:
            number, among = sum_sites
            name = self.agreement.request_name(number, self.site.name)
            entry = replace(entry, request=name, round=number, among=among)
        self.egress.append(entry, self.authorization)
        return answer

    def _load_received(self) -> None:
        """Load the global values last received, if the disk has newer ones.

        Damaged files are deleted, so that the server sends all values again.
        """
        if max(self.received_store.numbers(), default=0) == self._checkpoint:
            return
        try:
            checkpoint = self.received_store.read_newest()
        except StoreError:
            self.site.journal.client_state()  # raises if the key is wrong: then nothing is deleted
            shutil.rmtree(self.folder / "seen")
            self.received_store, checkpoint = self._open_store(), None
        self._checkpoint = checkpoint.number if checkpoint else 0
        self.site.received = checkpoint.tensors if checkpoint else {}
        self.site.received_versions = dict(checkpoint.meta["held"]) if checkpoint else {}

    def _open_store(self) -> Store:
        return Store(self.folder / "seen", keep=1, encryption=self.site.journal.encryption)

    def _store_received(self, before: Mapping[str, int]) -> None:
        """Write the received global values to disk, if their versions differ from `before`."""
        versions = self.site.received_versions
        if versions != before:
            self._checkpoint = max(self.received_store.numbers(), default=0) + 1
            self.received_store.write(
                self.site.received, {"held": versions}, number=self._checkpoint
            )

    def _agreement_fields(self) -> dict[str, Any]:
        """Return the settings that the site agreed to, for its agreement file."""
        method, account = self.agreement.method, self.site.account
        secagg_client = self.secagg_client
        return {
            "site": self.site.name,
            "experiment": self.agreement.experiment,
            "plan": method.plan.text,
            "model": self.agreement.start,
            "fingerprint": self.agreement.fingerprint,
            "compression": method.compression.text,
            "traits": self.site.traits,
            "limits": asdict(account.limits) if account else {},
            "account": str(account.folder.absolute()) if account else "",
            "run": self.agreement.run,
            "prefix": self.agreement.request_prefix,
            **({"peers": secagg_client.peer_key_digests} if secagg_client is not None else {}),
        }


def site_run_folder(folder: Path, run: str) -> Path:
    """Return a run's folder under a site's folder of the study; the latter without a run id."""
    return folder / run if run else folder


def only_run_folder(folder: Path) -> Path:
    """Return the folder of a site's only run of a study, or the folder itself without runs.

    Raises FedplanError if there are several runs.
    """
    runs = [path for path in sorted(folder.iterdir()) if is_run_id(path.name)]
    if len(runs) > 1:
        names = ", ".join(map(str, runs))
        raise FedplanError(f"{folder} holds {len(runs)} runs: name one of {names}")
    return runs[0] if runs else folder


def open_journal(
    folder: Path, encryption: Encryption | None = None, *, reading: bool = False
) -> Journal:
    """Open the journal in a site's run folder; read-only with `reading`."""
    return Journal(folder / "state", keep_replies=True, encryption=encryption, read_only=reading)


def read_personal_model(
    agreement: Agreement, folder: Path, key: Path | None = None
) -> dict[str, Tensor]:
    """Return a site's personal model: trainable values by key, as far as the disk has them.

    Params that were personal in the last turn have the stored value, others the global value last
    received. `key`: file with the site's key. Raises StoreError if no turn is stored.
    """
    encryption = Encryption.from_file(key) if key is not None else None
    client_state, notes = open_journal(folder, encryption, reading=True).client_state()
    if not notes:
        raise StoreError(f"{folder / 'state'} holds no turn of this run: restore a copy of it")
    received = Store(folder / "seen", keep=1, encryption=encryption, read_only=True).read_newest()
    letters = notes["lines"][-1]["roles"]
    personal = {
        p.key
        for p, letter in zip(agreement.params, letters, strict=False)
        if ROLE_BY_LETTER[letter].is_personal
    }
    stored = {key: value for key, value in client_state.items() if key in personal}
    values = (received.tensors if received else {}) | stored
    trainable = {p.key for p in agreement.trainable}
    return {key: value for key, value in values.items() if key in trainable}
