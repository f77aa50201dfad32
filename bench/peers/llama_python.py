"""llama-cpp-python: its own decoding loop, plain and with its prompt lookup."""

import os
from typing import Any

from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve


class LlamaPython:
    def load(self, load: Load) -> str:
        import llama_cpp  # type: ignore[import-not-found]
        from llama_cpp.llama_speculative import (  # type: ignore[import-not-found]
            LlamaPromptLookupDecoding,
        )

        lookup = load.mode == "lookup"
        more: dict[str, Any] = {"use_extra_bufts": False} if load.settings.get("no_extra_bufts") else {}
        self._llama = llama_cpp.Llama(
            load.model,
            n_ctx=load.context,
            n_threads=load.threads,
            n_threads_batch=load.threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5, max_ngram_size=3) if lookup else None,
            verbose=False,
            **more,
        )
        self._ends = {self._llama.token_eos(), llama_cpp.llama_vocab_eot(self._llama._model.vocab)}
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
            if len(tokens) == ask.max_tokens or (token in self._ends and not ask.ignore_eos):
                break
        return clock.answer(tokens, self._passes)

    def peak_mb(self) -> float:
        return peak_mb()


if __name__ == "__main__":
    assert "LLAMA_CPP_LIB_PATH" in os.environ, "start it through bench.peers.pool"
    serve(LlamaPython)
