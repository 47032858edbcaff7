# SPDX-License-Identifier: Apache-2.0
"""Masked sums over Flower's messages: the bits of the plain sum, whoever drops out or is killed."""

from __future__ import annotations

import gc
import io
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clients import Few
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from masked_runs import NAMES, SOON, MaskedRun, model_of
from often import first
from rich.console import Console
from torch import Tensor

from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.aggregation.secure import SecureAggregator
from fedplan.federation.client import client_turn
from fedplan.federation.client_round import score_layers
from fedplan.federation.ledger.egress import read_egress
from fedplan.federation.ledger.records import read_turn
from fedplan.federation.messages import RequestRefused, read_request, request_message
from fedplan.language.parser import parse
from fedplan.language.plan import Role
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.reports.pages.traffic import Traffic
from fedplan.runners.site import read_peer_keys
from fedplan.secagg import config as secagg_config
from fedplan.secagg.config import SecAggConfig
from fedplan.secagg.round import ROUND_CHECKPOINT
from fedplan.sites.egress import read_egress_report
from fedplan.storage import files
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests, full_digest

PARTS = 'chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(0) | blocks(1))))'
FEDAVG = method_by_name("fedavg")
PARAMS = describe(model_of(FEDAVG))
METHODS: dict[str, Method] = {
    "parts": Method(parse(PARTS)),
    "together": method_by_name("safl", {"k": 1, "joint_choice": True}),
    "fedper": method_by_name("fedper"),
    "fedfrozen": method_by_name("fedfrozen", {"warmup": 2}),
    "fedit": method_by_name("fedit", {"rank": 2}),
}


COUNTS = dict(zip(NAMES, (123_457, 274_177, 380_299), strict=True))
STEPS = ("train", *secagg_config.SECAGG_STEPS)
SERVER_POINTS = [point for point in POINTS if point.startswith("secagg.")]


class Claimed(Few):
    """A few rows that are counted as many."""

    def __init__(self, count: int) -> None:
        super().__init__("bert", 0, 4)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return super().batch(indices % 4)


def lost(run: MaskedRun, name: str, step: str, number: int = 0) -> None:
    """Have a site give no answer at a step, in one round or in all."""
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        here = not number or run.server.global_state.round + 1 == number
        if site == name and kind == step and here:
            raise RuntimeError("gone")
        return calm(site, kind, asked)

    run.answer = answer


EXAMPLE_COUNT = 16
"""Bytes of the masked number of examples, which is no part of a model and is not booked."""


def count_arrivals(run: MaskedRun) -> Counter[str]:
    """Count the bytes of masked inputs that sites put on the wire, by site."""
    counts, inner = Counter[str](), run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        found = inner(site, kind, asked)
        if kind == secagg_config.MASKED_INPUT_STEP:
            counts[site] += sum(map(len, found.blobs)) - EXAMPLE_COUNT
        return found

    run.answer = answer
    return counts


def require_booked(run: MaskedRun, counts: Counter[str]) -> None:
    """Ledger, its check and the bytes of a report agree with what came over the wire."""
    booked = Counter[str]()
    traffic = Traffic(run.server.agreement)
    for line in run.lines():
        if line["kind"] == "turn":
            booked[line["client"]] += line["upload_bytes"]
            traffic.add_turn(read_turn(line))
    assert {n: each for n, each in booked.items() if each} == dict(counts)
    assert sum(x["upload_bytes"] for x in run.rounds()) == counts.total() == traffic.up.total()
    assert run.faults() == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> MaskedRun:
    run = MaskedRun(FEDAVG, tmp_path_factory.mktemp("plain"), SecAggConfig(), rounds=1)
    run.carry()
    return run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> MaskedRun:
    """A masked round in which nothing goes wrong, of sites with counts that can be told."""
    run = MaskedRun(FEDAVG, tmp_path_factory.mktemp("calm"), rounds=1)
    for name, count in COUNTS.items():
        run.endpoints[name].site.examples = Claimed(count)
    run.carry()
    return run


@pytest.fixture(scope="module")
def fewer(tmp_path_factory: pytest.TempPathFactory) -> MaskedRun:
    """Of the first round, a plain run without one site."""
    run = MaskedRun(FEDAVG, tmp_path_factory.mktemp("fewer"), SecAggConfig(), rounds=1)
    lost(run, "client-1", "train")
    run.carry()
    return run


