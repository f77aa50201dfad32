"""Values and names from outside, as messages quote them."""

from collections.abc import Iterable
from difflib import get_close_matches


def short(value: object, limit: int = 60) -> str:
    """The value's repr, cut to `limit` characters."""
    shown = repr(value[: limit + 1] if isinstance(value, str | bytes | tuple | list) else value)
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def one_line(error: BaseException, limit: int = 160) -> str:
    """An exception's text without line breaks, cut to `limit` characters; it may quote anything."""
    line = " ".join(str(error)[: 4 * limit].split()) or type(error).__name__
    return line if len(line) <= limit else f"{line[:limit]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to a wrong one, as a question; empty if none is near."""
    near = get_close_matches(name[:100], list(known), 1)
    return f"did you mean {near[0]!r}?" if near else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Says that there is no `kind` of this name: a suggestion, then the names there are."""
    known = list(known)
    hint = did_you_mean(name, known)
    return f"unknown {kind} {short(name)}{f'; {hint}' if hint else '.'} Known: {', '.join(known)}"
