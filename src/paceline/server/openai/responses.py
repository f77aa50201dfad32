"""POST /v1/responses, top to bottom: the same shape as chat.py.

A request becomes a chat request; its output becomes items, whole or as a stream of events.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import groupby
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.errors import short
from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.openai.protocol import ChatRequest, Message
from paceline.server.openai.responses_events import Event, Items, TextLogprobs, copied
from paceline.server.openai.responses_protocol import (
    LOGPROBS,
    AllowedTools,
    CallItem,
    FunctionTool,
    Item,
    JsonSchema,
    MessageItem,
    NamedTool,
    ReasoningItem,
    ResponsesRequest,
    TextSettings,
    read_items,
    read_text,
    read_tools,
)
from paceline.server.openai.serving import ReadParams, Serving, newly_predicted, token_logprobs, usage
from paceline.web.api_errors import ApiError
from paceline.web.request_body import off_loop, read_request
from paceline.web.streaming import event

_ERROR_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # by status; else server_error
PREDICTED: Final = "response.predicted_tool_calls"  # an event that OpenAI has not, sent where it is wanted
_SAME: Final = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "cache_salt",
    "safety_identifier",
    "seed",
    "speculative_config",
    "priority",
    "remember",
    "predict_tool_calls",
    "chat_template_kwargs",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)


class ResponsesServing(Serving):
    async def create(self, http: Request) -> Response:
        body, request = await read_request(http, ResponsesRequest, self.max_body)
        chat = await off_loop(http, partial(as_chat, request))
        context = self.admission.admit(http, body, chat, "resp_", id_bytes=24)
        read, builder = partial(self.read_chat, http, context, chat), ResponseBuilder(context, request)
        if request.stream:
            events = self._events(context, read, builder)
            return await self.event_stream(http, context, events, lambda error: event(builder.failed(error)))
        await self.run(http, context, read)
        return JSONResponse(builder.whole(context.outputs[0]))

    async def _events(
        self, context: RequestContext, read: ReadParams, builder: "ResponseBuilder"
    ) -> AsyncGenerator[bytes, None]:
        """The last event holds the usage and says that it is the last: there is no DONE."""
        begun = False
        with self.recorded(context):
            (prepared,) = await self.prepare(context, await read())
            async with aclosing(context.engine.generate(context, prepared)) as deltas:
                async for output, delta in deltas:
                    if not begun:
                        begun = True
                        yield event(builder.created())
                    for part in builder.events(output, delta):
                        yield event(part)
        self.log.finished(context)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The same request to /v1/chat/completions."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    tools = read_tools(request.tools or ())
    chat: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    chat |= {
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
    }
    if LOGPROBS in (request.include or ()):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if tools:
        chat |= {"tools": [_chat_tool(tool) for tool in tools]}
    if request.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(request.tool_choice, tools)
    return ChatRequest(**chat)


def _messages(request: ResponsesRequest) -> list[Message]:
    if not request.input:
        raise ApiError(400, "input is empty: give a text or a list of items", param="input")
    chat: list[Message] = []
    if request.instructions:
        chat.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*chat, {"role": "user", "content": request.input}]
    called: set[str] = set()
    for i, item in enumerate(read_items(request.input)):
        _add(chat, item, f"input[{i}]", called)
    if not chat:
        raise ApiError(400, "input holds nothing but reasoning: give a message", param="input")
    return list(_with_one_system_message(chat))


def _with_one_system_message(chat: list[Message]) -> Iterator[Message]:
    """Joins system messages that follow one another: templates know one, the first."""
    for system, group in groupby(chat, lambda message: message["role"] == "system"):
        messages = list(group)
        if system and len(messages) > 1:
            yield {"role": "system", "content": "\n\n".join(message["content"] for message in messages)}
        else:
            yield from messages


def _add(chat: list[Message], item: Item, where: str, called: set[str]) -> None:
    """Appends an item to the conversation; some belong to the message before them."""
    last = chat[-1] if chat else None
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        text = read_text(item.content, f"{where}.content")
        chat.append({"role": role, "content": text})
    elif isinstance(item, CallItem):
        called.add(item.call_id)
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        if last is not None and last["role"] == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif not isinstance(item, ReasoningItem):
        if item.call_id not in called:
            raise ApiError(
                400,
                f"{where}: no function_call before it has call_id {short(item.call_id)}",
                param=f"{where}.call_id",
            )
        text = read_text(item.output, f"{where}.output")
        chat.append({"role": "tool", "tool_call_id": item.call_id, "content": text})


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    chat = {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
    return chat if tool.annotations is None else chat | {"annotations": tool.annotations}


def _tool_choice(
    choice: str | NamedTool | AllowedTools, tools: Sequence[FunctionTool]
) -> str | dict[str, Any]:
    known = [tool.name for tool in tools]
    if isinstance(choice, AllowedTools):
        return {"type": "allowed_tools", "mode": choice.mode, "tools": choice.tools}
    if isinstance(choice, NamedTool):
        if choice.name not in known:
            raise ApiError(
                400,
                f"tool_choice: {short(choice.name)} is none of the tools: {short(known)}",
                param="tool_choice",
            )
        return {"type": "function", "function": {"name": choice.name}}
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice: 'required' needs tools", param="tool_choice")
    return choice


def _response_format(text: TextSettings | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None:
        return None
    if isinstance(form, JsonSchema):
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return {"type": form.type}


class ResponseBuilder:
    """The response object of one request as it grows, and its numbered events."""

    def __init__(self, context: RequestContext, request: ResponsesRequest) -> None:
        self._context, self._request = context, request
        self._items = Items(context.id)
        self._logprobs = TextLogprobs()
        self._sent = 0  # events

    def created(self) -> Event:
        return self._numbered({"type": "response.created", "response": self._response("in_progress")})

    def events(self, output: RequestOutput, delta: OutputDelta) -> list[Event]:
        events: list[Event] = []
        if self._sent == 1:
            events.append({"type": "response.in_progress", "response": self._response("in_progress")})
        if (prediction := self._context.tool_prediction) is not None:
            events += [{"type": PREDICTED, **field} for field in newly_predicted(prediction, delta)]
        events += self._take(delta)
        if delta.finish is not None:
            closing, response = self._closed(output)
            events += [*closing, {"type": f"response.{response['status']}", "response": response}]
        return [self._numbered(event) for event in events]

    def failed(self, problem: ApiError) -> Event:
        error = {"code": _ERROR_CODES.get(problem.status, "server_error"), "message": problem.message}
        return self._numbered({"type": "response.failed", "response": self._response("failed", error=error)})

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        for delta in output.round_deltas:
            self._take(delta)
        return self._closed(output)[1]

    def _take(self, delta: OutputDelta) -> list[Event]:
        self._logprobs.push(delta)
        events: list[Event] = []
        tokenizer = self._context.engine.llm.tokenizer
        for part in delta.deltas:
            logprobs = token_logprobs(tokenizer, self._logprobs.take(part))
            events += self._items.take(part, tokenizer.tool_format, logprobs)
        return events

    def _numbered(self, event: Event) -> Event:
        self._sent += 1
        return {**event, "sequence_number": self._sent - 1}

    def _closed(self, output: RequestOutput) -> tuple[list[Event], dict[str, Any]]:
        status = "incomplete" if output.finish == "length" else "completed"
        events = self._items.close(status)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        at = int(time.time()) if status == "completed" else None
        used = _usage(usage([output]))
        predicted = self._context.tool_prediction
        known = {} if predicted is None else predicted.field
        return events, self._response(status, incomplete_details=why, completed_at=at, usage=used, **known)

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        response = {
            "id": self._context.id,
            "object": "response",
            "created_at": int(self._context.created),
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._context.model.name,
            "output": [copied(item) for item in self._items.done],
            "usage": None,
        }
        return response | _echo(self._request) | known


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """The request's settings, with the defaults that were taken."""
    choice = request.tool_choice or "auto"
    form = None if request.text is None else request.text.format
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
    tools = [{"strict": None, "parameters": None, "description": None} | tool for tool in request.tools or ()]
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": shown},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _usage(used: dict[str, Any]) -> dict[str, Any]:
    """A chat completion's usage in this API's words."""
    cached = used["prompt_tokens_details"]["cached_tokens"]
    reasoning = used["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": used["total_tokens"],
    }
