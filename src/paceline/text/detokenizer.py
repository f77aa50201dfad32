"""Incremental detokenization: whole characters only, and nothing from a stop string on."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from paceline.text.stop_strings import START, stop_automaton


class TokenDecoder(Protocol):
    """The part of a tokenizer that detokenization needs."""

    strips_first_space: bool

    def shown(self, token: int, skip_special: bool) -> bytes: ...


class TextReader(Protocol):
    """The text of each token, and the rest after the last one."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class IncrementalDecoder:
    """All pieces and flush(), joined, equal tokenizer.decode of all tokens.

    skip_special leaves out control tokens, except those in `keep`.
    """

    def __init__(
        self, tokenizer: TokenDecoder, skip_special: bool = False, keep: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._keep = keep  # control tokens that are not skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back an incomplete character
        self._at_start = tokenizer.strips_first_space

    def push(self, token: int) -> str:
        skip = self._skip_special and token not in self._keep
        return self._strip(self._decoder.decode(self._tokenizer.shown(token, skip)))

    def flush(self) -> str:
        """The rest; an incomplete character becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")


class Detokenizer:
    """Text that ends before the first stop string; no part of one is ever returned.

    The first stop string is the one completed first; of two that end together, the longer. min_tokens: the
    text of so many tokens is not searched.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDecoder(tokenizer, skip_special, keep)
        self._not_searched = min_tokens  # tokens still to come
        self._stop = stop_automaton(tuple(stop)) if stop else None
        self._state = START
        self._held = ""  # possible beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        text = self._detokenizer.push(token)
        if self._not_searched > 0:
            self._not_searched -= 1
            return text
        return self._release(text)

    def flush(self) -> str:
        """The rest, after the last token."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        if self._stop is None or not text:
            return text
        before, state = len(self._held), self._state
        text = self._held + text
        for end in range(before, len(text)):
            state = self._stop.after(state, text[end])
            if length := self._stop.complete(state):
                self.stopped, self._held = True, ""
                return text[: end + 1 - length]
        self._state = state
        keep = self._stop.begun(state)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def partial_match_len(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of the text that is a beginning of one of the marks."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(_starts(marks, n))), 0)


def _starts(marks: Sequence[str], length: int) -> tuple[str, ...]:
    return tuple(mark[:length] for mark in marks if len(mark) > length)


class StopChecker:
    """Called with each new token: True once the output contains a stop string. For `Seq.stopped_by`.

    The engine's thread calls it; the reader of the output then takes the text of the same tokens, in their
    order, with `push` and `flush`. So stop strings are matched once.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop: Sequence[str],
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, stop, skip_special, keep, min_tokens)
        self._texts: deque[str] = deque()  # of tokens that the reader has not taken yet

    def __call__(self, token: int) -> bool:
        self._texts.append(self._detokenizer.push(token))
        return self._detokenizer.stopped

    def push(self, token: int) -> str:
        return self._texts.popleft()

    def flush(self) -> str:
        """The rest, once the engine has ended the output."""
        return self._detokenizer.flush()
