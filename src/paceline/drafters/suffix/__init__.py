"""SuffixDecoding: the continuation of the longest matching context, in this request and in past ones.

drafter.py  Suffix: matches in the request and in its tenant's memory, then a vote
index.py    ContextIndex: an incremental suffix array over reversed contexts
memory.py   Memory: past sequences by tenant, bounded, saved to one file
"""

from paceline.drafters.suffix.drafter import Suffix, SuffixSettings

__all__ = ["Suffix", "SuffixSettings"]
