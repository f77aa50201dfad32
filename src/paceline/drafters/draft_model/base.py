"""What drafters that run a model share: the model's own view of each sequence, and its cache."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from paceline.drafters.draft_model.retokenizer import common
from paceline.drafters.draft_model.vocab_mapping import Telling
from paceline.errors import CacheFull
from paceline.sampling import Floats
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Feed, Seq, Target


class Growing(Protocol):
    """A draft being written."""

    ask: Ask
    mirror: Seq  # the model's own view of the sequence, in its own tokens; ends with the draft so far

    @property
    def full(self) -> bool: ...


G = TypeVar("G", bound=Growing)


class RunsModel(Drafter, Generic[G]):
    """Grows the drafts of all sequences together, one pass of the model for one step of each."""

    name = "model"

    def __init__(self, model: Target, telling: Telling, prefill_chunk: int) -> None:
        self._model = model
        self._telling = telling
        self._chunk = prefill_chunk
        self._mirrors: dict[str, Seq] = {}

    @abstractmethod
    def _begun(self, ask: Ask, mirror: Seq) -> G: ...

    @abstractmethod
    def _grow(self, g: G, row: Floats) -> None:
        """One step further: row is what the model says after its mirror."""

    @abstractmethod
    def _finished(self, g: G) -> Draft: ...

    def begin(self, seq: Seq) -> None:
        tokens = self._telling.tell(seq.id, seq.tokens)
        if tokens and len(tokens) < self._model.max_context:  # what does not fit is not drafted for
            mirror = Seq(seq.id, tokens, len(tokens), tenant=seq.tenant)
            mirror.computed = self._model.open(mirror)
            self._mirrors[seq.id] = mirror

    def end(self, seq: Seq) -> None:
        self._telling.forget(seq.id)
        if self._mirrors.pop(seq.id, None) is not None:
            self._model.close(seq.id)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        growing = [g for ask in asks if (g := self._start(ask)) is not None]
        active = [g for g in growing if not g.full]
        while active:
            try:
                rows = self._forward([g.mirror for g in active])
            except CacheFull:  # our cache, not the target's: the request goes on without a guess
                return [NO_DRAFT] * len(asks)
            for g, row in zip(active, rows, strict=True):
                self._grow(g, row)
            active = [g for g in active if not g.full]
        done = {g.ask.seq.id: self._finished(g) for g in growing}
        return [done.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _start(self, ask: Ask) -> G | None:
        mirror = self._mirrored(ask)
        if mirror is None:
            return None
        too_long = len(mirror.tokens) + ask.budget >= self._model.max_context
        if too_long or max(mirror.pending) >= self._model.vocab_size:
            return None
        return self._begun(ask, mirror)

    def _mirrored(self, ask: Ask) -> Seq | None:
        """The sequence as our model sees it, with the rows that are still right."""
        mirror = self._mirrors.get(ask.seq.id)
        if mirror is None:
            return None
        text = self._telling.tell(mirror.id, [*ask.seq.tokens, *ask.after])
        same = common(mirror.tokens[: mirror.computed], text[:-1])
        if same < mirror.computed:
            self._model.keep(mirror.id, same)
            mirror.computed = same
        mirror.tokens[:] = text
        return mirror

    def _forward(self, mirrors: Sequence[Seq]) -> list[Floats]:
        """Feeds all that is pending; the row after each sequence's last token."""
        rows: dict[str, Floats] = {}
        while pending := [m for m in mirrors if m.pending]:
            feeds = [
                Feed(m.id, m.pending[: self._chunk], scored=len(m.pending) <= self._chunk) for m in pending
            ]
            scores = self._model.forward(feeds)
            logits: Floats = scores.logits.numpy(force=True)
            for m, feed, start in zip(pending, feeds, scores.starts, strict=True):
                m.computed += len(feed.tokens)
                self._model.keep(m.id, m.computed)
                if feed.scored:
                    rows[m.id] = logits[start]
        return [rows[m.id] for m in mirrors]
