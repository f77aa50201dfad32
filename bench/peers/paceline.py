"""paceline. A mode names its drafters: plain, or for instance suffix+ngram.

With "learned" among them, what other conversations of a user said is remembered, as it is in use; what is
measured is not, and the KV cache forgets everything between two prompts. With "wide" they draft trees.
"""

from itertools import count
from time import perf_counter
from typing import Final

import numpy as np

import paceline
from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve, some_tokens
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig
from paceline.types import Draft, Feed, Round, Seq

ROWS: Final = 16
LEARNED: Final = "learned"
WIDE: Final = "wide"
TREE: Final = (16, 4)  # drafted tokens at most, in all and after one token
PLAIN: Final = SpecConfig(("none",), max_draft=0)


class Paceline:
    """Every prompt has a tenant of its own, unless it may be remembered: caches have never seen it."""

    def __init__(self) -> None:
        self._ids = count()
        self._learned = False
        self._probe = ("", 0)  # the sequence for timing passes, and how many tokens it holds

    def load(self, load: Load) -> str:
        config = EngineConfig(device="cpu", threads=load.threads, dtype=load.settings.get("dtype", "auto"))
        self._llm = LLM(load.model, config=config)
        parts = load.mode.split("+")
        self._learned = LEARNED in parts
        drafters = tuple(part for part in parts if part not in (LEARNED, WIDE))
        guessing = SpecConfig(drafters, *TREE) if WIDE in parts else SpecConfig(drafters)
        self._spec = PLAIN if load.mode == "plain" else guessing
        return paceline.__version__

    def generate(self, ask: Ask) -> Answer:
        seq = self.sequence(ask)
        clock, passes, tokens = Clock(), 0, list[int]()
        self._llm.target.forget(seq.tenant)
        self._llm.engine.submit(seq)
        while True:
            for r in self._llm.engine.step():
                tokens += r.tokens
                if r.tokens:
                    clock.tick()
                    passes += 1
                if r.finish is not None:
                    return _finished(r, clock.answer(tokens, passes))

    def sequence(self, ask: Ask) -> Seq:
        name = f"bench-{next(self._ids)}"
        params = SamplingParams(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
        )
        prompt, tenant = list(ask.prompt), ask.user if self._learned else name
        learn = ask.learn or not self._learned
        return Seq(name, prompt, len(prompt), params, self._spec, tenant, remember=learn)

    def time_pass(self, context: int, rows: int) -> float:
        """With no context: a prompt of so many tokens, in the engine's pieces."""
        target, name = self._llm.target, self._extend(context)
        tokens = some_tokens(context, rows)
        started = perf_counter()
        if context == 0:
            self._feed(name, tokens)
        else:
            draft = Draft(tuple(tokens[1:]))
            scores = target.forward([Feed(name, tokens[:1], draft)])
            scores.logits.sum().item()
        seconds = perf_counter() - started
        target.keep(name, context)
        return seconds

    def _extend(self, context: int) -> str:
        """A sequence with so many tokens in its cache; it only ever grows, until it starts anew."""
        name, held = self._probe
        if context < held or not name:
            if name:
                self._llm.target.close(name)
            name, held = f"probe-{next(self._ids)}", 0
            self._llm.target.open(Seq(name, some_tokens(0, 2), 2, tenant=name))
        self._feed(name, some_tokens(held, context - held))
        self._probe = (name, context)
        return name

    def _feed(self, name: str, tokens: list[int]) -> None:
        target, piece = self._llm.target, EngineConfig().prefill_chunk
        start = self._probe[1] if self._probe[0] == name else 0
        for i in range(0, len(tokens), piece):
            part = tokens[i : i + piece]
            last = i + piece >= len(tokens)
            target.forward([Feed(name, part, scored=last)])
            target.keep(name, start + i + len(part))

    def logits(self, tokens: list[int], file: str) -> int:
        """Sixteen rows a pass, as a verify pass has them."""
        target, name = self._llm.target, f"logits-{next(self._ids)}"
        target.open(Seq(name, tokens, len(tokens), tenant=name))
        found = []
        for start in range(0, len(tokens), ROWS):
            first, *rest = tokens[start : start + ROWS]
            scores = target.forward([Feed(name, [first], Draft(tuple(rest)))])
            found.append(scores.logits.numpy(force=True).copy())
            target.keep(name, start + 1, tuple(range(len(rest))))
        target.close(name)
        np.save(file, np.concatenate(found))
        return len(tokens)

    def peak_mb(self) -> float:
        return peak_mb()


def _finished(r: Round, answer: Answer) -> Answer:
    if r.error is not None:
        raise r.error
    return answer


if __name__ == "__main__":
    serve(Paceline)
