# SPDX-License-Identifier: Apache-2.0
"""What a masked sum costs beside the plain one: bytes and seconds of a site and of the server.

`python -m research.masking --fresh` measures on one core and writes research/results/masking/costs.json row by
row; without `--fresh` it goes on after the last row. `python -m research.masking --table` prints the
table of research/pages/masking.md from that file. Seconds are those of one core, of one site and of
the server; the plain sum is of float32. Beside them stands what Flower's own SecAgg+ takes of a
site for as many neighbours, by the steps of its client: no message of it is sent.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.crypto import SecAggError, node_public_key
from fedplan.secagg.progress import MemoryProgressStore
from fedplan.secagg.server import ProtocolServer, UnmaskedSums
from fedplan.secagg.terms import Slot, Terms
from fedplan.tensors.sums import ExactSum
from research.bench.facts import facts_of

RESULTS = Path(__file__).parent / "results" / "masking" / "costs.json"
CASES = [(count, size * 10**6) for size in (1, 22, 110) for count in (3, 10, 30)]
NOTE = "seconds of the process; `load` is the machine's when a row was begun"
WHOLE = 10**9
"""Numbers of all masks together up to which every site makes its own; above it one does, and the
server is given that one's words for each: what is opened is then rubbish, and takes as long."""
MOST = 12 * 10**8
"""Numbers of all masks of one site up to which Flower's are made too."""
MODULUS, RANGE, CLIP = 2**32, 2**22, 8.0
"""Flower's own defaults."""
Said = ParamSpec("Said")
Found = TypeVar("Found")


def size_of(letter: object) -> int:
    """The bytes in a letter, without what a transport adds."""
    if isinstance(letter, (bytes, str)):
        return len(letter)
    if isinstance(letter, Mapping):
        held = cast("Mapping[object, object]", letter)
        return sum(size_of(k) + size_of(v) for k, v in held.items())
    if isinstance(letter, (tuple, list)):
        return sum(map(size_of, cast("Sequence[object]", letter)))
    return 0


def seconds(
    asked: Callable[Said, Found], *words: Said.args, **more: Said.kwargs
) -> tuple[Found, float]:
    """What is asked for, and how long this process took."""
    start = time.process_time()
    return asked(*words, **more), time.process_time() - start


