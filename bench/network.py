"""A TCP proxy with the faults of a network: delay, jitter, and connections that are cut."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Network:
    """delay_s: one way. cut_after: bytes of a new connection's answers before it is cut; None: never."""

    port: int  # of the server; may be changed
    delay_s: float = 0.0
    jitter_s: float = 0.0
    cut_after: Callable[[], int | None] = lambda: None
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    cuts: int = 0  # made so far
    url: str = ""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut_all(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, up_writer}
        limit = self.cut_after()
        try:
            with suppress(asyncio.CancelledError):  # the test is over
                await asyncio.gather(
                    self._pump(reader, up_writer, None),
                    self._pump(up_reader, writer, limit),
                    return_exceptions=True,
                )
        finally:
            self._open -= {writer, up_writer}
            for one in (writer, up_writer):
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        """Bytes arrive in order, each after its delay."""
        loop, sent = asyncio.get_running_loop(), 0
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, data = await queue.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        at = 0.0
        try:
            while data := await reader.read(1 << 16):
                if limit is not None and sent + len(data) > limit:
                    self.cuts += 1
                    queue.put_nowait((at, data[: limit - sent]))  # perhaps within a message
                    return
                sent += len(data)
                at = max(at, loop.time() + self.delay_s + self.rng.random() * self.jitter_s)
                queue.put_nowait((at, data))
        finally:
            await asyncio.sleep(self.delay_s + self.jitter_s)
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering
            writer.transport.abort()


@asynccontextmanager
async def network(network: Network) -> AsyncIterator[Network]:
    server = await asyncio.start_server(network.connect, "127.0.0.1", 0)
    network.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield network
    finally:
        server.close()
        network.cut_all()