@pytest.mark.parametrize("name", first(1, list(METHODS)))
def test_the_same_bits_as_the_plain_sum(name: str, tmp_path: Path) -> None:
    made = METHODS[name]
    plain = MaskedRun(made, tmp_path / "plain", SecAggConfig())
    masked = MaskedRun(made, tmp_path / "masked")
    for run in (plain, masked):
        run.carry()
    told = {"threshold": 2, "clients": list(NAMES), "not_unmasked": {}}
    assert [x["secagg"] for x in masked.rounds()] == [told] * 2
    assert digests(masked.server.global_state.values) == digests(plain.server.global_state.values)
    assert masked.server.global_state.drift == {}  # its squares would be opened beside its sums
    assert masked.faults() == []


def test_a_poll_is_masked_and_its_sum_chooses_for_all(tmp_path: Path) -> None:
    run, polled = MaskedRun(METHODS["together"], tmp_path, rounds=1), dict[str, list[float]]()
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if kind == "poll":
            own = run.endpoints[site]
            polled[site] = list(score_layers(own.agreement, own.site, read_request(asked)).values())
        return calm(site, kind, asked)

    run.answer = answer
    run.carry()
    assert set(polled) == set(NAMES) and len({max(each) for each in polled.values()}) == 3
    turns = [line for line in run.lines() if line["kind"] == "turn"]
    sums = [sum(each) for each in zip(*polled.values(), strict=True)]
    for line in turns:
        assert [score for *_, score in line["scores"]] == pytest.approx(sums, abs=2**-44)
    whole = b"".join(run.said)
    single = [x for each in polled.values() for x in each if x]
    assert single and not any(struct.pack("<d", x) in whole for x in single)
    assert not any(repr(x).encode() in whole for x in single)
    kinds = [x["kind"] for x in read_egress(tmp_path / "sites/client-0") if x["kind"] != "hello"]
    assert kinds.count("scores") == kinds.count("update") == 1 and kinds.count("unmasking") == 2


@pytest.mark.parametrize("step", STEPS)
def test_a_site_that_drops_out_at_a_step_is_counted_if_its_words_have_come(
    step: str, tmp_path: Path, plain: MaskedRun, fewer: MaskedRun
) -> None:
    masked = MaskedRun(FEDAVG, tmp_path / "masked", rounds=1)
    lost(masked, "client-1", step)
    arrived = count_arrivals(masked)
    masked.carry()
    require_booked(masked, arrived)
    (line,) = masked.rounds()
    there = step in (secagg_config.SIGNATURE_STEP, secagg_config.UNMASK_STEP)
    assert line["aggregated"] == list(NAMES if there else NAMES[::2])
    assert ("client-1" in line["rejected"]) != there and masked.faults() == []
    world = digests(masked.server.global_state.values)
    assert (world == digests(fewer.server.global_state.values)) != there
    if there:
        assert line["changed"] == plain.rounds()[0]["changed"]


def test_too_few_for_the_threshold_change_nothing_and_the_round_says_why(tmp_path: Path) -> None:
    run = MaskedRun(FEDAVG, tmp_path, rounds=2)
    for name in NAMES[:2]:
        lost(run, name, secagg_config.MASKED_INPUT_STEP, 1)
    before, arrived = digests(run.server.global_state.values), count_arrivals(run)
    run.carry()
    require_booked(run, arrived)
    first, second = run.rounds()
    assert not first["aggregated"] and not first["changed"] and run.faults() == []
    assert "threshold is 2" in first["secagg"]["not_unmasked"]["all"]
    assert first["secagg"]["discarded"] == {NAMES[2]: 2}  # in both attempts
    assert second["aggregated"] == list(NAMES) and digests(run.server.global_state.values) != before


