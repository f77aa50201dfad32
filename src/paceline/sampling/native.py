"""choose.cpp, called from Python: a row of logits in, its token out, the same as from `choose` in numpy."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from paceline.config import SamplingParams
from paceline.errors import ModelError, NotCompiled
from paceline.native_build import Sources, Unit, library, load
from paceline.sampling.choose import choose
from paceline.sampling.distribution import NO_HISTORY, Floats, History, distribution, lowest, penalises
from paceline.sampling.masks import check_length, nothing_allowed
from paceline.sampling.noise import Key
from paceline.types import Bits

SOURCE: Final = Path(__file__).parent / "csrc" / "choose.cpp"
HEADERS: Final = tuple(
    SOURCE.with_name(name) for name in ("cutoff.h", "mask.h", "exact_math.h", "exact_exp.h")
)
SOURCES: Final = Sources("sampling", [Unit(SOURCE)], HEADERS)
NO_MEMORY: Final = -2  # instead of a token: as in choose.cpp

Function = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Among:
    """For C++ that chooses from rows of some tokens, without penalties: see choose.cpp."""

    function: int  # address of paceline_choose_among
    settings: int  # and what it is to be given; good as long as the chooser is there


class Settings(ctypes.Structure):
    """Field by field what choose.cpp calls Settings."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        ("presence", ctypes.c_double),
        ("frequency", ctypes.c_double),
        ("per_temperature", ctypes.c_float),
        ("repetition", ctypes.c_float),
        ("min_p_depth", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("biased", ctypes.c_int64),
        ("bias_ids", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
    )


class Chooser:
    """Chooses tokens with one request's parameters."""

    def __init__(self, params: SamplingParams) -> None:
        self.needs_history = penalises(params)
        self.among: Among | None = None
        self._params = params

    def __call__(
        self, logits: Floats, key: Key, history: History = NO_HISTORY, mask: Bits | None = None
    ) -> int:
        """The token of one row, [vocab]."""
        return choose(distribution(logits, self._params, history, mask), key)


class NativeChooser(Chooser):
    def __init__(self, params: SamplingParams, function: Function, among: int = 0) -> None:
        super().__init__(params)
        self._function = function
        self._ids = np.array([token for token, _ in params.logit_bias], np.int64)  # the settings point here
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._settings = Settings(
            top_p=params.top_p,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            per_temperature=1 / params.temperature if params.temperature else 0,
            repetition=params.repetition_penalty,
            min_p_depth=abs(lowest(params.min_p)) if params.min_p else np.inf,
            top_k=min(params.top_k, 2**31 - 1),
            biased=len(self._ids),
            bias_ids=self._ids.ctypes.data,
            biases=self._biases.ctypes.data,
        )
        self._where = ctypes.addressof(self._settings)
        if among and not self.needs_history:
            self.among = Among(among, self._where)

    def __call__(
        self, logits: Floats, key: Key, history: History = NO_HISTORY, mask: Bits | None = None
    ) -> int:
        row = np.ascontiguousarray(logits, np.float32)
        bits = None if mask is None else np.ascontiguousarray(mask, np.uint32)
        if bits is not None:
            check_length(bits, len(row))
        text = history.text() if self.needs_history else None
        token = self._function(
            row.ctypes.data,
            len(row),
            self._where,
            None if bits is None else bits.ctypes.data,
            None if text is None else text.ctypes.data,
            0 if text is None else len(text),
            history.prompt_len,
            *key,
        )
        if token == NO_MEMORY:
            raise ModelError(f"no memory to choose one of {len(row)} tokens: give a smaller cache_mb")
        if token < 0:
            raise nothing_allowed()
        return token


@lru_cache(maxsize=64)
def chooser(params: SamplingParams) -> Chooser:
    """The fastest there is on this machine."""
    functions = _functions()
    return Chooser(params) if functions is None else NativeChooser(params, *functions)


@cache
def _functions() -> tuple[Function, int] | None:
    try:
        library = load(*SOURCES)
        among = ctypes.cast(library.paceline_choose_among, ctypes.c_void_p).value
        return bind(library), among or 0
    except NotCompiled as error:
        logging.getLogger("paceline").info("%s", error)  # whoever loads a model has warned already
        return None


def describe() -> str:
    """One line for `paceline doctor`: native sampling or not, and the reason."""
    try:
        return f"native, {library(*SOURCES)}"
    except NotCompiled as error:
        return f"numpy: {error}"


def bind(library: ctypes.CDLL) -> Function:
    """The function for a row of the whole vocabulary.

    It keeps the interpreter's lock: getting it back could take far longer.
    """
    function = ctypes.PyDLL(library._name, handle=library._handle).paceline_choose
    pointer, number, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    function.argtypes = (pointer, number, pointer, pointer, pointer, number, number, word, word)
    function.restype = number
    return function
