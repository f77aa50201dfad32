"""OpenVINO GenAI on the same GGUF file, plain and with its prompt lookup."""

from typing import Any

from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve

CACHE_GB = 1
GUESSES, NGRAM = 5, 3


class OpenVino:
    def load(self, load: Load) -> str:
        import openvino_genai as ov  # type: ignore[import-not-found]

        self._ov = ov
        self._lookup = load.mode == "lookup"
        scheduler = ov.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # it would find the prompt of an earlier repeat
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = max(load.context, 256)
        self._pipe = ov.LLMPipeline(
            load.model,
            "CPU",
            scheduler_config=scheduler,
            INFERENCE_NUM_THREADS=load.threads,
            **({"prompt_lookup": True} if self._lookup else {}),
        )
        return f"openvino-genai {ov.__version__}"

    def generate(self, ask: Ask) -> Answer:
        import numpy as np
        from openvino import Tensor  # type: ignore[import-not-found]

        config = self._pipe.get_generation_config()
        config.max_new_tokens, config.ignore_eos = ask.max_tokens, ask.ignore_eos
        config.stop_token_ids = ask.stops
        config.do_sample, config.apply_chat_template = ask.temperature > 0, False
        if config.do_sample:
            config.temperature, config.top_p, config.rng_seed = ask.temperature, 1.0, ask.seed
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = GUESSES, NGRAM
        clock = Clock()
        ids = Tensor(np.array([ask.prompt], dtype=np.int64))
        result = self._pipe.generate(ids, config, self._streamer(clock))
        tokens = [int(t) for t in result.tokens[0]]
        return clock.answer(tokens, None if self._lookup else len(tokens))

    def _streamer(self, clock: Clock) -> Any:
        running = self._ov.StreamingStatus.RUNNING

        class Ticking(self._ov.StreamerBase):  # type: ignore[name-defined,misc]
            def write(self, token: Any) -> Any:
                clock.tick()
                return running

            def end(self) -> None:
                clock.tick()

        return Ticking()

    def peak_mb(self) -> float:
        return peak_mb()


if __name__ == "__main__":
    serve(OpenVino)
