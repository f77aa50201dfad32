"""A route's speculation as settings of other engines: vLLM, SGLang, llama.cpp.

These engines have one setting for all requests and, but for llama.cpp, one drafter. Names and defaults are
those of vLLM 0.32, SGLang 0.5 and llama.cpp of autumn 2026.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

# Of a list, the drafter that an engine with a single one should have: the first that it knows.
PREFERENCE: Final = ("block", "eagle", "medusa", "model", "suffix", "ngram", "recycle")
NGRAM: Final = (2, 4)  # fewest and most tokens that must match, as in the drafter `ngram`
PROPOSER: Final = "paceline.vllm.proposer.Proposer"  # runs `suffix` and `ngram` inside vLLM
PROPOSER_KEY: Final = "paceline"  # of its settings in --additional-config
SUFFIX_MATCH: Final = 8  # tokens that must match in llama.cpp's pool of n-grams; its own default is 24


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine is to do. draft_model: a folder or file that the engine loads, where it needs one."""

    drafters: tuple[str, ...]  # (): plain decoding
    max_draft: int
    draft_model: str | None = None
    # First and last number of sequences in a pass, and the draft length for them; 0: none.
    by_batch: Sequence[tuple[int, int, int]] = ()

    @property
    def drafter(self) -> str | None:
        """The one drafter of an engine that has no lists."""
        return next((name for name in PREFERENCE if name in self.drafters), None) if self.max_draft else None


def vllm_config(spec: Speculation) -> dict[str, Any] | None:
    """`--speculative-config` of vLLM's own methods; None: it has no such drafter, or none is to be used."""
    config = _vllm_method(spec)
    if config is None:
        return None
    config["num_speculative_tokens"] = spec.max_draft
    if spec.by_batch:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in spec.by_batch]
    return config


def _vllm_method(spec: Speculation) -> dict[str, Any] | None:
    name = spec.drafter
    if name in ("block", "eagle", "medusa"):
        from paceline.convert import METHODS

        return {"method": METHODS.get(name, name), "model": spec.draft_model or f"EXPORTED_{name.upper()}"}
    if name == "model":
        return {"method": "draft_model", "model": spec.draft_model or "DRAFT_MODEL"}
    if name == "suffix":
        return {"method": "suffix"}
    if name == "ngram":
        return {"method": "ngram", "prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
    return None


def vllm_flags(spec: Speculation) -> list[str]:
    """paceline's proposer for `suffix`: it asks `ngram` too, and remembers each tenant's requests."""
    if spec.drafter == "suffix":
        return _proposer_flags(spec)
    config = vllm_config(spec)
    return [] if config is None else ["--speculative-config", json.dumps(config)]


def _proposer_flags(spec: Speculation) -> list[str]:
    config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": spec.max_draft}
    settings: dict[str, Any] = {}
    if "ngram" not in spec.drafters:
        settings["drafters"] = ["suffix"]
    full = next((first for first, _, length in spec.by_batch if not length), 0)
    if full > 1:  # sequences in a pass from which on nothing is to be drafted
        settings["max_batch"] = full - 1
    flags = ["--speculative-config", json.dumps(config)]
    return [*flags, "--additional-config", json.dumps({PROPOSER_KEY: settings})] if settings else flags


def sglang_flags(spec: Speculation) -> list[str]:
    """Its draft tokens include the last token of the text."""
    name, nodes = spec.drafter, str(spec.max_draft + 1)
    if name in ("suffix", "ngram"):
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", nodes]
    if name not in ("model", "eagle"):
        return []
    algorithm = "EAGLE3" if name == "eagle" else "STANDALONE"
    model = spec.draft_model or ("EXPORTED_EAGLE" if name == "eagle" else "DRAFT_MODEL")
    return [
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", model),
        *("--speculative-num-steps", str(spec.max_draft), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", nodes),
    ]


def llama_cpp_flags(spec: Speculation) -> list[str]:
    """Of llama-server. N-gram drafters are tried before a draft model, whatever their order here."""
    length, types, flags = str(spec.max_draft), [], list[str]()
    if not spec.max_draft:
        return []
    if "ngram" in spec.drafters:
        types.append("ngram-simple")
        flags += ["--spec-ngram-simple-size-n", str(NGRAM[1]), "--spec-ngram-simple-size-m", length]
    if "suffix" in spec.drafters:
        types.append("ngram-mod")
        flags += ["--spec-ngram-mod-n-match", str(SUFFIX_MATCH), "--spec-ngram-mod-n-min", "1"]
        flags += ["--spec-ngram-mod-n-max", length]
    if "model" in spec.drafters:
        types.append("draft-simple")
        flags += ["--spec-draft-model", spec.draft_model or "DRAFT_MODEL.gguf", "--spec-draft-n-max", length]
    return ["--spec-type", ",".join(types), *flags] if types else []


def engine_flags(spec: Speculation) -> dict[str, str]:
    """Flags by engine, quoted for a shell; empty: the engine cannot do it, or nothing is to be done."""
    flags = {
        "vllm": vllm_flags(spec),
        "sglang": sglang_flags(spec),
        "llama.cpp": llama_cpp_flags(spec),
    }
    return {engine: shlex.join(given) for engine, given in flags.items()}
