# SPDX-License-Identifier: Apache-2.0
"""Machines of a federation with a damaged file: its server, a site, and a site behind its gateway."""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from damage import damage_file, damaged_files, harmless, relative_files
from setting import Setting
from simulator import Trial
from sites import NAME, PRIVATE, RUN, hello, study_text, words_of, write_rows

from fedplan.errors import FedplanError
from fedplan.federation.endpoint import EVALUATE, HELLO, TRAIN
from fedplan.federation.messages import read_update, request_message
from fedplan.federation.rounds import make_request
from fedplan.federation.server import Server
from fedplan.runners.flower.records import reply_fields
from fedplan.sites.approvals import site_approvals
from fedplan.sites.gateway import SiteGateway
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.encryption import new_key_file
from fedplan.studies.schema import parse_toml, study_from_dict

SETTINGS = {
    "sites, personal": Setting("fedper", False, "", 2, 4, 1.0),
    "sites, scaffold": Setting("scaffold", False, "", 2, 4, 1.0),
    "sites, client-level": Setting("fedper", False, "client", 2, 4, 1.0),
    "sites, example-level": Setting("fedper", False, "example", 2, 4, 1.0),
    "sites, secure": Setting("fedper", True, "", 3, 4, 1.0),
    "sites, secure, client-level": Setting("fedper", True, "client", 3, 4, 1.0),
}
"""Federations in one process, by kind."""
STOP = {"server": "round.committed:kill@2"}
"""Where the server dies before a file is damaged."""
LOGS = ("replies.jsonl", "charges.jsonl", "reveals.jsonl", "egress.jsonl", "approvals.jsonl")
"""Logs of a site: nothing in them may be forgotten."""


def records(site: Path) -> Counter[str]:
    """All lines of a site's logs, without times, chain and refusals."""
    found = Counter[str]()
    for file in sorted(file for name in LOGS for file in site.rglob(name)):
        for line in read_json_lines(file):
            kept = {k: v for k, v in line.items() if k not in ("time", "before", "content")}
            if not line.get("code"):
                found[f"{file.name} {sorted(kept.items())}"] += 1
    return found


@dataclass
class FederationWorkshop:
    """A federation whose server died after two rounds, and how the undisturbed one ends."""

    setting: Setting
    folder: Path
    expected: dict[str, Any]
    remembered: dict[str, Counter[str]]

    @staticmethod
    def build(kind: str, place: Path) -> FederationWorkshop:
        """Run a federation of a kind until its server stops, and go on with a copy of it."""
        setting = SETTINGS[kind]
        Trial(setting, place / "run", stops=dict(STOP)).run_to_stop()
        shutil.copytree(place / "run", place / "whole")
        whole = Trial(setting, place / "whole").run()
        kept = {name: records(whole.sites[name].place) for name in setting.names}
        return FederationWorkshop(setting, place / "run", whole.outcome(), kept)

    def files(self) -> list[Path]:
        """The files of the server and of one site, which is as the others are."""
        machines = ("server", self.setting.names[0])
        files = [f for f in relative_files(self.folder) if f.parts[0] in machines]
        assert any(f.name == "egress.jsonl" for f in files), "the federation has not begun"
        return [f for f in files if f.name != "policy.toml"]

    def damage(self, name: Path, how: str, rng: Random) -> str:
        """Damage a file of a copy, and go on with it; return the outcome.

        A machine that refuses to work with the file gets it back, as from a backup. "same": nobody
        noticed, and nothing differs. "refused": before an update of the damaged site left.
        "SILENT": something differs, or was forgotten, or an update left first.
        """
        copy = self.folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        trial = Trial(self.setting, copy, rng)
        machine = trial.sites.get(name.parts[0], trial.server)
        for file in damaged_files(copy, name, how):
            machine.damage(file, flip=how == "flipped")
        try:
            trial.run()
            different = list(self.differences(trial))
        except AssertionError as error:
            different = [str(error)[:300]]
        finally:
            gc.collect(0)
        if different:
            return f"SILENT: {', '.join(different[:4])}; noticed {trial.noticed[:1]}"
        if not trial.noticed:
            return harmless(name) or "same"
        reason, updates = trial.noticed[0]
        return f"{'LATE' if updates else 'refused'}: {reason.splitlines()[0]}"

    def differences(self, trial: Trial) -> Iterator[str]:
        """Yield what is not as in the undisturbed federation."""
        setting, outcome = self.setting, trial.outcome()
        for name, kept in self.remembered.items():
            yield from (
                f"{name} forgot {line[:150]}" for line in kept - records(trial.sites[name].place)
            )
        if trial.noticed and (setting.secure or setting.unit == "client"):
            return  # a sum went on without the site, as the rules of such sums say
        names = self.expected.keys() | outcome.keys()
        if setting.secure and setting.unit:  # each attempt has noise of its own
            names = {name for name in names if name.endswith("charges")}
        yield from sorted(n for n in names if self.expected.get(n) != outcome.get(n))


