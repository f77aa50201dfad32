"""Where paceline keeps what it made or fetched: models, built libraries, notes about the machine."""

import os
from pathlib import Path


def home() -> Path:
    """$PACELINE_HOME, else paceline's folder in the user's cache."""
    if given := os.environ.get("PACELINE_HOME"):
        return Path(os.path.expanduser(given)).absolute()
    try:
        import platformdirs
    except ImportError:  # a bare machine
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(cache) / "paceline"
    return Path(platformdirs.user_cache_dir("paceline", appauthor=False))
