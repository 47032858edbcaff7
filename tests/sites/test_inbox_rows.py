# SPDX-License-Identifier: Apache-2.0
"""The list of offers is stored only as long as nothing that its verdicts depend on has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run
from studies import approvals_in, offered

from fedplan.runners.site import Site, read_site
from fedplan.sites import approvals as decisions
from fedplan.sites import inbox_rows as listing
from fedplan.sites.inbox_rows import ROWS_FILE, inbox_rows


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with an approved and a violating study, whose list may be stored at once."""
    (tmp_path / "site.toml").write_text('name = "north"\n')
    approvals = approvals_in(tmp_path, 'never_share = ["embed"]\n')
    kept = offered("chain(share(), keep(head | embed))")
    approvals.record_offer(kept)
    approvals.approve(kept.full_digest)
    approvals.record_offer(offered("share()"))
    monkeypatch.setattr(listing, "RECENT_NANOSECONDS", -(10**15))
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


def _touch_the_code(site: Site) -> None:
    """As an update does: fedplan itself is one of the files; its own time comes back after."""
    os.utime(decisions.__file__)


def _edit_the_rows(site: Site) -> None:
    file = Path(site.state, ROWS_FILE)
    file.write_text(file.read_text().replace("violates the policy", "approved by ada"))


@pytest.mark.parametrize(
    "change",
    [_edit_policy, _withdraw, _offer, _forget_an_offer, _touch_the_code, _edit_the_rows],
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


def test_a_file_beside_one_that_was_read_and_the_environment_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's folder: a new file there, and a changed one of which only another was read."""
    folder, real = tmp_path / "model", decisions.Approvals.inbox_row
    folder.mkdir()
    for name in ("config.json", "weights"):
        (folder / name).write_text("{}")

    def reading(approvals: decisions.Approvals, digest: str) -> dict[str, str]:
        (folder / "config.json").read_text()
        return real(approvals, digest)

    monkeypatch.setattr(decisions.Approvals, "inbox_row", reading)
    for change in (
        lambda: (folder / "weights").write_text("[]"),
        lambda: (folder / "adapter_config.json").write_text("{}"),
        lambda: (folder / "config.json").unlink(),
        lambda: monkeypatch.setenv("HF_HOME", str(tmp_path)),
    ):
        (folder / "config.json").touch()
        computed(site, monkeypatch)
        assert not computed(site, monkeypatch)[0]
        change()
        if (folder / "config.json").exists():
            assert computed(site, monkeypatch)[0]
        (folder / "config.json").write_text("{}")


def test_a_list_is_not_stored_that_may_be_stale_at_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that have just changed, people who sign, and a study that cannot be checked here."""
    file = Path(site.state, ROWS_FILE)
    with monkeypatch.context() as patch:
        patch.setattr(listing, "RECENT_NANOSECONDS", 2 * 10**9)
        Path(site.policy).touch()
        inbox_rows(site)
        assert not file.exists()
    with monkeypatch.context() as patch:
        patch.setattr(
            decisions.Approvals, "violations", lambda *_: [f"{listing.UNCHECKED}: no model"]
        )
        inbox_rows(site)
        assert not file.exists()
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGq5Cv2l6l2q1s1Yd1v9dJ6i0zXcJb0cY0n4n8m4q1aB"
    Path(site.policy).write_text(f'[people]\nada = "{key}"\n')
    assert inbox_rows(site) and not file.exists()
    Path(site.policy).write_text("")
    assert inbox_rows(site) and json.loads(file.read_text())["rows"]


def test_the_command_prints_the_stored_list(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(site.file)
    first = run("site", "inbox", "--site", place)
    monkeypatch.setattr(decisions, "site_approvals", None)
    assert run("site", "inbox", "--site", place) == first and first[0] == 0