STUDIES = {
    "site": study_text(
        method='plan = "chain(share(), keep(head))"', train="lr = 0.1", privacy="", rounds=5
    ).replace("holdout_fraction = 0.0", "holdout_fraction = 0.25")
    + "[evaluate]\non_clients = true\n",
    "site, encrypted, example-level": study_text(
        method='plan = "chain(share(), keep(head))"', train="lr = 0.1", privacy=PRIVATE, rounds=4
    ),
}
"""Studies of a site behind its gateway, by kind."""
POLICY = 'metrics = ["loss", "accuracy"]\nmin_examples = 1\n[limits]\nrounds = 40\n'
"""A policy with limits, under which a person approves each study."""


@dataclass
class SiteWorkshop:
    """A site behind its gateway that has answered two rounds, and how the undisturbed one ends."""

    kind: str
    folder: Path
    answers: list[dict[str, Any]]
    remembered: Counter[str]

    @staticmethod
    def build(kind: str, place: Path) -> SiteWorkshop:
        """Approve a study, answer two rounds of it, and go on with a copy of the folder."""
        folder, text = place / "run", STUDIES[kind]
        folder.mkdir(parents=True)
        write_rows(folder / "rows.npz")
        (folder / "policy.toml").write_text(POLICY)
        if "encrypted" in kind:
            new_key_file(folder / "state.key")
        workshop = SiteWorkshop(kind, folder, [], Counter())
        gateway = workshop.open(folder)
        assert reply_fields(gateway.answer(HELLO, hello(text)))["refused"] == "not-approved"
        site_approvals(gateway.site).approve(study_from_dict(parse_toml(text)).full_digest[:12])
        workshop.play(folder, 2)
        shutil.copytree(folder, place / "whole")
        workshop.answers = workshop.play(place / "whole", 4)
        workshop.remembered = records(place / "whole" / "state")
        return workshop

    def open(self, folder: Path) -> SiteGateway:
        """The gateway of the site in a folder, as it starts."""
        key = {"encryption_key": str(folder / "state.key")} if "encrypted" in self.kind else {}
        site, _ = words_of(folder, **key)
        return SiteGateway(site, site_approvals(site))

    def play(self, folder: Path, rounds: int) -> list[dict[str, Any]]:
        """Let a server go on up to a round; return the fields of all answers, with the values.

        Raises FedplanError with the code if the site refuses or fails.
        """
        gateway, text, answers = self.open(folder), STUDIES[self.kind], list[dict[str, Any]]()

        def ask(kind: str, message: Any) -> Any:
            reply = gateway.answer(kind, message)
            fields = reply_fields(reply)
            for word in {"refused", "failed"} & fields.keys():
                raise FedplanError(f"{kind}: {fields[word]}")
            if kind != HELLO and "missing" not in fields:
                answers.append(fields | {"values": b"".join(map(bytes, reply.blobs))})
            return reply

        ask(HELLO, hello(text))
        runtime = gateway._runtime_for(study_from_dict(parse_toml(text)))
        endpoint = runtime.endpoint(RUN)
        server = Server(
            endpoint.agreement,
            endpoint.site.setup.start,
            folder / "server",
            rounds=4,
            roster={NAME: {}},
        )
        while server.global_state.round < rounds:
            round_state = server.begin_round()
            reply = ask(TRAIN, request_message(round_state.cohort[NAME]))
            if "missing" in reply_fields(reply):
                server.resend_all(round_state, NAME)
                reply = ask(TRAIN, request_message(round_state.cohort[NAME]))
            server.take(round_state, read_update(reply))
            server.close_round(round_state)
            server.commit(round_state)
            if "evaluate" in text:
                request = make_request(server.agreement, server.global_state, NAME, {}, full=True)
                ask(EVALUATE, request_message(request))
        return answers

    def rewritten(self, folder: Path) -> set[tuple[str, bytes]]:
        """Files that tell what a run is, with their contents: no round changes them."""
        names = ("study.json", "manifest.json", "task.json", "agreement.json", f"{RUN}.json")
        files = (file for name in names for file in (folder / "state").rglob(name))
        contents = ((f.name, f.read_bytes().replace(str(folder).encode(), b"")) for f in files)
        return set(contents)

    def files(self) -> list[Path]:
        """The files of the site's state, and its key."""
        inputs = ("rows.npz", "policy.toml", "study.toml")
        files = relative_files(self.folder)
        return [f for f in files if f.parts[0] != "server" and f.name not in inputs]

    def damage(self, name: Path, how: str, rng: Random) -> str:
        """Damage a file of a copy, and let the site answer on; return the outcome."""
        copy = self.folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        damage_file(copy, name, how, rng)
        try:
            answers = self.play(copy, 4)
        except FedplanError as error:
            return f"refused: {str(error).splitlines()[0]}"
        finally:
            gc.collect(0)
        forgotten = self.remembered - records(copy / "state")
        if different := self.rewritten(copy) ^ self.rewritten(self.folder):
            return f"SILENT: left damaged: {min(different)[0]}"
        if forgotten:
            return f"SILENT: forgot {min(forgotten)[:200]}"
        if answers != self.answers:
            return "SILENT: another answer"
        return harmless(name) or "same"
