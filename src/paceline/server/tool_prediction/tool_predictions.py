"""Predicted tool calls for requests: which may be predicted, by whose memory, and what became of them."""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from paceline.log import log_error
from paceline.server.tool_prediction.conversation import Conversation, canonical, read_arguments
from paceline.server.tool_prediction.predictor import (
    Calls,
    Forecast,
    Function,
    PredictedCall,
    ToolCallPredictor,
)
from paceline.server.tool_prediction.predictor_files import PredictorFiles

log = logging.getLogger("paceline.server")

MAX_TENANTS: Final = 64  # whose predictors are in memory, those used last
MAX_PENDING: Final = 64  # requests to predict for or to learn from; further ones get no prediction
MIN_PROBABILITY: Final = 0.22
MAX_CALLS: Final = 4  # predicted for one answer
SAVE_S: Final = 60.0  # between two writes of a tenant's predictor, while the server runs


@dataclass(frozen=True, slots=True)
class PredictionRequest:
    """The part of a chat request that predictions need."""

    messages: Sequence[Mapping[str, Any]]
    tools: Mapping[str, Function]  # whose calls may be predicted, by name
    min_probability: float = MIN_PROBABILITY
    max_calls: int = MAX_CALLS
    name: str | None = None  # of the one tool that the answer must call

    @classmethod
    def of(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any] | None,
        safe_tools: Sequence[str] = (),
        min_probability: float | None = None,
        max_calls: int | None = None,
    ) -> "PredictionRequest":
        function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        safe = {} if tool_choice == "none" else safe_functions(tools, safe_tools)
        return cls(
            messages,
            safe if name is None else {n: tool for n, tool in safe.items() if n == name},
            MIN_PROBABILITY if min_probability is None else min_probability,
            max_calls or MAX_CALLS,
            name,
        )


def safe_functions(tools: Sequence[Mapping[str, Any]], safe_tools: Sequence[str]) -> dict[str, Function]:
    """The offered tools in the list, and those with `annotations.readOnlyHint`, as MCP has it."""
    safe: dict[str, Function] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            hints = (tool.get("annotations"), function.get("annotations"))
            hinted = any(isinstance(hint, Mapping) and hint.get("readOnlyHint") is True for hint in hints)
            if hinted or name in safe_tools:
                safe[name] = function
    return safe


