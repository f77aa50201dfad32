"""paceline without a server: LLM.stream in a process of its own. Modes: plain, default."""

from itertools import count
from time import perf_counter

import paceline
from bench.peers.wire import Answer, Ask, Load, peak_mb, serve
from paceline import LLM, EngineConfig, SamplingParams, SpecConfig

PLAIN = SpecConfig(("none",), max_draft=0)


class InProcess:
    """Every prompt has a tenant of its own; a prompt that names a mode of its own is answered in it."""

    def __init__(self) -> None:
        self._ids = count()

    def load(self, load: Load) -> str:
        self._llm = LLM(load.model, config=EngineConfig(device="cpu", threads=load.threads))
        return paceline.__version__

    def generate(self, ask: Ask) -> Answer:
        params = SamplingParams(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
        )
        spec = PLAIN if ask.user == "plain" else None
        started, first, last = perf_counter(), 0.0, 0.0
        with self._llm.stream(ask.prompt, params, spec=spec, tenant=f"bench-{next(self._ids)}") as stream:
            for _ in stream:
                last = perf_counter() - started
                first = first or last
        return Answer(list(stream.result.token_ids), first, last, stream.result.passes)

    def peak_mb(self) -> float:
        return peak_mb()


if __name__ == "__main__":
    serve(InProcess)
