# SPDX-License-Identifier: Apache-2.0
"""Serve a site: its gateway checks every request of the server before the site works on it.

A study arrives as data with the first request of a run (hello). From then on the run belongs to
that study, and each request is answered only while the study is approved.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedplan.errors import FedplanError
from fedplan.federation.client import MetricPolicy, last_trained_round
from fedplan.federation.endpoint import EVALUATE, HELLO, Endpoint, site_run_folder
from fedplan.federation.identity import is_run_id
from fedplan.federation.ledger.egress import STATISTICS, Authorization, EgressLog, error_entry
from fedplan.federation.ledger.faults import KINDS, FaultLog, encode_code, error_fields
from fedplan.federation.messages import RequestRefused, read_run_id
from fedplan.models.layer_maps import restore_layer_maps
from fedplan.naming import allow_imports
from fedplan.runners.site import Site, read_site
from fedplan.runners.site_runtime import SiteRuntime, private_umask, site_study_folder
from fedplan.sites.approvals import site_approvals
from fedplan.sites.policy import Policy
from fedplan.sites.statistics import answer_statistics, require_match
from fedplan.sites.tls_probe import certificate_digest
from fedplan.storage.files import PRIVATE, make_folder, write_atomic
from fedplan.storage.locks import acquire_folder_lock
from fedplan.storage.logs import Log
from fedplan.studies.schema import ConfigError, Study, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

REQUESTS = ("hello", "poll", "train", "evaluate", STATISTICS)
"""Kinds of requests that the log names; any other is logged as "request"."""
RUNS_FOLDER, REJOIN_FOLDER = "runs", "rejoin"
"""In the state folder: the study of each run; runs that may continue from a restored state."""


class Approver(Protocol):
    """Decides whether a study may run at a site, as Approvals does."""

    @property
    def policy(self) -> Policy: ...

    def require_approval(self, study: Study, server: str = "", run: str = "") -> str: ...


class SiteGateway:
    """Answers the requests of a server at a site, for approved studies only. Call `answer`.

    Every answer is logged before it leaves; repeated refusals are only counted, and an error code
    is sent even if the log cannot be written. Not thread-safe.
    """

    def __init__(
        self,
        site: Site,
        approver: Approver,
        read_certificate_digest: Callable[[], str] = lambda: "",
    ) -> None:
        self.site, self.approver = site, approver
        self.read_certificate_digest = read_certificate_digest
        self.state_folder = Path(site.state)
        with private_umask():
            self.faults = FaultLog(self.state_folder, site.encryption)
            self.egress = EgressLog(self.state_folder)
        self.log, self._last_logged = Log(self.state_folder), ("", "", "")
        self._runtime: tuple[tuple[str, str], SiteRuntime] | None = None
        self._certificate_digest = self._study_digest = ""

    def answer(self, kind: str, message: Message) -> Message:
        """Return the answer to a request of a kind, as "train"; the first of a run is a hello.

        Never raises for a bad request: the answer to a refused or failed request is an error code
        alone, and the error's text goes to the site's fault log.
        """
        # To compare two studies, the code that they name is imported.
        # Layer maps that a study registers must not be seen by the next study.
        with private_umask(), allow_imports(self.site.allow_packages), restore_layer_maps():
            try:
                self._study_digest = ""
                # The certificate may change between requests, for example when it is renewed.
                self._certificate_digest = (
                    self.read_certificate_digest() or self._certificate_digest
                )
                if kind == STATISTICS:
                    answer = self._answer_statistics(message)
                else:
                    answer = self._admit(kind, message).answer(kind, message)
            except Exception as error:
                answer = self._error_answer(self.faults.append(error), message)
            self._log_answer(kind, message, answer)
            return answer

    def _log_answer(self, kind: str, message: Message, answer: Message) -> None:
        """Note a request and its answer's error in the log, the same error once in a row."""
        fields = _message_fields(answer)
        code = next((encode_code(str(fields[word])) for word in KINDS if word in fields), "")
        asked = _message_fields(message)
        run, number = _run_id_or_empty(asked), asked.get("round")
        if code and (kind, run, code) == self._last_logged:
            return
        self._last_logged = kind, run, code
        self.log.note(
            f"{kind if kind in REQUESTS else 'request'} {'error' if code else 'answered'}",
            code,
            level="warning" if code else "info",
            run=run,
            round=number if type(number) is int else 0,
            site=self.site.name,
        )

    def _error_answer(self, code: str, message: Message) -> Message:
        """Return an answer with an error code only; log it, unless the log cannot be written."""
        answer = pack_message({}, {"client": self.site.name, **error_fields(code)})
        with suppress(FedplanError):
            fields, offered_digest = _message_fields(message), ""
            run = _run_id_or_empty(fields)
            # A study that could not be parsed is identified by "?" and the hash of its JSON.
            offered = None if self._study_digest else fields.get("study")
            if isinstance(offered, dict):
                text = json.dumps(offered, sort_keys=True)
                offered_digest = "?" + hashlib.sha256(text.encode()).hexdigest()
            self.egress.append(
                error_entry(code, answer, site=self.site.name, run=run),
                Authorization(self._study_digest or offered_digest, self._certificate_digest),
            )
        return answer

    def _answer_statistics(self, message: Message) -> Message:
        """Return the counts that the study in a request (`message`) asks for, after logging them.

        An approval of the study covers them, whether or not it has a run.
        """
        study = self._offered_study("", unpack_message(Message(message.header))[1])
        authorization = self._authorize(study)
        return answer_statistics(self.site, study, self.approver.policy, self.egress, authorization)

    def _authorize(self, study: Study, run: str = "") -> Authorization:
        """Return the authorization of a study's answers; RequestRefused if it is not approved."""
        self._study_digest, server = study.full_digest, self._certificate_digest
        approver = self.approver.require_approval(study, server, run)
        return Authorization(self._study_digest, server, approver)

    def _admit(self, kind: str, message: Message) -> SiteRuntime:
        """Check a request (`message`) and return the runtime of its study, ready to answer."""
        run, (_, fields) = read_run_id(message), unpack_message(Message(message.header))
        study = self._offered_study(run, fields) if kind == HELLO else self._study_of_run(run)
        authorization = self._authorize(study, run)
        if kind == HELLO:
            # Before the run is known here, so that no other request of it is answered either.
            if study.statistics is not None and study.statistics.require:
                require_match(self.site, study, self.approver.policy)
            file, text = self._study_file(run), study.model_dump_json(indent=1)
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                make_folder(file.parent)
                write_atomic(file, text)
        runtime = self._runtime_for(study)
        endpoint = runtime.endpoint(run)
        endpoint.authorization = authorization
        if kind != HELLO:
            if kind == EVALUATE and not study.evaluate.on_clients:
                raise RequestRefused(
                    "the server asks for metrics, but the approved study has no evaluation at sites"
                ).with_code("metrics-not-allowed")
            number, rounds = fields.get("round"), study.train.rounds
            if type(number) is int and number > rounds:
                raise RequestRefused(
                    f"the server asks for round {number}, but the approved study has {rounds}"
                ).with_code("too-many-rounds")
            self._require_current_state(endpoint, run, fields)
        return runtime

    def _offered_study(self, run: str, fields: Mapping[str, Any]) -> Study:
        """Parse the study in the header of a hello; RequestRefused if it cannot run here."""
        offered = fields.get("study")
        if not isinstance(offered, dict):
            raise RequestRefused(f"the request {run} contains no study").with_code("another-study")
        study = study_from_dict(offered)
        data = study.data
        if study.has_central_data or data.test_path or data.test_split or data.test_filter:
            raise RequestRefused(
                "the study names its own data, but this site reads only the data of its site.toml"
            ).with_code("policy")
        if study.continue_from and self._study_file(study.continue_from).exists():
            earlier_study = self._study_of_run(study.continue_from)
            folder = site_study_folder(self.site.state, earlier_study, self.site.name)
            if not site_run_folder(folder, study.continue_from).is_dir():
                raise RequestRefused(
                    f"this site has lost its state of run {study.continue_from}"
                ).with_code("outdated-state")
        if self._study_file(run).exists() and self._study_of_run(run).digest != study.digest:
            raise RequestRefused(f"run {run} belongs to another study").with_code("another-study")
        return study

    def _study_of_run(self, run: str) -> Study:
        """Read the study that a run was bound to by its hello."""
        try:
            fields = json.loads(self._study_file(run).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise RequestRefused(f"run {run} is not known at this site").with_code(
                "unknown-run"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._study_file(run)} cannot be read: {error}").with_code(
                "disk"
            ) from error
        return study_from_dict(fields)

    def _study_file(self, run: str) -> Path:
        return self.state_folder / RUNS_FOLDER / f"{run}.json"

    def _runtime_for(self, study: Study) -> SiteRuntime:
        policy = self.approver.policy
        key = study.full_digest, policy.digest
        if self._runtime is None or self._runtime[0] != key:
            self._runtime = None  # frees the old model before the new one is built
            runtime = SiteRuntime(
                self.site,
                study,
                policy.account_limits,
                egress=self.egress,
                hide_loss="loss" not in policy.metrics,
                metric_policy=MetricPolicy(
                    frozenset(policy.metrics), policy.min_examples, personal=not policy.never_share
                ),
            )
            self._runtime = (key, runtime)
        return self._runtime[1]

    def _require_current_state(
        self, endpoint: Endpoint, run: str, fields: Mapping[str, Any]
    ) -> None:
        """Raise RequestRefused if the state is older than the server's, unless `allow_rejoin`."""
        last_round = last_trained_round(endpoint.site.journal.client_state()[1])
        answered_round = fields.get("last_update_round")
        permission = self.state_folder / REJOIN_FOLDER / run
        endpoint.site.may_rejoin = permission.exists()
        if type(answered_round) is not int or answered_round <= last_round:
            permission.unlink(missing_ok=True)
            return
        if not permission.exists():
            raise RequestRefused(
                f"the server has an answer of {self.site.name} for round {answered_round} of run "
                f"{run}, but the state of this site ends with round {last_round}: an old copy was "
                f"restored, or files are lost; `fedplan site rejoin {run}` continues from there"
            ).with_code("outdated-state")


