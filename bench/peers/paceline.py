"""paceline. A mode names its drafters: plain, or for instance suffix+ngram."""

from itertools import count
from typing import Final

import paceline
from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig
from paceline.types import Round, Seq

PLAIN: Final = SpecConfig(("none",), max_draft=0)


class Paceline:
    """Every prompt has a tenant of its own: caches and indexes have never seen it."""

    def __init__(self) -> None:
        self._ids = count()

    def load(self, load: Load) -> str:
        cache_mb = int(load.settings.get("cache_mb", EngineConfig().cache_mb))
        self._llm = LLM(load.model, config=EngineConfig(threads=load.threads, cache_mb=cache_mb))
        self._spec = PLAIN if load.mode == "plain" else SpecConfig(tuple(load.mode.split("+")))
        return paceline.__version__

    def generate(self, ask: Ask) -> Answer:
        seq = self.sequence(ask)
        clock, passes, tokens = Clock(), 0, list[int]()
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
        prompt = list(ask.prompt)
        return Seq(name, prompt, len(prompt), params=params, spec=self._spec, tenant=name)

    def peak_mb(self) -> float:
        return peak_mb()


def _finished(r: Round, answer: Answer) -> Answer:
    if r.error is not None:
        raise r.error
    return answer


if __name__ == "__main__":
    serve(Paceline)
