"""Requests and their rounds in SQLite or PostgreSQL."""

from paceline.trace.store.connect import default_url
from paceline.trace.store.store import Store

__all__ = ["Store", "default_url"]
