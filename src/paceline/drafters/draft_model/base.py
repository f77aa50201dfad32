"""The base of drafters that run a model: the model's own copy of each sequence, and its KV cache."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from paceline.drafters.draft_model.vocab_mapping import Retokenizer
from paceline.errors import CacheFull
from paceline.sampling import Floats
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Feed, Seq, Target, common_prefix

FEW_PENDING: Final = 16  # tokens that one round of the target may add


class DraftState(Protocol):
    """A draft in progress."""

    ask: Ask
    draft_seq: Seq  # the sequence in the model's own tokens; ends with the draft so far

    @property
    def full(self) -> bool: ...


S = TypeVar("S", bound=DraftState)


class ModelRunnerDrafter(Drafter, Generic[S]):
    """Extends the drafts of all sequences together: one pass of the model for one step of each.

    Before a draft the model reads at most `prefill_chunk` tokens of prompts (chunked prefill), so that a long
    one holds up no other sequence: it has drafts once it is read.
    """

    name = "model"

    def __init__(self, model: Target, retokenizer: Retokenizer, prefill_chunk: int) -> None:
        self._model = model
        self._retokenizer = retokenizer
        self._chunk = prefill_chunk
        self._draft_seqs: dict[str, Seq] = {}

    @abstractmethod
    def _start(self, ask: Ask, draft_seq: Seq) -> S: ...

    @abstractmethod
    def _extend(self, state: S, row: Floats) -> None:
        """One step further. row: the model's logits after `state.draft_seq`."""

    @abstractmethod
    def _draft(self, state: S) -> Draft: ...

    def begin(self, seq: Seq) -> None:
        tokens = self._retokenizer.retokenize(seq.id, seq.tokens)
        if tokens and len(tokens) < self._model.max_context:  # a longer one gets no drafts
            draft_seq = Seq(seq.id, tokens, len(tokens), tenant=seq.tenant, anonymous=seq.anonymous)
            draft_seq.computed = self._model.open(draft_seq)
            self._draft_seqs[seq.id] = draft_seq

    def end(self, seq: Seq) -> None:
        self._retokenizer.forget(seq.id)
        if self._draft_seqs.pop(seq.id, None) is not None:
            self._model.close(seq.id)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        begun = [state for ask in asks if (state := self._begin_draft(ask)) is not None]
        try:
            states = self._read_prompts(begun)
            active = [state for state in states if not state.full]
            while active:
                rows = self._forward([state.draft_seq for state in active])
                for state, row in zip(active, rows, strict=True):
                    self._extend(state, row)
                active = [state for state in active if not state.full]
        except CacheFull:  # the draft model's cache: the request continues without a draft
            return [NO_DRAFT] * len(asks)
        done = {state.ask.seq.id: self._draft(state) for state in states}
        return [done.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _read_prompts(self, states: Sequence[S]) -> list[S]:
        """Reads as much of the prompts as one draft may; gives the states of those that are read to the end.

        Shortest remainders first. A few pending tokens are no prompt.
        """
        rows, unread = self._chunk, dict[str, int]()
        for state in sorted(states, key=lambda state: len(state.draft_seq.pending)):
            pending = len(state.draft_seq.pending)
            if pending > max(rows, FEW_PENDING):
                unread[state.draft_seq.id] = rows
            if pending > FEW_PENDING:
                rows = max(0, rows - pending)
        reading = [(s.draft_seq, unread[s.draft_seq.id]) for s in states if unread.get(s.draft_seq.id)]
        if reading:
            self._model.forward([Feed(seq.id, seq.pending[:n], scored=False) for seq, n in reading])
        for seq, n in reading:
            seq.computed += n
            self._model.keep(seq.id, seq.computed)
        return [state for state in states if state.draft_seq.id not in unread]

    def _begin_draft(self, ask: Ask) -> S | None:
        draft_seq = self._synced_seq(ask)
        if draft_seq is None:
            return None
        too_long = len(draft_seq.tokens) + ask.budget >= self._model.max_context
        if too_long or max(draft_seq.pending) >= self._model.vocab_size:
            return None
        return self._start(ask, draft_seq)

    def _synced_seq(self, ask: Ask) -> Seq | None:
        """The draft-side sequence, up to date; cache rows that no longer fit are dropped."""
        draft_seq = self._draft_seqs.get(ask.seq.id)
        if draft_seq is None:
            return None
        text = self._retokenizer.retokenize(draft_seq.id, [*ask.seq.tokens, *ask.after])
        same = common_prefix(draft_seq.tokens[: draft_seq.computed], text[:-1])
        if same < draft_seq.computed:
            self._model.keep(draft_seq.id, same)
            draft_seq.computed = same
        draft_seq.tokens[:] = text
        return draft_seq

    def _forward(self, draft_seqs: Sequence[Seq]) -> list[Floats]:
        """Computes all pending tokens; returns the logits after each sequence's last one."""
        scores = self._model.forward([Feed(seq.id, seq.pending) for seq in draft_seqs])
        for seq in draft_seqs:
            seq.computed = len(seq.tokens)
            self._model.keep(seq.id, seq.computed)
        logits: Floats = scores.logits.numpy(force=True)
        return [logits[start] for start in scores.starts]
