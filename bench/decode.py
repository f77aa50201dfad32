"""Plain decoding of SmolLM2, ms per token, against Transformers on the same weights in the same run."""

import time
from typing import Any
from unittest import mock

import torch

from bench.spread import Spread, interleaved, ratio
from paceline import LLM, SpecConfig, hub

PROMPT_TOKENS = 300
NEW_TOKENS = 48
PLAIN = SpecConfig(("none",), max_draft=0)


def measure(llm: LLM, repeats: int) -> dict[str, Any]:
    import transformers

    path = hub.resolve(llm.name)
    # It asks for accelerate before it reads a GGUF file, and then does not use it.
    with mock.patch("transformers.modeling_utils.is_accelerate_available", return_value=True):
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    ids = (llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. ") * 40)[:PROMPT_TOKENS]
    text = llm.tokenizer.decode(ids)

    def ours() -> float:
        result = llm.generate(text, spec=PLAIN, max_tokens=NEW_TOKENS, seed=0, ignore_eos=True)
        return _per_token(result.seconds - result.first_token_seconds)

    def theirs() -> float:
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            cache = reference(tokens[:, :-1], use_cache=True).past_key_values
            token = tokens[:, -1:]
            for i in range(NEW_TOKENS):
                if i == 1:
                    started = time.perf_counter()
                out = reference(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        return _per_token(time.perf_counter() - started)

    values = interleaved({"paceline": ours, "transformers": theirs}, repeats)
    return {
        "what": f"ms per token, plain greedy decoding, {PROMPT_TOKENS}-token context, float32",
        "paceline_ms": Spread.of(values["paceline"]).text(),
        "transformers_ms": Spread.of(values["transformers"]).text(),
        "ratio": ratio(values["transformers"], values["paceline"]).text(2),
        "runs": values,
    }


def _per_token(seconds: float) -> float:
    return 1000 * seconds / (NEW_TOKENS - 1)
