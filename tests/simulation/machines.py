# SPDX-License-Identifier: Apache-2.0
"""The machines of a simulated federation: their processes and files, and the operator of a site.

Gateway, approvals, endpoint and files of a site are real. Only the building of model and data from
a study is replaced.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calls import ERRORS, Killed, Process, failpoints
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from masked import directory, node
from offers import study_of
from power import flipped
from setting import RUN, Rows, agreement_of, initial_model, loss, score, start_values, tiny_model

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.client import (
    KEY,
    Client,
    ClientPrivacy,
    EvalSet,
    TrainSetup,
    make_example_guard,
    make_noise_guard,
)
from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
from fedplan.federation.ledger.egress import (
    REPLIES,
    Account,
    Answer,
    Limits,
    require_complete_account,
)
from fedplan.federation.ledger.faults import KINDS
from fedplan.federation.messages import RequestRefused
from fedplan.federation.secure_client import SecAggClient
from fedplan.models.values import set_values
from fedplan.privacy.guard import CHARGES_FILE, SECRET_FILE
from fedplan.runners.flower.records import make_reply, reply_fields
from fedplan.runners.site import Site
from fedplan.sites.approvals import Approvals
from fedplan.sites.gateway import SiteGateway
from fedplan.storage import files as storage_files
from fedplan.storage.append_log import DamagedLog, head_file, read_head, read_json_lines
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import write_atomic
from fedplan.studies.schema import Study
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import unpack_message

if TYPE_CHECKING:
    from simulator import Trial

APPROVAL_CODES = ("not-approved", "study-refused", "policy")
"""Codes of a site whose operator does not allow the study."""
DECISIONS = {
    **{"approve": "approved", "withdraw": "withdrawn", "refuse": "refused"},
    **{"policy": "", "allow": ""},
}
"""Acts of a site's operator, with what they record; the last two forbid and allow by the policy."""
POLICY = "auto_approve = {}\n[limits]\nrounds = {}\n"
SITE_POINTS = ("store", "log", "journal")
"""First words of named failpoints that a site reaches, as `store.begun`."""
SERVER_POINTS = ("store", "log", "round", "secagg")


class Broken(BaseException):
    """A guarantee is broken."""


class DamageNoticed(BaseException):
    """A site refuses to work with its damaged files."""


