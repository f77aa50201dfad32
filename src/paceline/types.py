"""The records every other module passes around, and the protocols between them.

Read this first, then engine/engine.py, then engine/accept.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import SamplingParams, SpecConfig, warn_renamed
from paceline.errors import PacelineError

if TYPE_CHECKING:  # a command that needs no model starts without torch
    from torch import Tensor

Bits = NDArray[np.uint32]  # [words] token t is allowed if bit t % 32 of word t // 32 is set

ROOT: Final = -1  # the last committed token: parent of a draft's first nodes
TARGET: Final = "target"  # the source of a token that no drafter proposed

Finish = Literal["stop", "length", "cancelled", "error"]


class Cursor(Protocol):
    """The grammar state after one output. Forks are cheap, and advancing one moves nothing else."""

    @property
    def finished(self) -> bool: ...  # no token can follow

    def fill(self, row: Bits) -> bool:
        """Sets the bits of the tokens that may come next. False: any token may, and the row is untouched."""

    def advance(self, token: int) -> bool: ...  # False: not grammar-valid, and nothing moved
    def advance_along(self, tokens: Sequence[int]) -> int:
        """Advances up to the first token that is not grammar-valid, or follows an end; how many it took."""
        for taken, token in enumerate(tokens):
            if self.finished or not self.advance(token):
                return taken
        return len(tokens)

    def forced(self) -> list[int]: ...  # the next tokens, as far as each has no alternative
    def canonical(self) -> list[int]:
        """The canonical tokens of forced text that other tokens could also write."""

    def fork(self) -> "Cursor": ...

    def clone(self) -> "Cursor":
        """A fork for another output: two threads may use the two at the same time."""
        return self.fork()

    def commit(self, token: int) -> bool:
        """As `advance`, for a token that the mask allowed. Quick: the engine's thread calls it."""
        return self.advance(token)

    @property
    def unsettled(self) -> bool:
        """True if `commit` has left something to do, and `finished` is not known until `settle`."""
        return False

    def settle(self) -> None:
        """Before `fill`, which may be slow too: does what `commit` has left to do. `finished` may change."""
        return

    def matcher_copy(self) -> Any:
        """A `constraints.mask_batch.MatcherCopy`: masks are computed together with those of others.

        None: `fill` has to be called.
        """
        return None

    def hints(self) -> "Cursor":
        """A cursor for drafters, which fork it: quick, and may know less of what may follow."""
        return self

    def spelled(self) -> list[int]:
        """The name of `canonical` before 0.2."""
        warn_renamed("Cursor.spelled", "Cursor.canonical")
        return self.canonical()


