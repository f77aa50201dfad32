"""What is known of one output once it has ended."""

from dataclasses import dataclass

from paceline.types import Finish


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One output of a request; a request with n choices has n of them. Times run from the arrival."""

    model: str
    route: str
    endpoint: str  # the path of the URL
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache
    output_tokens: int
    queue_s: float  # until the engine took it up
    first_token_s: float | None  # until its first token; None: there was none
    decode_s: float  # from its first token to its last
    seconds: float  # until the end
    reason: Finish
    lossy: bool = False
    choice: int = 0  # of its prompt
    begun: bool = True  # was in a pass; False: left or failed before

    @property
    def prefill_s(self) -> float | None:
        """From the queue to the first token."""
        return None if self.first_token_s is None else max(0.0, self.first_token_s - self.queue_s)

    @property
    def token_s(self) -> float | None:
        """Seconds per output token after the first; None: there was no second."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return self.decode_s / (self.output_tokens - 1)
