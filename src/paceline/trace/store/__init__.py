"""The trace store: requests and their rounds in SQLite or PostgreSQL.

store        save, list, export, prune
schema       tables, and records to rows
connect      URLs and engines
migrations   versions of the schema
"""

from paceline.trace.store.connect import default_url
from paceline.trace.store.store import Store

__all__ = ["Store", "default_url"]