class Machine:
    """A machine: a folder, into which its processes write.

    `damaged`: each damaged file, its old and new content. `copies`: an older copy of the folder,
    and, while the older copy is in use, also the newest. `lost`: whether a checkpoint was deleted.
    `full_until`: when its disk has space again. `updates`: number of updates that it sent.
    """

    points = SERVER_POINTS

    def __init__(self, trial: Trial, name: str) -> None:
        self.trial, self.name, self.place = trial, name, trial.folder / name
        self.damaged = list[tuple[Path, bytes, bytes | None]]()
        self.copies = list[dict[Path, bytes]]()
        self.full_until, self.is_old, self.wants_copy, self.lost = 0.0, False, False, False
        self.counts, self.updates = Counter[str](), 0
        self.place.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def process(self, kill: float) -> Iterator[Process]:
        """Run the body as a process of this machine; it may die, or its disk may fail.

        Yields the process. Raises Killed; then the files are as the kill left them.
        """
        trial, armed, named = self.trial, self.draw_fault(kill), ""
        old_counts, storage_files._reached = storage_files._reached, Counter()
        if stop := trial.stops.get(self.name):
            armed, named, storage_files._reached = Process("kill", point=stop), stop, self.counts
        elif armed.point in storage_files.POINTS:
            named = f"{armed.point}:kill@{armed.at}"
        old, os.environ[storage_files.VARIABLE] = os.environ.get(storage_files.VARIABLE, ""), named
        outer, trial.running = trial.running, self.name
        try:
            with trial.calls.running(armed):
                yield armed
        except Killed:
            trial.stops.pop(self.name, None)
            if trial.plan is not None and trial.rng.random() < trial.plan.power:
                trial.faults[f"power cut: {trial.disk.cut(self.place, trial.rng)}"] += 1
            raise
        finally:
            if armed.happened:
                trial.faults[f"{armed.act}: {armed.happened}"] += 1
            trial.reached.update(f"failpoint {name}" for name in storage_files._reached)
            trial.running, os.environ[storage_files.VARIABLE] = outer, old
            storage_files._reached = old_counts

    def draw_fault(self, kill: float) -> Process:
        """Draw whether and where a process dies, or its disk fails."""
        trial, rng = self.trial, self.trial.rng
        if trial.plan is None:
            return Process()
        if trial.clock.now < self.full_until:
            return Process("ENOSPC", lasting=True)
        act = "kill" if trial.draws(kill) else ""
        if not act and trial.draws(trial.plan.fail_disk):
            act = rng.choice(tuple(ERRORS))
        if not act:
            return Process()
        where = rng.random()
        if where < 0.2 and act == "kill":
            named = [p for p in storage_files.POINTS if p.split(".")[0] in self.points]
            return Process(act, rng.choice((1, 1, 2, 3)), rng.choice(named))
        if where < 0.5:
            return Process(act, rng.choice((1, 1, 2, 3)), rng.choice(failpoints()))
        return Process(act, rng.randrange(1, rng.choice((20, 80, 300))))

    def files(self) -> list[Path]:
        """Files that may be damaged: not the TOML files, and no secret that is not used yet.

        Nor a log whose writer died before its head counted the last line: nothing reads it yet.
        """
        files = sorted(f for f in self.place.rglob("*") if f.is_file() and f.suffix != ".toml")
        files = [f for f in files if is_counted(f)]
        return [f for f in files if f.name not in (SECRET_FILE, KEY) or self.uses(f)]

    def uses(self, secret: Path) -> bool:
        """Whether results depend on a secret, so that a changed secret must be noticed."""
        return (secret.parent / CHARGES_FILE).exists()

    def harm(self, only: tuple[str, ...] = ()) -> None:
        """Flip a bit of a file while the machine is off, or delete the file.

        `only`: names of files to choose from.
        """
        rng, files = self.trial.rng, [f for f in self.files() if not only or f.name in only]
        if not files or len(self.copies) > 1:
            return
        self.damage(rng.choice(files), flip=rng.random() < 0.7)

    def damage(self, file: Path, *, flip: bool) -> None:
        """Flip a bit of a file, or delete it; an empty file is deleted."""
        whole = file.read_bytes()
        if damaged := flipped(whole, self.trial.rng) if flip else b"":
            file.write_bytes(damaged)
        else:
            file.unlink()
            self.lost |= file.stem.isdigit()
        self.damaged.append((file, whole, damaged or None))
        what = "bit flipped" if damaged else "file deleted"
        self.trial.faults[f"{what}: {kind_of(file)}"] += 1
        self.trial.disk.settle(self.place)

    def go_back(self) -> None:
        """Put an older copy of the folder in its place; the first time, make the copy.

        Nothing happens to a folder that is damaged or old, or of a site that may not answer.
        """
        if self.wrong or not getattr(self, "allowed", True):
            return
        present = {f: f.read_bytes() for f in self.place.rglob("*") if f.is_file()}
        self.copies.append(present)
        if len(self.copies) == 2:
            self.trial.faults["older copy put in place"] += 1
            self.put(self.copies[0])

    def put(self, copy: dict[Path, bytes]) -> None:
        """Replace all files by those of a copy."""
        shutil.rmtree(self.place)
        for file, content in copy.items():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.touch(mode=0o600)
            file.write_bytes(content)
        self.trial.disk.settle(self.place)

    @property
    def wrong(self) -> bool:
        """Whether it has damaged or old files."""
        return bool(self.damaged) or len(self.copies) > 1

    def restore(self, reason: str = "") -> None:
        """Restore the files of a machine whose damage was noticed, as from a backup of that moment.

        `reason`: the error of its process; "" if no process has read the files again. An older copy
        from which the machine has come further than the newest copy stays: it sent nothing else.
        """
        if reason:
            self.trial.noticed.append((reason, self.updates))
        self.trial.faults[f"damage {'noticed' if reason else 'not read'} and mended"] += 1
        if len(self.copies) > 1:
            newest = self.copies.pop()
            if newest_number(self.place.rglob("*.json")) <= newest_number(newest):
                self.put(newest)
            self.copies.clear()
            self.damaged.clear()
            self.is_old = False
        lost = {file for file, _, damaged in self.damaged if damaged is None}
        for file, whole, damaged in reversed(self.damaged):
            present = file.read_bytes() if file.exists() else None
            # A log that is lost with its head begins again, with the refusal to work without it.
            log = file.with_suffix("") if file.suffix == ".head" else file
            is_anew = {log, head_file(log)} <= lost
            if present == damaged or not (present or damaged) or is_anew:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(whole)
                file.chmod(0o600)
            elif damaged and present and present.startswith(damaged):  # a log that grew since
                file.write_bytes(whole + present[len(damaged) :])
        self.damaged.clear()
        self.trial.disk.settle(self.place)


