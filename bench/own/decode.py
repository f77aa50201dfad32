"""Plain decoding, ms per token: as paceline serves the model, in float32, and Transformers in float32.

Only the two in float32 do the same arithmetic; each side says what it ran.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.peers.systems import precision
from bench.spread import Spread, interleaved, ratio
from paceline import LLM, EngineConfig, SpecConfig, hub

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

    dense = LLM(llm.name, spec=PLAIN, config=EngineConfig(dtype="float32"))

    def ours(llm: LLM) -> float:
        result = llm.generate(text, spec=PLAIN, max_tokens=NEW_TOKENS, seed=0, ignore_eos=True)
        return _per_token(result.seconds - (result.first_token_s or 0.0))

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

    runs: dict[str, Callable[[], float]] = {
        "paceline": partial(ours, llm),
        "paceline_float32": partial(ours, dense),
        "transformers": theirs,
    }
    values = interleaved(runs, repeats)
    return {
        "what": f"ms per token, plain greedy decoding, {PROMPT_TOKENS}-token context",
        **{f"{name}_ms": Spread.of(times).text() for name, times in values.items()},
        "float32_ratio": ratio(values["transformers"], values["paceline_float32"]).text(2),
        "precision": {
            "paceline": f"{llm.target.describe()}: {precision('paceline', {})}",
            "paceline_float32": f"{dense.target.describe()}: {precision('transformers', {})}",
            "transformers": precision("transformers", {}),
        },
        "runs": values,
    }


def _per_token(seconds: float) -> float:
    return 1000 * seconds / (NEW_TOKENS - 1)
