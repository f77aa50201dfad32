"""A pass that fails while requests run: each hears of it in its own API's shape, and the server goes on."""

from typing import Any

import openai
import pytest

from support.servers import Running

pytestmark = pytest.mark.model

ASKED: list[Any] = [{"role": "user", "content": "Tell a long story."}]
SECRET = "/home/anna/weights"


def break_passes(server: Running, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From the pass of that number on, until undone."""
    engine = server.app.engine.llm.engine
    step, passes = engine.step, iter(range(after))

    def broken() -> Any:
        if next(passes, None) is None:
            raise RuntimeError(f"cannot read {SECRET}")
        return step()

    monkeypatch.setattr(engine, "step", broken)


@pytest.mark.parametrize("path", ["chat", "responses"])
@pytest.mark.parametrize("after", [0, 4])
def test_whole_answers(server: Running, monkeypatch: pytest.MonkeyPatch, path: str, after: int) -> None:
    break_passes(server, monkeypatch, after)
    client: Any = server.client()
    create = client.chat.completions.create if path == "chat" else client.responses.create
    asked = {"messages": ASKED} if path == "chat" else {"input": ASKED}
    with pytest.raises(openai.InternalServerError) as caught:
        create(model=server.model, **asked)
    assert caught.value.type == "server_error"
    assert SECRET not in str(caught.value.body)
    assert_goes_on(server, monkeypatch)


def test_a_chat_stream_ends_with_an_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    break_passes(server, monkeypatch, 4)
    stream = server.client().chat.completions.create(model=server.model, messages=ASKED, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.type == "server_error"
    assert SECRET not in str(caught.value.body)
    assert_goes_on(server, monkeypatch)


def test_a_response_stream_ends_as_failed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    break_passes(server, monkeypatch, 4)
    stream = server.client().responses.create(model=server.model, input="Tell a long story.", stream=True)
    events = list(stream)
    last = events[-1]
    assert last.type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert last.response.status == "failed"
    assert last.response.id == events[0].response.id  # type: ignore[union-attr]
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert SECRET not in last.response.error.message
    assert_goes_on(server, monkeypatch)


def assert_goes_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert server.in_flight == 0
    found = server.client().completions.create(model=server.model, prompt="x", max_tokens=2, temperature=0)
    assert found.usage is not None
    assert found.usage.completion_tokens == 2
