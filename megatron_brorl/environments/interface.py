"""Environments that users write: classes with one object per rollout. Imports no torch, because workers import it.

`reset(row)` receives a VerifierRow, and may return an observation before the first turn. `reward()`
returns a finite number, or any other score that a verifier may return. Every other public method is a tool, with type
hints and a docstring in the format of transformers' get_json_schema. No method is async. A turn without a tool call
ends the episode; the optional method `final(text)` receives it. A class with a method `step` has no tools: `step(text)`
receives each turn and returns (observation, done). On the last turn that the limits allow, tools and `step` are called
as usual, but the model does not see their results. environments.calculator is an example.

Results and observations become text: a string as it is, any other value as JSON, MAX_TEXT characters at most. A tool
tells the model about a mistake by returning a text. An exception ends the episode with reward 0.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import validate_call

from megatron_brorl.errors import UserError, shown
from megatron_brorl.user_functions import import_function, source_sha256

MAX_TEXT = 4096  # characters of a result or observation
Format = Literal["hermes", "json", "tags"]  # of tool calls, see environments.calls

_ARGUMENTS = {"reset": 1, "step": 1, "final": 1, "reward": 0}  # of the methods that are not tools, without self
_NOT_CALLS = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)  # are refused
_CHOICES = re.compile(r"\(choices:\s*(\[.*?\])\)\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """The properties of an environment class that are the same for all rollouts."""

    tools: tuple[dict[str, Any], ...]  # JSON schemas for the chat template; () for a class with `step`
    sha256: str  # of the file of the class


def describe(factory: str | type) -> Kind:
    """Check an environment class, given as itself or as "my_env.py:Class". Raises UserError if it cannot be used.

    The class is imported, but no object is created.
    """
    if isinstance(factory, str):
        label = f"environment {factory}"
        cls, sha256 = import_function(factory, "environment")
    else:
        label = f"environment {getattr(factory, '__name__', factory)}"
        cls, sha256 = factory, source_sha256(factory)
    if not isinstance(cls, type):
        raise UserError(f"{label}: is not a class; name a class with the methods reset and reward")
    for method in ("reset", "reward"):
        if not callable(getattr(cls, method, None)):
            raise UserError(f"{label}: has no method {method}; define it")
    methods = {name: inspect.getattr_static(cls, name) for name in _ARGUMENTS if hasattr(cls, name)}
    for name, method in {**methods, **tools(cls)}.items():
        if any(check(getattr(method, "__func__", method)) for check in _NOT_CALLS):
            raise UserError(f"{label}: {name} is async or a generator; define a method that returns its result")
        try:
            if inspect.isfunction(method) and name in _ARGUMENTS:
                inspect.signature(method).bind(None, *[None] * _ARGUMENTS[name])  # self, and the arguments
        except TypeError as e:
            count = _ARGUMENTS[name]
            raise UserError(f"{label}: {name} is called with {count} arguments after self: {e}") from None
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError) as e:
        raise UserError(f"{label}: cannot be created without arguments: {e}; read data in reset") from None
    if hasattr(cls, "step"):
        return Kind(tools=(), sha256=sha256)
    if not tools(cls):
        raise UserError(f"{label}: has neither tools (public methods) nor a method step; define one of them")
    return Kind(tuple(_schema(tool, f"{label}: tool {name}") for name, tool in tools(cls).items()), sha256)


def tools(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the tools of a class by name, sorted. They are functions, whose first argument is the object."""
    if hasattr(cls, "step"):
        return {}
    public = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {name: value for name, value in public.items() if inspect.isfunction(value) and name not in _ARGUMENTS}


def choices(tool: Callable[..., Any]) -> dict[str, list[Any]]:
    """Return the allowed values by parameter, which (choices: [...]) lists at the end of its description."""
    parameters = inspect.signature(tool).parameters
    name = ""
    allowed = {}
    for line in (inspect.getdoc(tool) or "").splitlines():
        if (entry := re.match(r"\s*(\w+)[^:]*:", line)) and entry[1] in parameters:
            name = entry[1]
        if name and (listed := _CHOICES.search(line)):
            allowed[name] = [c.strip() if isinstance(c, str) else c for c in json.loads(listed[1])]
    return allowed


def _schema(tool: Callable[..., Any], label: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # imports torch

    try:
        validate_call(tool)  # as worker processes do
        schema: dict[str, Any] = get_json_schema(tool)
        listed = choices(tool)
    except Exception as e:  # Type hints of a user may fail in many ways.
        remedy = "give it type hints, and a docstring that describes each argument under Args:"
        raise UserError(f"{label}: {shown(e)}; {remedy}") from None
    kinds = [parameter.kind for parameter in inspect.signature(tool).parameters.values()]
    if not kinds or not set(kinds[1:]) <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise UserError(f"{label}: arguments are passed by name; define it with self, and without /, *args or **kwargs")
    properties = schema["function"]["parameters"]["properties"]
    enforced = all(properties[name].get("enum") == values for name, values in listed.items())
    if not enforced or (inspect.getdoc(tool) or "").lower().count("(choices:") != len(listed):
        raise UserError(f"{label}: (choices: [...]) must be on one line, at the end of the description of an argument")
    return schema
