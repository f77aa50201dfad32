"""gate.yaml: upstreams, and the routes to them (docs/gate.md). Checked as a whole, reloaded on change."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from paceline.errors import unknown_name
from paceline.gate.judge import Judge
from paceline.gate.policy import Policy
from paceline.gate.promotion import Plan
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
    # Prometheus pages with further figures of it, such as that of a DCGM exporter, besides its own /metrics.
    metrics_urls: tuple[Annotated[str, AfterValidator(_url)], ...] = ()
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
            and all(
                (value := headers.get(name)) is not None and fnmatchcase(value, glob)
                for name, glob in (self.header or {}).items()
            )
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


class JudgeConfig(StrictModel):
    """A judge model that scores both answers of a pair."""

    url: Annotated[str, AfterValidator(_url)]  # an OpenAI-compatible server
    model: str | None = None  # None: the server's only one
    api_key_env: str | None = None  # the variable that holds its key
    share: _Share = 0.1  # of mirrored conversations
    max_per_minute: _Count = 10  # pairs; more are not scored
    timeout_s: _Seconds = 60.0  # of a score

    def judge(self) -> Judge:
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        return Judge(Upstream(name="judge", url=self.url, model=self.model, api_key=key), self.timeout_s)


class MirrorConfig(StrictModel):
    """A share of the route's conversations goes to the candidate too, off the user's path."""

    candidate: str  # an upstream; the baseline itself: an A/A experiment
    experiment: _Name | None = None  # the name of its pairs and its rollout; None: ROUTE-CANDIDATE
    share: _Share = 0.1  # of conversations
    order: Literal["after", "concurrent"] = (
        "after"  # the second leg begins when the first has ended, or with it
    )
    max_concurrent: _Count = 4  # second legs at once
    max_waiting: _Count = 64  # further ones; those beyond are dropped
    shed_above: _Count | None = None  # user requests in flight on the route, above which nothing is mirrored
    timeout_s: _Seconds = 300.0  # of a second leg
    text: bool = False  # pairs hold prompts and answers
    judge: JudgeConfig | None = None


class PromotionConfig(StrictModel):
    """The candidate's share of users, raised stage by stage as the verdict allows."""

    stages: Annotated[tuple[_Share, ...], AfterValidator(lambda stages: _rising(stages))] = (
        0.1,
        0.25,
        0.5,
        1.0,
    )
    min_pairs: _Count = 100  # of a stage, before it may end with a promotion
    check_every_s: _Seconds = 30.0
    automatic: bool = True  # False: `paceline gate status` shows the verdict, and an operator acts
    policy: Policy = Policy()  # margins and error rates of the verdict


def _rising(stages: tuple[float, ...]) -> tuple[float, ...]:
    if not stages or list(stages) != sorted(set(stages)) or stages[0] <= 0:
        raise expected("shares above 0 that rise, such as [0.1, 0.25, 0.5, 1.0]")
    return stages


class Route(StrictModel):
    name: _Name
    match: Match | None = None  # None: takes every request
    upstreams: dict[str, _Weight]  # by name
    fallback: tuple[str, ...] = ()  # upstreams for requests that those above could not answer, in order
    retries: RetryConfig = RetryConfig()
    timeout_s: _Seconds | None = None  # of a whole request
    keys: tuple[str, ...] | None = None  # names of the API keys that may use it; None: all
    limits: RouteLimits = RouteLimits()
    mirror: MirrorConfig | None = None
    promotion: PromotionConfig | None = None

    def takes(self, path: str, headers: Mapping[str, str], model: str, key: Key | None) -> bool:
        return self.match is None or self.match.holds(path, headers, model, key)

    @cached_property
    def account(self) -> Key:
        """The route's own entry in a RateLimiter."""
        return Key(
            name=f"route.{self.name}"[:64], hash=_NO_HASH, limits=KeyLimits(**self.limits.model_dump())
        )

    @property
    def experiment(self) -> str:
        assert self.mirror is not None
        return self.mirror.experiment or f"{self.name}-{self.mirror.candidate}"

    @property
    def is_aa(self) -> bool:
        """The candidate is the baseline: an experiment that calibrates the gate."""
        return self.mirror is not None and set(self.upstreams) == {self.mirror.candidate}


class _File(StrictModel):
    upstreams: tuple[UpstreamConfig, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class GateConfig:
    upstreams: Mapping[str, UpstreamConfig]
    routes: tuple[Route, ...]

    @property
    def plans(self) -> dict[str, Plan]:
        """Of the experiments that may be promoted, by name."""
        return {
            route.experiment: Plan(
                route.experiment,
                route.promotion.stages,
                route.promotion.min_pairs,
                route.promotion.check_every_s,
                route.promotion.automatic,
                route.promotion.policy,
            )
            for route in self.routes
            if route.promotion is not None
        }

    def route(self, path: str, headers: Mapping[str, str], model: str, key: Key | None) -> Route | None:
        """The first that takes the request."""
        return next((route for route in self.routes if route.takes(path, headers, model, key)), None)


def load(path: Path | str, check_environment: bool = True) -> GateConfig:
    """GateConfigError lists every problem of the file. check_environment: keys of upstreams must be set."""
    file, problems = validate(_File, read(Path(path), GateConfigError))
    if file is None:
        raise GateConfigError(*problems)
    problems += [*_upstream_problems(file.upstreams), *_route_problems(file)]
    if check_environment:
        problems += _missing_keys(file)
    if problems:
        raise GateConfigError(*problems)
    return GateConfig({one.name: one for one in file.upstreams}, file.routes)


def _missing_keys(file: _File) -> Iterator[str]:
    named = [(f"upstreams[{i}]", one.api_key_env) for i, one in enumerate(file.upstreams)]
    named += [
        (f"routes[{i}].mirror.judge", route.mirror.judge.api_key_env)
        for i, route in enumerate(file.routes)
        if route.mirror is not None and route.mirror.judge is not None
    ]
    for at, name in named:
        if name is not None and not os.environ.get(name):
            yield f"{at}.api_key_env: the variable {name} is not set: export it first"


def _upstream_problems(upstreams: tuple[UpstreamConfig, ...]) -> Iterator[str]:
    if not upstreams:
        yield "upstreams: empty: name at least one server"
    first: dict[str, int] = {}
    for i, one in enumerate(upstreams):
        if first.setdefault(one.name, i) != i:
            yield f"upstreams[{i}].name: {one.name!r} is the name of upstreams[{first[one.name]}] already"


def _route_problems(file: _File) -> Iterator[str]:
    known = {one.name for one in file.upstreams}
    first: dict[str, int] = {}
    experiments: dict[str, int] = {}
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
        if route.mirror is not None:
            used.append(("mirror.candidate", route.mirror.candidate))
            if experiments.setdefault(route.experiment, i) != i:
                earlier = experiments[route.experiment]
                yield f"{at}.mirror.experiment: {route.experiment!r} is that of routes[{earlier}] already"
        for field, name in used:
            if name not in known:
                yield f"{at}.{field}: {unknown_name('upstream', name, sorted(known))}"
        yield from (f"{at}.{problem}" for problem in _promotion_problems(route))


def _promotion_problems(route: Route) -> Iterator[str]:
    if route.promotion is None:
        return
    if route.mirror is None:
        yield "promotion: expected a mirror too: without pairs there is no verdict"
    elif route.mirror.candidate in route.upstreams:
        yield "promotion: expected a candidate that is none of the route's own upstreams"


class GateFile(ReloadingFile[GateConfig]):
    """The configuration of a file, as it is now."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, load)
