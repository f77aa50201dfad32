"""The words every other module speaks, and the protocols between them.

Read this first, then engine/engine.py, then engine/accept.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import SamplingParams, SpecConfig
from paceline.errors import PacelineError

if TYPE_CHECKING:  # a command that needs no model starts without torch
    from torch import Tensor

Bits = NDArray[np.uint32]  # [words] token t is allowed if bit t % 32 of word t // 32 is set

ROOT: Final = -1  # the last committed token: parent of a draft's first nodes
TARGET: Final = "target"  # the source of a token nobody guessed

Finish = Literal["stop", "length", "cancelled", "error"]


class Cursor(Protocol):
    """Where one output stands in its grammar. A fork is cheap, and walking it moves nothing else."""

    @property
    def finished(self) -> bool: ...  # nothing can follow any more

    def fill(self, row: Bits) -> bool:
        """Sets the bits of the tokens that may come next. False: any may, and the row was not written."""

    def advance(self, token: int) -> bool: ...  # False: the grammar cannot take it, and nothing moved
    def forced(self) -> list[int]: ...  # the tokens to come as far as each has no alternative
    def spelled(self) -> list[int]: ...  # one way to write the text to come, where other tokens may write it
    def fork(self) -> "Cursor": ...


@dataclass(slots=True)
class Seq:
    """One output being written. Drafters and controllers may read it; only the engine writes."""

    id: str
    tokens: list[int]  # prompt and committed output; only ever appended to
    prompt_len: int
    params: SamplingParams = field(default_factory=SamplingParams)
    spec: SpecConfig = field(default_factory=SpecConfig)
    tenant: str = ""  # caches and indexes never cross tenants
    prediction: tuple[int, ...] = ()  # what the caller expects the output to be
    stopped_by: Callable[[int], bool] | None = None  # told each new token; True ends the output there
    cursor: Cursor | None = None  # grammar state at the end of `tokens`
    computed: int = 0  # how many tokens the target's cache holds
    priority: int = 0  # higher comes first
    learn: bool = True  # drafters may remember it for the same tenant's later sequences
    deadline: float | None = None  # by time.monotonic
    places: int = 1  # that its request needs, all its outputs together; 0: it came in with an earlier one
    shared: int = 0  # how many of them were found in the cache when the sequence was opened

    @property
    def pending(self) -> list[int]:
        """Tokens the target has not seen: one when decoding, many when prefilling."""
        return self.tokens[self.computed :]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at the tokens to come.

    Node i guesses tokens[i] right after node parents[i]; parents precede their children.
    A wrong token costs time. A wrong q costs correctness.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None  # None: a chain, node i follows node i - 1
    sources: tuple[str, ...] = ()  # who guessed each node
    scores: tuple[float, ...] = ()  # how sure of each node, given its parent; 1: it is certain; () if unknown
    q: "Tensor | None" = None  # [len, vocab]: row i is what tokens[i] was drawn from; None for bare guesses
    refused: tuple[str, ...] = ()  # who made each guess that the grammar of the output cannot take

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def children(self, node: int) -> list[int]:
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        for i in self.children(node):
            if self.tokens[i] == token:
                return i
        return None

    def depth(self, node: int) -> int:
        """How many guesses stand between the committed text and what follows `node`."""
        return node + 1 if self.parents is None else len(self.path(node))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first guess down to `node`."""
        if self.parents is None:
            return tuple(range(node + 1))
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent(node)
        return tuple(reversed(nodes))

    def paths(self) -> list[tuple[int, ...]]:
        """Every way from the first guess to a leaf; a chain has one."""
        if self.parents is None:
            return [tuple(range(len(self.tokens)))] if self.tokens else []
        inner = set(self.parents)
        return [self.path(i) for i in range(len(self.tokens)) if i not in inner]

    def first(self, n: int) -> "Draft":
        """The first n nodes, which are always a draft of their own."""
        if n >= len(self.tokens):
            return self
        parents = None if self.parents is None else self.parents[:n]
        q = None if self.q is None else self.q[:n]
        return Draft(self.tokens[:n], parents, self.sources[:n], self.scores[:n], q, self.refused)


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for guesses after `seq.tokens` and `after`, which other drafters guessed already."""

    seq: Seq
    budget: int  # most nodes wanted, those apart that are certain
    after: tuple[int, ...] = ()
    cursor: Cursor | None = None  # standing after `after`; to be forked, not moved
    certain: int = 0  # most nodes wanted that are certain


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: the nodes it agreed with, then one token of its own."""

    path: tuple[int, ...]
    token: int
    draft: Draft = NO_DRAFT  # what was judged, for drafters that learn from what was refused too


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms under the model's raw distribution, before temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest first


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verdict: all that statistics, traces, the gate and training ever see."""

    request: str
    start: int  # len(tokens) before
    drafters: tuple[str, ...]  # who was to be asked
    draft: Draft
    path: tuple[int, ...]  # the draft's nodes that were kept
    tokens: tuple[int, ...]  # committed; one more than the path unless a stop cut it; () while prefilling
    budget: int  # what the controller allowed
    batch: int  # sequences in the pass
    rows: int  # rows in the pass, all sequences together
    draft_us: int  # of the pass, all sequences together
    target_us: int  # likewise
    finish: Finish | None = None
    error: PacelineError | None = None  # why the sequence could not go on, where finish is "error"
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for
    guessed: int = 0  # nodes that drafters made, before any was cut
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # of draft_us, what each drafter took

    @property
    def sources(self) -> tuple[str, ...]:
        """Who guessed each committed token."""
        guessed = tuple(self.draft.sources[i] for i in self.path)
        return (*guessed, TARGET)[: len(self.tokens)]


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence puts into a pass: tokens that follow its cached rows, then its draft."""

    seq_id: str
    tokens: Sequence[int]  # at least one
    draft: Draft = NO_DRAFT
    scored: bool = True  # False: an inner piece of a prompt, nothing is chosen after it