def allow_rejoin(site: Site, run: str) -> None:
    """Let the site continue `run` from a state folder that was restored from an older backup.

    The permission ends when the state is as new as the server's. Raises FedplanError if the site
    does not know the run, or the current user is no approver.
    """
    file = Path(site.state) / RUNS_FOLDER / f"{run}.json"
    if not is_run_id(run) or not file.exists():
        runs = [each.stem for each in sorted((Path(site.state) / RUNS_FOLDER).glob("*.json"))]
        raise FedplanError(
            f"{site.name} does not know run {run[:40]!r}: its runs are {', '.join(runs) or 'none'}"
        )
    with private_umask(), allow_imports(site.allow_packages):
        study = study_from_dict(json.loads(file.read_text(encoding="utf-8")))
        site_approvals(site).record_rejoin(run, study)
        folder = Path(site.state) / REJOIN_FOLDER
        make_folder(folder)
        (folder / run).touch(PRIVATE)


def _run_id_or_empty(fields: Mapping[str, Any]) -> str:
    run = fields.get("run")
    return str(run) if is_run_id(run) else ""


def _message_fields(message: Message) -> dict[str, Any]:
    try:
        return unpack_message(Message(message.header))[1]
    except FedplanError:
        return {}


def serve_site(folder: Path) -> None:
    """Serve the site described by site.toml in `folder`; block until SIGTERM or SIGINT.

    Sets the process's umask, signal handlers and NO_PROXY. StoreError if it is served already.
    """
    from fedplan.runners.flower.supernode import run_supernode, serve_tasks

    site, stopped = read_site(folder), threading.Event()
    os.umask(0o077)
    # Connections to this machine must not go through a proxy.
    proxy_exceptions = [
        os.environ[name] for name in ("NO_PROXY", "no_proxy") if os.environ.get(name)
    ]
    for name in ("NO_PROXY", "no_proxy"):  # if both are set, libraries read either
        os.environ[name] = ",".join(dict.fromkeys((*proxy_exceptions, "127.0.0.1")))

    def stop(number: int, frame: object) -> None:
        # In another thread, since this one may hold the event's lock.
        threading.Thread(target=stopped.set).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    state_folder = Path(site.state)
    make_folder(state_folder)
    lock = acquire_folder_lock(state_folder)
    gateway = SiteGateway(site, site_approvals(site), lambda: certificate_digest(site.server))
    gateway.log.note("site started", site=site.name)
    with run_supernode(site, stopped) as api:
        serve_tasks(api, gateway.answer, stopped)
    gateway.egress.flush()
    gateway.log.note("site stopped", site=site.name)
    del lock
