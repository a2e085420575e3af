"""The endpoint of a rank: POST /v1/chat/completions and GET /v1/models on the loopback interface.

Requests and responses are those that the openai package sends and reads. Each rollout has an API key of its own, which
names it and expires with it. The server runs in a thread. Until the key expires, only this thread uses the rollout.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, PositiveInt, ValidationError

from megatron_brorl.environments.calls import Call as ToolCall
from megatron_brorl.environments.calls import find_calls
from megatron_brorl.environments.interface import Format
from megatron_brorl.errors import UserError, warn
from megatron_brorl.rollout.agents.sequences import Call, Message, Sequences, canonical
from megatron_brorl.rollout.engine import Sampling
from megatron_brorl.rollout.turns import in_thought

MODEL = "policy"
_NO_RETRY = {"x-should-retry": "false"}
_warn_once = functools.cache(warn)
# Fields that do not change the distribution of the tokens.
_IGNORED = {"model", "user", "seed", "store", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier"}
_IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "verbosity"}
_Zero = Annotated[float, Field(ge=0, le=0)]
_Text = Annotated[str, Field(min_length=1)]


class BadRequest(Exception):
    """A request that is refused with status 400. The openai package does not repeat it."""

    def __init__(self, message: str, field: str = "", code: str = "unsupported") -> None:
        super().__init__(message)
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": code}}


def _canonical(messages: list[Any]) -> list[Message]:
    try:
        messages = [canonical(message) for message in messages]
    except (TypeError, AttributeError) as e:
        raise ValueError(e) from None
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("the last one must be of another role than assistant")
    return messages


class ChatRequest(BaseModel, extra="forbid", strict=True):
    """The fields of a request that are supported, with the values that are supported."""

    messages: Annotated[list[Any], AfterValidator(_canonical)]
    tools: list[Annotated[dict[Literal["type", "function"], Any], Field(min_length=2)]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    stop: _Text | list[_Text] = []
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    logprobs: bool = False
    temperature: float | None = None  # The values of the run are used.
    top_p: float | None = None
    n: Literal[1] = 1
    frequency_penalty: _Zero = 0
    presence_penalty: _Zero = 0
    top_logprobs: _Zero = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    response_format: dict[Literal["type"], Literal["text"]] = {}


def read_request(body: Any) -> ChatRequest:
    """Return the request in a JSON body. Raises BadRequest that names the first field that is not supported."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    try:
        fields = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        return ChatRequest(**fields)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        field = str(first["loc"][0])
        raise BadRequest(f"{field}: {first['msg']}", field) from None


