# SPDX-License-Identifier: Apache-2.0
"""The list of offers is stored only as long as nothing that its verdicts depend on has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run
from studies import approvals_in, offered

from fedplan.runners.site import Site, read_site
from fedplan.sites import approvals as decisions
from fedplan.sites import inbox_rows as listing
from fedplan.sites.inbox import Inbox, Offer
from fedplan.sites.inbox_rows import ROWS_FILE, inbox_rows


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with an approved and a violating study."""
    (tmp_path / "site.toml").write_text('name = "north"\n')
    approvals = approvals_in(tmp_path, 'never_share = ["embed"]\n')
    kept = offered("chain(share(), keep(head | embed))")
    approvals.record_offer(kept)
    approvals.approve(kept.full_digest)
    approvals.record_offer(offered("share()"))
    return read_site(tmp_path)


def computed(site: Site, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[dict[str, str]]]:
    """Whether the list is computed when it is asked for, and the list."""
    calls, real = list[int](), decisions.site_approvals

    def counting(each: Site) -> decisions.Approvals:
        calls.append(1)
        return real(each)

    with monkeypatch.context() as patch:
        patch.setattr(decisions, "site_approvals", counting)
        rows = inbox_rows(site)
    return bool(calls), rows


def _edit_policy(site: Site) -> None:
    Path(site.policy).write_text('never_share = ["head"]\n')


def _withdraw(site: Site) -> None:
    approvals = decisions.site_approvals(site)
    approvals.withdraw(next(iter(approvals.inbox.digests())))


def _offer(site: Site) -> None:
    decisions.site_approvals(site).record_offer(offered(rounds=7))


def _forget_an_offer(site: Site) -> None:
    sorted(Path(site.state, "inbox").iterdir())[0].unlink()


def _edit_the_rows(site: Site) -> None:
    file = Path(site.state, ROWS_FILE)
    file.write_text(file.read_text().replace("violates the policy", "approved by ada"))


@pytest.mark.parametrize(
    "change",
    [_edit_policy, _withdraw, _offer, _forget_an_offer, _edit_the_rows],
)
def test_a_stored_list_is_used_until_something_changes(
    change: Callable[[Site], None], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, rows = computed(site, monkeypatch)
    assert fresh and [row["state"][:8] for row in rows] == ["approved", "violates"]
    assert computed(site, monkeypatch) == (False, rows)
    change(site)
    fresh, now = computed(site, monkeypatch)
    assert fresh
    approvals = decisions.site_approvals(site)
    assert now == [approvals.inbox_row(digest) for digest in approvals.inbox.digests()]


def test_a_model_and_the_versions_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "model", Inbox.read_offer
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def of_a_folder(inbox: Inbox, digest: str) -> Offer:
        offer = real(inbox, digest)
        model = offer.study.model.model_copy(update={"path": str(folder)})
        return replace(offer, study=offer.study.model_copy(update={"model": model}))

    monkeypatch.setattr(Inbox, "read_offer", of_a_folder)
    monkeypatch.setattr(decisions.Approvals, "violations", lambda *_: [])
    for change in (
        lambda: (folder / "config.json").write_text("[]"),
        lambda: (folder / "adapter_config.json").write_text("{}"),
        lambda: (folder / "config.json").unlink(),
        lambda: monkeypatch.setattr(listing, "version", lambda _: "9"),
    ):
        computed(site, monkeypatch)
        assert not computed(site, monkeypatch)[0]
        change()
        assert computed(site, monkeypatch)[0]


def test_a_list_is_not_stored_that_may_be_stale(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People who sign, a study's own code, one that cannot be checked here, a change meanwhile."""
    file, policy = Path(site.state, ROWS_FILE), Path(site.policy)
    unchecked = [f"{decisions.UNCHECKED}: no model"]
    inbox_rows(site.model_copy(update={"allow_packages": ["ours"]}))
    with monkeypatch.context() as patch:
        patch.setattr(decisions.Approvals, "violations", lambda *_: unchecked)
        inbox_rows(site)
    with monkeypatch.context() as patch:
        patch.setattr(decisions.Approvals, "violations", lambda *_: policy.touch() or [])
        inbox_rows(site)
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGq5Cv2l6l2q1s1Yd1v9dJ6i0zXcJb0cY0n4n8m4q1aB"
    policy.write_text(f'[people]\nada = "{key}"\n')
    assert inbox_rows(site) and not file.exists()
    policy.write_text("")
    assert inbox_rows(site) and json.loads(file.read_text())["rows"]


def test_the_command_prints_the_stored_list(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(site.file)
    first = run("site", "inbox", "--site", place)
    monkeypatch.setattr(decisions, "site_approvals", None)
    assert run("site", "inbox", "--site", place) == first and first[0] == 0
