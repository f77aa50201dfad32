"""Values that a shell completes: models, drafters and other names. Each is looked up when it is asked for."""

from collections.abc import Callable, Iterable


def among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes one of these names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _models() -> list[str]:
    from paceline import hub

    return [model.name for model in hub.installed()]


def _accept_rules() -> Iterable[str]:
    from paceline.config import ACCEPT_RULES

    return ACCEPT_RULES


def _dtypes() -> Iterable[str]:
    from paceline.config import DTYPES

    return DTYPES


def _tool_formats() -> Iterable[str]:
    from paceline.text.tool_calls.formats import FORMATS

    return FORMATS


def drafters(incomplete: str) -> list[str]:
    """Completes the last name of a list: suffix,ngr becomes suffix,ngram."""
    from paceline.drafters import DRAFTERS

    listed, comma, last = incomplete.rpartition(",")
    names = [name for name in DRAFTERS if name != "none"] if comma else ["auto", *DRAFTERS]
    return [f"{listed}{comma}{name}" for name in names if name.startswith(last)]


models = among(_models)
accept_rules = among(_accept_rules)
dtypes = among(_dtypes)
tool_formats = among(_tool_formats)
