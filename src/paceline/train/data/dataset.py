"""The dataset: answers of the target in one .npz file, and training batches of them."""

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.atomic import remove_unfinished, replacing
from paceline.errors import DataError, SettingError, UsageError

VERSION: Final = 1
MIN_ANSWER_TOKENS: Final = 8  # within the maximum length, for an answer to be used
_WIDTH: Final = 64  # tokens by which the lengths in a batch may differ, about

Part = Literal["training", "held out", "all"]


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [b, n] int64, right-padded with 0
    lengths: Tensor  # [b] int64
    loss_mask: Tensor  # [b, n] bool: the token is the target's own output
    constrained: Tensor  # [b] bool: written under a grammar


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    ids: NDArray[np.int64]  # ascending
    coverage: float  # share of the held-out answers' tokens


@dataclass(frozen=True, slots=True)
class Answers:
    """Prompts and the target's answers.

    Answer i: tokens[offsets[i] : offsets[i + 1]] are `prompt_lens[i]` tokens of prompt, then the answer.
    """

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]  # [answers + 1]
    prompt_lens: NDArray[np.int64]
    sampled: NDArray[np.bool_]  # False: greedy
    held_out: NDArray[np.bool_]  # never trained on
    constrained: NDArray[np.bool_]  # written under a grammar that made it call a tool
    always: NDArray[np.int64]  # tokens of every draft vocabulary
    vocab_size: int
    target: str  # fingerprint
    tokenizer: str

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        sampled: Sequence[bool],
        held_out: Sequence[bool],
        constrained: Sequence[bool],
        always: Sequence[int],
        vocab_size: int,
        target: str,
        tokenizer: str,
    ) -> "Answers":
        texts = [np.asarray((*p, *a), np.uint32) for p, a in zip(prompts, answers, strict=True)]
        return cls(
            np.concatenate(texts) if texts else np.zeros(0, np.uint32),
            np.cumsum([0, *map(len, texts)], dtype=np.int64),
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.array(sampled, bool),
            np.array(held_out, bool),
            np.array(constrained, bool),
            np.array(sorted(set(always)), np.int64),
            vocab_size,
            target,
            tokenizer,
        )

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def prompt(self, i: int) -> NDArray[np.uint32]:
        return self.tokens[self.offsets[i] : self.offsets[i] + self.prompt_lens[i]]

    def answer(self, i: int) -> NDArray[np.uint32]:
        return self.tokens[self.offsets[i] + self.prompt_lens[i] : self.offsets[i + 1]]

    def which(self, part: Part) -> NDArray[np.int64]:
        masks = {"training": ~self.held_out, "held out": self.held_out, "all": np.ones(len(self), bool)}
        return np.flatnonzero(masks[part])

    def answer_tokens(self, part: Part) -> NDArray[np.uint32]:
        """The tokens of the answers without prompts, concatenated."""
        return np.concatenate([np.zeros(0, np.uint32), *(self.answer(int(i)) for i in self.which(part))])

    def __add__(self, other: "Answers") -> "Answers":
        """Joins answers of one target. A prompt that either holds out stays held out."""
        if (self.target, self.tokenizer) != (other.target, other.tokenizer):
            raise UsageError("these answers are of different models: train on those of one")
        both = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        joined = {
            name: np.concatenate(both[name])
            for name in ("tokens", "prompt_lens", "sampled", "held_out", "constrained")
        }
        out = {self.prompt(int(i)).tobytes() for i in self.which("held out")}
        out |= {other.prompt(int(i)).tobytes() for i in other.which("held out")}
        made = Answers(
            **joined,
            offsets=np.concatenate((self.offsets, self.offsets[-1] + other.offsets[1:])),
            always=np.union1d(*both["always"]),
            vocab_size=self.vocab_size,
            target=self.target,
            tokenizer=self.tokenizer,
        )
        for i in range(len(made)):
            made.held_out[i] |= made.prompt(i).tobytes() in out
        return made

    def save(self, path: Path) -> None:
        arrays = {f.name: np.asarray(getattr(self, f.name)) for f in fields(self)}
        remove_unfinished(path)
        with replacing(path) as fresh, fresh.open("wb") as file:
            np.savez_compressed(file, version=np.int64(VERSION), **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Answers":
        try:
            with np.load(path, allow_pickle=False) as file:
                if int(file["version"]) != VERSION:
                    raise UsageError(f"{path.name} is of version {file['version']}: make the answers again")
                held = {f.name: file[f.name] for f in fields(cls)}
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} holds no answers: {error}; `paceline train` makes such a file"
            ) from error
        scalars = {name: held.pop(name).item() for name in ("vocab_size", "target", "tokenizer")}
        return cls(**held, **scalars)

    def usable(self, part: Part, max_len: int) -> NDArray[np.int64]:
        """Answers of which MIN_ANSWER_TOKENS tokens, or all, are within the first `max_len`."""
        chosen = self.which(part)
        lengths = np.diff(self.offsets)[chosen]
        needed = np.minimum(self.prompt_lens[chosen] + MIN_ANSWER_TOKENS, lengths)
        return chosen[(needed <= max_len) & (lengths > self.prompt_lens[chosen])]

    def batches(
        self, seed: int, tokens_per_batch: int, max_len: int, part: Part = "training"
    ) -> Iterator[Batch]:
        """Each usable answer once, cut after `max_len` tokens, batched with others of about its length."""
        chosen = self.usable(part, max_len)
        if not len(self.which(part)):
            raise UsageError(f"there is no {part} answer among {len(self)}: give more conversations")
        if not len(chosen):
            raise UsageError(
                f"no {part} answer begins within the first {max_len} tokens: allow longer prompts"
            )
        rng = np.random.default_rng(seed)
        lengths = np.minimum(np.diff(self.offsets), max_len)
        near = lengths[chosen] + rng.uniform(0, _WIDTH, len(chosen))
        groups = _packed(chosen[np.argsort(near, kind="stable")], lengths, tokens_per_batch)
        for group in rng.permutation(len(groups)):
            yield self._batch(groups[group], lengths)

    def _batch(self, chosen: Sequence[int], lengths: NDArray[np.int64]) -> Batch:
        counts = lengths[chosen]
        tokens = np.zeros((len(chosen), counts.max()), np.int64)
        for row, i in enumerate(chosen):
            tokens[row, : lengths[i]] = self.tokens[self.offsets[i] : self.offsets[i] + lengths[i]]
        at = np.arange(tokens.shape[1])
        own = (at >= self.prompt_lens[chosen][:, None]) & (at < counts[:, None])
        parts = (tokens, counts, own, self.constrained[chosen])
        return Batch(*(torch.from_numpy(part) for part in parts))

    def draft_ids(self, size: int, preferred: NDArray[np.int64] | None = None) -> DraftVocabulary:
        """The `size` most frequent tokens of the training answers, `always` included.

        preferred: taken first among those that never occur.
        """
        if not len(self.always) <= size <= self.vocab_size:
            raise SettingError("draft_vocab", size, f"{len(self.always)} to {self.vocab_size}")
        counts = 2 * np.bincount(self.answer_tokens("training"), minlength=self.vocab_size)
        if preferred is not None:
            counts[preferred] += 1
        counts[self.always] = counts.max() + 1
        ids = np.sort(np.argsort(-counts, kind="stable")[:size])
        return DraftVocabulary(ids, self.covered(ids))

    def covered(self, ids: NDArray[np.int64]) -> float:
        """Share of the held-out answers' tokens that are among these."""
        tokens = self.answer_tokens("held out")
        return float(np.isin(tokens, ids).mean()) if len(tokens) else 0.0


def _packed(ordered: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Groups of at most `max_tokens` tokens, padding included, or of a single answer."""
    groups: list[list[int]] = []
    longest = 0
    for i in ordered.tolist():
        longest = max(longest, int(lengths[i]))
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = int(lengths[i])
        groups[-1].append(i)
    return groups
