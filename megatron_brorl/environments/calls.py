"""Find tool calls in a turn of the model.

    hermes, for the chat templates of Qwen and others:  <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>
        and of Qwen3-Coder and Qwen3.5:  <tool_call><function=add><parameter=a>2</parameter></function></tool_call>
    json, for the chat templates of Llama 3.1 and 3.2:  {"name": "add", "parameters": {"a": 2}}
    tags, for small models without a chat template:     <call>calculate: 2 + 3</call>

A turn may contain several calls. docs/environments.md has the rules for tags in strings, in prose and in thoughts. The
text after the colon of format tags is the argument of a tool with one parameter, and else a JSON object.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_brorl.environments.interface import Format

_MAX_CALLS = 16  # per turn, to bound the size of a reply
_THOUGHT = r"(<think>.*?(?:</think>|\Z))"
_BEGINS: dict[Format, re.Pattern[str]] = {
    "hermes": re.compile(_THOUGHT + r"|<tool_call>\s*(?=\{|\[\s*[\[{]|<function=)", re.DOTALL),
    "json": re.compile(r"\s*" + _THOUGHT + r"|[\s;]*(?:<\|python_tag\|>\s*)?(?=\{)", re.DOTALL),
    "tags": re.compile(_THOUGHT + r"|<call>(?=\w+\Z|\s*\w+\s*:|(?:(?!<call>).)*?</call>)", re.DOTALL),
}
_END_TAGS: dict[Format, str] = {"hermes": "</tool_call>", "json": "", "tags": "</call>"}
_NO_END = "the end tag is missing"
_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:')
_NAME = re.compile(r"\s*(\w+)\s*:\s*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
# A value ends where the next parameter begins or the function ends. The line breaks around it are the template's.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>\s*</tool_call>))", re.DOTALL
)


class MalformedCall(Exception):
    """A tool call that cannot be executed. The message is for the model."""


@dataclass(frozen=True)
class Call:
    """A tool call, not yet checked against the tool."""

    name: str
    arguments: dict[str, Any] | str  # a string: the text after the colon of format "tags"
    error: str = ""  # the reason why the call could not be parsed; name and arguments are empty
    texts: bool = False  # the values of the arguments are texts, as in XML
    begin: int = field(default=0, compare=False)  # position of its opening tag in the turn


def find_calls(text: str, format: Format, in_thought: bool = False) -> list[Call]:
    """Return the first _MAX_CALLS calls of a turn in order, and one malformed call in place of all further calls.

    in_thought: the prompt of the turn ends with <think>.
    """
    find_begin = _BEGINS[format].match if format == "json" else _BEGINS[format].search
    end_tag = _END_TAGS[format]
    text = f"<think>{text}" if in_thought else text
    calls: list[Call] = []
    position = 0
    while begin := find_begin(text, position):
        if begin[1]:  # a thought, in which calls do not count
            position = begin.end()
            continue
        try:
            call, position = _PARSERS[format](text, begin.end())
            if call is None:  # JSON that is not a call
                break
            if not text[position:].lstrip().startswith(end_tag):
                call = Call(name="", arguments={}, error=_NO_END)
        except MalformedCall as e:
            end = text.find(end_tag, begin.end()) if end_tag else len(text)
            call = Call(name="", arguments={}, error=str(e) if end >= 0 else _NO_END)
            position = end if end >= 0 else len(text)
        if len(calls) == _MAX_CALLS:
            return [*calls, Call(name="", arguments={}, error=f"at most {_MAX_CALLS} calls are executed per turn")]
        calls.append(replace(call, begin=begin.start()))
    return calls


def keyword_arguments(call: Call, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises MalformedCall.

    tool: the function of the class, whose first parameter is the object. Values that are texts (Call.texts) are read as
    JSON if the type hint of the parameter does not accept a text.
    """
    raw = call.arguments
    _, *parameters = inspect.signature(tool).parameters
    if isinstance(raw, str) and len(parameters) == 1:
        raw = {parameters[0]: raw}
    elif isinstance(raw, str):
        arguments, end = _decode(raw or "{}", begin=0, what="the arguments")
        if end < len(raw):
            raise MalformedCall("the arguments must be a single JSON object")
        return arguments
    elif not call.texts:
        return raw
    types = _types(tool)
    return {name: _value(text, types[name]) if name in types else text for name, text in raw.items()}


@functools.cache
def _types(tool: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(inspect.unwrap(tool), include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name != "return"}


def _value(text: Any, hint: TypeAdapter[Any]) -> Any:
    try:
        hint.validate_python(text, strict=True)
    except ValidationError:
        with suppress(ValueError, RecursionError):  # True and None are not JSON.
            return json.loads(text)
    return text


def _parse_hermes(text: str, begin: int) -> tuple[Call | None, int]:
    function = _FUNCTION.match(text, begin)
    if not function:
        call, end = _decode(text, begin, "the call")
        return _named(call, "arguments"), end
    values = {}
    end = function.end()
    while parameter := _PARAMETER.match(text, end):
        values[parameter[1].strip()] = parameter[2]
        end = parameter.end()
    if not (closed := _FUNCTION_END.match(text, end)):
        raise MalformedCall("</parameter> must end each parameter, and </function> must follow the last one")
    return Call(function[1].strip(), values, texts=True), closed.end()


def _parse_llama(text: str, begin: int) -> tuple[Call | None, int]:
    try:
        call, end = _decode(text, begin, "the call")
    except MalformedCall:
        if _LLAMA_CALL.match(text, begin):
            raise
        return None, begin
    return _named(call, "parameters") if {"name", "parameters"} <= set(call) else None, end


def _parse_tags(text: str, begin: int) -> tuple[Call | None, int]:
    if (start := _NAME.match(text, begin)) and text.startswith("{", start.end()):
        with suppress(MalformedCall):  # A text may begin with a brace, too.
            _, end = _decode(text, start.end(), "the arguments")
            if text[end:].lstrip().startswith("</call>"):
                return Call(start[1], text[start.end() : end]), end
    if (end := text.find("</call>", begin)) < 0:
        raise MalformedCall(_NO_END)
    name, _, arguments = text[begin:end].partition(":")
    return Call(name.strip(), arguments.strip()), end


_PARSERS = {"hermes": _parse_hermes, "json": _parse_llama, "tags": _parse_tags}


def _named(call: dict[str, Any], key: str) -> Call:
    name = call.get("name")
    arguments = call.get(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise MalformedCall(f'the call needs a "name", which is a string, and "{key}", which are an object')
    return Call(name, arguments)


def _decode(text: str, begin: int, what: str) -> tuple[dict[str, Any], int]:
    """Return the JSON object that begins at a position, and the position after it. Raises MalformedCall."""
    try:
        value, length = json.JSONDecoder().raw_decode(text[begin:])
    except (ValueError, RecursionError) as e:
        raise MalformedCall(f"{what} cannot be parsed as JSON: {e}") from None
    if not isinstance(value, dict):
        raise MalformedCall(f"{what} must be a JSON object")
    return value, begin + length