def read_reply(text: str, call: Call, format: Format, in_thought: bool) -> Message:
    """Return the message of the assistant in a completion.

    The text before the first tool call is its content. A text with a malformed call is content as a whole.
    """
    tool_calls = find_calls(text, format, in_thought) if call.tools else []
    if not tool_calls or any(tool_call.error for tool_call in tool_calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": tool_call.name, "arguments": _arguments(tool_call, call.tools)} for tool_call in tool_calls]
    calls = [{"id": f"call_{call.key:016x}_{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return {"role": "assistant", "content": text[: tool_calls[0].begin].strip(), "tool_calls": calls}


def _arguments(call: ToolCall, tools: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call. Texts are read as JSON where the tool's schema does not ask for a string."""
    assert isinstance(call.arguments, dict)
    arguments = dict(call.arguments)
    schemas = {tool["function"].get("name"): tool["function"].get("parameters", {}) for tool in tools}
    properties = schemas.get(call.name, {}).get("properties", {})
    for name, value in arguments.items():
        if call.texts and properties.get(name, {}).get("type", "string") != "string":
            with suppress(ValueError, RecursionError):
                arguments[name] = json.loads(value)
    return arguments


def response(call: Call, request: ChatRequest, model: str, tokens: Sequence[str], used: Mapping[str, Any]) -> Any:
    """Return the response to a request. tokens: the text of each sampled token. used: the sampling of the run."""
    message: dict[str, Any] = {**call.reply}
    finish = "stop" if call.finish == "stop" else "length"
    if calls := message.get("tool_calls"):
        finish = "tool_calls"
        functions = [{**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls]
        message["tool_calls"] = [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]
        message["content"] = message["content"] or None
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if request.logprobs:
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, value in zip(tokens, call.log_probs.tolist(), strict=True)
        ]
        choice["logprobs"] = {"content": content}
    prompt, completion = len(call.prompt_ids), len(call.ids)
    return {
        "id": f"chatcmpl-{call.key:016x}",
        "object": "chat.completion",
        "created": 0,  # Equal runs have equal responses.
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        # Not a field of OpenAI's.
        "brorl": {"prompt_token_ids": call.prompt_ids, "token_ids": call.ids.tolist(), "sampling": dict(used)},
    }


def stream(whole: Mapping[str, Any], usage: bool) -> Iterator[str]:
    """Yield a response as server-sent events: the message in one piece, then the reason for its end."""
    common = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = whole["choices"]
    delta = {**choice["message"]}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    for piece in (first, last):
        yield f"data: {json.dumps({**common, 'choices': [piece]})}\n\n"
    if usage:
        yield f"data: {json.dumps({**common, 'choices': [], 'usage': whole['usage']})}\n\n"
    yield "data: [DONE]\n\n"


@dataclass(eq=False)
class Endpoint:
    """The endpoint of one rollout."""

    sequences: Sequences
    sampling: Sampling  # of the run or the evaluation
    submit: Callable[[Call], None]  # to the engine
    # Tasks of requests whose response has not been delivered, by the hash of the body.
    _pending: dict[bytes, asyncio.Task[tuple[Call, ChatRequest]]] = field(default_factory=dict)

    @property
    def used(self) -> dict[str, float]:
        """The sampling parameters that are used whatever a request asks for."""
        return {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}

    async def chat(self, body: bytes, is_retry: bool) -> tuple[Call, ChatRequest]:
        """Return the completed call of a request. A retry waits for the call of the same body. Raises BadRequest."""
        digest = hashlib.sha256(body).digest()
        if not is_retry or digest not in self._pending:
            self._pending[digest] = asyncio.ensure_future(self._complete(body))
        return await asyncio.shield(self._pending[digest])

    async def _complete(self, body: bytes) -> tuple[Call, ChatRequest]:
        try:
            request = read_request(json.loads(body))
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"the body cannot be parsed as JSON: {e}") from None
        chat, calls = self.sequences.chat, self.sequences.calls
        tools = request.tools if request.tool_choice == "auto" else []
        if tools and chat.format is None:
            raise BadRequest("tools: the chat template of the model does not read tools", field="tools")
        if len(calls) >= chat.config.max_calls:
            raise BadRequest(f"agent.max_calls = {chat.config.max_calls} is reached", code="max_calls")
        requested = request.model_dump(include=set(self.used), exclude_none=True)
        if not requested.items() <= self.used.items():
            _warn_once(f"the agent asks for {requested}; the calls are sampled with {self.used}")
        try:
            call = self.sequences.begin(request.messages, tools)
        except UserError as e:
            raise BadRequest(str(e), field="messages") from None
        try:
            call.limit = self._limit(call, request)
        except BadRequest:
            calls.remove(call)  # It has sampled nothing.
            raise

        done, loop = asyncio.Event(), asyncio.get_running_loop()
        call.stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        call.done = lambda: loop.call_soon_threadsafe(done.set)
        self.submit(call)
        await done.wait()
        if call.finish == "cut":
            raise BadRequest("the call of the engine has ended", code="cancelled")
        thinks = in_thought(chat.decode, call.prompt_ids)
        call.reply = read_reply(self._text(call), call, chat.format or "hermes", thinks)
        return call, request

    def _limit(self, call: Call, request: ChatRequest) -> int:
        """Return how many tokens a call may sample. Raises BadRequest if it may sample none."""
        chat, run_limit = self.sequences.chat, self.sampling.max_tokens
        if len(call.prompt_ids) > chat.prompt_tokens:
            text = f"the messages have {len(call.prompt_ids)} tokens, more than {chat.prompt_tokens}"
            raise BadRequest(f"{text}, which leave room for a reply", field="messages", code="context_length_exceeded")
        limit = min(run_limit, request.max_completion_tokens or request.max_tokens or run_limit)
        if chat.config.max_tokens:
            limit = min(limit, chat.config.max_tokens - sum(len(c.ids) for c in self.sequences.calls))
            if limit <= 0:
                raise BadRequest(f"agent.max_tokens = {chat.config.max_tokens} is reached", code="max_tokens")
        return limit

    def _text(self, call: Call) -> str:
        """Return the text of a completion without its stop token or stop string."""
        text = self.sequences.chat.decode(call.ids[: len(call.ids) - call.stopped].tolist())
        if call.finish == "stop" and not call.stopped:
            positions = [text.find(stop) for stop in (*call.stop, *self.sampling.stop_strings) if stop in text]
            text = text[: min(positions, default=len(text))]
        return text


class AgentServer:
    """The HTTP server of a rank, and the endpoints of its rollouts by their keys."""

    def __init__(self) -> None:
        """Raise UserError if starlette or uvicorn is missing."""
        try:
            import starlette  # noqa: F401
            import uvicorn
        except ImportError as e:
            raise UserError(f"agent.function needs {e.name}: pip install 'megatron-brorl[agents]'") from None
        self.endpoints: dict[str, Endpoint] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = _app(self.endpoints)
        options = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=600)
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()


def _app(endpoints: dict[str, Endpoint]) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def chat(request: Request) -> Response:
        endpoint = endpoints.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if endpoint is None:
            error = {"message": "the key is unknown, or its rollout has ended", "code": "invalid_api_key"}
            return JSONResponse({"error": error}, status_code=401, headers=_NO_RETRY)
        body = await request.body()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            call, parameters = await endpoint.chat(body, is_retry)
        except asyncio.CancelledError:  # by AgentServer.close
            return JSONResponse({"error": {"message": "the run has ended"}}, status_code=503, headers=_NO_RETRY)
        except BadRequest as e:
            return JSONResponse(e.body, status_code=400, headers=_NO_RETRY)
        # A client that has gone may ask again. Without a retry, the call is not trained on.
        call.delivered = call.delivered or not await request.is_disconnected()
        texts = [endpoint.sequences.chat.decode([i]) for i in call.ids.tolist()] if parameters.logprobs else []
        whole = response(call, parameters, MODEL, texts, endpoint.used)
        if parameters.stream:
            chunks = stream(whole, usage=bool(parameters.stream_options.get("include_usage")))
            return StreamingResponse(chunks, media_type="text/event-stream")
        return JSONResponse(whole)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)])
