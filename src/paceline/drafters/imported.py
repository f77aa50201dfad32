"""Drafters of the operator's own, by import path: `mymodule:Echo`, a class or a function without arguments.

Importing runs code, so only what starts a server or loads a model may name a path. Requests name a drafter by
the name it has.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError, one_line, short
from paceline.types import Drafter

_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as labels of metrics may be


def is_import_path(name: str) -> bool:
    return ":" in name


def import_drafter(path: str) -> Drafter:
    """A new drafter, made by the class or function at `module:name`; the working folder is searched first."""
    if not _PATH.fullmatch(path):
        raise UsageError(f"{short(path)} is no import path: expected module:Class, such as mymodule:Echo")
    module, _, attributes = path.partition(":")
    with _working_folder_first():
        try:
            found: Any = import_module(module)
        except Exception as problem:
            raise UsageError(_why_not_imported(path, module, problem)) from problem
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"{path} is not there: {module} has no {attribute!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UsageError(
            f"{path} is {_kind(found)}: expected a class of drafters, or a function that makes one"
        )
    try:
        made = found()
    except Exception as problem:
        raise UsageError(
            f"{path} could not be made: {type(problem).__name__}: {one_line(problem)}; "
            "it is called without arguments"
        ) from problem
    return _checked(path, made)


def _why_not_imported(path: str, module: str, problem: Exception) -> str:
    missing = isinstance(problem, ModuleNotFoundError) and f"{module}.".startswith(f"{problem.name}.")
    if missing:
        return f"{path} cannot be imported: there is no module {module!r} here or in the environment"
    return f"{path} cannot be imported: {type(problem).__name__}: {one_line(problem)}"


def _checked(path: str, made: Any) -> Drafter:
    if Drafter not in type(made).__mro__:
        raise UsageError(f"{path} makes {_kind(made)}: expected a drafter, a subclass of paceline.Drafter")
    if type(made).draft is Drafter.draft:
        raise UsageError(f"{path} has no method `draft`: write it, it is the one that a drafter needs")
    if not isinstance(getattr(made, "name", None), str) or not _NAME.fullmatch(made.name):
        raise UsageError(
            f"{path} has no usable `name`: expected 1 to 64 letters, digits, '_', '.' or '-', "
            "by which requests name it"
        )
    drafter: Drafter = made
    return drafter


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """As `python -m` has it; a console script does not."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
