"""A route's speculation as settings of other engines: vLLM, SGLang, llama.cpp.

These engines have one setting for all requests and, but for llama.cpp, one drafter. Names and defaults are
those of vLLM 0.32, SGLang 0.5 and llama.cpp of autumn 2026. What an engine leaves out is a note.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

# Of a list, the drafter of an engine with a single one: the first that it knows.
PREFERENCE: Final = ("block", "eagle", "medusa", "model", "suffix", "ngram")
HAVE_MODEL: Final = ("block", "eagle", "medusa", "model")  # drafters that an engine loads from a file
WITHOUT_MODEL: Final = ("suffix", "ngram")
VLLM_FIXED: Final = ("medusa", "suffix")  # methods of vLLM that draft one length whatever the batch
NGRAM: Final = (2, 4)  # fewest and most tokens that must match, as in the drafter `ngram`
PROPOSER: Final = "paceline.vllm.proposer.Proposer"  # runs `suffix` and `ngram` inside vLLM
PROPOSER_KEY: Final = "paceline"  # of its settings in --additional-config
SUFFIX_MATCH: Final = 8  # tokens that must match in llama.cpp's pool of n-grams; its own default is 24
NGRAM_NOTE: Final = (
    f"vLLM's ngram drafts after {NGRAM[0]} tokens that occurred before, as paceline's does (its own default "
    f"is 5). Spoiled tool calls were reported with prompt_lookup_min {NGRAM[0]} on models with linear "
    "attention: compare texts there, or set it to 8 and prompt_lookup_max too"
)
NGRAM_DEVICES: Final = "SGLang's NGRAM runs on CUDA, and since 0.5.16 on CPUs"
EAGLE_FORMAT: Final = (
    "SGLang reads EAGLE-3 checkpoints as their authors publish them (LlamaForCausalLMEagle3), not as "
    "`paceline drafters export` writes them"
)
# Heads that an engine runs, but not from the files of `paceline drafters export`: by what name.
SGLANG_PUBLISHED: Final = {"block": "--speculative-algorithm DSPARK, since 0.5.16"}
LLAMA_CPP_PUBLISHED: Final = {
    "block": "--spec-type draft-dspark, converted to GGUF",
    "eagle": "--spec-type draft-eagle3, converted to GGUF",
}
MEDUSA_FORMAT: Final = (
    "`paceline drafters export` writes no medusa: name the checkpoint that it was imported from"
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine is to do."""

    drafters: tuple[str, ...]  # (): plain decoding
    max_draft: int
    # The folder or file of each drafter that the engine loads; those without one cannot be used.
    models: Mapping[str, str] = field(default_factory=dict)
    # First and last number of sequences in a pass, and the draft length for them; 0: none.
    by_batch: Sequence[tuple[int, int, int]] = ()
    longest: Mapping[str, int] = field(default_factory=dict)  # drafts of the drafters that have a limit

    def drafter(self, known: Collection[str]) -> str | None:
        """The one drafter of an engine that has no lists and knows these."""
        return next((name for name in PREFERENCE if name in known and self.has(name)), None)

    def has(self, name: str) -> bool:
        needs_model = name in HAVE_MODEL and not self.models.get(name)
        return bool(self.max_draft) and name in self.drafters and not needs_model

    def limited(self, name: str) -> "Speculation":
        """With drafts that this drafter can make."""
        most = min(self.longest.get(name, self.max_draft), self.max_draft)
        ranges = list[tuple[int, int, int]]()
        for first, last, length in self.by_batch:
            if ranges and ranges[-1][2] == min(length, most):
                first = ranges.pop()[0]
            ranges.append((first, last, min(length, most)))
        return replace(self, max_draft=most, by_batch=ranges if len(ranges) > 1 else ())

    def left_out(self, engine: str, used: Collection[str]) -> list[str]:
        """Tells which drafters an engine drops, if it has any."""
        dropped = [name for name in self.drafters if name not in used and name != "none"]
        if not self.max_draft or not dropped:
            return []
        rest = f"drafts by {', '.join(used)} only" if used else "drafts nothing"
        return [f"{engine} {rest}; left out: {', '.join(dropped)}"]

    def published_only(self, engine: str, heads: Mapping[str, str]) -> list[str]:
        """Tells which of its heads an engine runs from other files than ours."""
        return [
            f"{engine} runs {name} from checkpoints as their authors publish them ({how}), not from those "
            "of `paceline drafters export`"
            for name, how in heads.items()
            if self.has(name)
        ]

    def fixed_length(self, engine: str) -> list[str]:
        """Tells for how many sequences the one length of an engine is not the best."""
        others = [
            f"{length or 'none'} for {first}{f' to {last}' if last != first else ''}"
            for first, last, length in self.by_batch
            if length != self.max_draft
        ]
        best = f"best here by sequences in a pass: {', '.join(others)}"
        return [f"{engine} has one draft length, {self.max_draft}; {best}"] if others else []


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Words of an engine's command line; (): it cannot do it, or nothing is to be done."""

    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Quoted for a shell."""
        return shlex.join(self.words)


@dataclass(frozen=True, slots=True)
class VllmSpeculation:
    """`--speculative-config`, and the settings of paceline's proposer where that drafts."""

    config: Mapping[str, Any] | None = None  # None: plain decoding
    proposer: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def vllm_speculation(spec: Speculation, plugin: bool = True) -> VllmSpeculation:
    """plugin: paceline's proposer drafts `suffix` and `ngram`, in place of vLLM's own methods."""
    name = spec.drafter(PREFERENCE)
    if name is None:
        return VllmSpeculation(notes=tuple(spec.left_out("vLLM", ())))
    if plugin and name in WITHOUT_MODEL:
        return _by_proposer(spec)
    spec = spec.limited(name)
    config, notes = {**_vllm_method(name, spec), "num_speculative_tokens": spec.max_draft}, []
    if name in VLLM_FIXED:
        notes = spec.fixed_length(f"vLLM's {name}")
    elif spec.by_batch:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in spec.by_batch]
    if name == "ngram":
        notes.append(NGRAM_NOTE)
    if name == "medusa":
        notes.append(MEDUSA_FORMAT)
    return VllmSpeculation(config, notes=(*spec.left_out("vLLM", (name,)), *notes))


