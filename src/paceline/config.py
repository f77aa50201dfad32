"""Settings of requests and engines, and the validators of all settings.

Settings are frozen. An unknown key is an error that lists the known ones.
"""

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import partial
from operator import index, le
from typing import Any, Final, Literal, TypeVar, get_args

from paceline import limits
from paceline.errors import HIDDEN, SettingError, UsageError, unknown_name

T = TypeVar("T")

Accept = Literal["match", "residual", "block", "typical"]
ACCEPT_RULES: Final[tuple[Accept, ...]] = get_args(Accept)
FLOAT_DTYPES: Final = ("float32", "bfloat16", "float16")
DTYPES: Final = ("auto", *FLOAT_DTYPES, "int8", "fp8", "gguf")


def settings(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds a settings dataclass from names and values that came from outside."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UsageError(unknown_name("setting", key, known))
    return cls(**values)


def require(fits: Callable[[Any], bool], setting: str, value: object, expected: str) -> None:
    """Refuses a value that does not fit; one that cannot even be compared does not."""
    try:
        ok = fits(value)
    except TypeError:
        ok = False
    if not ok:
        raise SettingError(setting, value, expected)


def require_between(settings: object, low: float, high: float, *names: str) -> None:
    """Numbers from `low` to `high`, both included."""
    for name in names:
        require(lambda x: low <= x <= high, name, getattr(settings, name), f"{low} to {high}")


def require_min(settings: object, **minima: float) -> None:
    """The smallest value of each setting: require_min(self, steps=1, threads=0)."""
    for name, low in minima.items():
        require(partial(le, low), name, getattr(settings, name), f"{low} or more")


def require_positive(settings: object, *names: str) -> None:
    for name in names:
        require(lambda x: x > 0, name, getattr(settings, name), "more than 0")


def require_whole(settings: object, *names: str) -> None:
    """Whole numbers, alone or in a tuple, or None."""
    for name in names:
        value = getattr(settings, name)
        try:
            if isinstance(value, tuple):
                object.__setattr__(settings, name, tuple(index(x) for x in value))
            elif value is not None:
                index(value)
        except TypeError:
            raise SettingError(name, value, "whole numbers") from None


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """A DeprecationWarning for the caller's caller. stacklevel: 4 in the __post_init__ of a dataclass."""
    message = f"{old} is now called {new}; the old name will be removed"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def freeze(settings: object, *names: str) -> None:
    """Makes tuples of what a caller may give as one text, a list or a mapping."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, str):
            value = (value,)
        elif isinstance(value, Mapping):
            value = tuple(value.items())
        elif isinstance(value, Sequence):
            value = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        else:
            raise SettingError(name, value, "a list")
        object.__setattr__(settings, name, value)


def _token_biases(pairs: tuple[Any, ...]) -> tuple[tuple[int, float], ...]:
    """Token ids may come as text, as they do in JSON keys."""
    try:
        return tuple((int(token), bias) for token, bias in pairs)
    except (TypeError, ValueError):
        raise SettingError("logit_bias", pairs, "whole numbers") from None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target chooses its tokens. The same values with a seed always give the same text.

    Without a seed each request draws one; `Result.seed` reports it.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0, or vLLM's -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: each request draws its own
    choice: int = 0  # which of n outputs of one request this is
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report for each token; None: no logprobs
    min_tokens: int = 0  # until then no end or stop token is possible, and stop texts do not count

    def __post_init__(self) -> None:
        freeze(self, "stop", "stop_tokens", "logit_bias")
        require_whole(self, "top_k", "seed", "choice", "max_tokens", "min_tokens", "stop_tokens", "logprobs")
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        require(lambda t: t == 0 or 1e-4 <= t < 1e6, "temperature", self.temperature, "0, or 0.0001 and more")
        require(lambda x: x >= -1, "top_k", self.top_k, "0 or -1 (off), or more")
        object.__setattr__(self, "top_k", max(0, self.top_k))
        require(lambda x: 0 < x <= 1, "top_p", self.top_p, "more than 0, at most 1")
        require_between(self, 0, 1, "min_p")
        require_between(self, 0.01, 100, "repetition_penalty")
        require_between(self, -2, 2, "presence_penalty", "frequency_penalty")
        require(lambda x: all(abs(b) <= 1e4 for _, b in x), "logit_bias", self.logit_bias, "token id: bias")
        require(lambda x: x is None or 0 <= x < 2**64, "seed", self.seed, "a whole number of at most 64 bits")
        require_min(self, choice=0, max_tokens=1)
        require_between(self, 0, self.max_tokens, "min_tokens")
        if not all(s and isinstance(s, str) for s in self.stop):  # texts of the user's are not repeated
            raise SettingError("stop", HIDDEN, "texts, none empty")
        require(lambda x: x is None or 0 <= x <= 20, "logprobs", self.logprobs, "0 to 20")

    def seeded(self) -> "SamplingParams":
        """Itself if it has a seed, else a copy with a random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def noise_seed(self) -> int:
        """The seed of the sampling noise. An engine gives every sequence one; without an engine it is 0."""
        return self.seed or 0


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How one request speculates."""

    drafters: tuple[str, ...] = ("grammar", "suffix", "ngram")  # in this order; () or "none": plain decoding
    max_draft: int = 8  # 0: plain decoding, same code
    tree_width: int = 1  # nodes of a draft for one position; 1: a chain
    adaptive: bool = True  # the controller may draft less than max_draft, or nothing
    accept: Accept = "match"
    threshold: float = 0.0  # lowest score of a drafted token; only the speed depends on it
    num_speculative_tokens: InitVar[int | None] = field(
        default=None, kw_only=True
    )  # vLLM's name of max_draft

    def __post_init__(self, num_speculative_tokens: int | None) -> None:
        if num_speculative_tokens is not None:
            default = next(f.default for f in fields(self) if f.name == "max_draft")
            if self.max_draft not in (default, num_speculative_tokens):
                hint = f"max_draft is {self.max_draft}; give one of them"
                raise SettingError(
                    "num_speculative_tokens", num_speculative_tokens, "the same as max_draft", hint
                )
            object.__setattr__(self, "max_draft", num_speculative_tokens)
        freeze(self, "drafters")
        object.__setattr__(self, "drafters", tuple(dict.fromkeys(self.drafters)))
        require_whole(self, "max_draft", "tree_width")
        require_between(self, 0, 64, "max_draft")
        require_between(self, 1, 16, "tree_width")
        require_between(self, 0, 1, "threshold")
        require(lambda x: x in ACCEPT_RULES, "accept", self.accept, f"one of {', '.join(ACCEPT_RULES)}")
        if self.accept == "block":
            require(lambda x: x == 1, "tree_width", self.tree_width, "1: accept='block' is for chains")

    @property
    def lossy(self) -> bool:
        return self.accept == "typical"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs, for all requests."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    # auto: quantised weights as they are on a CPU, float32 where torch runs them, bfloat16 on a GPU.
    # int8: weights rounded to 8 bits: on a CPU those that are floats, on a GPU all.
    # fp8: all weights rounded to e4m3, on a GPU. gguf: quantised weights as the file has them, on a GPU too.
    # The others: dense weights, run by torch, bfloat16 on a GPU by the CUDA kernels.
    dtype: str = "auto"
    threads: int = 0  # CPU threads; 0: all cores that the process may use
    cache_mb: int = 1024  # memory for the KV cache
    # Disk space for the same, where a prefix that was read once is found again after a restart. 0: none.
    cache_disk_mb: int = 0  # `paceline serve`: 2048
    cache_dir: str | None = None  # its folder; None: that of paceline's own files
    max_model_len: int = 0  # tokens of a prompt with its answer; 0: all that the model and the cache hold
    max_batch: int = 16  # sequences in one pass
    # On a GPU a row's bits are the same whatever the batch. If not, torch multiplies passes of more than 64
    # rows. On a CPU the native engine is always deterministic.
    deterministic: bool = True
    prefill_chunk: int = 256  # prompt tokens in one pass
    prefill_beside: int = 256  # the same, while other sequences wait for their next token
    prefill_beside_ms: int = 40  # what these tokens may add to the time of such a pass; 0: any
    max_waiting: int = 0  # sequences that may wait for admission; 0: any number
    max_grammar_s: float = (
        3.0  # CPU time to compile one constraint; 4 times that for the slow masks of an output
    )
    max_grammar_mb: int = 256  # memory to compile one constraint
    max_fixed_text: int = 8192  # bytes of text in a row that one constraint may prescribe

    def __post_init__(self) -> None:
        require(lambda x: x in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        require(lambda x: isinstance(x, bool), "deterministic", self.deterministic, "True or False")
        require_whole(
            self,
            *("cache_mb", "max_batch", "prefill_chunk", "prefill_beside", "max_waiting", "threads"),
            *("max_model_len", "prefill_beside_ms", "cache_disk_mb"),
        )
        require(lambda x: x >= 0, "cache_disk_mb", self.cache_disk_mb, "0 (none) or more")
        require(lambda x: x >= 0, "max_waiting", self.max_waiting, "0 (any number) or more")
        require(lambda x: x >= 0, "prefill_beside_ms", self.prefill_beside_ms, "0 (any) or more")
        require(
            lambda x: x != 1 and x >= 0, "max_model_len", self.max_model_len, "0 (the model's), 2 or more"
        )
        require_min(self, cache_mb=1, max_batch=1, prefill_chunk=1, prefill_beside=1)
        require_positive(self, "max_grammar_s")
        require_min(self, max_grammar_mb=16, max_fixed_text=1)
        if self.threads:
            cores = limits.cores()
            require(lambda x: 0 <= x <= cores, "threads", self.threads, f"0 (all cores) to {cores}")