def newest_number(files: Iterable[Path]) -> int:
    """Return the number of the newest checkpoint of a server or site among files; 0 if none."""
    return max(
        (int(f.stem) for f in files if f.stem.isdigit() and f.parent.name in ("global", "state")),
        default=0,
    )


def is_counted(file: Path) -> bool:
    """Whether a file is not a chained log, or is one whose head counts its last line."""
    if file.suffix != ".jsonl" or b'"before": ' not in (content := file.read_bytes()):
        return True
    try:
        return read_head(file).length == len(content)
    except DamagedLog:
        return True


def kind_of(file: Path) -> str:
    """Return the kind of a file: its name, or its suffix if the name has a number."""
    return file.suffix or file.name if file.name[0].isdigit() or ".tmp" in file.name else file.name


class Runtime:
    """The runtime of a site for its gateway: the endpoint, opened when it is needed."""

    def __init__(self, machine: SiteMachine) -> None:
        self.machine, self.opened = machine, None

    def endpoint(self, run: str) -> Endpoint:
        """The endpoint of the only run."""
        if run != RUN:
            raise RequestRefused(f"there is no run {run}").with_code("another-study")
        self.opened = self.opened or self.machine.open_endpoint()
        return self.opened

    def answer(self, kind: str, message: Message) -> Message:
        """The endpoint's answer."""
        return self.endpoint(RUN).answer(kind, message)


class Gateway(SiteGateway):
    """A site's gateway, whose runtime is the simulated one."""

    runtime: Any

    def _runtime_for(self, study: Study) -> Any:
        return self.runtime


