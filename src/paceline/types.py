"""The words every other module speaks, and the protocols between them.

Imports nothing of ours but the errors. Read this first, then engine/engine.py, then engine/accept.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from torch import Tensor

from paceline.errors import SettingError

ROOT: Final = -1  # the last committed token: parent of a draft's first nodes
TARGET: Final = "target"  # the source of a token nobody guessed

Accept = Literal["match", "residual", "block", "typical"]
ACCEPT_RULES: Final[tuple[Accept, ...]] = ("match", "residual", "block", "typical")
Finish = Literal["stop", "length", "cancelled"]


def _require(ok: bool, setting: str, value: object, expected: str) -> None:
    if not ok:
        raise SettingError(f"{setting}={value!r} is not usable: expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target chooses its tokens. The same values always give the same text."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0  # which of n outputs of one request this is
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report; None reports nothing

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < 1e6, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "more than 0")
        _require(abs(self.presence_penalty) <= 2, "presence_penalty", self.presence_penalty, "-2 to 2")
        _require(abs(self.frequency_penalty) <= 2, "frequency_penalty", self.frequency_penalty, "-2 to 2")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "a whole number of at most 64 bits")
        _require(self.choice >= 0, "choice", self.choice, "0 or more")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "0 to 20")


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How one request speculates."""

    drafters: tuple[str, ...] = ("suffix", "ngram")  # asked in this order; () or ("none",): plain decoding
    max_draft: int = 8  # 0: plain decoding, same code
    tree_width: int = 1  # most guesses for one position; 1 is a chain
    adaptive: bool = True  # let the controller draft less than max_draft, or nothing
    accept: Accept = "match"

    def __post_init__(self) -> None:
        _require(0 <= self.max_draft <= 64, "max_draft", self.max_draft, "0 to 64")
        _require(1 <= self.tree_width <= 16, "tree_width", self.tree_width, "1 to 16")
        _require(self.accept in ACCEPT_RULES, "accept", self.accept, f"one of {', '.join(ACCEPT_RULES)}")
        _require(
            self.accept != "block" or self.tree_width == 1,
            "tree_width",
            self.tree_width,
            "1 with accept='block', which verifies chains only",
        )

    @property
    def lossy(self) -> bool:
        return self.accept == "typical"


class Cursor(Protocol):
    """Where one output stands in its grammar."""

    finished: bool

    def fill(self, mask: Tensor, row: int) -> None: ...  # which tokens may come next
    def advance(self, token: int) -> bool: ...  # False: illegal, and nothing moved
    def rewind(self, n: int) -> None: ...
    def forced(self) -> list[int]: ...  # what the grammar leaves no choice about
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
    scores: tuple[float, ...] = ()  # how sure of each node, given its parent; () if unknown
    q: Tensor | None = None  # [len, vocab]: row i is what tokens[i] was drawn from; None for bare guesses

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def children(self, node: int) -> list[int]:
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        return next((i for i in self.children(node) if self.tokens[i] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first guess down to `node`."""
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
        return Draft(self.tokens[:n], parents, self.sources[:n], self.scores[:n], q)


NO_DRAFT: Final = Draft()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for guesses after `seq.tokens` and `after`, which other drafters guessed already."""

    seq: Seq
    budget: int  # most nodes wanted
    after: tuple[int, ...] = ()
    cursor: Cursor | None = None  # a fork, standing after `after`


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: the nodes it agreed with, then one token of its own."""

    path: tuple[int, ...]
    token: int


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
    draft: Draft
    path: tuple[int, ...]  # the draft's nodes that were kept
    tokens: tuple[int, ...]  # committed; one more than the path unless a stop cut it; () while prefilling
    budget: int  # what the controller allowed
    batch: int  # sequences in the pass
    rows: int  # rows in the pass, all sequences together
    draft_us: int
    target_us: int
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for

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

    A feed that is not scored has no rows.
    """

    logits: Tensor  # [rows, vocab] float32
    starts: tuple[int, ...]
    hidden: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # layer -> [rows, width], for the taps asked for


class Drafter(Protocol):
    """Guesses. Subclass it to inherit the no-ops; `draft` is the one method to write."""

    name: str
    taps: tuple[int, ...] = ()  # target layers whose hidden states it wants to see in observe()

    def draft(self, asks: Sequence[Ask]) -> list[Draft]: ...  # at most ask.budget nodes each; asks untouched

    def begin(self, seq: Seq) -> None:
        """A sequence arrived; its prompt is known."""
        return

    def observe(self, seqs: Sequence[Seq], verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Verdicts were committed: seqs[i].tokens already ends with what verdicts[i] says."""
        return

    def end(self, seq: Seq) -> None:
        """A sequence left, finished or cancelled."""
        return


class Target(Protocol):
    """The model whose text we owe. It owns its cache."""

    vocab_size: int
    max_context: int  # most tokens one sequence may hold
    invariant_rows: int  # rows of one sequence in a pass up to which no row's bits depend on their number

    def open(self, seq: Seq) -> int: ...  # tokens found in a shared prefix; always leaves one to compute
    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores: ...
    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        """Called after a pass, once for each feed.

        The first `length` rows of the sequence stay, then the rows of the draft's nodes on `path`, moved up
        to follow them; every other row is dropped. A later `keep` may shorten the sequence further.
        """

    def close(self, seq_id: str) -> None: ...


class Controller(Protocol):
    """Decides how far to guess."""

    def plan(self, seqs: Sequence[Seq], rows: int) -> list[int]: ...  # a budget each
    def learn(self, rounds: Sequence[Round]) -> None: ...


class Sink(Protocol):
    """Hears of every round. Must not raise, must not block."""

    def round(self, r: Round) -> None: ...
    def finish(self, seq: Seq, reason: Finish) -> None: ...
