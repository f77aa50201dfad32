"""Later."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    raise SystemExit("not written")
