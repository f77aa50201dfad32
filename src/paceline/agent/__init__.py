"""For agents: the client's side of predicted tool calls. Needs neither torch nor the server.

prefetch.py  Prefetch, AsyncPrefetch: run predicted calls of safe tools ahead of time
"""

from paceline.agent.prefetch import AsyncPrefetch, Prefetch, PrefetchStats, read_only_tools

__all__ = ["AsyncPrefetch", "Prefetch", "PrefetchStats", "read_only_tools"]
