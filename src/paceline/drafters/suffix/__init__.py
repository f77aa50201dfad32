"""What followed the longest stretch of text like this, in this request and in those before it."""

from paceline.drafters.suffix.drafter import Suffix, SuffixSettings

__all__ = ["Suffix", "SuffixSettings"]
