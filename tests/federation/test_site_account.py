# SPDX-License-Identifier: Apache-2.0
"""One account for a site's dataset: its limits hold over all studies, by content and not by name."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import run
from sites import (
    PRIVATE,
    RUN,
    SAFL,
    SHARE,
    TRAIN,
    VOTE,
    asked,
    charges,
    site_of,
    study_text,
    world_of,
)

from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.endpoint import POLL, Endpoint
from fedplan.federation.ledger.egress import (
    EVALUATION,
    REVEAL_LOG,
    UNMASKING,
    Account,
    Answer,
    EgressEntry,
    EgressLog,
    Limits,
    read_replies,
    require_complete_account,
)
from fedplan.federation.messages import RequestRefused
from fedplan.privacy.accounting.accountant import DPSGDSteps, epsilon
from fedplan.privacy.guarantee import Guarantee
from fedplan.privacy.guard import ClientGuard
from fedplan.secagg.progress import RevealLog
from fedplan.secagg.terms import Slot, Terms
from fedplan.storage.append_log import DamagedLog, head_file
from fedplan.tensors.named import digests

STUDIES: dict[str, dict[str, Any]] = {
    "one": {"name": "one"},
    "another name": {"name": "two"},
    "another seed": {"name": "one", "seed": 1},
    "another rate": {"name": "one", "train": "lr = 0.5"},
    "another delta": {"name": "three", "privacy": PRIVATE + "delta = 0.8\n"},
}
TOGETHER = {"method": SAFL, "privacy": ""}


def told(said: dict[str, Any]) -> str:
    return str(said.get("refused") or said.get("failed") or "")


def storm(endpoints: list[Endpoint], count: int, kinds: tuple[str, ...]) -> dict[str, set[str]]:
    """Requests as a curious server would ask them; the different answers to each kind."""
    draw, found = random.Random(0), {kind: set[str]() for kind in kinds}
    for _ in range(count):
        endpoint, kind = draw.choice(endpoints), draw.choice(kinds)
        version = draw.randint(1, 3)
        global_state = world_of(
            endpoint, round=draw.choice((1, 3, 5)), scale=1 + version / 10, version=version
        )
        values, said = asked(endpoint, global_state, kind)
        if not told(said):
            found[kind].add(str(digests(values) if kind == TRAIN else said["scores"]))
    return found


@pytest.mark.parametrize("privacy", ["", PRIVATE], ids=["plain", "private"])
def test_no_more_turns_leave_than_the_limit_in_all_studies(privacy: str, tmp_path: Path) -> None:
    studies = [each for name, each in STUDIES.items() if privacy or name != "another delta"]
    studies = [{"privacy": privacy} | each for each in studies]
    endpoints = [site_of(tmp_path, study_text(**each), limit_rounds=3) for each in studies]
    assert len(storm(endpoints, 40, (TRAIN,))[TRAIN]) == 3
    assert charges(tmp_path) == (3 if privacy else 0)


def test_as_many_polls_as_turns(tmp_path: Path) -> None:
    methods = [TOGETHER | {"name": name} for name in "ab"]
    endpoints = [site_of(tmp_path, study_text(**each), limit_rounds=2) for each in methods]
    found = storm(endpoints, 30, (TRAIN, POLL))
    assert {kind: len(answers) for kind, answers in found.items()} == {TRAIN: 2, POLL: 2}


def test_no_more_bytes_leave_than_the_limit_in_all_studies(tmp_path: Path) -> None:
    texts = [study_text(name=name, privacy="") for name in "abc"]
    size = sum(p.nbytes for p in site_of(tmp_path, texts[0]).agreement.exchanged)
    endpoints = [site_of(tmp_path, text, limit_bytes=2 * size + 5) for text in texts]
    left = 0
    for endpoint in endpoints * 2:
        values, said = asked(endpoint, world_of(endpoint))
        left += sum(v.numel() * v.element_size() for v in values.values())
        assert values or told(said) == "limit-bytes"
    assert left == 2 * size, "what is sent again counts again"


@pytest.mark.parametrize("method", [SHARE, SAFL], ids=["turns", "turns and polls"])
def test_epsilon_is_of_all_studies_at_the_sites_own_delta(method: str, tmp_path: Path) -> None:
    vote = VOTE if method == SAFL else ""
    studies = [{**each, "method": method} for each in STUDIES.values()]
    for each in studies:
        each["privacy"] = each.get("privacy", PRIVATE).replace("20.0", "1.5") + vote
    limit, delta = 4.0, 1e-6
    node = {"limit_epsilon": limit, "limit_delta": delta}
    endpoints = [site_of(tmp_path, study_text(**each), **node) for each in studies]
    kinds = (TRAIN, POLL) if vote else (TRAIN,)
    found = storm(endpoints, 40, kinds)
    assert found[TRAIN], "some of it was answered"
    guarantee = endpoints[0].agreement.guarantee
    assert guarantee is not None and guarantee.sampling_rate
    turns = [
        DPSGDSteps(guarantee.noise_multiplier, guarantee.sampling_rate, guarantee.steps)
    ] * len(found[TRAIN])
    assert epsilon(turns, delta) <= limit
    assert sum(map(len, found.values())) <= charges(tmp_path)
    assert endpoints[0].site.privacy.guard is not None
    again = site_of(tmp_path, study_text(**studies[0]), **node)
    assert (
        again.site.privacy.guard is not None
        and again.site.privacy.guard.budget.epsilon_spent() <= limit
    )
    global_state = world_of(again, round=7, scale=3.0, version=9)
    assert told(asked(again, global_state)[1]) == "limit-epsilon"


def test_a_limit_of_epsilon_and_answers_that_nothing_hides_do_not_go_together(
    tmp_path: Path,
) -> None:
    plain = study_text(name="plain", privacy="")
    hidden = study_text(name="hidden")
    endpoint = site_of(tmp_path, plain, limit_epsilon=2.0)
    assert told(asked(endpoint, world_of(endpoint))[1]) == "unprotected"
    free = site_of(tmp_path, plain)
    assert asked(free, world_of(free))[0]
    late = site_of(tmp_path, hidden, limit_epsilon=2.0)
    assert told(asked(late, world_of(late))[1]) == "unprotected", "what has left cannot be hidden"
    other = site_of(tmp_path, hidden, limit_epsilon=2.0, dataset="ward-3")
    assert asked(other, world_of(other))[0] and charges(tmp_path, "ward-3") == 1


@pytest.mark.parametrize("dataset", ["ward-3", "..", "a/b", ".hidden", "examples"])
def test_a_dataset_is_one_folder_of_the_home(dataset: str, tmp_path: Path) -> None:
    endpoint = site_of(tmp_path, study_text(privacy=""), dataset=dataset)
    account = endpoint.site.privacy.account
    assert account is not None and account.folder.parent == tmp_path / "state" / "account"
    assert account.folder.resolve().parent == (tmp_path / "state" / "account").resolve()
    assert "dataset" not in endpoint.site.traits


CHANCE = 'plan = "chain(freeze(), best(1))"\nprobe = "random"\njoint_choice = true'
POLLS: dict[str, tuple[dict[str, Any], int, str]] = {
    "a probe and no best": ({"method": SHARE + '\nprobe = "gradient"', "privacy": ""}, 1, "no-scoring"),
    "hidden, a probe, no best": ({"method": SHARE + '\nprobe = "gradient"'}, 1, "no-scoring"),
    "each for itself": (
        {"method": 'name = "safl"\nsettings = { k = 1, joint_choice = false }', "privacy": ""}, 1, "no-scoring"
    ),
    "not in this round": (
        {
            "method": 'plan = "chain(share(), when(after(2), best(1)))"\n'
            'probe = "gradient"\njoint_choice = true',
            "privacy": "",
        },
        1,
        "no-scoring",
    ),
    "in this round": (
        {
            "method": 'plan = "chain(share(), when(after(2), best(1)))"\n'
            'probe = "gradient"\njoint_choice = true',
            "privacy": "",
        },
        3,
        "",
    ),
    "hidden, by chance": ({"method": CHANCE}, 1, ""),
    "a vote": ({"method": SAFL, "privacy": PRIVATE + VOTE}, 1, ""),
    "between votes": ({"method": SAFL, "privacy": PRIVATE + VOTE}, 2, "no-scoring"),
}  # fmt: skip


@pytest.mark.parametrize("name", POLLS)
def test_a_poll_is_answered_where_the_plan_chooses_and_somebody_pays(
    name: str, tmp_path: Path
) -> None:
    study, number, wanted = POLLS[name]
    endpoint = site_of(tmp_path, study_text(**study))
    for version in (1, 2):
        global_state = world_of(endpoint, round=number, scale=1 + version, version=version)
        _, said = asked(endpoint, global_state, POLL)
        assert told(said) == wanted and ("scores" in said) != bool(wanted)
    lines = read_replies(tmp_path / "state/account/examples") if not wanted else []
    assert len({line["content"] for line in lines}) == (0 if wanted else 2)
    assert charges(tmp_path) == (2 if name == "a vote" else 0)


@pytest.mark.parametrize(
    ("method", "privacy"), [(SAFL, PRIVATE + VOTE), (CHANCE, PRIVATE)], ids=["vote", "chance"]
)
def test_a_lost_charge_of_a_vote_is_missed(method: str, privacy: str, tmp_path: Path) -> None:
    text = study_text(method=method, privacy=privacy)
    endpoint = site_of(tmp_path, text)
    assert "scores" in asked(endpoint, world_of(endpoint), POLL)[1]
    site_of(tmp_path, text)
    for end in ("", ".head"):
        (tmp_path / f"state/account/examples/charges.jsonl{end}").unlink(missing_ok=True)
    if method == CHANCE:
        site_of(tmp_path, text)  # scores by chance need no examples: nothing was charged
        return
    with pytest.raises(DamagedLog, match="noise was added to the scores, but no epsilon"):
        site_of(tmp_path, text)


def test_a_lost_charge_of_an_evaluation_is_missed(tmp_path: Path) -> None:
    account, egress = Account(tmp_path / "account/rows"), EgressLog(tmp_path)
    account.charge(Answer(EVALUATION, "r", "content", 8, protected=True))
    egress.append(EgressEntry(EVALUATION, request="r"))
    with pytest.raises(DamagedLog, match="noise was added to the evaluation, but no epsilon"):
        require_complete_account(account, egress)
    guarantee = Guarantee("example", 900.0, 1e-5, 1.0, 1.0, evaluation_noise_multiplier=2.0)
    ClientGuard(guarantee, account.folder).release_counts([1], 1.0, "r", "content")
    require_complete_account(account, egress)


def unmask(account: Account, egress: EgressLog, number: int) -> None:
    """Log a sum of the round `number`, as a site with this account does."""
    slots = (Slot("a", 1),)
    terms = Terms("e", RUN, "", number, "", 2, 2, slots)
    RevealLog(account.folder / REVEAL_LOG).record(terms, str(number), {"a": ("ann", "bob")})
    egress.append(EgressEntry(UNMASKING, request=f"{number}", content=f"{number}"))


def without(file: Path) -> None:
    """Remove a log and its head."""
    for end in ("", ".head"):
        file.with_name(file.name + end).unlink()


@pytest.mark.parametrize("datasets", [1, 2])
def test_a_lost_or_older_log_of_unmasked_sums_is_missed(datasets: int, tmp_path: Path) -> None:
    accounts = [Account(tmp_path / f"account/{number}") for number in range(datasets)]
    first, egress = accounts[0], EgressLog(tmp_path)
    log, backup = first.folder / REVEAL_LOG, tmp_path / "backup"
    unmask(first, egress, 1)
    backup.mkdir()
    for file in (log, head_file(log)):
        shutil.copy(file, backup)
    for number, account in enumerate([first, *accounts], 2):
        unmask(account, egress, number)
    egress.append(EgressEntry(UNMASKING, request="1", content="1"))  # the same shares again
    require_complete_account(first, egress)
    without(log)
    with pytest.raises(DamagedLog, match=r"helped to unmask .* lost or an older copy"):
        require_complete_account(first, egress)
    shutil.copytree(backup, first.folder, dirs_exist_ok=True)
    with pytest.raises(DamagedLog, match=r"helped to unmask .* lost or an older copy"):
        require_complete_account(first, egress)
    without(log)
    log.touch()  # as its owner may empty it
    require_complete_account(first, egress)
    unmask(first, egress, 9)
    require_complete_account(first, egress)
    RevealLog(log).require_consistent(Terms("e", RUN, "", 9, "", 2, 2, (Slot("a", 1),)), "9", {})


def test_two_processes_share_an_account(tmp_path: Path) -> None:
    """However they meet: no more is admitted than the limits allow, and nothing fails."""
    guarantee = Guarantee("example", 900.0, 1e-5, 1.0, 1.0, 0.5, steps=1, batch_size=4)
    limit = epsilon([DPSGDSteps(1.0, 0.5, 1)] * 6, 1e-5)
    Account(tmp_path)
    children = list[int]()
    for child in range(2):
        pid = os.fork()
        if pid == 0:
            account, failed = Account(tmp_path, Limits(rounds=9)), 0
            guard = ClientGuard(guarantee, tmp_path, run=f"{child}/", limit=limit, delta=1e-5)
            for number in range(8):
                try:
                    account.charge(
                        Answer("update", f"{child}/{number}", f"{child}/{number}", 3, True)
                    )
                    guard.make_fit(1, f"{child}/{number}", "content")
                except (RequestRefused, PrivacyError) as error:
                    failed += error.code not in ("limit-rounds", "limit-epsilon")
                except FedplanError:
                    failed += 1
            os._exit(failed)
        children.append(pid)
    assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
    assert len(read_replies(tmp_path)) == 9
    guard = ClientGuard(guarantee, tmp_path, limit=limit, delta=1e-5)
    assert len(guard.budget.charges) == 6 and guard.budget.epsilon_spent() <= limit


def test_two_threads_share_an_account(tmp_path: Path) -> None:
    accounts = [Account(tmp_path, Limits(rounds=10)) for _ in range(4)]
    refused = list[str]()

    def ask(mine: int) -> None:
        for number in range(5):
            try:
                accounts[mine].charge(Answer("update", "r", f"{mine} {number}", 1))
            except RequestRefused as error:
                refused.append(error.code)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_replies(tmp_path)) == 10 and refused == ["limit-rounds"] * 10


def test_a_line_that_a_kill_cut_off_is_cut_off(tmp_path: Path) -> None:
    account = Account(tmp_path, Limits(rounds=2))
    account.charge(Answer("update", "r1", "a", 1))
    whole, head = ((tmp_path / f"replies.jsonl{end}").read_bytes() for end in ("", ".head"))
    for length in range(len(whole)):
        (tmp_path / "replies.jsonl").write_bytes(whole + whole[:length])
        (tmp_path / "replies.jsonl.head").write_bytes(head)
        account.charge(Answer("update", "r1", "a", 1))
        assert [line["request"] for line in read_replies(tmp_path)] == ["r1", "r1"]


@pytest.mark.parametrize("damage", ["deleted", "emptied", "shortened", "a bit"])
def test_a_damaged_account_admits_nothing(tmp_path: Path, damage: str) -> None:
    account, file = Account(tmp_path, Limits(rounds=1)), tmp_path / "replies.jsonl"
    for content in ("a", "a"):
        account.charge(Answer("update", "r1", content, 1))
    whole = file.read_bytes()
    flipped = bytes([*whole[:20], whole[20] ^ 1, *whole[21:]])
    changed = {"emptied": b"", "shortened": whole[: len(whole) // 2], "a bit": flipped}
    file.write_bytes(changed[damage]) if damage in changed else file.unlink()
    with pytest.raises(FedplanError):
        Account(tmp_path, Limits(rounds=1)).charge(Answer("update", "r2", "b", 1))


def test_a_runs_own_promise_is_of_its_own_charges(tmp_path: Path) -> None:
    small = PRIVATE.replace("900.0", "3.0").replace("20.0", "1.5")
    ends = list[int]()
    for name in ("one", "two"):
        endpoint = site_of(tmp_path, study_text(name=name, privacy=small))
        for number in range(1, 30):
            values, said = asked(
                endpoint, world_of(endpoint, round=number, scale=number, version=number)
            )
            if not values:
                assert said == {"failed": "epsilon"}
                ends.append(number)
                break
        guard = endpoint.site.privacy.guard
        assert guard is not None and guard.epsilon_spent <= 3.0
    assert ends[0] == ends[1] and charges(tmp_path) == sum(ends) - 2
    folder = tmp_path / "state/two-0/north"
    code, told_ = run("privacy", str(folder), "--json")
    assert code == 0 and 2.0 < json.loads(told_)["epsilon_spent"] <= 3.0
    code, told_ = run("egress", str(tmp_path / "state"))
    assert code == 0 and f"all studies: {sum(ends) - 2} updates" in " ".join(told_.split())


def test_a_lost_secret_of_a_used_account_is_not_drawn_anew(tmp_path: Path) -> None:
    Account(tmp_path).charge(Answer("update", "r1", "a", 1))
    (tmp_path / "secret").unlink()
    with pytest.raises(PrivacyError, match=r"secret is lost: restore a copy"):
        Account(tmp_path)
