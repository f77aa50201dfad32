"""SuffixDecoding (arXiv 2411.04975): drafts what followed the longest matches of the current context.

Special here: a suffix array instead of a suffix tree, a weighted vote of the best matches instead of counts,
and memories that never cross tenants.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Final

from paceline.config import require_min, warn_renamed
from paceline.drafters.suffix.index import SuffixIndex
from paceline.drafters.suffix.memory import Memory, load, save
from paceline.drafters.suffix.native import new_index
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Seq

MAX_PUT_OFF: Final = 64  # texts


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    remember: bool = True  # finished sequences are used for later ones of their tenant
    max_tokens: int = 1_000_000  # remembered, of all tenants together; the oldest go first
    max_depth: int = 32  # tokens of context that are compared
    min_chance: float = 0.1  # a node less likely than this to be accepted is not drafted
    learn: InitVar[bool | None] = None  # the name of `remember` before 0.2

    def __post_init__(self, learn: bool | None) -> None:
        if learn is not None:
            warn_renamed("learn", "remember", stacklevel=4)
            object.__setattr__(self, "remember", learn)
        require_min(self, max_tokens=1, max_depth=1, min_chance=0)


@dataclass(slots=True)
class _Own:
    """The tokens of a sequence that its tenant's memory did not hold when it began."""

    index: SuffixIndex
    indexed: int  # tokens of the sequence in the index or the memory


class Suffix(Drafter):
    name = "suffix"
    fingerprint = "1"  # raised where its scores change their meaning

    def __init__(self, settings: SuffixSettings | None = None) -> None:
        self.settings = settings or SuffixSettings()
        self._memory = Memory(self.settings.max_tokens, self.settings.max_depth)
        self._own: dict[str, _Own] = {}
        # Tenants and texts still to be remembered, and what was indexed for them: freeing it takes time, too.
        self._ended: deque[tuple[str, Sequence[int], _Own | None]] = deque()
        self._puts_off = False

    @property
    def memory(self) -> Memory:
        """With all texts that have ended."""
        while self._ended:
            self._remember_oldest()
        return self._memory

    def _remember_oldest(self) -> None:
        tenant, tokens, _ = self._ended.popleft()
        self._memory.learn(tenant, tokens)

    def save(self, path: Path, tokenizer: str) -> None:
        """Writes the memory to one file, for this tokenizer's fingerprint only."""
        save(self.memory, path, tokenizer)

    def load(self, path: Path, tokenizer: str) -> None:
        """Replaces the memory by that of a file."""
        self._ended.clear()
        self._memory = load(path, tokenizer, self.settings.max_tokens, self.settings.max_depth)

    def begin(self, seq: Seq) -> None:
        self._own.pop(seq.id, None)

    def prepare(self, seq: Seq) -> None:
        own = self._own.get(seq.id) or self._start(seq)
        new, own.indexed = seq.tokens[own.indexed :], len(seq.tokens)
        own.index.extend(new)

    def end(self, seq: Seq) -> None:
        own = self._own.pop(seq.id, None)
        if self.settings.remember and seq.remember and not seq.anonymous:
            self._ended.append((seq.tenant, seq.tokens, own))
            while len(self._ended) > MAX_PUT_OFF * self._puts_off:
                self._remember_oldest()

    def idle(self) -> None:
        """Remembers one text. Drafts of others do without it until then."""
        self._puts_off = True
        if self._ended:
            self._remember_oldest()

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) if ask.budget > 0 else NO_DRAFT for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        seq = ask.seq
        own, width = self._own.get(seq.id) or self._start(seq), seq.spec.tree_width
        new, own.indexed = seq.tokens[own.indexed :], len(seq.tokens)
        past = self._memory.index(seq.tenant)
        nodes = own.index.draft(new, past, ask.after, ask.budget, width, self.settings.min_chance, ask.cursor)
        if nodes is None:
            return NO_DRAFT
        tokens, parents, chances = nodes
        return Draft(tokens, parents if width > 1 else None, (self.name,) * len(tokens), chances)

    def _start(self, seq: Seq) -> _Own:
        depth = self.settings.max_depth
        while any(tenant == seq.tenant for tenant, _, _ in self._ended):
            self._remember_oldest()
        start = self._memory.known(seq.tenant, seq.tokens)
        index = new_index(depth)
        index.open(seq.tokens[max(0, start - depth) : start])
        own = self._own[seq.id] = _Own(index, start)
        return own