class SiteMachine(Machine):
    """A site: its gateway while it runs, and whether its operator allows the study.

    `allowed`: None while an act of the operator is not finished. `encryption`: of its files.
    """

    points = SITE_POINTS

    def __init__(self, trial: Trial, name: str) -> None:
        super().__init__(trial, name)
        self.state, self.account = self.place / "state", self.place / "account"
        self.run_folder = site_run_folder(self.state / "simulated", RUN)
        self.key_file, self.policy_file = self.place / "key.hex", self.place / "policy.toml"
        self.encryption: Encryption | None = None
        if trial.plan is not None and trial.plan.encrypted:
            key = hashlib.sha256(name.encode()).digest()
            self.key_file.touch(mode=0o600)
            self.key_file.write_text(f"{key.hex()} {Encryption(key).key_id}\n")
            self.encryption = Encryption.from_file(self.key_file)
        self.allowed: bool | None = trial.plan is None or not trial.plan.asks
        self.deciding = False
        self.write_policy()
        self.gateway: Gateway | None = None
        self.checked: tuple[int, list[bytes]] = (0, [])

    def uses(self, secret: Path) -> bool:
        if secret.name == SECRET_FILE:
            return (self.account / REPLIES).exists()
        has_personal = agreement_of(self.trial.setting).has_personal
        return has_personal and any(secret.parent.glob("*.json"))

    def write_policy(self, *, allow: bool = True) -> None:
        """Write the site's policy: exactly as many answers as the study needs, or too few."""
        by_rule = str(self.trial.plan is None or not self.trial.plan.asks).lower()
        rounds = self.trial.setting.rounds if allow else 1
        write_atomic(self.policy_file, POLICY.format(by_rule, rounds))

    def open_gateway(self) -> Gateway:
        """The gateway of the site at its start."""
        key = str(self.key_file) if self.encryption else ""
        policy, state = str(self.policy_file), str(self.state)
        site = Site(name=self.name, state=state, policy=policy, encryption_key=key)
        gateway = Gateway(site, self.approvals())
        gateway.runtime = Runtime(self)
        return gateway

    def approvals(self) -> Approvals:
        """The site's decisions."""
        return Approvals(self.state, self.policy_file)

    def open_endpoint(self) -> Endpoint:
        """The site's endpoint of the run, from its disk alone."""
        setting, agreement, model = (
            self.trial.setting,
            agreement_of(self.trial.setting),
            tiny_model(),
        )
        assert self.gateway is not None
        encryption = self.gateway.site.encryption
        set_values(model, start_values(), agreement.params)
        account = Account(self.account, Limits(rounds=setting.rounds), encryption=encryption)
        require_complete_account(account, self.gateway.egress)
        site = Client(
            name=self.name,
            examples=Rows(setting.names.index(self.name)),
            journal=open_journal(self.run_folder, encryption),
            setup=TrainSetup(model, loss, start_values(), initial_model()),
            privacy=ClientPrivacy(
                account=account,
                guard=make_example_guard(agreement, self.place, account),
                noise_guard=make_noise_guard(agreement, account),
            ),
        )
        if setting.scores:
            rows = Rows(100 + setting.names.index(self.name))
            site.eval_set = EvalSet(rows, score, rounds=setting.rounds, validation=rows)
        masker, names = None, setting.names
        if agreement.secagg.active:
            masker = SecAggClient(
                *(agreement, site, node(self.name), directory(names), self.run_folder),
                cohort=lambda _: names,
            )
        folder, egress, faults = self.state / "simulated", self.gateway.egress, self.gateway.faults
        return Endpoint(agreement, site, folder, egress=egress, faults=faults, secagg_client=masker)

    # -- messages

    def answer(self, message: FlowerMessage, context: Context) -> FlowerMessage | None:
        """The reply to a message; None if the site dies before it replies."""
        trial, plan = self.trial, self.trial.plan
        try:
            with self.process(plan.kill_site if plan else 0.0) as process:
                self.gateway = self.gateway or self.open_gateway()
                reply = make_reply(message, self.checked_answer)
        except (Killed, DamageNoticed, FedplanError, OSError) as error:
            if isinstance(error, Killed):
                if plan is not None and trial.draws(plan.damage):
                    self.harm()
            elif self.wrong and not process.happened:
                self.restore(str(error))
            else:
                trial.codes[f"start {getattr(error, 'code', 'disk')}"] += 1
            self.restart(trial.rng.choice((1.0, 100.0, 5000.0)))
            return None
        if trial.broken:
            raise trial.broken
        if plan is not None:
            if self.allowed is False and not self.deciding:
                self.decide_later("approve")
            trial.disturb(self)
        return reply

    def checked_answer(self, kind: str, message: Message) -> Message:
        """The gateway's answer, after a check of the guarantees."""
        assert self.gateway is not None
        reply = self.gateway.answer(kind, message)
        fields = reply_fields(reply)
        code = next((str(fields[word]) for word in KINDS if word in fields), "")
        other = self.offers_other(kind, message)
        if code:
            self.trial.codes[code] += 1
            self.trial.server.is_old |= code == "past-round"
            unwanted = not other and (code not in APPROVAL_CODES or self.allowed)
            disk_failed = self.trial.calls.process.happened
            if self.wrong and unwanted and "missing" not in fields and not disk_failed:
                raise DamageNoticed(code)
        elif kind != "hello":
            self.trial.clock.progress()
            self.updates += "ledger_line" in fields
        try:
            with self.trial.calls.running(Process()):
                self.check(reply, code, other=other)
        except AssertionError as error:
            self.trial.broken = Broken(str(error))
        except StoreError:
            if not self.wrong:  # the site has not read its damaged state yet
                raise
        return reply

    def offers_other(self, kind: str, message: Message) -> bool:
        """Whether a message offers another study than the operator decides about."""
        plan = self.trial.plan
        if plan is None or not plan.confused or kind != "hello":
            return False
        fields = unpack_message(Message(message.header))[1]
        return fields["study"]["train"]["rounds"] != self.trial.setting.rounds

    def check(self, reply: Message, code: str, *, other: bool) -> None:
        """Assert that approvals are obeyed, and that no personal value of the site leaves.

        `other`: the request offers another study, which must be refused.
        """
        if self.allowed is not None:
            obeyed = code not in APPROVAL_CODES if self.allowed and not other else bool(code)
            assert obeyed, f"{self.name}, allowed {self.allowed}: {code or 'answered'}"
        assert not code or not reply.blobs, f"{self.name} sends values with {code}"
        if not agreement_of(self.trial.setting).has_personal or code:
            return
        journal = open_journal(self.run_folder, self.encryption, reading=True)
        newest = max(journal._store.numbers(), default=0)
        if newest != self.checked[0]:
            state, _ = journal.client_state()
            raw = [value.numpy().tobytes() for value in state.values()]
            self.checked = newest, [value for value in raw if len(value) >= 32]
        content = b"".join((reply.header, *map(bytes, reply.blobs)))
        assert not any(value in content for value in self.checked[1]), f"{self.name} sends values"

    def restart(self, seconds: float) -> None:
        """Disconnect the site for some time; it starts again from its disk."""
        self.gateway = None
        gc.collect(0)
        self.disconnect(seconds)

    def disconnect(self, seconds: float) -> None:
        """Disconnect the site for some time."""
        network = self.trial.network
        network.down.add(self.name)

        def back() -> None:
            network.down.discard(self.name)
            network.since[self.name] += 1

        self.trial.clock.at(seconds, back)

    # -- the operator

    def decide(self, act: str) -> None:
        """Let the operator allow the study, or forbid it for a while: one of DECISIONS.

        The process of the act may die: then the operator checks, and repeats it if it is not done.
        """
        trial, self.allowed, self.deciding = self.trial, None, True
        digest = study_of(trial.setting.rounds).full_digest
        try:
            with self.process(trial.plan.kill_site if trial.plan else 0.0) as process:
                if act in ("policy", "allow"):
                    self.write_policy(allow=act == "allow")
                elif self.approvals().last_decision(digest) != DECISIONS[act]:
                    getattr(self.approvals(), act)(digest)
        except (Killed, FedplanError, OSError) as error:
            killed = isinstance(error, Killed)
            trial.codes[f"operator {'killed' if killed else getattr(error, 'code', 'disk')}"] += 1
            if self.wrong and not killed and not process.happened:
                self.restore(str(error))
            trial.clock.at(60.0, lambda: self.decide(act))
            return
        trial.faults[f"operator: {act}"] += 1
        self.allowed, self.deciding = act in ("approve", "allow"), False
        if not self.allowed:
            self.decide_later("allow" if act == "policy" else "approve")

    def decide_later(self, act: str) -> None:
        """Let the operator do one of DECISIONS in some seconds, an hour or a day."""
        self.deciding = True
        seconds = self.trial.rng.choice((10.0, 3000.0, 90000.0))
        self.trial.clock.at(seconds, lambda: self.decide(act))

    # -- at the end

    def outcome(self) -> dict[str, Any]:
        """Everything of the site that must equal the undisturbed run."""
        journal = open_journal(self.run_folder, self.encryption, reading=True)
        found: dict[str, Any] = {
            f"{self.name} {k}": v.numpy().tobytes() for k, v in journal.client_state()[0].items()
        }
        if (charges := self.account / CHARGES_FILE).exists():
            found[f"{self.name} charges"] = len(read_json_lines(charges))
        if (replies := self.account / REPLIES).exists():
            lines = [line for line in read_json_lines(replies) if line["kind"] == "update"]
            found[f"{self.name} answers"] = len({line["content"] for line in lines})
        return found

    def check_limit(self, answers: int) -> None:
        """Assert that the site has counted all its answers: at the limit it gives no more."""
        account = Account(self.account, Limits(rounds=answers), encryption=self.encryption)
        try:
            account.charge(Answer("update", "one more", "one more", 1))
        except RequestRefused as error:
            assert error.code == "limit-rounds", error
            self.trial.codes["one answer more: limit-rounds"] += 1
        else:
            raise AssertionError(f"{self.name} has forgotten answers")
