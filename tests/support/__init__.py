"""Shared by tests of several rooms: doubles, tiny models and heads, servers and clients, recorded cases.

Scripts that a test runs in a process of its own are here too; they say so in their first line.
"""

from pathlib import Path

from hypothesis import settings

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent


def examples(count: int, fewest: int = 2) -> int:
    """Examples of a property: a tenth of them with --hypothesis-profile=quick."""
    return max(count // 10, fewest) if settings.get_current_profile_name() == "quick" else count
