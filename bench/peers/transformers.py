"""Transformers in float32 on the weights of the same GGUF file: plain, prompt lookup, and assisted."""

from pathlib import Path
from typing import Any

import torch

from bench.peers.dense import folder_of
from bench.peers.wire import Answer, Ask, Clock, Load, peak_mb, serve

GUESSES, NGRAM = 5, 3


class Streamer:
    """Transformers hands it the prompt first, then tokens as they are kept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt = True

    def put(self, tokens: Any) -> None:
        if not self._prompt:
            self._clock.tick()
        self._prompt = False

    def end(self) -> None:
        return


class Transformers:
    def load(self, load: Load) -> str:
        import transformers

        torch.set_num_threads(load.threads)
        torch.set_grad_enabled(False)
        path = Path(load.model)
        self._model = _read(path)
        self._options: dict[str, Any] = {}
        if load.mode == "lookup":
            self._options = {"prompt_lookup_num_tokens": GUESSES, "max_matching_ngram_size": NGRAM}
        elif load.mode == "assisted":
            assert load.draft is not None
            self._options = {"assistant_model": _read(Path(load.draft))}
        self._passes = 0
        self._model.register_forward_hook(self._count)
        return f"transformers {transformers.__version__}, torch {torch.__version__}"

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def generate(self, ask: Ask) -> Answer:
        from transformers import GenerationConfig

        torch.manual_seed(ask.seed)
        prompt = torch.tensor([ask.prompt])
        sampling = {"temperature": ask.temperature, "top_k": 0, "top_p": 1.0} if ask.temperature else {}
        config = GenerationConfig(
            max_new_tokens=ask.max_tokens,
            do_sample=ask.temperature > 0,
            eos_token_id=sorted(ask.stops) or None,
            pad_token_id=0,
            **sampling,
        )
        self._passes, clock = 0, Clock()
        whole = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            streamer=Streamer(clock),
            **self._options,
        )
        return clock.answer(whole[0, len(ask.prompt) :].tolist(), self._passes)

    def peak_mb(self) -> float:
        return peak_mb()


def _read(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder_of(path), dtype=torch.float32).eval()


if __name__ == "__main__":
    serve(Transformers)
