"""A client of the split protocol that sends what it likes."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from paceline.split.wire import (
    ClientMessage,
    Commit,
    End,
    Hello,
    Mode,
    Open,
    Opened,
    ServerMessage,
    Welcome,
    decode_server,
    encode,
)


class Closed(Exception):
    """The server has closed the connection."""


class RawClient:
    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.tokens: list[int] = []
        self.opened: Opened | None = None

    async def send(self, message: ClientMessage) -> None:
        await self.ws.send_bytes(encode(message))

    async def receive(self) -> ServerMessage:
        message = await self.ws.receive(120)
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise Closed(self.ws.close_code)
        return decode_server(message.data)

    async def hello(self, fingerprint: bytes, ticket: str = "") -> Welcome:
        await self.send(Hello(fingerprint, ticket))
        welcome = await self.receive()
        assert isinstance(welcome, Welcome), welcome
        return welcome

    async def open(self, body: Mapping[str, Any], mode: Mode = Mode.OPPORTUNISTIC, **options: Any) -> Opened:
        await self.send(Open(json.dumps(body).encode(), mode, **options))
        opened = await self.receive()
        assert isinstance(opened, Opened), opened
        self.opened = opened
        return opened

    async def commit(self) -> Commit | End:
        """The next commit, appended where it belongs, or the end."""
        message = await self.receive()
        assert isinstance(message, Commit | End), message
        if isinstance(message, Commit):
            assert message.start == len(self.tokens), "a commit is missing or came twice"
            self.tokens += message.tokens
        return message

    async def rest(self) -> End:
        while isinstance(message := await self.commit(), Commit):
            pass
        return message


@asynccontextmanager
async def raw_client(url: str, **options: Any) -> AsyncIterator[RawClient]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/split", **options) as ws:
        yield RawClient(ws)
