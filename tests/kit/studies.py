# SPDX-License-Identifier: Apache-2.0
"""Studies that a server may offer to a site, as values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sites import NAME, study_text

from fedplan.language.predicates import Turn
from fedplan.sites.approvals import Approvals
from fedplan.studies.schema import Study, parse_toml, study_from_dict

SITE = Turn(client=NAME)
"""The site as plans see it."""


def offered(plan: str = "chain(share(), keep(head))", **said: Any) -> Study:
    """A study of a tiny model with a plan."""
    said = {"privacy": "", "rounds": 3} | said
    return study_from_dict(parse_toml(study_text(method=f"plan = {plan!r}", **said)))


def approvals_in(folder: Path, policy: str = "") -> Approvals:
    """The approvals of a site in a folder, under a policy."""
    (folder / "policy.toml").write_text(policy)
    return Approvals(folder / "state", folder / "policy.toml", site=SITE)
