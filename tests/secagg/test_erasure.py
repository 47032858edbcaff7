# SPDX-License-Identifier: Apache-2.0
"""Secrets of a finished round are on no disk, and its messages are refused from then on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from masked import Round, drawn, refusal, terms
from masked_runs import NAMES, MaskedRun

from fedplan.methods.registry import method_by_name
from fedplan.secagg.client_state import ClientRoundState
from fedplan.secagg.progress import DiskProgressStore, RoundProgress
from fedplan.secagg.terms import Slot
from fedplan.tensors.message import Message

SITES = ("ada", "bea", "cleo")
SLOTS = (Slot("body", 5), Slot("head", 3, wide=True))


def secrets_of(name: str, progress: RoundProgress) -> list[bytes]:
    """Everything by which the input of a site in a round could be unmasked."""
    state = ClientRoundState(name, progress)
    seeds = [state.self_mask_seed(group) for group in state.groups]
    shares = [share for client in state.sharing for share in state.shares_of(client)]
    own = [progress.secret, state.masking_secret, state.encryption_secret]
    return [*own, *seeds, *shares, *progress.ciphertexts.values()]


def holds(folder: Path, secrets: list[bytes]) -> bool:
    """Whether a file below a folder has one of some secrets, as bytes or in hex."""
    contents = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    texts = [form for each in secrets for form in (each, each.hex().encode())]
    return any(text in content for content in contents for text in texts)


def lasting(folder: Path, **said: object) -> Round:
    dice = random.Random(2)
    numbers = {site: {slot.name: drawn(dice, slot) for slot in SLOTS} for site in SITES}
    stores = {site: DiskProgressStore(folder / site) for site in SITES}
    agreed = terms(SLOTS, threshold=2, **{"round": 4, **said})
    return Round(agreed, numbers, dict.fromkeys(SITES, 7), {}, stores)


def test_a_committed_round_leaves_no_secret_and_answers_nothing(tmp_path: Path) -> None:
    made = lasting(tmp_path)
    made.play()
    found = dict[str, list[bytes]]()
    for name, site in made.sites.items():
        progress = site._store.read()
        assert progress is not None
        found[name] = secrets_of(name, progress)
        assert holds(tmp_path / name, found[name]), "a restarted server may ask again"
        assert site.reveal_shares(made.server.signature_list()) == made.answers[name]
        site.erase_until(3)
        assert holds(tmp_path / name, found[name]), "its round is not committed yet"
        site.erase_until(4)
        assert not holds(tmp_path, found[name])
    again = terms(SLOTS, threshold=2, round=4, attempt=2)
    names = [slot.name for slot in SLOTS]
    for name, site in made.sites.items():
        for asked in (
            lambda site=site: site.advertise_keys(made.terms, names),
            lambda site=site: site.advertise_keys(again, names),
            lambda site=site: site.share_secrets(made.server.roster()),
            lambda site=site, name=name: site.mask_input(
                made.server.shares_for(name), made.numbers[name], 7
            ),
            lambda site=site: site.sign_survivors(made.server.survivor_list()),
            lambda site=site: site.reveal_shares(made.server.signature_list()),
        ):
            assert "secrets are erased" in refusal(asked)
        later = site.advertise_keys(terms(SLOTS, threshold=2, round=5), names)
        assert later.client == name


@pytest.mark.parametrize("said", [{"attempt": 2}, {"round": 5}])
def test_a_later_attempt_or_round_leaves_none_of_the_one_before(
    said: dict[str, int], tmp_path: Path
) -> None:
    made = lasting(tmp_path)
    made.play(until=4)
    progress = made.sites["ada"]._store.read()
    assert progress is not None
    old = secrets_of("ada", progress)
    later = terms(SLOTS, threshold=2, **{"round": 4, **said})
    made.sites["ada"].advertise_keys(later, ["body"])
    assert not holds(tmp_path / "ada", old)


def test_after_a_run_no_site_has_a_secret_of_it(tmp_path: Path) -> None:
    """Over all messages of a run, from the first to the last."""
    run, found = MaskedRun(method_by_name("fedavg"), tmp_path, rounds=2), dict[str, list[bytes]]()
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        said = calm(site, kind, asked)
        if kind == "unmask":
            client = run.endpoints[site].secagg_client
            assert client is not None
            progress = client._progress()
            found.setdefault(site, []).extend(secrets_of(site, progress))
            assert holds(tmp_path / "sites" / site, found[site])
        return said

    run.answer = answer
    run.carry()
    for name in NAMES:
        assert len(found[name]) > 10 and not holds(tmp_path / "sites" / name, found[name])


def test_secrets_left_by_a_crash_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """A crash between writing the erased state and removing the one before leaves both."""
    made = lasting(tmp_path)
    made.play()
    site, folder = made.sites["ada"], tmp_path / "ada"
    progress = site._store.read()
    assert progress is not None
    secrets, before = (
        secrets_of("ada", progress),
        {f: f.read_bytes() for f in folder.glob("*.json")},
    )
    site.erase_until(4)
    for file, content in before.items():
        file.write_bytes(content)
    assert holds(folder, secrets)
    del made, site
    DiskProgressStore(folder)
    assert not holds(folder, secrets)
