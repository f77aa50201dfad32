"""The target guesses for itself with some of its layers, in its own cache.

It needs no memory: committed rows are the target's, and rows of guesses lie behind them until the verifying
pass writes over them.
"""

from collections.abc import Sequence
from typing import Final

from paceline.drafters.draft_model.token_drafter import ModelDrafter
from paceline.sampling import Floats
from paceline.types import Ask, Feed, LayerSkipTarget, Seq

MOST_UNREAD: Final = 16  # committed tokens; a prompt is read once, by the pass that is about to come


def sketch_cost(target: LayerSkipTarget, layers: int) -> float:
    """Of a pass through so many layers, as a share of a whole one."""
    return 1 - (target.layers - layers) * target.layer_share


class SelfDrafter(ModelDrafter):
    def __init__(self, target: LayerSkipTarget, layers: Sequence[int]) -> None:
        """layers: those to run, ascending."""
        cost = sketch_cost(target, len(layers))
        super().__init__(target, target.vocab_size, cost=cost, name="self")
        self._target = target
        self.layers = tuple(layers)

    def begin(self, seq: Seq) -> None:
        return

    def end(self, seq: Seq) -> None:
        return

    def _mirrored(self, ask: Ask) -> Seq | None:
        """All that the target has not read is sketched anew."""
        seq = ask.seq
        if len(seq.pending) > MOST_UNREAD:
            return None
        return Seq(seq.id, [*seq.tokens, *ask.after], seq.prompt_len, computed=seq.computed)

    def _forward(self, mirrors: Sequence[Seq]) -> list[Floats]:
        feeds = [Feed(m.id, m.pending) for m in mirrors]
        scores = self._target.skip_forward(feeds, [m.computed for m in mirrors], self.layers)
        for m in mirrors:
            m.computed = len(m.tokens)
        logits: Floats = scores.logits.numpy(force=True)
        return [logits[start] for start in scores.starts]
