"""Self-speculative decoding by layer skipping: some layers of the target draft for it, in its own KV cache.

Draft & Verify (arXiv 2309.08168); LayerSkip (arXiv 2404.16710). It needs no memory of its own: committed rows
are the target's, and rows of the draft lie behind them until the verifying pass overwrites them.
"""

from collections.abc import Sequence
from typing import Final

from paceline.drafters.draft_model.token_drafter import ModelDrafter
from paceline.sampling import Floats
from paceline.types import Ask, Feed, LayerSkipTarget, Seq

MAX_PENDING: Final = 16  # committed tokens that a draft computes; a prompt waits for the full pass


def skip_cost(target: LayerSkipTarget, layers: int) -> float:
    """The cost of a pass through so many layers, as a share of a full one."""
    return 1 - (target.layers - layers) * target.layer_share


class SelfDrafter(ModelDrafter):
    def __init__(self, target: LayerSkipTarget, layers: Sequence[int]) -> None:
        """layers: the ones to run, ascending."""
        cost = skip_cost(target, len(layers))
        super().__init__(target, target.vocab_size, cost=cost, name="self")
        self._target = target
        self.layers = tuple(layers)

    def begin(self, seq: Seq) -> None:
        return

    def end(self, seq: Seq) -> None:
        return

    def _synced_seq(self, ask: Ask) -> Seq | None:
        """Tokens that the target has not computed go through the chosen layers again."""
        seq = ask.seq
        if len(seq.pending) > MAX_PENDING:
            return None
        return Seq(seq.id, [*seq.tokens, *ask.after], seq.prompt_len, computed=seq.computed)

    def _forward(self, draft_seqs: Sequence[Seq]) -> list[Floats]:
        feeds = [Feed(seq.id, seq.pending) for seq in draft_seqs]
        scores = self._target.skip_forward(feeds, [seq.computed for seq in draft_seqs], self.layers)
        for seq in draft_seqs:
            seq.computed = len(seq.tokens)
        logits: Floats = scores.logits.numpy(force=True)
        return [logits[start] for start in scores.starts]
