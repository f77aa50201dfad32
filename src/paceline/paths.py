"""The folder of paceline's own files: models, built libraries, trained heads, measurements."""

import os
from pathlib import Path


def home() -> Path:
    """$PACELINE_HOME, or else the user's cache folder."""
    if folder := os.environ.get("PACELINE_HOME"):
        return Path(os.path.expanduser(folder)).absolute()
    try:
        import platformdirs
    except ImportError:  # a bare machine
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(cache) / "paceline"
    return Path(platformdirs.user_cache_dir("paceline", appauthor=False))
