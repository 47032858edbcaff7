# SPDX-License-Identifier: Apache-2.0
"""A server that lies: each site refuses with a reason, notes nothing, and goes on with the truth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import masked
import numpy as np
import pytest
from masked import NEVER, Round, directory, drawn, node, refusal, terms

from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.client_state import ClientRoundState
from fedplan.secagg.crypto import sign
from fedplan.secagg.messages import (
    ForwardedShares,
    KeyAdvert,
    KeyRoster,
    SignatureList,
    SurvivorList,
    SurvivorSignature,
    survivors_digest,
)
from fedplan.secagg.progress import RevealLog
from fedplan.secagg.server import ProtocolServer
from fedplan.secagg.terms import Slot, Terms

SITES = ("ada", "bea", "cleo", "dora", "eve")
SLOTS = (Slot("body", 5), Slot("head", 3, wide=True))
Lie = tuple[str, Callable[[], object], str]


def whole(**said: object) -> Round:
    dice = random.Random(1)
    agreed = terms(SLOTS, threshold=4, floor=3, round=3, **said)
    numbers = {site: {slot.name: drawn(dice, slot) for slot in SLOTS} for site in SITES}
    return Round(agreed, numbers, dict.fromkeys(SITES, 7))


def other_round(said: Terms) -> dict[str, KeyAdvert]:
    """What the sites have signed under other terms, at another time."""
    found = dict[str, KeyAdvert]()
    for name in SITES:
        site = ProtocolClient(name, node(name), directory(SITES), masked.MemoryProgressStore())
        found[name] = site.advertise_keys(said, [slot.name for slot in SLOTS])
    return found


def early(made: Round, me: str) -> Iterator[Lie]:
    site, now = made.sites[me], made.terms
    names = [slot.name for slot in SLOTS]
    yield "an earlier round", lambda: site.advertise_keys(replace(now, round=2), names), "is over"
    yield "another run", lambda: site.advertise_keys(replace(now, run="b"), names), "of run 'a'"
    for field, value in (
        ("base_digest", "c"),
        ("agreement_digest", "c"),
        ("experiment", "c"),
        ("threshold", 5),
    ):
        lie = replace(now, **{field: value})
        yield f"another {field}", lambda lie=lie: site.advertise_keys(lie, names), "other terms"
    yield "no slot of it", lambda: site.advertise_keys(now, ["tail"]), "is no slot"
    yield "fewer slots", lambda: site.advertise_keys(now, ["body"]), "other slots"
    for asked in (
        lambda: site.mask_input(ForwardedShares(now.digest, {}, {}), {}, 1),
        lambda: site.sign_survivors(SurvivorList(now.digest, SITES, {})),
        lambda: site.reveal_shares(SignatureList(now.digest, ())),
    ):
        yield "a step too early", asked, "before"


def rosters(made: Round, me: str) -> Iterator[Lie]:
    site, now = made.sites[me], made.terms
    true = dict(zip(SITES, made.server._adverts.values(), strict=True))
    you = next(name for name in SITES if name != me)
    third = next(name for name in SITES if name not in (me, you))

    def told(*adverts: KeyAdvert, at: bytes = now.digest) -> Callable[[], object]:
        return lambda: site.share_secrets(KeyRoster(at, adverts))

    def with_(**others: KeyAdvert) -> Callable[[], object]:
        return told(*(true | others).values())

    mine = replace(true[you], masking_key=true[me].masking_key[::-1])
    yield "keys of the server's own", with_(**{you: mine}), "not signed"
    own = replace(true[me], masking_key=bytes(31) + b"\1")
    yield "other keys of mine", with_(**{me: own}), "than its own"
    yield (
        "a signature of another",
        with_(**{you: replace(mine, signature=sign(node(third), mine.body))}),
        "not signed",
    )
    yield (
        "boxing keys swapped",
        with_(
            **{
                you: replace(true[you], encryption_key=true[third].encryption_key),
                third: replace(true[third], encryption_key=true[you].encryption_key),
            }
        ),
        "not signed",
    )
    yield (
        "one key for two",
        with_(**{you: replace(true[you], masking_key=true[third].masking_key)}),
        "one key",
    )
    for field, value in (
        ("round", 2),
        ("attempt", 2),
        ("base_digest", "c"),
        ("run", "b"),
        ("agreement_digest", "c"),
    ):
        old = other_round(replace(now, **{field: value}))[you]
        yield f"signed for another {field}", with_(**{you: old}), "other terms"
        yield (
            f"that, renamed to this {field}",
            with_(**{you: replace(old, terms_digest=now.digest)}),
            "not signed",
        )
    yield "other slots of a site", with_(**{you: replace(true[you], slots=("body",))}), "not signed"
    few = {name: true[name] for name in (me, you, third)}
    yield "too few", told(*dict(sorted(few.items())).values()), "the threshold is 4"
    yield "nobody", told(), "the threshold is 4"
    without = [advert for name, advert in true.items() if name != me]
    yield "without me", told(*without), "or none"
    yield "a site twice", told(true[me], *true.values()), "twice"
    yield "another order", told(*reversed(true.values())), "not sorted"
    yield "other terms", told(*true.values(), at=bytes(32)), "other terms"
    strange = replace(
        true[you], client="zoe", masking_key=bytes(31) + b"\2", encryption_key=bytes(31) + b"\3"
    )
    strange = replace(strange, signature=sign(node("zoe"), strange.body))
    yield "a site that nobody knows", told(*true.values(), strange), "not in the directory"


def deliveries(made: Round, me: str) -> Iterator[Lie]:
    site, now, server = made.sites[me], made.terms, made.server
    boxes, hashes = dict(server.shares_for(me).ciphertexts), server.shares_for(me).share_hashes
    one, two = list(boxes)[:2]

    def told(held: dict[str, bytes], at: bytes = now.digest) -> Callable[[], object]:
        return lambda: site.mask_input(ForwardedShares(at, held, hashes), made.numbers[me], 7)

    yield "too few", told({one: boxes[one], two: boxes[two]}), "the threshold is 4"
    yield "nobody", told({}), "the threshold is 4"
    yield "boxes swapped", told(boxes | {one: boxes[two], two: boxes[one]}), "do not decrypt"
    swapped = dict(hashes) | {one: hashes[two], two: hashes[one]}
    lie = ForwardedShares(now.digest, boxes, swapped)
    yield "hashes swapped", lambda: site.mask_input(lie, made.numbers[me], 7), "do not decrypt"
    bare = ForwardedShares(now.digest, boxes, {})
    yield "no hashes", lambda: site.mask_input(bare, made.numbers[me], 7), "has not committed"
    yield "a box of nobody", told(boxes | {"zoe": boxes[one]}), "no other client"
    yield "a box of mine", told(boxes | {me: boxes[one]}), "no other client"
    yield "other terms", told(boxes, bytes(32)), "other terms"
    less = server.roster().adverts[:-1]
    yield "another roster", lambda: site.share_secrets(KeyRoster(now.digest, less)), "differs"
    few = {"body": made.numbers[me]["body"]}
    true = server.shares_for(me)
    yield "fewer numbers", lambda: site.mask_input(true, few, 7), "declared"
    yield "no weight", lambda: site.mask_input(true, made.numbers[me], 0), "weight"
    heavy = true, made.numbers[me], 2**27 + 1
    yield "more than a plain sum takes", lambda: site.mask_input(*heavy), "weight"
    yield (
        "survivors too early",
        lambda: site.sign_survivors(SurvivorList(now.digest, SITES, {})),
        "before",
    )


def survivors(made: Round, me: str) -> Iterator[Lie]:
    site, now, server = made.sites[me], made.terms, made.server
    again = server.shares_for(me)
    others = tuple(name for name in SITES if name != me)

    def told(*sites: str, at: bytes = now.digest) -> Callable[[], object]:
        return lambda: site.sign_survivors(SurvivorList(at, sites, {}))

    yield "without me", told(*others), "not among the survivors"
    yield "too few", told(*sorted((me, *others[:2]))), "the threshold is 4"
    yield "nobody", told(), "not among the survivors"
    yield "one who was not there", told(*SITES, "zoe"), "did not share"
    yield "a site twice", told(me, *SITES), "twice"
    yield "another order", told(*reversed(SITES)), "not sorted"
    yield "other terms", told(*SITES, at=bytes(32)), "other terms"
    less = {name: again.ciphertexts[name] for name in list(again.ciphertexts)[:3]}
    masked_less = ForwardedShares(now.digest, less, again.share_hashes)
    yield (
        "another delivery",
        lambda: site.mask_input(masked_less, made.numbers[me], 7),
        "differs",
    )
    more = {name: np.add(each, np.uint64(1)) for name, each in made.numbers[me].items()}
    yield (
        "the same masks on other numbers",
        lambda: site.mask_input(again, more, 7),
        "other numbers",
    )
    yield (
        "the same masks on another weight",
        lambda: site.mask_input(again, made.numbers[me], 8),
        "other",
    )
    yield "to open at once", lambda: site.reveal_shares(SignatureList(now.digest, ())), "before"


def openings(made: Round, me: str) -> Iterator[Lie]:
    site, now = made.sites[me], made.terms
    held = {name: made.server._signatures[name] for name in SITES}
    you, third, *_ = (name for name in SITES if name != me)

    def told(*consents: SurvivorSignature, at: bytes = now.digest) -> Callable[[], object]:
        return lambda: site.reveal_shares(SignatureList(at, consents))

    notes = made.sites[me]._store.read()
    assert notes is not None
    other = tuple(name for name in SITES if name != third)
    lie = sign(node(you), survivors_digest(ClientRoundState(me, notes).context, other))
    some = list(held.values())
    yield "too few", told(*some[:3]), "the threshold is 4"
    yield "nobody", told(), "the threshold is 4"
    yield "one of them four times", told(*[held[you]] * 4), "the threshold is 4"
    changed = held | {you: replace(held[you], signature=lie)}
    yield "signed for other survivors", told(*changed.values()), "has not signed"
    taken = held | {you: replace(held[third], client=you)}
    yield "a signature of another", told(*taken.values()), "has not signed"
    yield "no signature", told(*some[:3], replace(held[you], signature=b"")), "has not signed"
    yield "one who is not there", told(*some, replace(held[you], client="zoe")), "not among"
    yield "other terms", told(*some, at=bytes(32)), "other terms"
    less = tuple(name for name in SITES if name != third)
    yield (
        "other survivors",
        lambda: site.sign_survivors(SurvivorList(now.digest, less, {})),
        "differs",
    )


def afterwards(made: Round, me: str) -> Iterator[Lie]:
    site, now, names = made.sites[me], made.terms, [slot.name for slot in SLOTS]
    you = next(name for name in SITES if name != me)
    less = tuple(name for name in SITES if name != you)
    yield (
        "to open it for others",
        lambda: site.sign_survivors(SurvivorList(now.digest, less, {})),
        "differs",
    )
    for attempt in (2, 3):
        again = replace(now, attempt=attempt)
        yield "another attempt", lambda again=again: site.advertise_keys(again, names), "round once"
    model = replace(now, attempt=2, base_digest="c")
    yield (
        "another attempt of another model",
        lambda: site.advertise_keys(model, names),
        "round once",
    )
    yield "an earlier round", lambda: site.advertise_keys(replace(now, round=1), names), "is over"


AT = (None, rosters, deliveries, survivors, openings, afterwards)
"""What is tried before each step of a round, once the steps before it are done."""


@pytest.fixture(scope="module")
def lies() -> list[tuple[str, str, str, str, bool]]:
    """Every lie to every site: its step, what it is, why it was refused, and what should be said."""
    made, found = whole(), list[tuple[str, str, str, str, bool]]()
    steps = [made.advertise, made.share, made.mask, made.consent, made.answer]
    for number in range(NEVER + 1):
        tried = [each for each in (early if number == 1 else None, AT[number]) if each]
        for kind in tried:
            for me in SITES:
                for name, asked, reason in kind(made, me):
                    before = made.sites[me]._store.read()
                    said = refusal(asked)
                    kept = made.sites[me]._store.read() == before
                    found.append((f"{kind.__name__} to {me}", name, said, reason, kept))
        if number < NEVER:
            steps[number]()
    wanted = masked.plain(made)
    assert wanted is not None and masked.said(made.server.unmask(), made) == wanted
    return found


def test_every_lie_is_refused_with_its_reason_and_leaves_no_note(
    lies: list[tuple[str, str, str, str, bool]],
) -> None:
    assert len(lies) >= 200
    for where, name, said, reason, kept in lies:
        assert reason in said, (where, name, said)
        assert kept, (where, name)
    assert len({name for _, name, *_ in lies}) >= 40


def test_a_site_with_a_key_that_leaves_no_secret_is_refused() -> None:
    """A point of small order agrees on zero with everybody."""
    made = whole()
    made.advertise()
    held = made.server._adverts
    weak = replace(held["bea"], encryption_key=bytes(32))
    held["bea"] = replace(weak, signature=sign(node("bea"), weak.body))
    assert "is invalid" in refusal(made.share)
    assert "is invalid" in refusal(lambda: whole().server.accept_advert(held["bea"]))


def test_a_site_whose_directory_has_another_key_of_it_does_not_begin() -> None:
    known = directory(SITES) | {"ada": directory(["bea"])["bea"]}
    assert "another key" in refusal(
        lambda: ProtocolClient("ada", node("ada"), known, masked.MemoryProgressStore())
    )


def test_one_key_under_two_names_is_refused() -> None:
    """Whoever has it would be two of those who open a sum."""
    known = directory(SITES) | {"bea": directory(["cleo"])["cleo"]}
    assert "one key" in refusal(
        lambda: ProtocolClient("ada", node("ada"), known, masked.MemoryProgressStore())
    )


def test_from_the_same_values_no_sum_of_other_sites_is_opened(tmp_path: Path) -> None:
    """In another round or run: the difference of two such sums is what one site sent."""
    names, known = ("ada", "bea", "dora"), directory(("ada", "bea", "dora"))

    def opened(run: str, ground: str, there: tuple[str, ...], short: str = "") -> int:
        told = terms([Slot("x", 1), Slot("y", 1)], threshold=2, run=run)
        sent = {name: ["y"] if name == short else ["x", "y"] for name in there}
        server = ProtocolServer(told, known)
        sites = {
            name: ProtocolClient(
                name,
                node(name),
                known,
                masked.MemoryProgressStore(),
                RevealLog(tmp_path / name / "opened"),
            )
            for name in there
        }
        for name, site in sites.items():
            server.accept_advert(site.advertise_keys(told, sent[name], ground))
        for site in sites.values():
            server.accept_shares(site.share_secrets(server.roster()))
        for name, site in sites.items():
            own = np.array([10 ** names.index(name)], dtype=np.uint64)
            server.add_masked_input(
                site.mask_input(server.shares_for(name), dict.fromkeys(sent[name], own), 1)
            )
        for site in sites.values():
            server.accept_signature(site.sign_survivors(server.survivor_list()))
        for site in sites.values():
            server.accept_unmask_shares(site.reveal_shares(server.signature_list()))
        return int(server.unmask().numbers["x"][0])

    assert opened("a", "world", names) == opened("b", "world", names) == 111
    said = refusal(lambda: opened("c", "world", names[:2]))
    assert "from the same values" in said and "is what dora sent" in said
    said = refusal(lambda: opened("c", "world", names, short="dora"))
    assert "is what dora sent" in said, "though all are there, one has not sent all that it did"
    assert opened("d", "another world", names[:2]) == 11
    assert "from the same values" in refusal(lambda: opened("e", "another world", names))
    assert len((tmp_path / "ada" / "opened").read_text().splitlines()) == 3
    (tmp_path / "ada" / "opened").write_text("no line\n")
    said = refusal(lambda: RevealLog(tmp_path / "ada" / "opened"))
    assert "opened does not hold line" in said, "before a site trains for a sum"


def test_more_sites_than_twice_the_threshold_are_refused() -> None:
    """Else two halves of them could each open a sum."""
    made = whole()
    some = Round(replace(made.terms, threshold=2, min_senders=2), made.numbers, made.weights)
    assert "two halves" in refusal(some.play)
    for name in SITES:
        notes = some.sites[name]
        roster = tuple(sorted(some.server._adverts.values(), key=lambda each: each.client))
        told = KeyRoster(some.terms.digest, roster)
        assert "two halves" in refusal(lambda notes=notes, told=told: notes.share_secrets(told))


def test_a_threshold_is_more_than_half_of_the_sites() -> None:
    agreed = terms(SLOTS, threshold=3)
    agreed.require_client_count(5)
    assert "take 4 at least" in refusal(lambda: agreed.require_client_count(6))


def test_the_server_takes_no_signature_of_other_survivors() -> None:
    """Else one site that lies would make all others refuse to open the sum."""
    made = whole()
    made.play(until=4)
    held = made.server._signatures["bea"]
    false = replace(held, signature=made.server._signatures["ada"].signature)
    assert "has signed other survivors" in refusal(lambda: made.server.accept_signature(false))
    assert made.server._signatures["bea"] == held


def test_no_site_is_laid_open_by_two_answers() -> None:
    """Of no site does anybody give a share of its mask and a share of its key."""
    dice = random.Random(5)
    for _ in range(6):
        made = whole()
        made.gone = {dice.choice(SITES): dice.randrange(NEVER)}
        made.play()
        for answer in made.answers.values():
            assert not set(answer.masking_key_shares) & {
                s for each in answer.self_mask_shares.values() for s in each
            }
