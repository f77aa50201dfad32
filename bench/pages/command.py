"""python -m bench pages: writes the pages from the stored results, without measuring anything."""

from collections.abc import Sequence

from bench import pages


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments:
        raise SystemExit("python -m bench pages takes no arguments")
    pages.write()
