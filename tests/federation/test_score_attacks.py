# SPDX-License-Identifier: Apache-2.0
"""Scores at sites, attacked: other studies on the same examples, other values, and kills."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from often import first
from test_masked_kills import apart
from test_score_sums import MASKS, NOISY, SECURE, Sites, written

from fedplan.federation.ledger.egress import REPLIES, read_replies
from fedplan.privacy.guarantee import evaluation_name
from fedplan.storage import files
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.tensors.message import Message

ONE_ROUND = SECURE.replace("rounds = 3", "rounds = 1")
BOTH = NOISY.replace("rounds = 3", "rounds = 1") + MASKS
HOLDOUT = "holdout_fraction = 0.4"
STUDIES = {
    "validation_fraction": (HOLDOUT, HOLDOUT + "\nvalidation_fraction = 0.4"),
    "holdout_fraction": (HOLDOUT, "holdout_fraction = 0.41"),
    "name": ('name = "tiny"', 'name = "other"'),
    "seed": ('name = "tiny"', 'name = "tiny"\nseed = 5'),
    "filter": (HOLDOUT, HOLDOUT + "\nfilter = { digit = [0, 1] }"),
    "labels": ("labels = [0, 1, 2]", "labels = [2, 1, 0]"),
    "image_size": ("image_size = 8", "image_size = 16"),
    "personal": ("every = 2", "every = 2\npersonal = false"),
    "batch_size": ("batch_size = 8", "batch_size = 4"),
}
"""What another study on the same tables may say: other examples are tested, or others count."""


def carried(text: str, folder: Path, lost: int | None = None) -> dict[str, Any]:
    """The scores of a run's only evaluation; the site number `lost` does not answer it."""
    sites = Sites(written(text, f"{folder.name}.toml"), folder, folder.parent / "accounts")

    def fail(name: str, kind: str) -> None:
        if lost is not None and name == sites.names[lost] and kind == "evaluate":
            raise OSError("the site is down")

    sites.broken = fail
    (told,) = sites.carry()
    return told


@pytest.mark.parametrize("field", first(1, list(STUDIES)))
def test_no_other_study_gets_a_sum_of_other_sites(field: str, here: Path) -> None:
    """Else the difference of both is one site's number of examples by label."""
    old, new = STUDIES[field]
    assert old in ONE_ROUND
    other = ONE_ROUND.replace(old, new)
    whole = carried(ONE_ROUND, here / "one")
    assert whole["clients"] == 3
    without = carried(other, here / "other", lost=1)
    assert set(without) == {"silent"} and len(without["silent"]) == 3
    if field == "seed":
        assert carried(other, here / "again")["clients"] == 3, "the same sites may be summed"


def test_of_the_same_request_other_values_are_refused(here: Path) -> None:
    """A server that chooses values would learn personal ones, and get noise of its choice."""
    for text in (NOISY, SECURE):
        folder = here / f"{len(text)}"
        sites = Sites(written(text), folder)
        name = sites.names[0]
        told = sites.asked(name)
        assert set(told) <= {"counts", "advert"}
        for _ in range(2):
            assert sites.asked(name, 2.0) == {"refused": "no-evaluation"}
            sites.endpoints.clear()  # it starts again
            gc.collect()
            assert sites.asked(name) == told
        counted = read_replies(sites.accounts / name)
        assert len({line["content"] for line in counted if line["kind"] == "evaluation"}) == 1
        (sites.accounts / name / REPLIES).write_text("[")
        assert sites.asked(name) == {"failed": "disk"}, "what was answered is not known"


def test_masks_and_noise_together(here: Path) -> None:
    """The sum has the noise of all sites, each site charges its own, and any sites may be in it."""
    told = carried(BOTH, here / "run", lost=2)
    assert told["clients"] == 2
    assert any(name.endswith("_low") for name in told["global"])  # by the noise, not all have one
    assert carried(BOTH, here / "other")["clients"] == 3, "noise hides the difference"


class Killed(Sites):
    """Sites of which one is killed in its first evaluation, each time that it reaches a point."""

    point, deaths = "", 0

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        def calm() -> Message:
            return super(Killed, self).answer(context, kind, message)

        victim = self.names[1]
        if kind != "evaluate" or context.node_config["name"] != victim or self.deaths:
            return calm()

        def work() -> None:
            files.reset_failpoints()
            os.environ[VARIABLE] = f"{self.point}:kill@{self.deaths + 1}"
            calm()

        while True:
            self.endpoints.pop(victim, None)
            gc.collect()
            code = os.waitstatus_to_exitcode(os.waitpid(apart(work), 0)[1])
            if code != -signal.SIGKILL:
                assert code == 0
                break
            self.deaths += 1
        return calm()


KILLS = sorted(
    (point for point in POINTS if point.startswith(("log.", "store."))),
    key=lambda point: point != "store.manifest_renamed",
)


@pytest.mark.parametrize("text", first(1, [BOTH, ONE_ROUND]))
@pytest.mark.parametrize("point", first(1, KILLS))
def test_a_site_killed_in_an_evaluation_is_in_its_sum(point: str, text: str, here: Path) -> None:
    """Between charge and answer, and between the protocol's progress and the counts."""
    sites = Killed(written(text), here / "run")
    sites.point = point
    (told,) = sites.carry()
    assert sites.deaths or point != KILLS[0], "it dies where it is known to come by"
    assert told["senders"] == sites.names and told["silent"] == {}
    guard = sites.endpoint(sites.names[1]).site.privacy.guard
    charges = guard.budget.charges if guard is not None else ()
    names = [charge.name for charge in charges if charge.name.endswith(evaluation_name(""))]
    assert len(names) == (text == BOTH), "one charge for all deaths"
    if text == ONE_ROUND:
        assert told == carried(text, here / "calm")


def test_a_kill_before_a_new_sum_leaves_the_last_one_whole(here: Path) -> None:
    """At every point of the store: there are counts of the sum that the protocol has begun."""
    sites = Sites(written(SECURE.replace("every = 2", "every = 1")), here)
    name, deaths = sites.names[0], 0
    assert set(sites.asked(name, number=2)) == {"advert"}

    def work() -> None:
        files.reset_failpoints()
        os.environ[VARIABLE] = f"store.manifest_renamed:kill@{deaths + 1}"
        sites.asked(name, number=3)

    while True:
        sites.endpoints.clear()
        gc.collect()
        code = os.waitstatus_to_exitcode(os.waitpid(apart(work), 0)[1])
        masker = sites.endpoint(name).secagg_client
        assert masker is not None
        if masker.round_and_sites("evaluation")[0] == 3:
            break
        assert code == -signal.SIGKILL
        masker._number_words("evaluation")
        deaths += 1
    assert code == -signal.SIGKILL, "killed between the protocol's progress and the counts"
    assert set(sites.asked(name, number=3)) == {"advert"}
    masker._number_words("evaluation")
