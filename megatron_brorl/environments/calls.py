"""Find tool calls in a turn of the model.

    hermes, for the chat templates of Qwen and others:  <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>
    tags, for small models without a chat template:     <call>calculate: 2 + 3</call>

The text after the colon is the argument of a tool with one parameter, and else a JSON object of the arguments. A turn
may contain several calls. Calls in a thought, which ends with </think>, do not count.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_brorl.environments.interface import Format
from megatron_brorl.rewards.extract import after_thought

_MAX_CALLS = 16  # per turn, to bound the size of a reply
# A call without an end tag extends to the end of the text.
_CALLS = {tag: re.compile(rf"<{tag}>(.*?)(</{tag}>|\Z)", re.DOTALL) for tag in ("tool_call", "call")}


class MalformedCall(Exception):
    """A tool call that cannot be executed. The message is for the model."""


@dataclass(frozen=True)
class Call:
    """A tool call, not yet checked against the tool."""

    name: str
    arguments: dict[str, Any] | str  # a string: the text after the colon of format "tags"
    error: str = ""  # the reason why the call could not be parsed; name and arguments are empty


def find_calls(text: str, format: Format) -> list[Call]:
    """Return the calls of a turn in order, the first _MAX_CALLS and a malformed one in place of the others."""
    tag, parse = ("tool_call", _parse_hermes) if format == "hermes" else ("call", _parse_tags)
    calls: list[Call] = []
    for match in _CALLS[tag].finditer(after_thought(text)):
        if len(calls) == _MAX_CALLS:
            return [*calls, Call("", {}, f"at most {_MAX_CALLS} calls are executed per turn")]
        try:
            if not match[2]:
                raise MalformedCall("the end tag is missing")
            calls.append(parse(match[1].strip()))
        except MalformedCall as e:
            calls.append(Call("", {}, str(e)))
    return calls


def keyword_arguments(call: Call, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises MalformedCall.

    tool: the function of the class, whose first parameter is the object.
    """
    if isinstance(call.arguments, dict):
        return call.arguments
    _, *parameters = inspect.signature(tool).parameters
    if len(parameters) == 1:
        return {parameters[0]: call.arguments}
    return _json_object(call.arguments or "{}", "the arguments")


def _parse_hermes(body: str) -> Call:
    call = _json_object(body, "the call")
    name = call.get("name")
    arguments = call.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedCall('the call needs a "name", which is a string, and "arguments", which are an object')
    return Call(name, arguments)


def _parse_tags(body: str) -> Call:
    name, _, arguments = body.partition(":")
    return Call(name.strip(), arguments.strip())


def _json_object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise MalformedCall(f"{what} cannot be parsed as JSON: {e}") from None
    if not isinstance(value, dict):
        raise MalformedCall(f"{what} must be a JSON object")
    return value
