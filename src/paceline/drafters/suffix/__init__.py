"""SuffixDecoding: the continuation of the longest matching context, in this request and in past ones.

drafter.py  Suffix: matches in the request and in its tenant's memory, then a vote
index.py    ContextIndex: an incremental suffix array over reversed contexts
vote.py     the vote of the best matches
native.py   both in C++ (csrc/suffix.cpp), the same drafts; index.py where nothing compiles
memory.py   Memory: past sequences by tenant, bounded, saved to one file
"""

from paceline.drafters.suffix.drafter import Suffix, SuffixSettings

__all__ = ["Suffix", "SuffixSettings"]
