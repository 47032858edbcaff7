# SPDX-License-Identifier: Apache-2.0
"""Keys of sites as people compare them: the same digits everywhere, others after any change."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import run

NAMES = ("north", "south", "west")


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Three sites that have made their keys and exchanged them by hand."""
    for name in NAMES:
        (tmp_path / name / "peers").mkdir(parents=True)
        text = f'name = "{name}"\npeer_keys = "peers"\n[server]\naddress = "localhost:9"\n'
        (tmp_path / name / "site.toml").write_text(text + 'node_key = "node"\n')
        assert run("site", "keys", "--site", str(tmp_path / name))[0] == 0
    for name in NAMES:
        exchange(tmp_path, name)
    return tmp_path


def exchange(sites: Path, name: str) -> None:
    """Give the public key of a site to all."""
    for other in NAMES:
        shutil.copy(sites / name / "node.pub", sites / other / "peers" / f"{name}.pub")


def peers(sites: Path, name: str) -> tuple[int, dict[str, object]]:
    code, out = run("site", "peers", "--json", "--site", str(sites / name))
    return code, json.loads(out[: out.rindex("}") + 1])


def test_all_sites_see_the_same_and_it_is_what_openssh_prints(sites: Path) -> None:
    told = [peers(sites, name) for name in NAMES]
    assert [code for code, _ in told] == [0, 0, 0]
    assert len({str(each["together"]) for _, each in told}) == 1
    assert len({str(each["peers"]) for _, each in told}) == 1
    own = [each["own"] for _, each in told]
    assert len(set(own)) == 3 and list(told[0][1]["peers"].values()) == own  # type: ignore[attr-defined]
    digits = str(told[0][1]["together"])
    assert len(digits.split()) == 12 and len(digits.replace(" ", "")) == 60
    if shutil.which("ssh-keygen"):
        asked = ["ssh-keygen", "-lf", str(sites / "south" / "node.pub")]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert said.split()[1] == own[1]
    code, out = run("site", "peers", "--site", str(sites / "north"))
    assert code == 0 and digits in out and all(f"{n}: SHA256:" in out for n in NAMES)


def test_a_key_that_somebody_replaced_changes_the_digits(sites: Path) -> None:
    before = peers(sites, "north")[1]
    assert run("site", "keys", "--site", str(sites / "mallory"))[0] == 0
    shutil.copy(sites / "mallory" / "node.pub", sites / "north" / "peers" / "south.pub")
    code, after = peers(sites, "north")
    assert (
        code == 0 and after["together"] != before["together"] == peers(sites, "west")[1]["together"]
    )
    shutil.copy(sites / "mallory" / "node.pub", sites / "north" / "peers" / "north.pub")
    (sites / "north" / "peers" / "south.pub").unlink()
    code, after = peers(sites, "north")
    assert code == 1 and "is not this site's node.pub" in str(after["problem"])
    shutil.copy(sites / "mallory" / "node.pub", sites / "north" / "peers" / "south.pub")
    code, out = run("site", "peers", "--site", str(sites / "north"))
    assert code != 0 and "one key for north and south" in " ".join(out.split())


def test_a_key_is_rotated_and_all_agree_again(sites: Path) -> None:
    before, state = peers(sites, "south")[1], (sites / "south" / "state.key").read_bytes()
    old = (sites / "south" / "node").read_bytes()
    code, out = run("site", "keys", "--rotate", "--site", str(sites / "south"))
    assert code == 0 and len(out.split()) == 2
    assert (sites / "south" / "old-node").read_bytes() == old
    assert (sites / "south" / "state.key").read_bytes() == state, "its state stays readable"
    assert peers(sites, "south")[0] == 1, "its own folder of keys has the old one"
    exchange(sites, "south")
    told = [peers(sites, name) for name in NAMES]
    assert {code for code, _ in told} == {0} and len({str(e["together"]) for _, e in told}) == 1
    assert told[0][1]["together"] != before["together"] and told[1][1]["own"] != before["own"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('name = "north"\n')
    code, out = run("site", "peers", "--site", str(tmp_path))
    assert code != 0 and "peer_keys and server.node_key" in " ".join(out.split())
    code, out = run("site", "keys", "--rotate", "--site", str(tmp_path))
    assert code != 0 and "no node key to replace" in " ".join(out.split())