@pytest.mark.parametrize("point", first(1, SERVER_POINTS[::-1]))
def test_a_server_killed_between_two_letters_closes_with_the_same_bits(
    point: str, tmp_path: Path, plain: MaskedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{point}:raise@1")
    files.reset_failpoints()
    killed = MaskedRun(FEDAVG, tmp_path, rounds=1)
    with pytest.raises(OSError, match="failpoint"):
        killed.carry()
    monkeypatch.delenv(VARIABLE)
    del killed
    gc.collect()
    again = MaskedRun(FEDAVG, tmp_path, rounds=1)
    again.carry()
    assert digests(again.server.global_state.values) == digests(plain.server.global_state.values)
    assert again.faults() == [] and 'attempt": 1' in (tmp_path / ROUND_CHECKPOINT).read_text()


@pytest.mark.parametrize("step", first(1, [*STEPS[2:], *STEPS[:2]]))
def test_a_site_killed_before_and_after_a_step_says_the_same_again(
    step: str, tmp_path: Path, plain: MaskedRun
) -> None:
    run, times = MaskedRun(FEDAVG, tmp_path, rounds=1), dict[str, int]()
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if site != "client-1" or kind != step:
            return calm(site, kind, asked)
        times[kind] = times.get(kind, 0) + 1
        if times[kind] == 1:
            run.restart(site)
            raise RuntimeError("killed before it was said")
        found = calm(site, kind, asked)
        if times[kind] == 2:
            run.restart(site)
            raise RuntimeError("killed after it was noted, before it could be sent")
        return found

    run.answer = answer
    run.carry()
    assert digests(run.server.global_state.values) == digests(plain.server.global_state.values)
    assert run.faults() == [] and times[step] > 2


def test_a_server_that_sends_one_site_another_model_is_refused(tmp_path: Path) -> None:
    """What one site alone makes of its own model could be told from the sum."""
    run = MaskedRun(FEDAVG, tmp_path, rounds=1)
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if site == "client-1" and kind == "train":
            request = read_request(asked)
            key = min(request.values)
            other = request.values | {key: request.values[key] + 1}
            asked = request_message(replace(request, values=other))
        return calm(site, kind, asked)

    run.answer = answer
    run.carry()
    (line,) = run.rounds()
    assert line["aggregated"] == [*NAMES[::2]]
    assert "unexpected-values" in line["rejected"]["client-1"]


@pytest.mark.parametrize("told", [False, True])
def test_no_sum_is_of_an_update_that_was_made_of_other_values_than_all_start_from(
    told: bool, tmp_path: Path
) -> None:
    """What a site is sent and does not share makes its update: a dead layer makes it nothing.

    The lie comes first, and then the truth; its digests are those of the lie, if it is `told`.
    """
    run, kept = MaskedRun(METHODS["parts"], tmp_path, rounds=1), list[object]()
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if site == "client-1" and kind == "train" and not kept:
            request, own = read_request(asked), run.endpoints[site]
            roles = own.agreement.permitted(client_turn(own.site, request))
            shared = {p.key for p in roles if roles[p] is Role.SHARE}
            key = min(k for k in request.values.keys() - shared if "LayerNorm.weight" in k)
            dead = {key: torch.zeros_like(request.values[key])}
            assert request.values[key].any()  # else the lie would be the truth
            marks = {key: full_digest(dead[key])} if told else {}
            lie = replace(
                request, values=request.values | dead, base_digests=request.base_digests | marks
            )
            calm(site, kind, request_message(lie))
            kept.append(own.site.journal.reply_for(request.name))
        return calm(site, kind, asked)

    run.answer = answer
    run.carry()
    (line,) = run.rounds()
    assert (kept == [None]) != told
    assert line["aggregated"] == list(NAMES[::2] if told else NAMES) and run.faults() == []


def test_a_world_that_stands_still_is_not_summed_again_without_one_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of both sums would be what that site sent."""
    close = SecureAggregator.close

    def held(total: SecureAggregator) -> AggregationResult:
        return (
            AggregationResult({}, secagg=close(total).secagg)
            if total.round_number == 1
            else close(total)
        )

    monkeypatch.setattr(SecureAggregator, "close", held)
    run = MaskedRun(FEDAVG, tmp_path, rounds=2)
    lost(run, "client-1", "train", 2)
    run.carry()
    first, second = run.rounds()
    assert first["aggregated"] == list(NAMES) and not second["aggregated"]
    assert "signed the survivors" in second["secagg"]["not_unmasked"]["all"]
    assert "from the same values" in (tmp_path / "sites/client-0/faults.log").read_text()


def test_another_run_from_the_same_start_is_not_summed_without_one_site(tmp_path: Path) -> None:
    """Both draw the same: the difference of the sums would be the words of that site, to the bit."""
    for name in ("one", "other"):
        run = MaskedRun(FEDAVG, tmp_path / name, rounds=1, accounts=tmp_path / "accounts")
        if name == "other":
            lost(run, "client-1", "train")
        run.carry()
        assert run.rounds()[0]["aggregated"] == (list(NAMES) if name == "one" else [])
        assert bool(run.rounds()[0]["changed"]) == (name == "one") and run.faults() == []


def test_a_roster_with_a_site_that_the_study_does_not_ask_is_refused(tmp_path: Path) -> None:
    run = MaskedRun(FEDAVG, tmp_path, rounds=1)
    masker = run.endpoints["client-0"].secagg_client
    assert masker is not None
    masker._protocols["round"]._cohort = lambda number: NAMES[:2]
    run.carry()
    (line,) = run.rounds()
    assert line["aggregated"] == list(NAMES[1:]) and "share" in line["rejected"]["client-0"]


def test_each_name_has_a_file_and_a_key_of_its_own(tmp_path: Path) -> None:
    def put(name: str) -> bytes:
        key = generate_private_key(SECP384R1()).public_key()
        said = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (tmp_path / f"{name}.pub").write_bytes(said)
        return said

    put("ada")
    bob = put("bob")
    assert len(set(read_peer_keys(tmp_path, ["ada", "bob"]).values())) == 2
    for alias in ("./bob", f"../{tmp_path.name}/bob", f"{tmp_path}/bob"):
        with pytest.raises(RequestRefused, match="is not a node key"):
            read_peer_keys(tmp_path, ["ada", "bob", alias])
    (tmp_path / "eve.pub").write_bytes(bob)
    with pytest.raises(RequestRefused, match="one key for bob and eve"):
        read_peer_keys(tmp_path, ["ada", "bob", "eve"])


def test_no_message_and_no_file_of_the_server_tells_of_one_site(calm: MaskedRun) -> None:
    held = [value for name in NAMES for value in canaries(calm, name)]
    kept = [f.read_bytes() for f in calm.folder.rglob("*") if f.is_file() and is_server(calm, f)]
    whole = b"".join([*calm.said, *kept])
    assert len(whole) > 10**5 and len(held) > 100
    for count in COUNTS.values():
        held += [str(count).encode(), *(struct.pack(f"<{kind}", count) for kind in "iqfd")]
    assert [value for value in held if value in whole] == []
    turns = [line for line in calm.lines() if line["kind"] == "turn"]
    assert {(line["weight"], line["loss"], line["steps"]) for line in turns} == {(1, None, 2)}


def canaries(run: MaskedRun, name: str) -> list[bytes]:
    """Stretches of a site's update where it moved, as numbers and as steps, and its digests."""
    site = run.endpoints[name].site
    found = site.journal.reply_for(run.server.agreement.request_name(1, name))
    assert found is not None
    told = list[bytes]()
    for key, value in found[0].items():
        moved = (value != site.received[key]).flatten().nonzero().flatten()[:4]
        if len(moved) == 4:
            some = value.flatten()[moved]
            change = some.double() - site.received[key].flatten()[moved].double()
            steps = [(each * 2**47).round().long() for each in (some.double(), change)]
            told += [each[:2].numpy().tobytes() for each in (some, *steps)]
            told.append(digests({key: value})[key].encode())
    return told


def is_server(run: MaskedRun, file: Path) -> bool:
    return file.relative_to(run.folder).parts[0] not in ("sites", "clients")


def test_the_site_s_own_record_says_what_left_under_masks_and_with_whom(calm: MaskedRun) -> None:
    place = calm.folder / "sites/client-0"
    lines = [x for x in read_egress(place) if x["kind"] != "hello"]
    assert [x["kind"] for x in lines] == ["keys", "shares", "update", "signature", "unmasking"]
    assert [x.get("clients", []) for x in lines] == [[], *[list(NAMES)] * 4]
    most = sum(calm.server.agreement.upload_bytes(p) for p in calm.server.agreement.exchanged)
    assert lines[2]["upload_bytes"] == most == 8 * sum(p.numel for p in PARAMS)
    assert all(line["upload_bytes"] == 0 for line in lines if line["kind"] != "update")
    told = io.StringIO()
    Console(file=told, width=200).print(*read_egress_report(place))
    assert "uploads were masked" in told.getvalue()
    assert f"rounds 1: {', '.join(NAMES)}" in told.getvalue()


def test_a_site_without_the_keys_of_the_others_takes_no_part(tmp_path: Path) -> None:
    run = MaskedRun(FEDAVG, tmp_path, rounds=1)
    run.endpoints["client-1"].secagg_client = None
    run.carry(replace(SOON, sites=0.5))
    (line,) = run.rounds()
    assert line["aggregated"] == [*NAMES[::2]]
