"""Values that a shell completes, looked up when asked for. typer offers those that fit what is typed."""

from collections.abc import Iterable


def models() -> list[str]:
    from paceline import hub

    return [model.name for model in hub.installed()]


def drafters(incomplete: str) -> list[str]:
    """Completes the last name of a list: suffix,ngr becomes suffix,ngram."""
    from paceline.drafters import DRAFTERS

    listed, comma, _ = incomplete.rpartition(",")
    names = [name for name in DRAFTERS if name != "none"] if comma else ["auto", *DRAFTERS]
    return [f"{listed}{comma}{name}" for name in names]


def accept_rules() -> Iterable[str]:
    from paceline.config import ACCEPT_RULES

    return ACCEPT_RULES


def dtypes() -> Iterable[str]:
    from paceline.config import DTYPES

    return DTYPES


def tool_formats() -> Iterable[str]:
    from paceline.text.tool_calls.formats import FORMATS

    return FORMATS
