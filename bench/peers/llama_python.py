"""llama-cpp-python: its own decoding loop, plain and with its prompt lookup."""

import os
from time import perf_counter
from typing import Any, Final

from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve, some_tokens

BATCH: Final = 512
ROWS: Final = 16


class LlamaPython:
    def load(self, load: Load) -> str:
        if library := load.settings.get("library"):
            os.environ["LLAMA_CPP_LIB_PATH"] = library
        import llama_cpp  # type: ignore[import-not-found]
        from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
            LlamaPromptLookupDecoding,
        )

        lookup = load.mode == "lookup"
        if load.settings.get("no_extra_bufts"):
            without_extra_buffers(llama_cpp.llama_cpp)
        self._llama = llama_cpp.Llama(
            load.model,
            n_ctx=load.context,
            n_threads=load.threads,
            n_threads_batch=load.threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5, max_ngram_size=3) if lookup else None,
            verbose=False,
        )
        self._api, self._held = llama_cpp.llama_cpp, 0
        self._batch = self._api.llama_batch_init(BATCH, 0, 1)
        self._passes, evaluate = 0, self._llama.eval

        def counted(tokens: Any) -> None:
            self._passes += 1
            evaluate(tokens)

        self._llama.eval = counted
        return f"llama-cpp-python {llama_cpp.__version__}"

    def generate(self, ask: Ask) -> Answer:
        """Its cache is emptied first: it would find the prompt of an earlier repeat there."""
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()
        self._llama.set_seed(ask.seed)
        self._passes = 0
        clock, tokens = Clock(), list[int]()
        for token in self._llama.generate(
            ask.prompt, temp=ask.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            tokens.append(token)
            clock.tick()
            if len(tokens) == ask.max_tokens or token in ask.stops:
                break
        return clock.answer(tokens, self._passes)

    def peak_mb(self) -> float:
        return peak_mb()

    def time_pass(self, context: int, rows: int) -> float:
        """With no context: a prompt of so many tokens, of which only the last is asked about."""
        if context < self._held or not context:
            self._keep(0)
        self._decode(some_tokens(self._held, context - self._held), self._held, scored=False)
        self._held = context
        started = perf_counter()
        self._decode(some_tokens(context, rows), context, scored=context > 0)
        seconds = perf_counter() - started
        self._keep(context)
        return seconds

    def _keep(self, length: int) -> None:
        memory = self._api.llama_get_memory(self._llama._ctx.ctx)
        self._api.llama_memory_seq_rm(memory, 0, length, -1)
        self._held = length

    def _decode(self, tokens: list[int], start: int, scored: bool) -> None:
        """Reading a logit waits for the pass to end."""
        context, batch = self._llama._ctx.ctx, self._batch
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, start + first + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = scored or i == len(part) - 1
            if self._api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            self._api.llama_get_logits_ith(context, len(part) - 1)[0]

    def logits(self, tokens: list[int], file: str) -> int:
        import numpy as np

        self._keep(0)
        size, found = self._llama.n_vocab(), []
        for start in range(0, len(tokens), ROWS):
            part = tokens[start : start + ROWS]
            self._decode(part, start, scored=True)
            for i in range(len(part)):
                row = self._api.llama_get_logits_ith(self._llama._ctx.ctx, i)
                found.append(np.ctypeslib.as_array(row, (size,)).astype(np.float32))
        self._keep(0)
        np.save(file, np.stack(found))
        return len(tokens)


def without_extra_buffers(api: Any) -> None:
    """Llama has no argument for this setting."""
    usual = api.llama_model_default_params

    def params() -> Any:
        found = usual()
        found.use_extra_bufts = False
        return found

    api.llama_model_default_params = params


if __name__ == "__main__":
    serve(LlamaPython)
