# SPDX-License-Identifier: Apache-2.0
"""Sum up the records of simulated seeds: faults, failpoints and error codes, and what is missing.

python tests/simulation/summary.py RECORDS... [--write FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calls import failpoints

from fedplan.federation.endpoint import EVALUATE, HELLO, POLL, TRAIN
from fedplan.federation.ledger.faults import KINDS
from fedplan.secagg.config import SECAGG_STEPS
from fedplan.storage.files import POINTS

MESSAGES = [
    kind
    for each in (HELLO, POLL, TRAIN, EVALUATE, *SECAGG_STEPS)
    for kind in (each, f"reply to {each}")
]
"""Kinds of messages."""
COMMAND = "only by a command that reads a folder or makes a key, while no process runs"
CHECK = "only by the check of a finished run"
UNREACHABLE: dict[str, str] = {
    "federation/server.py:Server.remove_evaluation": "only by a simulation that goes on",
    "federation/ledger/callbacks.py": "only with a tracker, such as MLflow",
    "federation/ledger/egress.py:read_agreement": COMMAND,
    "federation/ledger/faults.py:read_faults": COMMAND,
    "federation/ledger/segments.py:ledger_lines": CHECK,
    "privacy/accounting/budget.py:read_budget_unit": COMMAND,
    "sites/approvals.py:Inbox.add unlink": "only in an inbox that is full of studies",
    "sites/gateway.py:allow_rejoin": COMMAND,
    "sites/gateway.py:serve_site": "starts a real SuperNode",
    "storage/encryption.py:new_key_file": COMMAND,
    "storage/files.py:write_folder": "only by an export",
    "storage/locks.py:_file_system": "only on a disk without locks",
    "storage/logs.py:follow_log": COMMAND,
    "storage/logs.py:read_log": COMMAND,
    "storage/locks.py:sync_file_system": "only in a run of one process",
    "failpoint round.answered": "only in a run of one process",
}
"""Failpoints, by the start of their names, that no trial can reach, with the reason."""
BY_STUDY = "by the study, the model or the data of a site, none of which changes"
ASKED = "by a server that asks for what the study does not have, or by a policy on metrics"
COUNTED = "by a study that counts the data, which the simulated one does not"
NOT_BY_FAULTS: dict[str, str] = {
    **dict.fromkeys(("data", "model", "plan", "training", "unknown-name", "unprotected"), BY_STUDY),
    **dict.fromkeys(("no-scoring", "no-evaluation", "few-examples", "metrics-not-allowed"), ASKED),
    **dict.fromkeys(("metrics-not-private", "metrics-not-summed"), ASKED),
    **dict.fromkeys(("too-many-rounds", "unknown-request", "message"), "by a server that lies"),
    **dict.fromkeys(("too-many-studies", "refused"), "by a server that lies"),
    "unexpected-values": "by a server that sends values outside of the plan, or other than before",
    **dict.fromkeys(("statistics", "dictionary", "other-statistics"), COUNTED),
    **dict.fromkeys(("limit-bytes", "limit-epsilon", "epsilon"), "a limit that the study keeps"),
    "peer-keys": "by the keys that a site was set up with",
    "memory": "by a lack of memory",
    "worker": "by a worker process, which simulated sites do not have",
}
"""Error codes that faults of storage and network do not cause, with the reason."""


@dataclass
class Totals:
    """Sums over all records."""

    seeds: int = 0
    seconds: float = 0.0
    commits: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    codes: Counter[str] = field(default_factory=Counter[str])
    reached: set[str] = field(default_factory=set[str])
    failed: dict[int, str] = field(default_factory=dict[int, str])

    def add_file(self, lines: Iterable[str]) -> None:
        """Add the records of a file; a line without a seed describes the records after it."""
        points, commit = list[str](), ""
        for line in lines:
            record = json.loads(line)
            if "failpoints" in record:
                points, commit = record["failpoints"], record["commit"]
                continue
            self.seeds += 1
            self.seconds += record["cpu"]
            self.commits[commit] += 1
            if "failed" in record:
                self.failed[record["seed"]] = f"{commit}: {record['failed'][:300]}"
                continue
            self.faults.update(record["faults"])
            self.codes.update(record["codes"])
            bits = int(record["reached"], 16)
            self.reached.update(p for i, p in enumerate(points) if bits >> i & 1)
            self.reached.update(record["named"])

    def summary(self) -> dict[str, Any]:
        """Return the sums by topic."""
        kinds, failed_at = Counter[str](), set[str]()
        for fault, number in self.faults.items():
            kind, _, detail = fault.partition(": ")
            kinds[fault if kind in ("operator", "power cut") else kind] += number
            if kind in ("kill", "EIO", "ENOSPC"):
                failed_at.add(detail)
        points = [*failpoints(), *(f"failpoint {name}" for name in POINTS)]
        possible = [p for p in points if not _reason(p, UNREACHABLE)]
        bad = {"lost", "doubled", "delayed"}
        messages = {f"message {how}: {kind}" for how in bad for kind in MESSAGES}
        codes = [code for by_kind in KINDS.values() for code in by_kind]
        raised = {code.rpartition(" ")[2] for code in self.codes}
        hurt = failed_at | {f"failpoint {name}" for name in failed_at}
        return {
            "seeds": self.seeds,
            "CPU hours": round(self.seconds / 3600, 2),
            "seconds of CPU per seed": round(self.seconds / max(1, self.seeds), 3),
            "seeds by commit": dict(self.commits),
            "failed": self.failed,
            "faults": dict(kinds.most_common()),
            "failpoints": {
                "in the source": len(points),
                "reachable": len(possible),
                "reached": len(self.reached.intersection(possible)),
                "with a fault there": len(hurt.intersection(possible)),
                "never reached": [p for p in possible if p not in self.reached],
                "never with a fault": [p for p in possible if p not in hurt],
                "unreachable": {p: why for p in points if (why := _reason(p, UNREACHABLE))},
            },
            "messages": {
                "kinds": len(messages),
                "reached": len(messages & self.faults.keys()),
                "never": sorted(messages - self.faults.keys()),
            },
            "error codes": {
                "raised": {c: self.codes[c] for c in sorted(self.codes)},
                "never": [c for c in codes if c not in raised and c not in NOT_BY_FAULTS],
                "not by faults": {c: why for c, why in NOT_BY_FAULTS.items() if c not in raised},
            },
        }


def _reason(point: str, reasons: Mapping[str, str]) -> str:
    return next((why for start, why in reasons.items() if point.startswith(start)), "")


def main(arguments: list[str]) -> None:
    """Print the summary of files of records, or write it with the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    options, totals = parser.parse_args(arguments), Totals()
    for file in options.records:
        with file.open() as lines:
            totals.add_file(lines)
    facts = {"command": "make simulate SEED=100000 SEEDS=100000", "machine": os.uname().machine}
    text = json.dumps(facts | {"cores": 1} | totals.summary(), indent=1) + "\n"
    if options.write:
        options.write.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
