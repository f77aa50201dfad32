"""The first divergence of two greedy answers: a tie of two tokens, or a bug?

The baseline writes its answer again with log-probabilities. Its lead of its own token over the candidate's
says how close the choice was. Only texts of chats have log-probabilities; divergences of tool calls, and of
answers that are not the same again, stay unexplained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from paceline.gate.pair import Divergence, Pair, common_prefix

_CHAT: Final = "/v1/chat/completions"
_ALTERNATIVES: Final = 20  # the most that OpenAI's API gives


def rescoring_request(pair: Pair, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The request again, with log-probabilities; None: there is nothing that they could explain."""
    called = pair.baseline.calls or pair.candidate.calls
    if pair.endpoint != _CHAT or not pair.greedy or pair.same is not False or called:
        return None
    again = {**request, "stream": False, "logprobs": True, "top_logprobs": _ALTERNATIVES}
    again.pop("stream_options", None)
    return again


def with_lead(pair: Pair, answer: Any) -> Pair:
    """answer: of the rescoring request. One that is no use changes nothing."""
    try:
        choice = answer["choices"][0]
        if choice["message"]["content"] != pair.baseline.text:
            return pair
        divergence = first_divergence(choice["logprobs"]["content"], pair.candidate.text or "")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return pair
    return pair if divergence is None else replace(pair, divergence=divergence)


def first_divergence(tokens: Sequence[Mapping[str, Any]], text: str) -> Divergence | None:
    """Of the baseline's tokens, each with its alternatives, from the candidate's text.

    The lead is over the longest alternative that the candidate's text goes on with; one that is not among the
    alternatives is less probable than all of them. A text that ends there has no lead: its end is no text.
    """
    output, done = text.encode("utf-8", "replace"), b""
    for index, token in enumerate(tokens):
        written = _bytes(token)
        if output.startswith(done + written):
            done += written
            continue
        character = common_prefix("".join(_bytes(t).decode("utf-8", "replace") for t in tokens), text)
        lead = _lead(token, output[len(done) :])
        return Divergence(character, index, lead)
    return None


def _lead(token: Mapping[str, Any], rest: bytes) -> float | None:
    others = [other for other in token["top_logprobs"] if _bytes(other) != _bytes(token)]
    if not rest or not others:
        return None
    fitting = [other for other in others if _bytes(other) and rest.startswith(_bytes(other))]
    last = min(others, key=lambda other: float(other["logprob"]))
    rival = max(fitting, key=lambda other: len(_bytes(other)), default=last)
    return float(token["logprob"] - rival["logprob"])


def _bytes(token: Mapping[str, Any]) -> bytes:
    raw = token.get("bytes")
    return bytes(raw) if raw is not None else str(token["token"]).encode()
