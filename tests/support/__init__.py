"""What tests of several rooms share: doubles, tiny models and heads, servers and clients, recorded cases.

Scripts that a test runs in a process of its own are here too; they say so in their first line.
"""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