@dataclass(frozen=True, slots=True)
class Scores:
    """Row starts[i] is what follows feed i's last token, then one row per node of its draft.

    A feed that is not scored has no such rows. Hidden states there are for every row of the pass: from row
    rows[i] on for the tokens of feed i, scored or not, then for the nodes of its draft.
    """

    logits: "Tensor"  # [scored rows, vocab] float32
    starts: tuple[int, ...]
    rows: tuple[int, ...] = ()
    hidden: Mapping[int, "Tensor"] = field(default_factory=dict)  # layer asked for -> [rows, width] float32


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows of a pass that stay in the target's cache, as some of its layers left them."""

    seq: Seq
    start: int  # position of the first row
    states: Mapping[int, "Tensor"]  # layer -> [n, width] float32: its output, after its residual additions
    rows: slice | list[int] | None = None  # which of the n are meant; None: all

    @property
    def hidden(self) -> dict[int, "Tensor"]:
        """Layer -> [rows, width]."""
        if self.rows is None:
            return dict(self.states)
        return {layer: states[self.rows] for layer, states in self.states.items()}


class Drafter(Protocol):
    """Guesses. Subclass it to inherit the no-ops; `draft` is the one method to write."""

    name: str
    taps: tuple[int, ...] = ()  # target layers whose hidden states it wants to read
    interleaves: bool = False  # in a list, others go on after its guesses, and it goes on after theirs

    def draft(self, asks: Sequence[Ask]) -> list[Draft]: ...  # asks stay as they are

    def begin(self, seq: Seq) -> None:
        """A sequence arrived; its prompt is known."""
        return

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Verdicts were committed: seqs[i].tokens already ends with what verdicts[i] says."""
        return

    def read(self, seen: Sequence[HiddenRows]) -> None:
        """A pass was committed; not called without taps.

        Each position is seen once, in order, pieces of prompts included, guesses that were refused not. Those
        that the target found in its cache are never computed, so they are never seen. The tensors are lent:
        they hold on to the whole pass, so copy what is to stay.
        """
        return

    def end(self, seq: Seq) -> None:
        """A sequence left, finished or cancelled."""
        return


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks of the KV cache as they are now, and token counts since the start."""

    blocks: int  # free + cached + live
    free: int
    cached: int  # hold the prefix of a closed sequence and no live one; evicted when room is needed
    live: int
    evicted: int  # blocks
    queried_tokens: int  # prompt tokens looked up in the prefix cache
    hit_tokens: int  # of them, already computed


class Target(Protocol):
    """The model whose text we owe. It owns its KV cache.

    `heads.runner.HeadTarget` adds what trained draft heads need, `LayerSkipTarget` layer skipping.
    """

    vocab_size: int
    max_context: int  # tokens one sequence may hold
    capacity: int  # positions the cache holds: all sequences together, closed ones included
    invariant_rows: int  # rows of one sequence in a pass up to which no row's bits depend on their number
    fingerprint: str  # of the weights and the model's configuration
    bytes_held: int  # weights in memory

    @property
    def cache_stats(self) -> CacheStats: ...
    def describe(self) -> str: ...  # backend, device, threads, type: one line; decides what a pass costs

    def open(self, seq: Seq) -> int: ...  # tokens found in a shared prefix; always leaves one to compute
    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores: ...
    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        """Called after a pass, once for each feed.

        The first `length` rows of the sequence stay, then the rows of the draft's nodes on `path`, moved up
        to follow them; every other row is dropped. A later `keep` may shorten the sequence further.
        """

    def close(self, seq_id: str) -> None: ...
    def forget(self, tenant: str) -> None: ...  # drops the tenant's cached rows that no open sequence holds


class LayerSkipTarget(Target, Protocol):
    """A target that can run a subset of its layers as a draft model (LayerSkip, arXiv 2404.16710)."""

    layers: int
    layer_share: float  # one layer's share of the work for one row of a pass

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        """Runs the tokens of each feed, from position starts[i] on, through these layers in ascending order.

        Their rows are temporary: no full pass reads them and the next one overwrites them. Rows between the
        kept ones and starts[i] come from earlier calls since the last full pass.
        """


class Controller(Protocol):
    """Decides how far to guess. rows: those of the pass besides the guesses."""

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]: ...  # a budget each
    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        """How many nodes of each draft are worth checking, now that it is known how sure they are."""
        return [len(draft) for draft in drafts]

    def learn(self, rounds: Sequence[Round]) -> None: ...
    def forget(self, drafter: str) -> None:
        """Another one has this name from now on: what was learned of the old one says nothing."""
        return


class Sink(Protocol):
    """Hears of every round. Must not raise, must not block."""

    def round(self, r: Round) -> None: ...
    def finish(self, seq: Seq, reason: Finish) -> None: ...
