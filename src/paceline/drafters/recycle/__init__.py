"""Token Recycling: the target's own candidates for each token, from earlier passes, as a draft tree.

drafter.py  Recycle: learns from every pass, drafts a tree best-first
table.py    the table of successors, with calibrated chances
"""

from paceline.drafters.recycle.drafter import Recycle, RecycleSettings

__all__ = ["Recycle", "RecycleSettings"]
