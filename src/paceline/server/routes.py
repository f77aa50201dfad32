"""Routes: speculation, limits and priority by request, from a YAML file (docs/routes.md)."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import log2
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, AliasChoices, Field

from paceline.config import Accept, SpecConfig
from paceline.errors import SettingError
from paceline.web.config_file import (
    ConfigFileError,
    ReloadingFile,
    StrictModel,
    between,
    expected,
    identifier,
    read,
    validate,
    whole_between,
)
from paceline.web.request_body import log_renamed

DEFAULT_NAME: Final = "default"
PromptClass = Literal["code", "json", "chat", "tools"]

MAX_PROMPT_CHARS: Final = 20_000  # classified, from the end
_FENCE: Final = re.compile(r"^[ \t]*(?:```|~~~)", re.M)
_CODE_LINE: Final = re.compile(
    r"\s*(?:(?:async )?def \w|class \w|(?:from \S+ )?import \w|#include|func(?:tion)? \w|fn \w|return\b"
    r"|(?:const|let|var) \w|(?:if|for|while)\b.*[:{]$|(?:public|private|static) \w|[@}])"
    r"|.*[;{]$"
)
_CODE_LINES: Final = 3
_CODE_SHARE: Final = 0.25


class RouteError(ConfigFileError):
    """The routes file cannot be used."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The features of a request that routes match."""

    path: str = ""
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tools: frozenset[str] = frozenset()  # names
    prompt: PromptClass = "chat"

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", {name.lower(): value for name, value in self.headers.items()})
        object.__setattr__(self, "tools", frozenset(self.tools))

    @classmethod
    def of_body(cls, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> "RouteRequest":
        """From a body of chat completions, completions or responses, checked or not."""
        prompt = body.get("messages", body.get("prompt", body.get("input")))
        tools = body.get("tools")
        offered = tools if isinstance(tools, list) else []
        answer = body.get("text")  # /v1/responses has the format here
        format_ = answer.get("format") if isinstance(answer, Mapping) else body.get("response_format")
        model = body.get("model")
        return cls(
            path=path,
            model=model if isinstance(model, str) else "",
            headers=headers,
            tools=frozenset(_tool_names(offered)),
            prompt=prompt_class(prompt if isinstance(prompt, str | list) else "", offered, format_),
        )


def _tool_names(tools: Sequence[Any]) -> Iterator[str]:
    for tool in tools:
        if isinstance(tool, Mapping):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
            if isinstance(name, str):
                yield name


def _some(value: Any) -> Any:
    if not value:
        raise expected("at least one entry")
    return value


def _lower_names(header: dict[str, str]) -> dict[str, str]:
    lowered = {name.lower(): glob for name, glob in header.items()}
    if len(lowered) < len(header):
        raise expected("every header once: upper and lower case are the same")
    return lowered


def _fits(setting: str, value: Any) -> Any:
    """The bounds are those of SpecConfig."""
    try:
        SpecConfig(**{setting: value})
    except SettingError as error:
        raise expected(error.expected) from None
    return value


_Tokens = Annotated[int, AfterValidator(partial(whole_between, 1, 10_000_000))]
# Settings with a second name: vLLM's, that of SpeculativeConfig before 0.2, and `learn` before 0.2.
_MaxDraft = Annotated[
    Annotated[int, AfterValidator(partial(_fits, "max_draft"))] | None,
    Field(validation_alias=AliasChoices("max_draft", "num_speculative_tokens")),
]
_Threshold = Annotated[
    Annotated[float, AfterValidator(partial(between, 0, 1))] | None,
    Field(validation_alias=AliasChoices("threshold", "acceptance_threshold")),
]
_Remember = Annotated[bool | None, Field(validation_alias=AliasChoices("remember", "learn"))]


class Match(StrictModel):
    """Conditions of a route; all that are set must hold."""

    path: str | None = None  # glob
    model: str | None = None  # glob
    # Names in lower case, with a glob for the value.
    header: Annotated[dict[str, str], AfterValidator(_some), AfterValidator(_lower_names)] | None = None
    tools: Annotated[tuple[str, ...], AfterValidator(_some)] | None = None  # any of these is offered
    prompt: PromptClass | None = None

    def holds(self, request: RouteRequest) -> bool:
        return (
            (self.path is None or fnmatchcase(request.path, self.path))
            and (self.model is None or fnmatchcase(request.model, self.model))
            and (self.prompt is None or request.prompt == self.prompt)
            and (self.tools is None or not request.tools.isdisjoint(self.tools))
            and all(self._header_holds(request, name) for name in self.header or ())
        )

    def _header_holds(self, request: RouteRequest, name: str) -> bool:
        value = request.headers.get(name)
        return value is not None and self.header is not None and fnmatchcase(value, self.header[name])


def _not_empty(match: Match) -> Match:
    if not match.model_fields_set:
        raise expected("at least one condition; for a route that takes everything leave match out")
    return match


_Rate = Annotated[float, AfterValidator(partial(between, 1, 65))]
_Speedup = Annotated[float, AfterValidator(partial(between, 0.01, 65))]
_AtOnce = Annotated[int, AfterValidator(partial(whole_between, 1, 4096))]


class PredictedLoad(StrictModel):
    """What `paceline advise` expects of a route with so many outputs at once."""

    tokens_per_pass: _Rate
    speedup: _Speedup
    concurrency: _AtOnce


class Predicted(StrictModel):
    """What it expects for the planned load; metrics and the log compare it, or that of a nearer load."""

    tokens_per_pass: _Rate
    speedup: _Speedup
    concurrency: _AtOnce | None = None  # None: not told, compared whatever the load
    loads: tuple[PredictedLoad, ...] = ()  # other loads

    def at(self, batch: float) -> "Predicted | PredictedLoad":
        """The one for the load nearest to so many outputs in a pass, by ratio."""
        every: tuple[Predicted | PredictedLoad, ...] = (self, *self.loads)
        known = [one for one in every if one.concurrency]
        return min(known, key=lambda one: abs(log2(max(1.0, batch) / (one.concurrency or 1))), default=self)


def _of_a_load(predicted: Predicted) -> Predicted:
    if predicted.loads and predicted.concurrency is None:
        raise expected("`concurrency` beside `loads`: the outputs at once that tokens_per_pass is for")
    return predicted


class Route(StrictModel):
    """The settings of a route. None: the server's own value holds."""

    name: Annotated[str, AfterValidator(identifier)]
    match: Annotated[Match, AfterValidator(_not_empty)] | None = None  # None: takes every request

    enabled: bool = True  # False: plain decoding
    drafters: tuple[str, ...] | None = None
    max_draft: _MaxDraft = None
    tree_width: Annotated[int, AfterValidator(partial(_fits, "tree_width"))] | None = None
    adaptive: bool | None = None
    accept: Accept | None = None
    threshold: _Threshold = None

    max_tokens: _Tokens | None = None
    max_prompt_tokens: _Tokens | None = None
    timeout_s: Annotated[float, AfterValidator(partial(between, 0.001, 86_400))] | None = None
    priority: Annotated[int, AfterValidator(partial(whole_between, -1000, 1000))] = 0  # higher first
    remember: _Remember = None  # whether drafters may remember these requests, or be trained on them
    trace_text: bool | None = None  # whether traces hold their prompts and texts
    warm: str | None = None  # a file with the beginning of these requests, read when the server starts
    predicted: Annotated[Predicted, AfterValidator(_of_a_load)] | None = None

    def takes(self, request: RouteRequest) -> bool:
        return self.match is None or self.match.holds(request)

    def spec(self, base: SpecConfig, loaded: Collection[str] | None = None) -> SpecConfig:
        """`base` with the settings of this route. loaded: the drafters of a model; others are left out."""
        accept = self.accept or base.accept
        width = base.tree_width if self.tree_width is None else self.tree_width
        drafters = base.drafters if self.drafters is None else self.drafters
        if loaded is not None:
            drafters = tuple(name for name in drafters if name in loaded)
        max_draft = base.max_draft if self.max_draft is None else self.max_draft
        return SpecConfig(
            drafters=drafters if self.enabled else (),
            max_draft=max_draft if self.enabled else 0,
            tree_width=1 if accept == "block" else width,  # for chains, wherever the width is from
            adaptive=base.adaptive if self.adaptive is None else self.adaptive,
            accept=accept,
            threshold=base.threshold if self.threshold is None else self.threshold,
        )


class _File(StrictModel):
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """In the order they are tried. The last one takes everything."""

    routes: tuple[Route, ...] = (Route(name=DEFAULT_NAME),)

    def find(self, request: RouteRequest) -> Route:
        return next(route for route in self.routes if route.takes(request))


def load(
    path: Path | str,
    known_drafters: Collection[str] | None = None,
    imported: Mapping[str, str] | None = None,
) -> Routes:
    """Reads a routes file; RouteError lists every problem of it.

    imported: names of drafters by import path, which the file may have too.
    """
    data = read(Path(path), RouteError)
    file, problems = validate(_File, data)
    listed = data.get("routes") if isinstance(data, Mapping) else None
    indexed = enumerate(listed if isinstance(listed, list) else ())
    raw = {i: route for i, route in indexed if isinstance(route, Mapping)}
    for route in raw.values():
        log_renamed(route)
    names = imported or {}
    known = None if known_drafters is None else {*known_drafters, *names}
    problems += [*_order_problems(raw), *_drafter_problems(raw, known)]
    if file is None or problems:
        raise RouteError(*problems)
    routes = tuple(_with_names(route, names) for route in file.routes)
    ends = routes and routes[-1].match is None
    return Routes(routes if ends else (*routes, Route(name=DEFAULT_NAME)))


def import_paths(path: Path | str) -> list[str]:
    """Those among the drafters of a routes file, whatever else is wrong with it."""
    data = read(Path(path), RouteError)
    listed = data.get("routes") if isinstance(data, Mapping) else None
    routes = [route for route in (listed if isinstance(listed, list) else ()) if isinstance(route, Mapping)]
    lists = [drafters for route in routes if isinstance(drafters := route.get("drafters"), list)]
    return [name for names in lists for name in names if isinstance(name, str) and ":" in name]


def _with_names(route: Route, names: Mapping[str, str]) -> Route:
    """names: by import path."""
    if route.drafters is None or not names:
        return route
    return route.model_copy(update={"drafters": tuple(names.get(one, one) for one in route.drafters)})


def _order_problems(routes: Mapping[int, Mapping[Any, Any]]) -> Iterator[str]:
    """The problems of routes, by their index in the file: a route may have other problems as well."""
    first: dict[str, int] = {}
    for i, route in routes.items():
        path, name, matches = f"routes[{i}]", route.get("name"), "match" in route
        if isinstance(name, str) and first.setdefault(name, i) != i:
            yield f"{path}.name: {name!r} is the name of routes[{first[name]}] already"
        if not matches and i < max(routes):
            yield f"{path}: has no match and so takes every request: expected it to be the last route"
        if matches and name == DEFAULT_NAME:
            yield f"{path}.name: {DEFAULT_NAME!r} is the route of what no other takes: expected another name"
        width = route.get("tree_width")
        if route.get("accept") == "block" and isinstance(width, int) and 1 < width <= 16:
            yield f"{path}.tree_width: {width} is not usable: expected 1, as accept is 'block'"


def _drafter_problems(
    routes: Mapping[int, Mapping[Any, Any]], known: Collection[str] | None
) -> Iterator[str]:
    if known is None:
        return
    for i, route in routes.items():
        drafters = route.get("drafters")
        for j, name in enumerate(drafters if isinstance(drafters, list) else ()):
            if isinstance(name, str) and name not in known:
                from paceline.loading import not_loaded  # takes seconds: `routes check` starts without it

                yield f"routes[{i}].drafters[{j}]: {not_loaded(name, known)}"


class RouteFile(ReloadingFile[Routes]):
    """The routes of a file, as it is now."""

    def __init__(
        self,
        path: Path | str,
        known_drafters: Collection[str] | None = None,
        imported: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, partial(load, known_drafters=known_drafters, imported=imported))


def prompt_class(
    messages_or_text: str | Sequence[Any], tools: Sequence[Any] | None = None, response_format: Any = None
) -> PromptClass:
    """The kind of text that a request is after: the first of these that holds.

    tools: the request offers any.
    json: `response_format` asks for it (`json_object` or `json_schema`).
    code: the end of the prompt, or of the user's last message, has a fenced block, or at least three lines
        that look like code and make up a quarter of it.
    chat: everything else.
    """
    if tools:
        return "tools"
    if isinstance(response_format, Mapping) and response_format.get("type") in ("json_object", "json_schema"):
        return "json"
    text = messages_or_text if isinstance(messages_or_text, str) else _last_user_text(messages_or_text)
    return "code" if _like_code(text[-MAX_PROMPT_CHARS:]) else "chat"


def _like_code(text: str) -> bool:
    if _FENCE.search(text):
        return True
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    code = sum(_CODE_LINE.match(line) is not None for line in lines)
    return code >= max(_CODE_LINES, _CODE_SHARE * len(lines))


def _last_user_text(messages: Sequence[Any]) -> str:
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: Any) -> str:
    """A message's text, also where it comes in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))
