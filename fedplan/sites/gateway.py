# SPDX-License-Identifier: Apache-2.0
"""Gateway of a site: checks every request of the server before the site works on it.

A study arrives as data with the first request of a run (hello). From then on the run belongs to
that study, and each request is answered only while the study is approved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fedplan.errors import FedplanError
from fedplan.federation.egress_log import Authorization, EgressLog, error_entry
from fedplan.federation.endpoint import EVALUATE, HELLO, Endpoint, site_run_folder
from fedplan.federation.error_codes import KINDS, encode_code, error_fields
from fedplan.federation.eval_sets import MetricPolicy
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.identity import is_run_id
from fedplan.federation.messages import RequestRefused, read_run_id
from fedplan.language.turn import Turn
from fedplan.models.layer_maps import restore_layer_maps
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import SiteRuntime, private_umask, site_study_folder
from fedplan.sites.approvals import Approvals
from fedplan.sites.policy import Policy
from fedplan.storage.files import write_atomic
from fedplan.storage.logs import Log
from fedplan.studies.schema import ConfigError, Study, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

REQUESTS = ("hello", "poll", "train", "evaluate")
"""Kinds of requests that the log names; any other is logged as "request"."""
RUNS_FOLDER, REJOIN_FOLDER = "runs", "rejoin"
"""In the state folder: the study of each run; runs that may continue from a restored state."""


class Approver(Protocol):
    """Decides whether a study may run at a site: see Approvals."""

    @property
    def policy(self) -> Policy:
        """The site's present policy."""
        ...

    def require_approval(self, study: Study, server: str = "", run: str = "") -> str:
        """Return the approver of a study for a run; raise RequestRefused with a code without."""
        ...