@dataclass(slots=True)
class Seq:
    """One output being generated. Drafters and controllers may read it; only the engine writes it."""

    id: str
    tokens: list[int]  # prompt and committed output; only ever appended to
    prompt_len: int
    params: SamplingParams = field(default_factory=SamplingParams)
    spec: SpecConfig = field(default_factory=SpecConfig)
    tenant: str = ""  # caches and indexes never cross tenants
    anonymous: bool = False  # strangers share its tenant: whole blocks are cached for it, nothing remembered
    route: str = ""  # what drafters are good for is learned for each route
    client: str = ""  # tenants of one client share its turns: it is admitted as often as another client
    prediction: Sequence[int] = ()  # the output the caller expects
    stopped_by: Callable[[int], bool] | None = None  # called with each new token; True ends the output there
    cursor: Cursor | None = None  # grammar state at the end of `tokens`
    computed: int = 0  # how many tokens the target's cache holds
    priority: int = 0  # higher comes first
    remember: bool = True  # drafters may remember it for the same tenant's later sequences
    prefill: bool = False  # its prompt is read into the cache, and no token is generated
    deadline: float | None = None  # by time.monotonic
    cached: int = 0  # prompt tokens that the target's prefix cache held, so that they were never computed
    cached_on_disk: int = 0  # of them, those that were read from the disk
    preemptions: int = 0  # how often it gave its place back: to a full cache, or to one that generates
    end_tokens: frozenset[int] = frozenset()  # each ends the output; set by the engine
    reader: "HiddenReader | None" = None  # gets the hidden states of its rows as they are computed
    # By the engine's clock: in no pass before, since a draft is on its way. Its prompt is read all the same.
    held_until: Callable[[], float] | None = None

    @property
    def pending(self) -> list[int]:
        """Tokens the target has not computed: one when decoding, many when prefilling."""
        return self.tokens[self.computed :]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def learn(self) -> bool:
        """The name of `remember` before 0.2."""
        warn_renamed("Seq.learn", "Seq.remember")
        return self.remember

    @property
    def shared(self) -> int:
        """The name of `cached` before 0.2."""
        warn_renamed("Seq.shared", "Seq.cached")
        return self.cached


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations: a chain or a tree of tokens.

    Node i proposes tokens[i] right after node parents[i]; parents precede their children.
    A wrong token costs time. A wrong q costs correctness.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None  # None: a chain, node i follows node i - 1
    sources: tuple[str, ...] = ()  # the drafter of each node
    scores: tuple[float, ...] = ()  # P(node | its parent) as claimed; 1: forced by the grammar; () if unknown
    q: "Tensor | None" = None  # [len, vocab]: row i is what tokens[i] was sampled from; None: not sampled
    rejected_sources: tuple[str, ...] = ()  # the drafter of each token the grammar rejected

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
        """The number of nodes from the committed text down to `node`, both ends included."""
        return node + 1 if self.parents is None else len(self.path(node))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`."""
        if self.parents is None:
            return tuple(range(node + 1))
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent(node)
        return tuple(reversed(nodes))

    def paths(self) -> list[tuple[int, ...]]:
        """Every path from the root to a leaf; a chain has one."""
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
        return Draft(self.tokens[:n], parents, self.sources[:n], self.scores[:n], q, self.rejected_sources)

    @property
    def refused(self) -> tuple[str, ...]:
        """The name of `rejected_sources` before 0.2."""
        warn_renamed("Draft.refused", "Draft.rejected_sources")
        return self.rejected_sources


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a draft after `seq.tokens` and `after`, which other drafters have proposed already."""

    seq: Seq
    budget: int  # largest number of nodes, besides those the grammar forces
    after: tuple[int, ...] = ()
    cursor: Cursor | None = None  # the state after `after`; to be forked, not moved
    forced_budget: int = 0  # largest number of nodes that the grammar forces

    @property
    def certain(self) -> int:
        """The name of `forced_budget` before 0.2."""
        warn_renamed("Ask.certain", "Ask.forced_budget")
        return self.forced_budget


@dataclass(slots=True, unsafe_hash=True)  # not frozen: one is made for each sequence and pass
class Verdict:
    """The outcome of verification: the accepted nodes, then one token of the target's own."""

    path: tuple[int, ...]
    token: int
    draft: Draft = NO_DRAFT  # the draft that was verified, for drafters that learn from rejected nodes too


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms under the model's raw distribution, before temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(slots=True)  # not frozen: one is made for each sequence and pass
class Round:
    """One draft and its verdict: all that statistics, traces, the gate and training ever see of a pass."""

    request: str
    start: int  # len(tokens) before
    drafters: tuple[str, ...]  # the names in the request's SpecConfig
    draft: Draft
    path: tuple[int, ...]  # the draft's accepted nodes
    tokens: tuple[int, ...]  # committed; one more than the path unless a stop cut it; () while prefilling
    budget: int  # what the controller allowed
    batch: int  # sequences in the pass
    rows: int  # rows in the pass, all sequences together
    draft_us: int  # of the pass, all sequences together
    target_us: int  # the same
    finish: Finish | None = None
    error: PacelineError | None = None  # why the sequence could not continue, where finish is "error"
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if the request wants them
    drafted: int = 0  # nodes the drafters proposed, before any was cut
    draft_us_by: Mapping[str, int] = field(default_factory=dict)  # the part of draft_us of each drafter
    uncut: Draft = NO_DRAFT  # the draft before the controller cut it
    asked: tuple[str, ...] = ()  # the drafters that were asked, once for each time
    readers: tuple[str, ...] = ()  # the drafters that got its hidden states

    @property
    def sources(self) -> tuple[str, ...]:
        """The drafter of each committed token, or TARGET."""
        accepted = tuple(self.draft.sources[i] for i in self.path)
        return (*accepted, TARGET)[: len(self.tokens)]

    @property
    def guessed(self) -> int:
        """The name of `drafted` before 0.2."""
        warn_renamed("Round.guessed", "Round.drafted")
        return self.drafted


@dataclass(slots=True)  # not frozen: one is made for each sequence and pass
class Sampler:
    """The choice of a sequence's tokens, which a target may make itself where its logits are."""

    inverse_temperature: float  # as float32; 0: greedy
    seed: int  # 64 bits
    choice: int  # which of n outputs of one request
    index: int  # place in the output of the token that follows the feed's last one
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    bias: tuple[tuple[int, float], ...] = ()  # token, what its logit gains; no token twice
    repetition: float = 1.0  # over the text; 1: off
    presence: float = 0.0  # over the output
    frequency: float = 0.0  # over the output
    text: Sequence[int] = ()  # prompt and output so far; read where there are penalties
    prompt_len: int = 0
    # Of the scored rows: None where any token may come, an error where the mask is not known. To be called
    # once the pass is on its way, since masks are computed beside it.
    masks: "Callable[[], Sequence[Bits | Exception | None]] | None" = None

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """True: the choice depends on the text before it."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0

    @property
    def sees_draft(self) -> bool:
        """True: the choice of a row depends on its place in the draft."""
        return self.masks is not None or self.penalises


class Feed(NamedTuple):
    """The part of one sequence in a pass: tokens that follow its cached rows, then its draft."""

    seq_id: str
    tokens: Sequence[int]  # at least one
    draft: Draft = NO_DRAFT
    scored: bool = True  # False: an inner chunk of a prompt, no token is chosen after it
    sampler: Sampler | None = None  # given: the target may choose the tokens of the scored rows


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of a pass. Row starts[i] follows feed i's last token; one row per node of its draft comes next.

    A feed that is not scored has no such rows. Hidden states exist for every row of the pass: those of feed i
    begin at row rows[i], scored or not, first for its tokens, then for the nodes of its draft.
    """

    logits: "Tensor"  # [scored rows, vocab] float32
    starts: tuple[int, ...]
    rows: tuple[int, ...] = ()
    hidden: Mapping[int, "Tensor"] = field(default_factory=dict)  # tapped layer -> [rows, width] float32
    # [scored rows] the target's own choices, -1 where it made none; () if it made none at all. Where it made
    # all of them, the logits are lent: the next pass may overwrite them.
    tokens: Sequence[int] = ()
    running: bool = False  # the pass is still running: reading its tokens or logits waits for it


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states, at the tapped layers, of the rows of a pass that stay in the target's cache."""

    seq: Seq
    start: int  # position of the first row
    states: Mapping[int, "Tensor"]  # layer -> [n, width] float32: its output, residual included
    rows: slice | list[int] | None = None  # the selection among the n; None: all

    @property
    def hidden(self) -> dict[int, "Tensor"]:
        """Layer -> [rows, width]."""
        if self.rows is None:
            return dict(self.states)
        return {layer: states[self.rows] for layer, states in self.states.items()}


class HiddenReader(Protocol):
    """Reads the hidden states of one sequence; the rows come as to `Drafter.on_hidden`."""

    taps: tuple[int, ...]  # target layers

    def on_hidden(self, rows: HiddenRows) -> None: ...


class Drafter(Protocol):
    """Proposes tokens. Subclass it to inherit the no-ops; `draft` is the one method to write."""

    name: str
    taps: tuple[int, ...] = ()  # target layers whose hidden states `on_hidden` receives
    interleaves: bool = False  # in a list, others continue its drafts and it continues theirs
    private: bool = False  # its drafts for one sequence tell nothing of those for another: clients make them
    # Of its weights and settings: saved estimates about it hold while this is the same. "": none are saved.
    fingerprint: str = ""

    def draft(self, asks: Sequence[Ask]) -> list[Draft]: ...  # must not modify the asks

    def begin(self, seq: Seq) -> None:
        """A sequence was admitted; its prompt is known."""
        return

    def prepare(self, seq: Seq) -> None:
        """The target reads the prompt beside the engine: work of the first draft on it costs nothing now.

        Not called for every sequence, and maybe several times for one.
        """
        return

    def idle(self) -> None:
        """The target computes beside the engine: work that was put off costs nothing now.

        Called once in a pass, for targets whose passes run by themselves.
        """
        return

    def ready(self, seq: Seq) -> bool:
        """False where a drafter with taps has not read the last pass: it is not asked then."""
        return True

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Verdicts were committed: seqs[i].tokens already ends with the tokens of verdicts[i]."""
        return

    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        """A pass was committed; not called without taps.

        Each position comes once, in order, chunks of prompts included, rejected nodes excluded. Positions
        that the target found in its prefix cache are never computed, so they never come. Tensors are views
        into the whole pass: copy what must outlive the call.
        """
        return

    def end(self, seq: Seq) -> None:
        """A sequence ended, finished or cancelled."""
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
    hit_tokens: int  # of them, already computed, in memory or on the disk
    disk: "DiskCacheStats | None" = None  # of the disk tier, where there is one


@dataclass(frozen=True, slots=True)
class DiskCacheStats:
    """Pages of the disk tier as they are now, of all models in its folder, and counts since the start."""

    limit_bytes: int
    bytes: int
    pages: int
    hit_tokens: int  # prompt tokens that were read from the disk
    written: int  # pages
    dropped: int  # pages that were not written: the disk is too slow, full or failing
    evicted: int  # pages
    damaged: int  # pages that were found damaged, and not used


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
    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        """Between `open` and the first pass: loads more of the prefix from slower memory, for about so long.

        Gives the tokens found so far, and True if there are more to be loaded.
        """

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


class DraftPolicy(Protocol):
    """Decides whom a list of drafters asks. Subclass it to inherit the defaults: all, and scores believed."""

    def worth_asking(self, drafters: Sequence[str], seq: Seq) -> bool:
        """False where none of them would be asked in this pass. Called once for it, before any is."""
        return True

    def budget(
        self, drafter: str, seq: Seq, nodes: int, reach: float = 1.0, gain: float = 0.0, forced: int = 0
    ) -> int:
        """How many nodes to ask a drafter for, `nodes` at most; 0: its draft would not pay.

        reach: P(what it would continue is accepted). gain: of a draft that its own would replace. forced: so
        many of the nodes may be ones that the grammar forces.
        """
        return nodes

    def value(self, drafter: str, seq: Seq, reach: float = 1.0, gain: float = 0.0) -> float:
        """Tokens that asking it is expected to bring beyond its price; arguments as for `budget`."""
        return reach - gain - 0.2

    def reads(self, drafter: str, seq: Seq) -> bool:
        """True if a drafter with taps gets the hidden states of this pass."""
        return True

    def drafted(self, drafter: str, asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
        """The drafter was asked for these, in one call."""
        return

    def chances(self, seq: Seq, draft: Draft, depth: int = 0) -> list[float]:
        """P(node is accepted) for each node of a draft with scores, its ancestors included.

        depth: nodes before the draft.
        """
        chances: list[float] = []
        for node, score in enumerate(draft.scores):
            parent = draft.parent(node)
            chances.append(score * (1.0 if parent == ROOT else chances[parent]))
        return chances

    def gain(self, seq: Seq, draft: Draft) -> float:
        """Tokens that a draft is expected to add, less the price of verifying them."""
        return sum(max(0.0, chance - 0.05) for chance in self.chances(seq, draft))


class Controller(Protocol):
    """Decides how many tokens to draft and to verify. seqs: those that decode in this pass."""

    def plan(self, seqs: Sequence[Seq], rows: int, waiting: int = 0) -> list[int]:
        """A budget each. rows: those of the pass besides the drafts. waiting: others, with no token yet."""

    def trim(self, seqs: Sequence[Seq], drafts: Sequence[Draft], rows: int) -> list[int]:
        """How many nodes of each draft to verify, now that their scores are known."""
        return [len(draft) for draft in drafts]

    def learn(self, rounds: Sequence[Round]) -> None: ...
    def policy(self, drafters: tuple[str, ...]) -> DraftPolicy | None:
        """By which a list of drafters decides whom to ask; None: it asks all and believes their scores."""
        return None

    def end(self, seq: Seq) -> None:
        """A sequence ended, or was preempted."""
        return

    def forget(self, drafter: str) -> None:
        """The drafter of this name was replaced: drop what was learned about the old one."""
        return


class Sink(Protocol):
    """Receives every round. Must not raise, must not block."""

    def round(self, r: Round) -> None: ...
    def finish(self, seq: Seq, reason: Finish) -> None: ...


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items two sequences share: a binary search over slices, linear in all."""
    if type(a) is not type(b):  # slices of a list and a tuple are never equal
        a, b = tuple(a), tuple(b)
    same, differ = 0, min(len(a), len(b))
    if a[:differ] == b[:differ]:
        return differ
    while differ - same > 1:
        middle = (same + differ) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differ = middle
    return same
