"""Requests and responses of POST /v1/chat/completions, as the openai package sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, PositiveInt, ValidationError

from megatron_brorl.environments.calls import Call as ToolCall
from megatron_brorl.environments.calls import find_calls
from megatron_brorl.environments.interface import Format
from megatron_brorl.rollout.agents.sequences import Call, Message, canonical

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
    """The fields of a request that are supported, with those values that are."""

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
        given = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
        return ChatRequest(**given)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        field = str(first["loc"][0])
        raise BadRequest(f"{field}: {first['msg']}", field) from None


def read_reply(text: str, call: Call, format: Format, in_thought: bool) -> Message:
    """Return the message of the assistant in a completion.

    The text before the first tool call is its content. A text with a malformed call is content as a whole.
    """
    tool_calls = find_calls(text, format, in_thought) if call.tools else []
    if not tool_calls or any(each.error for each in tool_calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": each.name, "arguments": _arguments(each, call.tools)} for each in tool_calls]
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