class SiteGateway:
    """Answers the requests of a server at a site, for approved studies only.

    Every answer is written to the egress log before it leaves, refusals included. At most one study
    is loaded at a time. `read_certificate_digest` returns the digest of the server's present TLS
    certificate, or "".
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
        """Return the answer to a request; `kind` is "hello", "poll", "train" or "evaluate".

        The answer to a request that is refused or fails is an error code alone; the error's text
        goes to the site's fault log.
        """
        # To compare two studies, the code that they name is imported.
        # Layer maps that a study registers must not be seen by the next study.
        with private_umask(), allow_imports(self.site.allow_packages), restore_layer_maps():
            try:
                runtime = self._admit(kind, message)
            except Exception as error:
                answer = self._error_answer(self.faults.append(error), message)
            else:
                answer = runtime.answer(kind, message)
            self._log_answer(kind, message, answer)
            return answer

    def _log_answer(self, kind: str, message: Message, answer: Message) -> None:
        """Log the kind, run and round of a request, and the error code of the answer, if any.

        The same error is logged once in a row, since a server repeats its request while a study
        waits for approval.
        """
        fields = _message_fields(answer)
        code = next((encode_code(str(fields[word])) for word in KINDS if word in fields), "")
        run, number = _run_id_or_empty(message), _message_fields(message).get("round")
        if code and (kind, run, code) == self._last_logged:
            return
        self._last_logged = kind, run, code
        self.log.note(
            f"{kind if kind in REQUESTS else 'request'} {'ended' if code else 'answered'}",
            code,
            level="warning" if code else "info",
            run=run,
            round=number if type(number) is int else 0,
            site=self.site.name,
        )

    def _error_answer(self, code: str, message: Message) -> Message:
        """Return the answer with an error code, after an entry in the egress log.

        A failed write of the log does not block the answer.
        """
        answer = pack_message({}, {"client": self.site.name, **error_fields(code)})
        with suppress(FedplanError):
            run = _run_id_or_empty(message)
            self.egress.append(
                error_entry(code, answer, site=self.site.name, run=run),
                Authorization(
                    self._study_digest or _offered_digest(message), self._certificate_digest
                ),
            )
        return answer

    def _admit(self, kind: str, message: Message) -> SiteRuntime:
        """Return the runtime of a request's study, ready to answer; raise if it must be refused.

        A hello binds its run to the offered study; any other request uses the run's study.
        """
        self._study_digest = ""
        run, (_, fields) = read_run_id(message), unpack_message(Message(message.header))
        # The certificate may change between requests, for example when it is renewed.
        self._certificate_digest = self.read_certificate_digest() or self._certificate_digest
        study = self._offered_study(run, fields) if kind == HELLO else self._study_of_run(run)
        self._study_digest = study.full_digest
        approver = self.approver.require_approval(study, self._certificate_digest, run)
        if kind == HELLO:
            self._bind(run, study)
        runtime = self._runtime_for(study)
        endpoint = runtime.endpoint(run)
        endpoint.authorization = Authorization(
            study.full_digest, self._certificate_digest, approver
        )
        if kind != HELLO:
            _require_evaluation(kind, study)
            _require_approved_round(study, fields)
            self._require_current_state(endpoint, run, fields)
        return runtime

    def _offered_study(self, run: str, fields: Mapping[str, Any]) -> Study:
        """Return the study in the fields of a hello.

        Raises RequestRefused if there is none, if it names data of its own, if it continues a run
        whose state is lost here, or if the run began with another study. Additional rounds do not
        make it another study.
        """
        offered = fields.get("study")
        if not isinstance(offered, dict):
            raise RequestRefused(f"the hello of run {run} contains no study").with_code(
                "another-study"
            )
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
                ).with_code("restored")
        if self._study_file(run).exists() and self._study_of_run(run).digest != study.digest:
            raise RequestRefused(f"run {run} belongs to another study").with_code("another-study")
        return study

    def _study_of_run(self, run: str) -> Study:
        """Return the study that a run is bound to.

        Raises RequestRefused if the run is unknown, ConfigError if the file cannot be read.
        """
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

    def _bind(self, run: str, study: Study) -> None:
        """Write the file that binds a run to its study, unless it is there unchanged."""
        file = self._study_file(run)
        text = study.model_dump_json(indent=1)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text)

    def _study_file(self, run: str) -> Path:
        return self.state_folder / RUNS_FOLDER / f"{run}.json"

    def _runtime_for(self, study: Study) -> SiteRuntime:
        """Return the runtime of a study under the present policy.

        Only the last runtime is cached, since each holds a model.
        """
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
        """Raise RequestRefused if the site's state is older than the last answer the server has.

        `fields["heard"]` is the round of that answer. A permission of `allow_rejoin` lets the
        request pass, and is deleted once the state has caught up.
        """
        _, notes = endpoint.site.journal.client_state()
        last_round = max((line["round"] for line in notes.get("lines", ())), default=0)
        answered_round, permission = fields.get("heard"), self.state_folder / REJOIN_FOLDER / run
        if type(answered_round) is not int or answered_round <= last_round:
            permission.unlink(missing_ok=True)
            return
        if not permission.exists():
            raise RequestRefused(
                f"the server has an answer of {self.site.name} for round {answered_round} of run "
                f"{run}, but the state of this site ends with round {last_round}: an old copy was "
                f"restored, or files are lost; `fedplan site rejoin {run}` continues from there"
            ).with_code("restored")


def site_approvals(site: Site) -> Approvals:
    """Return the approvals of a site, read from its state folder and its policy file."""
    client = Turn(client=site.name, traits=site.traits)
    return Approvals(Path(site.state), Path(site.policy), site=client, allow=site.allow_packages)


def allow_rejoin(site: Site, run: str) -> None:
    """Let a run continue once from a restored, older state of the site.

    Records the permission with the approvals, and writes a file for the gateway. Raises
    FedplanError if the site does not know the run, or the current user is no approver.
    """
    file = Path(site.state) / RUNS_FOLDER / f"{run}.json"
    if not is_run_id(run) or not file.exists():
        runs = [known.stem for known in sorted((Path(site.state) / RUNS_FOLDER).glob("*.json"))]
        raise FedplanError(
            f"{site.name} does not know run {run[:40]!r}: its runs are {', '.join(runs) or 'none'}"
        )
    with private_umask(), allow_imports(site.allow_packages):
        study = study_from_dict(json.loads(file.read_text(encoding="utf-8")))
        site_approvals(site).record_rejoin(run, study)
        folder = Path(site.state) / REJOIN_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / run).touch()


def _require_evaluation(kind: str, study: Study) -> None:
    if kind == EVALUATE and not study.evaluate.on_clients:
        raise RequestRefused(
            "the server asks for metrics, but the approved study has no evaluation at sites"
        ).with_code("undisclosed")


def _require_approved_round(study: Study, fields: Mapping[str, Any]) -> None:
    number = fields.get("round")
    if type(number) is int and number > study.train.rounds:
        raise RequestRefused(
            f"the server asks for round {number}, but the approved study has {study.train.rounds}"
        ).with_code("rounds")


def _run_id_or_empty(message: Message) -> str:
    """Return the run id of a message, or "" if it has no valid one."""
    try:
        return read_run_id(message)
    except FedplanError:
        return ""


def _message_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message's header; none if it cannot be read."""
    try:
        return unpack_message(Message(message.header))[1]
    except FedplanError:
        return {}


def _offered_digest(message: Message) -> str:
    """Return "?" and the SHA-256 of the study in a request, valid or not; "" without a study."""
    offered = _message_fields(message).get("study")
    if not isinstance(offered, dict):
        return ""
    return "?" + hashlib.sha256(json.dumps(offered, sort_keys=True).encode()).hexdigest()
