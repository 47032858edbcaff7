# SPDX-License-Identifier: Apache-2.0
"""The tools of the fault and leak tests do what those tests believe they do."""

from __future__ import annotations

import base64
import gzip
import io
import socket
import socketserver
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from canaries import BLOCK, WINDOW, Hit, casts, hits, plant, unmarked
from proxy import KINDS, Count, Proxy

MEGABYTE = 2**20


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(MEGABYTE):
                self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy(echo) as proxy:
        yield proxy


def connect(proxy: Proxy) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=10))


def read(peer: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the peer ends before."""
    found = bytearray()
    while len(found) < size and (data := peer.recv(min(MEGABYTE, size - len(found)))):
        found += data
    return bytes(found)


@contextmanager
def sending(peer: socket.socket, data: bytes) -> Iterator[None]:
    """Meanwhile send it all, if the peer lives that long."""

    def send() -> None:
        with suppress(OSError):
            peer.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


def echoed(proxy: Proxy, data: bytes) -> bytes:
    with connect(proxy) as peer, sending(peer, data):
        return read(peer, len(data))


def is_reset(peer: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while peer.recv(MEGABYTE):
            pass
        return False
    return True


def differing(one: bytes, other: bytes) -> int:
    """In how many bits."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


def noise(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


def test_bytes_are_passed_on_counted_and_recorded(echo: int, tmp_path: Path) -> None:
    first, second = noise(MEGABYTE, 1), noise(300_000, 2)
    with Proxy(echo, record=tmp_path / "wire") as proxy:
        assert echoed(proxy, first) == first
        assert proxy.mark() == Count(len(first), len(first))
        assert echoed(proxy, second) == second
        assert proxy.mark() == Count(len(second), len(second))
        assert proxy.mark() == Count(0, 0)
    assert (proxy.up, proxy.down) == (len(first) + len(second),) * 2
    recorded = {path.name: path.read_bytes() for path in (tmp_path / "wire").iterdir()}
    assert recorded == {
        "0001.up": first, "0001.down": first, "0002.up": second, "0002.down": second,
    }  # fmt: skip


def test_hundreds_of_megabytes_pass_in_seconds_and_no_thread_stays(echo: int) -> None:
    before, data = set(threading.enumerate()), bytes(200 * MEGABYTE)
    began = time.process_time()
    with Proxy(echo) as proxy:
        assert len(echoed(proxy, data)) == len(data)
    assert time.process_time() - began < 8
    # the echo's own ends when it sees that its client is gone
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if "process_request" not in name}


def test_the_end_of_one_direction_leaves_the_other_open(proxy: Proxy) -> None:
    with connect(proxy) as peer:
        peer.sendall(b"last words")
        peer.shutdown(socket.SHUT_WR)
        assert read(peer, 100) == b"last words"


def test_a_server_that_is_not_there_is_a_reset(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        proxy.target = gone.getsockname()
    with pytest.raises(ConnectionResetError), connect(proxy) as peer:
        peer.recv(1)


def test_delay_is_of_time_and_not_of_speed(proxy: Proxy) -> None:
    data = noise(16 * MEGABYTE)
    proxy.delay(0.2)
    began = time.monotonic()
    assert echoed(proxy, data) == data
    assert 0.4 <= time.monotonic() - began < 60


def test_calm_lets_go_what_a_delay_would_keep(proxy: Proxy) -> None:
    proxy.delay(1000)
    with connect(proxy) as peer:
        peer.sendall(b"late")
        proxy.calm()
        assert read(peer, 4) == b"late"


def test_slow_is_as_slow_as_it_says(proxy: Proxy) -> None:
    proxy.slow(100_000)
    began = time.monotonic()
    assert echoed(proxy, noise(50_000)) == noise(50_000)
    assert 0.4 < time.monotonic() - began < 60


def test_cut_resets_what_is_open_and_nothing_else(proxy: Proxy) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        for peer in (one, other):
            peer.sendall(b"hello")
            assert read(peer, 5) == b"hello"
        assert proxy.open == 2
        proxy.cut()
        assert proxy.open == 0
        assert is_reset(one) and is_reset(other)
    assert echoed(proxy, b"again") == b"again"


def test_cut_after_resets_each_new_connection_at_its_limit(proxy: Proxy) -> None:
    with connect(proxy) as early:
        early.sendall(b"!")
        assert read(early, 1) == b"!"
        proxy.cut_after(100_000)
        for _ in range(3):
            proxy.mark()
            with connect(proxy) as peer, sending(peer, noise(MEGABYTE)):
                assert is_reset(peer)
            assert sum(proxy.mark()) == 100_000
        early.sendall(noise(200_000))
        assert read(early, 200_000) == noise(200_000)
    proxy.calm()
    assert echoed(proxy, noise(200_000)) == noise(200_000)


def test_truncate_ends_in_the_middle_without_an_error(proxy: Proxy) -> None:
    with connect(proxy) as peer:
        peer.sendall(b"hello")
        assert read(peer, 5) == b"hello"
        proxy.truncate()
        assert peer.recv(1) == b""
    assert echoed(proxy, b"again") == b"again"


def test_truncate_after_passes_exactly_its_limit(proxy: Proxy) -> None:
    proxy.truncate_after(150_000)
    with connect(proxy) as peer:
        peer.sendall(noise(100_000))
        assert read(peer, 100_000) == noise(100_000)[:50_000]


def test_corrupt_flips_about_as_many_bits_as_it_says(proxy: Proxy) -> None:
    data = noise(MEGABYTE)
    proxy.corrupt(10_000, seed=3)
    with connect(proxy) as peer, sending(peer, data):
        spoiled = read(peer, len(data))
    assert 150 < differing(data, spoiled) < 270
    proxy.calm()
    assert echoed(proxy, data) == data


def test_the_seed_decides_which_bits_flip(echo: int) -> None:
    def spoiled(seed: int) -> bytes:
        with Proxy(echo) as proxy:
            proxy.corrupt(1000, seed)
            return echoed(proxy, bytes(MEGABYTE))

    assert spoiled(1) == spoiled(1) != spoiled(2)


def test_what_is_held_comes_after_the_release(proxy: Proxy) -> None:
    with connect(proxy) as before:
        before.sendall(b"a")
        assert read(before, 1) == b"a"
        proxy.mark()
        proxy.hold()
        with connect(proxy) as after:
            for peer in (before, after):
                peer.sendall(b"held")
                peer.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                peer.settimeout(10)
            assert proxy.mark() == Count(0, 0)
            proxy.release()
            assert read(before, 4) == read(after, 4) == b"held"


def test_a_server_does_not_learn_of_a_client_that_died_while_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with Proxy(server.getsockname()[1]) as proxy:
            with connect(proxy) as client:
                peer, _ = server.accept()
                proxy.hold()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with peer:
                peer.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                proxy.release()
                assert is_reset(peer)


def test_what_a_fault_drops_is_recorded_all_the_same(echo: int, tmp_path: Path) -> None:
    with Proxy(echo, record=tmp_path) as proxy:
        proxy.cut_after(10)
        with connect(proxy) as peer:
            peer.sendall(noise(1000))
            assert is_reset(peer)
    assert (tmp_path / "0001.up").read_bytes() == noise(1000)


def test_a_script_plays_the_faults_of_its_seed_until_calm(echo: int) -> None:
    def played(seed: int) -> list[str]:
        with Proxy(echo) as proxy:
            proxy.script(seed, period=0.02)
            until = time.monotonic() + 60
            while len(proxy.history) < 20 and time.monotonic() < until:
                with suppress(OSError), connect(proxy) as peer:
                    peer.settimeout(0.05)
                    peer.sendall(noise(10_000))
                    read(peer, 10_000)
            proxy.calm()
            assert echoed(proxy, noise(MEGABYTE)) == noise(MEGABYTE)
            count = len(proxy.history)
            time.sleep(0.1)
            assert len(proxy.history) == count >= 20
            return [fault for _, fault in proxy.history[:20]]

    one, again, other = played(1), played(1), played(2)
    assert one == again != other
    assert {fault.split()[0] for fault in one + other} == set(KINDS)


def test_a_script_of_unknown_faults_is_refused(proxy: Proxy) -> None:
    with pytest.raises(ValueError, match="lightning"):
        proxy.script(0, 1.0, kinds=["calm", "lightning"])


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAME = "encoder.layer.3.weight"


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("tensor", data)
    return file.getvalue()


ENCODINGS: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "raw": (bytes, "raw", ""),
    "hex": (lambda data: data.hex().encode(), "hex", ""),
    "upper hex": (lambda data: data.hex().upper().encode(), "hex", ""),
    "base64": (base64.b64encode, "base64", ""),
    "base64 in lines": (base64.encodebytes, "base64", ""),
    "base64 for addresses": (base64.urlsafe_b64encode, "base64", ""),
    "zlib": (zlib.compress, "raw", " > zlib"),
    "gzip": (gzip.compress, "raw", " > gzip"),
    "zip": (zipped, "raw", " > zip"),
    "gzip that breaks off": (lambda data: gzip.compress(data)[:-1000], "raw", " > gzip"),
    "hex in zlib": (lambda data: zlib.compress(data.hex().encode()), "hex", " > zlib"),
    "zlib in gzip": (lambda data: gzip.compress(zlib.compress(data)), "raw", "zlib at 0"),
}


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def canary(dtype: torch.dtype = torch.float32, seed: int = 5) -> dict[str, torch.Tensor]:
    return plant({NAME: torch.randn(64, 32).to(dtype)}, seed)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_leak_is_found_in_each_encoding(encoding: str, tmp_path: Path) -> None:
    encode, form, within = ENCODINGS[encoding]
    for dtype, offset in product(DTYPES, range(3)):
        planted = canary(dtype)
        leak = noise(5000, 1) + encode(noise(offset) + raw(planted[NAME])) + noise(5000, 2)
        (tmp_path / "wire").write_bytes(leak)
        for found in (hits(planted, [leak]), hits(planted, [tmp_path])):
            assert {(hit.name, hit.form) for hit in found} == {(NAME, form)}
            assert any(within in hit.place for hit in found)
        assert not hits(canary(dtype, seed=6), [leak, tmp_path])


def test_a_few_rows_are_found_wherever_they_are() -> None:
    planted = canary(torch.bfloat16)
    for row in range(0, 64, 9):
        piece = raw(planted[NAME][row : row + 2])
        for before in (0, 1, 7, BLOCK - len(piece) // 2, BLOCK - 8, BLOCK - 1, BLOCK):
            assert hits(planted, [bytes(before) + piece])


def test_a_hit_says_where_the_leak_is(tmp_path: Path) -> None:
    planted = canary()
    (tmp_path / "empty").touch()
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "state.db"
    path.write_bytes(bytes(1000) + raw(planted[NAME]))
    count = 1 + len(range(0, 64 * 32 * 4 - WINDOW, 64))
    assert hits(planted, [b"", tmp_path]) == [Hit(NAME, "raw", str(path), 1000, count)]


def test_names_are_found_where_they_stand_alone() -> None:
    planted = plant({name: torch.zeros(8) for name in ("bias", "head.weight")}, 0)

    def named(data: bytes) -> set[str]:
        return {hit.name for hit in hits(planted, [data]) if hit.form == "name"}

    assert named(b'{"bias":1,"head.weight":2}') == {"bias", "head.weight"}
    assert named(b"\x0a\x0bhead.weight\x12\x04bias") == {"bias", "head.weight"}
    assert named(gzip.compress(b"bias of head.weight\n")) == {"bias", "head.weight"}
    assert not named(b"q.bias biased overhead.weight head.weights")
    letter = "x" * ord("0")
    planted = {letter: torch.zeros(8)}
    assert named(b"\x0a0" + letter.encode() + b"\x12")


def test_a_pattern_of_half_precision_is_found_by_its_cast() -> None:
    planted = canary()
    sent = raw(planted[NAME].half())
    assert not hits(planted, [sent])
    assert [hit.name for hit in hits(casts(planted), [sent])] == [f"{NAME} as float16"]


def test_what_tells_nothing_is_no_pattern() -> None:
    plain = {
        "ones": torch.ones(100),
        "zeros": torch.zeros(100, dtype=torch.bfloat16),
        "places": torch.arange(100),
        "two": torch.rand(2),
        "none": torch.empty(0),
    }
    assert unmarked(plain) == list(plain)
    assert not hits(plain, [raw(value) for value in plain.values()])
    assert unmarked(plant(plain, 0)) == ["places", "two", "none"]


def test_planting_keeps_shapes_types_and_signs() -> None:
    for dtype in DTYPES:
        before = {"weight": torch.randn(4, 5).to(dtype), "rows": torch.arange(3)}
        after = plant(before, 1)["weight"]
        assert (after.shape, after.dtype) == (before["weight"].shape, dtype)
        assert torch.equal(after.sign(), before["weight"].sign())
        assert torch.equal(after, plant(before, 1)["weight"])
        assert not torch.equal(after, plant(before, 2)["weight"])
        assert torch.equal(plant(before, 1)["rows"], before["rows"])


def test_a_hundred_megabytes_are_searched_in_seconds(tmp_path: Path) -> None:
    names = {f"layer.{number}.weight": torch.zeros(128, 128) for number in range(50)}
    planted = plant(names, 0)
    path = tmp_path / "wire"
    path.write_bytes(np.random.default_rng(0).bytes(100 * MEGABYTE))
    began = time.process_time()
    assert not hits(planted, [path])
    assert time.process_time() - began < 15