class ToolPredictions:
    """Predictors by tenant. One thread does all their work in the order it comes: an answer is learned from
    before the tenant's next request is predicted for."""

    def __init__(
        self, files: PredictorFiles | None = None, max_tenants: int = MAX_TENANTS, save_s: float = SAVE_S
    ) -> None:
        """files: None: predictors end with the server."""
        self._predictors: OrderedDict[str, ToolCallPredictor] = OrderedDict()
        # Since when it has learned. Weak: one that has left the memory may still learn from its last answers.
        self._unsaved: WeakKeyDictionary[ToolCallPredictor, float] = WeakKeyDictionary()
        self._files, self._save_s = files, save_s
        self._max_tenants = max_tenants
        self._thread = ThreadPoolExecutor(1, "paceline-predict")
        self._pending = 0
        self._closed = False

    async def predict(
        self, request: PredictionRequest, tenant: str | None, remember: bool
    ) -> "ToolPrediction":
        """tenant: None: nobody's memory is used, and none is made."""
        forecast = None
        if tenant is not None and request.tools and self._pending < MAX_PENDING and not self._closed:
            self._pending += 1
            try:
                work = partial(self._predict, request, tenant)
                forecast = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            finally:
                self._pending -= 1
        return ToolPrediction(request, forecast, self if remember else None)

    def close(self, timeout: float) -> None:
        """Saves what was learned; nothing is predicted or learned afterwards."""
        self._closed = True
        saved = self._thread.submit(self._save_all)
        self._thread.shutdown(wait=False)
        wait([saved], timeout)

    def _save_all(self) -> None:
        for tenant in list(self._predictors):
            self._save(tenant, self._predictors[tenant])

    def _save(self, tenant: str, predictor: ToolCallPredictor) -> None:
        if self._files is None or self._unsaved.pop(predictor, None) is None:
            return
        try:
            self._files.write(tenant, predictor)
        except Exception as problem:  # a full disk, say
            log_error(log, "the predictor of a tenant's tool calls could not be saved", problem)

    def _predictor(self, tenant: str) -> ToolCallPredictor:
        known = self._predictors.pop(tenant, None)
        if known is None and self._files is not None:
            known = self._files.read(tenant)
        predictor = self._predictors[tenant] = known or ToolCallPredictor()
        if len(self._predictors) > self._max_tenants:
            self._save(*self._predictors.popitem(last=False))
        return predictor

    def _predict(self, request: PredictionRequest, tenant: str) -> Forecast | None:
        predictor = self._predictor(tenant)
        if monotonic() - self._unsaved.get(predictor, inf) >= self._save_s:
            self._save(tenant, predictor)
        try:
            return predictor.predict(Conversation(request.messages), request.tools)
        except Exception as problem:  # a prediction is never worth a request
            log_error(log, "tool calls could not be predicted", problem)
            return None

    def learn(self, forecast: Forecast, calls: Calls) -> None:
        """Does not wait."""
        if self._pending < MAX_PENDING and not self._closed:
            self._pending += 1
            self._thread.submit(self._learn, forecast, calls)

    def _learn(self, forecast: Forecast, calls: Calls) -> None:
        try:
            forecast.predictor.learn(forecast, calls)
            self._unsaved.setdefault(forecast.predictor, monotonic())
        except Exception as problem:
            log_error(log, "an answer's tool calls could not be learned from", problem)
        finally:
            self._pending -= 1


@dataclass(slots=True)
class ToolPrediction:
    """The predicted calls of one request."""

    request: PredictionRequest
    forecast: Forecast | None
    _learns: ToolPredictions | None
    calls: tuple[PredictedCall, ...] = ()  # before the prompt is read
    _offered: dict[tuple[str, str], PredictedCall] = field(default_factory=dict)  # all of them, as they came

    def __post_init__(self) -> None:
        if self.request.name is not None:
            self.calls = self.given_name(self.request.name)
        elif self.forecast is not None:
            self.calls = self._new(self.forecast.calls(self.request.min_probability, self.request.max_calls))

    def given_name(self, name: str) -> tuple[PredictedCall, ...]:
        """Further calls, once the name of one is written."""
        if self.forecast is None:
            return ()
        request = self.request
        return self._new(self.forecast.given_name(name, request.min_probability, request.max_calls))

    def _new(self, calls: Sequence[PredictedCall]) -> tuple[PredictedCall, ...]:
        keys = {(call.name, canonical(call.arguments)): call for call in calls}
        new = {key: call for key, call in keys.items() if key not in self._offered}
        self._offered |= new
        return tuple(new.values())

    @property
    def field(self) -> dict[str, Any]:
        return predicted_field(tuple(self._offered.values()))

    def settle(self, written: Sequence[tuple[str, str]] | None) -> dict[str, int]:
        """Counts predictions by outcome, and learns. written: names and JSON; None: it did not end."""
        if written is None:
            return {"unknown": len(self._offered)}
        calls = [(name, read_arguments(arguments) or {}) for name, arguments in written]
        if self.forecast is not None and self._learns is not None:
            self._learns.learn(self.forecast, calls)
        made = {(name, canonical(arguments)) for name, arguments in calls}
        right = len(made & self._offered.keys())
        missed = sum(name in self.request.tools for name, _ in made) - right
        return {"right": right, "wrong": len(self._offered) - right, "missed": missed}


def predicted_field(calls: Sequence[PredictedCall]) -> dict[str, Any]:
    """The field of a response or an event, in the shape of OpenAI's tool calls."""
    return {
        "predicted_tool_calls": [
            {
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
                "probability": round(call.probability, 3),
            }
            for call in calls
        ]
    }
