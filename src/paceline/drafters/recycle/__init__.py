"""What the target thought could follow each token, the last time it stood there."""

from paceline.drafters.recycle.drafter import Recycle, RecycleSettings

__all__ = ["Recycle", "RecycleSettings"]
