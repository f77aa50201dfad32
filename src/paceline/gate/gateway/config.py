"""gate.yaml: upstreams, and the routes to them (docs/gate.md). Checked as a whole, reloaded on change."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from paceline.errors import unknown_name
from paceline.gate.upstream import Upstream
from paceline.web.api_keys import Key, KeyLimits
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

_NO_HASH: Final = "0" * 64  # of no key

_Name = Annotated[str, AfterValidator(identifier)]
_Seconds = Annotated[float, AfterValidator(partial(between, 0.001, 86_400))]
_Share = Annotated[float, AfterValidator(partial(between, 0, 1))]
_Weight = Annotated[float, AfterValidator(partial(between, 0, 1_000_000))]
_Count = Annotated[int, AfterValidator(partial(whole_between, 1, 1_000_000))]
_Limit = Annotated[int, AfterValidator(partial(whole_between, 1, 1_000_000_000))]


class GateConfigError(ConfigFileError):
    """The gate's configuration cannot be used."""


def _url(value: str) -> str:
    if not value.startswith(("http://", "https://")) or value.rstrip("/").endswith(":"):
        raise expected("http://host:port, with or without /v1")
    return value


class BreakerConfig(StrictModel):
    """Of a circuit breaker."""

    failures: _Count = 5  # in a row, to open it
    open_s: _Seconds = 10.0  # until one request may try again


class UpstreamConfig(StrictModel):
    name: _Name
    url: Annotated[str, AfterValidator(_url)]
    api_key_env: str | None = None  # the variable that holds its key; None: the client's own is passed on
    model: str | None = None  # its name there; None: as the client wrote it
    extra_body: dict[str, Any] = Field(default_factory=dict)  # fields of every request to it
    # The name of the client's API key goes into `vllm_xargs.tenant`, which paceline's proposer in vLLM reads.
    send_tenant: bool = False
    connect_timeout_s: _Seconds = 5.0
    first_byte_timeout_s: _Seconds = 120.0  # until the answer begins
    idle_timeout_s: _Seconds = 60.0  # between two parts of an answer
    max_concurrent: _Count | None = None  # requests at once; more go to others
    breaker: BreakerConfig = BreakerConfig()

    def upstream(self) -> Upstream:
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        return Upstream(
            name=self.name,
            url=self.url,
            api_key=key,
            model=self.model,
            extra_body=self.extra_body,
            send_tenant=self.send_tenant,
        )


class Match(StrictModel):
    """Conditions of a route; all that are set must hold."""

    model: str | None = None  # glob
    path: str | None = None  # glob
    header: dict[str, str] | None = None  # name: glob
    key: tuple[str, ...] | None = None  # names of API keys

    def holds(self, path: str, headers: Mapping[str, str], model: str, key: Key | None) -> bool:
        return (
            (self.model is None or fnmatchcase(model, self.model))
            and (self.path is None or fnmatchcase(path, self.path))
            and (self.key is None or (key is not None and key.name in self.key))
            and all(fnmatchcase(headers.get(name, ""), glob) for name, glob in (self.header or {}).items())
        )


class RetryConfig(StrictModel):
    """Further attempts, on any upstream, before the first byte of an answer."""

    max_attempts: Annotated[int, AfterValidator(partial(whole_between, 1, 10))] = 3
    budget: _Share = 0.2  # retries per request, over time
    min_per_s: Annotated[float, AfterValidator(partial(between, 0, 1000))] = 1.0  # besides the budget
    backoff_s: Annotated[float, AfterValidator(partial(between, 0, 60))] = 0.05  # doubled for each attempt


class RouteLimits(StrictModel):
    """Limits of a route, all its clients together. None: no limit."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent: _Limit | None = None


class Route(StrictModel):
    name: _Name
    match: Match | None = None  # None: takes every request
    upstreams: dict[str, _Weight]  # by name
    fallback: tuple[str, ...] = ()  # upstreams for requests that those above could not answer, in order
    retries: RetryConfig = RetryConfig()
    timeout_s: _Seconds | None = None  # of a whole request
    keys: tuple[str, ...] | None = None  # names of the API keys that may use it; None: all
    limits: RouteLimits = RouteLimits()

    def takes(self, path: str, headers: Mapping[str, str], model: str, key: Key | None) -> bool:
        return self.match is None or self.match.holds(path, headers, model, key)

    @property
    def account(self) -> Key:
        """The route's own entry in a RateLimiter."""
        return Key(
            name=f"route.{self.name}"[:64], hash=_NO_HASH, limits=KeyLimits(**self.limits.model_dump())
        )


class _File(StrictModel):
    upstreams: tuple[UpstreamConfig, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class GateConfig:
    upstreams: Mapping[str, UpstreamConfig]
    routes: tuple[Route, ...]

    def route(self, path: str, headers: Mapping[str, str], model: str, key: Key | None) -> Route | None:
        """The first that takes the request."""
        return next((route for route in self.routes if route.takes(path, headers, model, key)), None)


def load(path: Path | str) -> GateConfig:
    """GateConfigError lists every problem of the file."""
    file, problems = validate(_File, read(Path(path), GateConfigError))
    if file is None:
        raise GateConfigError(*problems)
    problems += [*_upstream_problems(file.upstreams), *_route_problems(file)]
    if problems:
        raise GateConfigError(*problems)
    return GateConfig({one.name: one for one in file.upstreams}, file.routes)


def _upstream_problems(upstreams: tuple[UpstreamConfig, ...]) -> Iterator[str]:
    if not upstreams:
        yield "upstreams: empty: name at least one server"
    first: dict[str, int] = {}
    for i, one in enumerate(upstreams):
        if first.setdefault(one.name, i) != i:
            yield f"upstreams[{i}].name: {one.name!r} is the name of upstreams[{first[one.name]}] already"
        if one.api_key_env is not None and not os.environ.get(one.api_key_env):
            yield f"upstreams[{i}].api_key_env: the variable {one.api_key_env} is not set: export it first"


def _route_problems(file: _File) -> Iterator[str]:
    known = {one.name for one in file.upstreams}
    first: dict[str, int] = {}
    if not file.routes:
        yield "routes: empty: expected at least one route"
    for i, route in enumerate(file.routes):
        at = f"routes[{i}]"
        if first.setdefault(route.name, i) != i:
            yield f"{at}.name: {route.name!r} is the name of routes[{first[route.name]}] already"
        if route.match is None and i < len(file.routes) - 1:
            yield f"{at}: has no match and so takes every request: expected it to be the last route"
        if not any(route.upstreams.values()):
            yield f"{at}.upstreams: expected at least one with a weight above 0"
        used = [
            *(("upstreams", name) for name in route.upstreams),
            *(("fallback", n) for n in route.fallback),
        ]
        for field, name in used:
            if name not in known:
                yield f"{at}.{field}: {unknown_name('upstream', name, sorted(known))}"


class GateFile(ReloadingFile[GateConfig]):
    """The configuration of a file, as it is now."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, load)
