# SPDX-License-Identifier: Apache-2.0
"""A wire with faults: a TCP proxy that counts, records, delays, slows, corrupts, holds and cuts."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import BinaryIO, NamedTuple, TypeVar

Result = TypeVar("Result")

CHUNK = 2**19
"""Bytes read at once."""

AHEAD = 32
"""Chunks that may wait in the proxy: a delay is of time, not of speed."""

KINDS = (
    *("calm", "delay", "slow", "corrupt", "hold"),
    *("cut", "cut_after", "truncate", "truncate_after"),
)
"""The faults of a script."""


class Count(NamedTuple):
    """Bytes passed on: from client to server, and from server to client."""

    up: int
    down: int


@dataclass(frozen=True)
class Weather:
    """The faults that hold at a moment. The limit is of the connections that start under it."""

    delay: float = 0.0
    rate: float = math.inf
    flips: tuple[int, int] | None = None
    held: bool = False
    limit: float = math.inf
    graceful: bool = False


class Proxy:
    """Forwards connections to `target`, and does to them what it is told, from any thread.

    Faults add up until `calm`. Each is also safe to ask for while others are at work.

        with Proxy(server.port, record=folder) as proxy:
            client.connect(("127.0.0.1", proxy.port))
            proxy.slow(10_000)

    `record` keeps every byte that arrives, also what a fault spoils or drops later, as
    `<number>.up` and `<number>.down`. `up`, `down` and `mark` count what is passed on, and what a
    peer has received is always counted already.
    """

    def __init__(self, target: int, *, record: Path | None = None) -> None:
        self.target, self.folder = ("127.0.0.1", target), record
        self.port = self.up = self.down = self.connections = 0
        self.history: list[tuple[float, str]] = []
        self.weather = Weather()
        self._marked = Count(0, 0)
        self._open: dict[Connection, asyncio.Task[None]] = {}
        self._errors: list[BaseException] = []
        self._script: asyncio.Task[None] | None = None

    def __enter__(self) -> Proxy:
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(ready)), name="proxy", daemon=True
        )
        self._thread.start()
        ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        if self._errors and error is None:
            raise self._errors[0]

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._open)

    def mark(self) -> Count:
        """What was passed on since the last mark."""
        return self._do(self._mark())

    def delay(self, seconds: float) -> None:
        """Pass on each byte so much later than it came."""
        self._do(self._change(replace(self.weather, delay=seconds)))

    def slow(self, rate: float) -> None:
        """Pass on at most so many bytes a second, in each direction of each connection."""
        self._do(self._change(replace(self.weather, rate=rate)))

    def corrupt(self, every: int, seed: int) -> None:
        """Flip one bit about every so many bytes."""
        self._do(self._change(replace(self.weather, flips=(every, seed))))

    def hold(self) -> None:
        """Accept connections and pass on nothing, not even that one of them ended."""
        self._do(self._change(replace(self.weather, held=True)))

    def release(self) -> None:
        """Pass on again, first of all what was held."""
        self._do(self._change(replace(self.weather, held=False)))

    def cut(self) -> None:
        """Reset all open connections."""
        self._do(self._cut())

    def cut_after(self, size: int) -> None:
        """Reset each new connection when so many bytes, both ways together, went through it."""
        self._do(self._change(replace(self.weather, limit=size, graceful=False)))

    def truncate(self) -> None:
        """Close all open connections in the middle, as if both peers had said all they wanted."""
        self._do(self._truncate())

    def truncate_after(self, size: int) -> None:
        """Close each new connection when so many bytes, both ways together, went through it."""
        self._do(self._change(replace(self.weather, limit=size, graceful=True)))

    def script(self, seed: int, period: float, *, kinds: Sequence[str] = KINDS) -> None:
        """Change from fault to fault, each for `period` seconds on average, until `calm`.

        The seed decides which faults, how strong and how long; `history` says what there was.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"{sorted(unknown)} are no faults; there are {KINDS}")
        self._do(self._begin(Random(seed), period, tuple(kinds)))

    def calm(self) -> None:
        """End the script and all faults, for open connections too."""
        self._do(self._calm())

    def count(self, way: str, size: int) -> None:
        if way == "up":
            self.up += size
        else:
            self.down += size

    def _do(self, work: Coroutine[None, None, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._began = self._loop.time()
        self.flowing = asyncio.Event()
        self.flowing.set()
        ready.set()
        with self._listener:
            accepting = self._start(self._accept())
            await self._over.wait()
            await self._calm()
            await _stopped(accepting)
            await self._cut()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            self.connections += 1
            connection = Connection(self, client, self.connections)
            task = self._open[connection] = self._start(connection.play())
            task.add_done_callback(lambda _, over=connection: self._close(over))

    def _close(self, connection: Connection) -> None:
        # not by the task itself, because one that is cancelled at once never starts
        connection.close()
        del self._open[connection]

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._errors.append(error)

    async def _mark(self) -> Count:
        now, before = Count(self.up, self.down), self._marked
        self._marked = now
        return Count(now.up - before.up, now.down - before.down)

    async def _change(self, weather: Weather) -> None:
        self.weather = weather
        if weather.held:
            self.flowing.clear()
        else:
            self.flowing.set()

    async def _cut(self) -> None:
        await _stopped(*self._open.values())

    async def _truncate(self) -> None:
        for connection in self._open:
            connection.end()

    async def _calm(self) -> None:
        if self._script:
            await _stopped(self._script)
            self._script = None
        for connection in self._open:
            connection.left = math.inf
        await self._change(Weather())

    async def _begin(self, draw: Random, period: float, kinds: tuple[str, ...]) -> None:
        await self._calm()
        self._script = self._start(self._play(draw, period, kinds))

    async def _play(self, draw: Random, period: float, kinds: tuple[str, ...]) -> None:
        while True:
            kind, strength = draw.choice(kinds), draw.random()
            self.history.append((self._loop.time() - self._began, f"{kind} {strength:.3f}"))
            await self._change(_weather(kind, strength, period))
            if kind in ("cut", "cut_after", "truncate_after"):
                await self._cut()
            elif kind == "truncate":
                await self._truncate()
            await asyncio.sleep(draw.uniform(0, 2 * period))


class Connection:
    """A client's socket, the server's, and a stream each way between them."""

    def __init__(self, proxy: Proxy, client: socket.socket, number: int) -> None:
        self.proxy, self.client, self.number = proxy, client, number
        self.server = socket.socket()
        self.left, self.graceful = proxy.weather.limit, proxy.weather.graceful
        self.ended = self.whole = False

    async def play(self) -> None:
        """Pass on both ways to the end. An error of one peer is a reset for the other."""
        for each in (self.client, self.server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(self.server, self.proxy.target)
            await self._both()
            self.whole = True
        except* OSError:
            pass
        await self.proxy.flowing.wait()

    async def _both(self) -> None:
        with ExitStack() as files:
            async with asyncio.TaskGroup() as tasks:
                for stream in self._streams(files):
                    tasks.create_task(stream.read())
                    tasks.create_task(stream.write())

    def _streams(self, files: ExitStack) -> Iterator[Stream]:
        up, down = ("up", self.client, self.server), ("down", self.server, self.client)
        for way, source, sink in (up, down):
            stream = Stream(self, way, source, sink)
            if self.proxy.folder:
                path = self.proxy.folder / f"{self.number:04d}.{way}"
                stream.record = files.enter_context(path.open("wb", buffering=0))
            yield stream

    def end(self) -> None:
        """Let both streams find their end now."""
        self.ended = True
        for each in (self.client, self.server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RD)

    def spend(self, wanted: int) -> int:
        """How many of the wanted bytes may still pass; they count as passed."""
        size = int(min(wanted, self.left))
        self.left -= size
        return size

    def close(self) -> None:
        """Close both sockets: at the end of all well, else with a reset."""
        for each in (self.client, self.server):
            if self.whole:
                _drain(each)
            else:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


class Stream:
    """One direction of a connection."""

    def __init__(
        self, connection: Connection, way: str, source: socket.socket, sink: socket.socket
    ) -> None:
        self.connection, self.way, self.source, self.sink = connection, way, source, sink
        self.proxy, self.loop = connection.proxy, asyncio.get_running_loop()
        self.chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(AHEAD)
        self.record: BinaryIO | None = None
        self.flips = Flips(None)

    async def read(self) -> None:
        data = b"?"
        while data:
            data = await self.loop.sock_recv(self.source, CHUNK)
            if self.record:
                self.record.write(data)
            if self.connection.ended:
                data = b""
            await self.chunks.put((self.loop.time(), data))
            await self.proxy.flowing.wait()

    async def write(self) -> None:
        data = b"?"
        while data:
            came, data = await self.chunks.get()
            while (early := came + self.proxy.weather.delay - self.loop.time()) > 0:
                await asyncio.sleep(min(early, 0.05))
            await self.proxy.flowing.wait()
            await self._pass(memoryview(self._spoiled(data)))
        with suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)

    async def _pass(self, data: memoryview) -> None:
        while data and not self.connection.ended:
            rate = self.proxy.weather.rate
            size = self.connection.spend(min(len(data), max(1, int(min(rate * 0.05, CHUNK)))))
            self.proxy.count(self.way, size)
            await self.loop.sock_sendall(self.sink, data[:size])
            data = data[size:]
            if not self.connection.left:
                self._stop()
            if rate < math.inf:
                await asyncio.sleep(size / rate)
            await self.proxy.flowing.wait()

    def _stop(self) -> None:
        if not self.connection.graceful:
            raise ConnectionResetError("cut at the limit")
        self.connection.end()

    def _spoiled(self, data: bytes) -> bytes | bytearray:
        if self.flips.what != self.proxy.weather.flips:
            self.flips = Flips(self.proxy.weather.flips, f"{self.connection.number} {self.way}")
        return self.flips.spoil(data)


class Flips:
    """Bits to flip in one stream, the same for the same seed and stream."""

    def __init__(self, what: tuple[int, int] | None, stream: str = "") -> None:
        self.what, self._draw = what, Random(f"{what} {stream}")
        self._next = self._gap()

    def spoil(self, data: bytes) -> bytes | bytearray:
        place, self._next = self._next, self._next - len(data)
        if self._next >= 0:
            return data
        spoiled = bytearray(data)
        while place < len(data):
            spoiled[int(place)] ^= 1 << self._draw.randrange(8)
            place += self._gap()
        self._next = place - len(data)
        return spoiled

    def _gap(self) -> float:
        return self._draw.randrange(1, 2 * self.what[0]) if self.what else math.inf


def _weather(kind: str, strength: float, period: float) -> Weather:
    """A fault of a script; sizes and rates go from 100 to 1 000 000."""
    size = int(10 ** (2 + 4 * strength))
    return {
        "delay": Weather(delay=strength * period),
        "cut_after": Weather(limit=size),
        "truncate_after": Weather(limit=size, graceful=True),
        "corrupt": Weather(flips=(size, size)),
        "hold": Weather(held=True),
        "slow": Weather(rate=size),
    }.get(kind, Weather())


def _drain(peer: socket.socket) -> None:
    """Read what nobody will: a socket closed with bytes unread resets, and takes back its last."""
    with suppress(OSError):
        for _ in range(64):
            if not peer.recv(CHUNK):
                return


async def _stopped(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
