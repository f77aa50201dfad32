"""Do two samplers write the same distribution of texts? Permutation tests, exact at any sample size.

`stratified_mmd_p_value` is Model Equality Testing (Gao, Liang, Guestrin, arXiv 2410.20247): maximum mean
discrepancy with a Hamming kernel over characters, labels permuted within each prompt. It sees any difference,
of prompts with several answers. `swap_p_value` sees a difference that all prompts share, such as another
temperature: word counts and lengths, with the legs of each pair swapped at random.
Permutation tests are not safe to repeat: `alpha_at_look` spends their error over looks at doubling sizes.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.gate.stats.mean import Floats

MAX_CHARACTERS: Final = 400  # compared of each text
PERMUTATIONS: Final = 999
MAX_PERMUTATIONS: Final = 20_000
FIRST_LOOK: Final = 50  # samples of each sampler
LAST_LOOK: Final = 5  # at 1,600 samples
_PART: Final = 1000  # permutations at once
_BUCKETS: Final = 256  # of hashed words
_END: Final = -1  # pads the shorter text

Texts = Sequence[str]


def stratified_mmd_p_value(
    groups: Iterable[tuple[Texts, Texts]], rng: np.random.Generator, permutations: int = PERMUTATIONS
) -> float:
    """Of equality. groups: for each prompt, the texts of either sampler."""
    observed = 0.0
    permuted = np.zeros(permutations)
    for a, b in groups:
        kernel = hamming_kernel([*a, *b])
        signs = np.concatenate([np.full(len(a), 1 / len(a)), np.full(len(b), -1 / len(b))])
        observed += float(signs @ kernel @ signs)
        for part in _parts(permutations):
            shuffled = rng.permuted(np.tile(signs, (part.stop - part.start, 1)), axis=1)
            permuted[part] += ((shuffled @ kernel) * shuffled).sum(axis=1)
    return _p_value(observed, permuted)


def swap_p_value(a: Texts, b: Texts, rng: np.random.Generator, permutations: int = PERMUTATIONS) -> float:
    """Of equality of two samplers that answered the same prompts, text i the same prompt."""
    difference = text_features(a) - text_features(b)
    scale = np.sqrt((difference**2).mean(axis=0))  # the same however the legs are swapped
    difference = difference[:, scale > 0] / scale[scale > 0]
    observed = float((difference.sum(axis=0) ** 2).sum())
    permuted = np.empty(permutations)
    for part in _parts(permutations):
        signs = rng.choice((-1.0, 1.0), (part.stop - part.start, len(difference)))
        permuted[part] = ((signs @ difference) ** 2).sum(axis=1)
    return _p_value(observed, permuted)


def hamming_kernel(texts: Texts) -> Floats:
    """The share of positions with the same character, for each two texts."""
    length = max(1, min(MAX_CHARACTERS, max(map(len, texts), default=1)))
    rows = np.full((len(texts), length), _END, dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        codes = [ord(c) for c in text[:length]]
        row[: len(codes)] = codes
    return np.array([(rows == row).mean(axis=1) for row in rows])


def text_features(texts: Texts) -> Floats:
    """Square roots of hashed word counts, and of the length; one row for each text."""
    counts = np.zeros((len(texts), _BUCKETS + 1))
    for row, text in zip(counts, texts, strict=True):
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            row[crc32(word.encode("utf-8", "surrogatepass")) % _BUCKETS] += 1
        row[-1] = len(text)
    return np.sqrt(counts)


def look(n: int) -> tuple[int, int] | None:
    """Index of the last look at n samples, and the samples it uses; None: before the first."""
    if n < FIRST_LOOK:
        return None
    index = min(LAST_LOOK, (n // FIRST_LOOK).bit_length() - 1)
    return index, FIRST_LOOK << index


def alpha_at_look(alpha: float, index: int) -> float:
    """alpha / ((i + 1) (i + 2)): all looks together spend alpha."""
    return alpha / ((index + 1) * (index + 2))


def _parts(permutations: int) -> list[slice]:
    return [slice(start, min(start + _PART, permutations)) for start in range(0, permutations, _PART)]


def _p_value(observed: float, permuted: NDArray[np.float64]) -> float:
    return float((1 + np.count_nonzero(permuted >= observed - 1e-12)) / (1 + len(permuted)))
