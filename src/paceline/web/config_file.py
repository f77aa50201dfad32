"""Configuration files (YAML or JSON): strict parsing, every problem at once, reloading on change."""

import json
import logging
import re
import time
from collections.abc import Callable, Hashable
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from paceline.errors import PacelineError, short
from paceline.web.request_body import json_path, unknown_key

log = logging.getLogger("paceline.web")

MAX_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 16
CHECK_EVERY_S: Final = 1.0

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_EXPECTED: Final = {
    "string_type": "a text, in quotes if it reads as something else",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


class ConfigFileError(PacelineError):
    """Lists every problem of a file, so that it can be corrected in one go."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class StrictModel(BaseModel):
    """Part of a file: nothing unknown in it, nothing converted, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def expected(expectation: str) -> PydanticCustomError:
    """For validators to raise: the value has the right type, but is not as expected."""
    return PydanticCustomError("expected", "{what}", {"what": expectation})


def identifier(value: str) -> str:
    """A name that may stand in a metric's label and in a log line."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
        raise expected("1 to 64 letters, digits, '_', '.' or '-'")
    return value


def between(low: float, high: float, value: float) -> float:
    if not low <= value <= high:
        raise expected(f"{low:,} to {high:,}")
    return value


def whole_between(low: int, high: int, value: int) -> int:
    between(low, high, value)
    return value


def read(path: Path, error: type[ConfigFileError]) -> Any:
    """The data of a YAML file, and so of a JSON file."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as problem:
        raise error(f"cannot read {path.name}: {problem.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise error(f"{path.name} is too large: expected at most {MAX_BYTES:,} bytes")
    try:
        return yaml.load(raw.decode("utf-8-sig"), _PlainLoader)
    except UnicodeDecodeError as problem:
        raise error(f"{path.name} is not UTF-8 text: see byte {problem.start}") from None
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: 2024-99-99, a number of 5,000 digits
        raise error(_yaml_problem(problem)) from None


class _PlainLoader(yaml.SafeLoader):
    """Data as it is written: no aliases, which can make gigabytes of a few lines, and no key twice."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            _refuse("anchors (&) and aliases (*) are not allowed: write the value out", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _refuse(f"nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    _refuse(f"the key {short(key.value)} is there twice", key)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse(why: str, where: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=why, problem_mark=where.start_mark)


def _yaml_problem(problem: Exception) -> str:
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark:
        mark = problem.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem.problem).split())}"
    return f"not YAML: {str(problem).splitlines()[0]}"


def checked(model: type[M], data: Any, error: type[ConfigFileError], show_values: bool = True) -> M:
    """Builds `model` from a file's data, or raises `error` with every problem and its path."""
    value, problems = validate(model, data, show_values)
    if value is None:
        raise error(*problems)
    return value


def validate(model: type[M], data: Any, show_values: bool = True) -> tuple[M | None, list[str]]:
    """The model, or None and every problem of the data. One path has one problem."""
    problems: dict[str, str] = {}
    plain = _plain(data, (), problems)
    try:
        value = model.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        details = [_problem(model, detail, show_values) for detail in error.errors(include_url=False)]
        return None, [*problems.values(), *(text for path, text in details if path not in problems)]
    return (None if problems else value), list(problems.values())


def _plain(data: Any, at: tuple[int | str, ...], problems: dict[str, str]) -> Any:
    """The data in JSON's types. Other types are problems, and so are nulls: a value is missing."""
    here = _path(at)
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str):
                problems[here] = (
                    f"{here}: the key {short(key)} is not usable: expected a text; put it in quotes"
                )
        return {k: _plain(v, (*at, k), problems) for k, v in data.items() if isinstance(k, str)}
    if isinstance(data, list):
        return [_plain(value, (*at, i), problems) for i, value in enumerate(data)]
    if data is None:
        problems[here] = f"{here}: empty: give it a value or leave it out"
    elif isinstance(data, date):
        problems[here] = f"{here}: reads as a date: put it in quotes"
        return None
    elif not isinstance(data, str | int | float | bool):
        problems[here] = f"{here}: expected a text, a number, true, false, a list or a mapping"
        return None
    return data


def _problem(model: type[BaseModel], detail: ErrorDetails, show_values: bool) -> tuple[str, str]:
    """The path of a value, and the problem with it."""
    kind, loc = detail["type"], detail["loc"]
    path = _path(loc)
    if kind == "extra_forbidden":
        return path, f"{_path(loc[:-1])}: {unknown_key(model, loc)}"
    if kind == "missing":
        return path, f"{_path(loc[:-1])}: {loc[-1]} is missing"
    expectation = _EXPECTED.get(kind) or _from_context(detail)
    value = f"{short(detail['input'])} is not usable: " if show_values else ""
    return path, f"{path}: {value}expected {expectation}"


def _path(loc: tuple[int | str, ...]) -> str:
    return json_path(loc) or "the file"


def _from_context(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    return str(context.get("what") or context.get("expected") or detail["msg"])


class ReloadingFile(Generic[T]):
    """The value of a file, reloaded when the file changes. A broken file changes nothing but the log."""

    def __init__(
        self, path: Path | str, load: Callable[[Path], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = Path(path)
        self._load = load
        self._clock = clock
        self._lock = Lock()
        self._seen = self._stamp()  # taken before reading: a change meanwhile is seen next time
        self._value = load(self._path)
        self._checked_at = clock()

    def current(self) -> T:
        """Never waits: while one thread reads the file, the others use the old value."""
        if self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._value

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._value = self._load(self._path)
        except ConfigFileError as error:
            log.error("%s is not usable, the old one stays: %s", self._path.name, "; ".join(error.problems))
        else:
            log.info("%s was read again", self._path.name)

    def _stamp(self) -> tuple[int, int, int] | None:
        """Modification time (ns), size and inode; None: there is no file."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
