"""Ctrl-C during answers: the log says what is waited for, a second one ends them at once."""

import json
import logging
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import EngineConfig
from paceline.server.launch import ServerSettings, build, draining_server, uvicorn_config
from paceline.trace.store import Store
from paceline.web.connections import ConnectionLimits
from support.servers import START_S, toy_chat_model, until

pytestmark = pytest.mark.slow


def test_a_third_ctrl_c_cuts_connections(tmp_path: Path) -> None:
    """A client that does not read keeps its connection after the second one."""
    engine = EngineConfig("cpu", cache_mb=64)
    settings = ServerSettings(
        str(toy_chat_model(tmp_path)),
        engine=engine,
        store="none",
        save_estimates=False,
        drain_s=600,
        connections=ConnectionLimits(write_timeout_s=600),
    )
    app = build(settings)
    server = draining_server(uvicorn_config(app, settings, port=0), app, settings, "serving")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: server.started, START_S)
    port = server.servers[0].sockets[0].getsockname()[1]
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 20}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", port))
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        connections: set[Any] = server.server_state.connections
        assert until(lambda: any(not c.flow._is_writable_event.is_set() for c in connections), 60)
        for _ in range(2):
            server.handle_exit(signal.SIGINT, None)
        thread.join(1)
        assert thread.is_alive()
        assert not server.force_exit
        server.handle_exit(signal.SIGINT, None)
        thread.join(60)
        assert not thread.is_alive()


def test_a_second_ctrl_c_ends_streams_with_the_last_event_and_saves_their_traces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = str(tmp_path / "traces.db")
    engine = EngineConfig("cpu", cache_mb=64)
    model = str(toy_chat_model(tmp_path))
    settings = ServerSettings(model, engine=engine, store=store, save_estimates=False, drain_s=600)
    app = build(settings)
    server = draining_server(uvicorn_config(app, settings, port=0), app, settings, "serving")
    thread = threading.Thread(target=server.run, daemon=True)
    caplog.set_level(logging.INFO)
    thread.start()
    assert until(lambda: server.started, START_S)
    port = server.servers[0].sockets[0].getsockname()[1]
    plain = {"speculative_config": {"disabled": True}}
    body: dict[str, Any] = {"model": "toy", "prompt": "Once", "max_tokens": 8000, "ignore_eos": True, **plain}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url, json={**body, "stream": True}) as answer,
    ):
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(events)
        server.handle_exit(signal.SIGINT, None)
        line = "stopping: waiting up to 600 s for 1 request; Ctrl-C again stops at once"
        assert until(lambda: line in caplog.messages, 60)
        server.handle_exit(signal.SIGINT, None)
        *_, error, done = events
    thread.join(60)
    assert not thread.is_alive()
    assert caplog.messages[-1] == "stopped by SIGINT"
    assert (json.loads(error)["error"]["code"], done) == ("shutting_down", "[DONE]")
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    with_traces = Store.open(store, create=False)
    assert [record.error for record in with_traces.list(10)] == ["shutting_down"]
    with_traces.close()