def _vllm_method(name: str, spec: Speculation) -> dict[str, Any]:
    if name == "suffix":
        return {"method": "suffix"}
    if name == "ngram":
        return {"method": "ngram", "prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
    if name == "model":
        return {"method": "draft_model", "model": spec.models[name]}
    from paceline.convert import METHODS

    return {"method": METHODS.get(name, name), "model": spec.models[name]}


def _by_proposer(spec: Speculation) -> VllmSpeculation:
    """It asks its drafters in order, and remembers each tenant's requests."""
    used = [name for name in spec.drafters if name in WITHOUT_MODEL]
    settings: dict[str, Any] = {} if used == list(WITHOUT_MODEL) else {"drafters": used}
    full = next((first for first, _, length in spec.by_batch if not length), 0)
    if full > 1:  # sequences in a pass from which on nothing is to be drafted
        settings["max_batch"] = full - 1
    config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": spec.max_draft}
    drafting = replace(spec, by_batch=[entry for entry in spec.by_batch if entry[2]])
    left_out = spec.left_out("vLLM with paceline's proposer", used)
    return VllmSpeculation(config, settings, (*left_out, *drafting.fixed_length("paceline's proposer")))


def vllm_flags(spec: Speculation) -> EngineFlags:
    made = vllm_speculation(spec)
    if made.config is None:
        return EngineFlags(notes=made.notes)
    words = ["--speculative-config", json.dumps(made.config)]
    if made.proposer:
        words += ["--additional-config", json.dumps({PROPOSER_KEY: made.proposer})]
    return EngineFlags(tuple(words), made.notes)


def sglang_flags(spec: Speculation) -> EngineFlags:
    """Its draft tokens include the last token of the text. Its n-grams are those of `suffix` and `ngram`."""
    name = spec.drafter(("eagle", "model", *WITHOUT_MODEL))
    published = spec.published_only("SGLang", SGLANG_PUBLISHED)
    if name is None:
        return EngineFlags(notes=(*spec.left_out("SGLang", ()), *published))
    used = [one for one in spec.drafters if one in WITHOUT_MODEL] if name in WITHOUT_MODEL else [name]
    spec = spec.limited(name)
    nodes = str(spec.max_draft + 1)
    notes = [*spec.left_out("SGLang", used), *published, *spec.fixed_length("SGLang")]
    if name in WITHOUT_MODEL:  # one guess for each position, as in a chain; by default up to 10
        breadth = ("--speculative-ngram-max-bfs-breadth", "1")
        ngram = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", nodes, *breadth)
        return EngineFlags(ngram, (*notes, NGRAM_DEVICES))
    words = (
        *("--speculative-algorithm", "EAGLE3" if name == "eagle" else "STANDALONE"),
        *("--speculative-draft-model-path", spec.models[name]),
        *("--speculative-num-steps", str(spec.max_draft), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", nodes),
    )
    return EngineFlags(words, (*notes, EAGLE_FORMAT) if name == "eagle" else tuple(notes))


def llama_cpp_flags(spec: Speculation) -> EngineFlags:
    """Of llama-server. N-gram drafters are tried before a draft model, whatever their order here."""
    length = str(spec.max_draft)
    found = {name: flags for name, flags in _llama_cpp_drafters(spec, length).items() if spec.has(name)}
    published = spec.published_only("llama.cpp", LLAMA_CPP_PUBLISHED)
    notes = (*spec.left_out("llama.cpp", list(found)), *published)
    if not found:
        return EngineFlags(notes=notes)
    types = ",".join(kind for kind, _ in found.values())
    words = [word for _, flags in found.values() for word in flags]
    return EngineFlags(("--spec-type", types, *words), (*notes, *spec.fixed_length("llama.cpp")))


def _llama_cpp_drafters(spec: Speculation, length: str) -> dict[str, tuple[str, list[str]]]:
    """The type of each drafter that it knows, and the flags of that."""
    simple = ["--spec-ngram-simple-size-n", str(NGRAM[1]), "--spec-ngram-simple-size-m", length]
    pool = ["--spec-ngram-mod-n-match", str(SUFFIX_MATCH), "--spec-ngram-mod-n-min", "1"]
    pool += ["--spec-ngram-mod-n-max", length]
    draft = ["--spec-draft-model", spec.models.get("model", ""), "--spec-draft-n-max", length]
    return {
        "ngram": ("ngram-simple", simple),
        "suffix": ("ngram-mod", pool),
        "model": ("draft-simple", draft),
    }


def engine_flags(spec: Speculation) -> dict[str, EngineFlags]:
    """By engine."""
    return {"vllm": vllm_flags(spec), "sglang": sglang_flags(spec), "llama.cpp": llama_cpp_flags(spec)}