def measured(count: int, numbers: int, lost: int) -> dict[str, float]:
    """One round of so many sites with one slot of so many numbers, of which some sites are lost."""
    names = [f"site{n:03}" for n in range(count)]
    keys = {name: generate_private_key(SECP384R1()) for name in names}
    known = {name: node_public_key(key) for name, key in keys.items()}
    slots = (Slot("body", numbers),)
    agreed = Terms("lab", "a", "f", 1, "b", count // 2 + 1, 2, slots)
    notes = {name: MemoryProgressStore() for name in names}
    sites = {n: ProtocolClient(n, keys[n], known, notes[n]) for n in names}
    server, me = ProtocolServer(agreed, known), sites[names[0]]
    up = down = spent = served = 0.0
    for name in names:
        advert, took = seconds(sites[name].advertise_keys, agreed, ["body"])
        served += seconds(server.accept_advert, advert)[1]
        if sites[name] is me:
            up, spent = up + size_of(asdict(advert)), spent + took
    roster = server.roster()
    down += size_of(asdict(roster))
    for name in names:
        boxes, took = seconds(sites[name].share_secrets, roster)
        server.accept_shares(boxes)
        if sites[name] is me:
            up, spent = up + size_of(asdict(boxes)), spent + took
    down += size_of(asdict(server.shares_for(names[0])))
    there, change = names[: count - lost], np.arange(numbers, dtype=np.uint64)
    masked, took = seconds(me.mask_input, server.shares_for(names[0]), {"body": change}, 100)
    up, spent = up + size_of(dict(masked.vectors)), spent + took
    whole = count * count * numbers <= WHOLE
    if not whole:
        change = np.zeros(0, np.uint64)  # it is not needed any more
    for name in there:
        if whole and name != names[0]:
            masked = sites[name].mask_input(server.shares_for(name), {"body": change}, 100)
        elif name != names[0]:
            held, given = notes[name].read(), server.shares_for(name)
            assert held is not None
            boxes, hashes = dict(given.ciphertexts), dict(given.share_hashes)
            held = replace(held, ciphertexts=boxes, share_hashes=hashes)
            notes[name].write(replace(held, masked_digest="as the first"))
        served += seconds(server.add_masked_input, replace(masked, client=name))[1]
    del masked, change
    survivors = server.survivor_list()
    down += size_of(asdict(survivors))
    for name in there:
        consent, took = seconds(sites[name].sign_survivors, survivors)
        served += seconds(server.accept_signature, consent)[1]
        if sites[name] is me:
            up, spent = up + size_of(asdict(consent)), spent + took
    consents = server.signature_list()
    down += size_of(asdict(consents))
    for name in there:
        answer, took = seconds(sites[name].reveal_shares, consents)
        server.accept_unmask_shares(answer)
        if sites[name] is me:
            up, spent = up + size_of(asdict(answer)), spent + took
    opened, took = seconds(tried, server)
    assert whole == (opened is not None)
    assert opened is None or int(opened.numbers["body"][1]) == len(there)
    served += took
    del opened, server
    return {"up": up, "down": down, "site": spent, "server": served} | plain(count - lost, numbers)


def tried(server: ProtocolServer) -> UnmaskedSums | None:
    try:
        return server.unmask()
    except SecAggError:  # the words were not of these sites
        return None


def plain(count: int, numbers: int) -> dict[str, float]:
    """The exact sum of as many updates of float32."""
    total, values = ExactSum(), {"body": torch.linspace(-1, 1, numbers)}
    took = sum(seconds(total.add, values, 100)[1] for _ in range(count))
    return {"plain_up": 4.0 * numbers, "plain_server": took + seconds(total.mean)[1]}


def flower(count: int, numbers: int) -> dict[str, float]:
    """What Flower's SecAgg+ does with a site's update: scale, quantize, mask, take the modulus."""
    if count * numbers > MOST:
        return {}
    values = [np.linspace(-1, 1, numbers)]
    words, took = seconds(_flower, values, count)
    return {"flower_site": took, "flower_up": float(sum(each.nbytes for each in words))}


def _flower(values: list[Any], count: int) -> list[Any]:
    scaled = arithmetic.parameters_multiply(values, 0.1)
    words: list[Any] = arithmetic.factor_combine(1, [*quantize(scaled, CLIP, RANGE)])
    shapes = [each.shape for each in words]
    for place in range(count):  # its own mask, and one for each neighbour
        mask: list[Any] = [*pseudo_rand_gen(place.to_bytes(32, "little"), MODULUS, shapes)]
        join = arithmetic.parameters_subtraction if place % 2 else arithmetic.parameters_addition
        words = join(words, mask)
    return arithmetic.parameters_mod(words, MODULUS)


def tables() -> str:
    """The rows of the file as a table."""
    lines = [
        "| sites | lost | million numbers | bytes up, beside float32 | site, s | server, s "
        "| plain server, s | server, beside plain | Flower's site, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in held():
        theirs = f"{row['flower_site']:.2f}" if "flower_site" in row else "-"
        lines.append(
            f"| {row['sites']:.0f} | {row['lost']:.0f} | {row['numbers'] / 10**6:.0f} | "
            f"{row['up'] / row['plain_up']:.3f} | {row['site']:.2f} | {row['server']:.2f} | "
            f"{row['plain_server']:.2f} | {row['server'] / row['plain_server']:.1f} | {theirs} |"
        )
    return "\n".join(lines) + "\n"


def held() -> list[dict[str, float]]:
    """The rows that were measured before."""
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []


def row_of(count: int, numbers: int, lost: int) -> dict[str, float]:
    """One row: the middle of three tries where numbers are few, else one."""
    load = os.getloadavg()[0]
    tries = [
        measured(count, numbers, lost) | (flower(count, numbers) if not lost else {})
        for _ in range(3 if numbers <= 10**6 else 1)
    ]
    middle = {key: round(statistics.median(x[key] for x in tries), 4) for key in tries[0]}
    return {"sites": count, "lost": lost, "numbers": numbers, "load": round(load, 2)} | middle


def main() -> None:
    """Measure all rows that are not there yet, the quick ones first."""
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows = [] if "--fresh" in sys.argv else held()
    facts = facts_of(RESULTS.parents[3])
    done = {(row["sites"], row["numbers"], row["lost"]) for row in rows}
    for count, numbers in CASES:
        for lost in (0, max(1, count // 10)):
            if (count, numbers, lost) in done:
                continue
            rows.append(row_of(count, numbers, lost))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            said = {"command": "python -m research.masking --fresh", "note": NOTE, "facts": facts}
            said |= {"threads": 1, "rows": rows}
            RESULTS.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    sys.stdout.write(tables()) if "--table" in sys.argv else main()
