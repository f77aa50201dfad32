"""Listening: of two servers that start at once for one port, the later one says so; the end is logged."""

import asyncio
import logging
import signal
import socket
from contextlib import closing

import pytest
import uvicorn
from starlette.applications import Starlette

from paceline.errors import UsageError
from paceline.web.listen import DrainingServer, bound


def draining(port: int) -> DrainingServer:
    config = uvicorn.Config(Starlette(), "127.0.0.1", port, lifespan="off", log_config=None)
    return DrainingServer(config, lambda: None, lambda: None, 0.0, "greeting")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_port_that_another_server_took_meanwhile_is_an_error(
    loop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new_loop = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip(loop).new_event_loop
    first = bound("127.0.0.1", 0)[0]
    port = first.getsockname()[1]
    try:
        later = bound("127.0.0.1", port)[0]  # both are bound: neither listens yet
    except UsageError:
        pytest.skip("this system refuses the second bind")
    with closing(first), closing(later), asyncio.Runner(loop_factory=new_loop) as runner:
        first.listen()
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port} "):
            runner.run(start(port, later))
    assert capsys.readouterr().out == ""


def test_the_log_ends_with_what_stopped_a_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    asyncio.run(run_and_stop())
    assert caplog.messages[-1] == "stopped by SIGTERM"


async def run_and_stop() -> None:
    with closing(bound("127.0.0.1", 0)[0]) as one:
        server = draining(one.getsockname()[1])
        running = asyncio.create_task(server.serve([one]))
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0.01)
            for sign in (signal.SIGTERM, signal.SIGINT):  # the first one counts
                server.handle_exit(sign, None)
            await running


async def start(port: int, one: socket.socket) -> None:
    starting = draining(port)
    starting.config.load()
    starting.lifespan = starting.config.lifespan_class(starting.config)  # as its `serve` does
    await starting.startup([one])
