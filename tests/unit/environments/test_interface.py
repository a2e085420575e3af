"""Tests that environment classes are checked and described, and that tool calls are parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils import get_json_schema

from megatron_brorl.environments.calculator import Calculator
from megatron_brorl.environments.calls import Call, MalformedCall, find_calls, keyword_arguments
from megatron_brorl.environments.interface import describe
from megatron_brorl.errors import UserError


class Tools(Calculator):
    def search(self, words: list[str], most: int = 3) -> str:
        """Search for words.

        Args:
            words: The words.
            most: The largest number of results.
        """
        return ""

    number, helper = 3, staticmethod(len)

    def _private(self) -> None: ...


def make(body: str) -> type:
    scope = {"__name__": __name__}
    exec(f"class Game:\n    def reset(self, row): ...\n    def reward(self): ...\n    {body}", scope)
    return scope["Game"]


def test_the_tools_are_the_public_methods() -> None:
    assert describe(Tools).tools == (get_json_schema(Tools.calculate), get_json_schema(Tools.search))
    assert describe(make("def step(self, text): ...")).tools == ()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("missing.py:Game", "environment missing.py:Game: no such file"),
        (f"{Calculator.__module__}:_value", "is not a class"),
        (make("reward = None"), "environment Game: has no method reward"),
        (make("def _act(self): ..."), "neither tools .* nor a method step"),
        (make("def act(self, a): 'Act.'"), "tool act: .*missing a type hint"),
        (make("def act(self, a: slice): 'Act.'"), "tool act: .*slice"),
        (make("def act(self, a: int): 'Act.'"), "tool act: .*no description for the argument 'a'"),
        (make("def __init__(self, size): ..."), "cannot be created without arguments: .*size"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_user_error(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(factory)


def hermes(*calls: tuple[str, Any]) -> str:
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize(
    "text",
    [
        "First.\n" + hermes(("look", {}), ("search", {"words": ["ä", "<b>"], "most": 2})),
        "<think>\n<tool_call>{}</tool_call>\n</think>\n\n" + hermes(("look", {"a": {"b": [None, 1.5, "\n"]}})),
    ],
)
def test_hermes_calls_are_those_that_transformers_finds(text: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    serving = pytest.importorskip("transformers.cli.serving.utils")
    (template,) = (template for names, template in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in names)
    expected = parsing.parse_response(f"{text}<|im_end|>", template, prefix="").get("tool_calls") or []
    calls = find_calls(text, "hermes")
    assert [{"name": call.name, "arguments": call.arguments} for call in calls] == [c["function"] for c in expected]
    assert not any(call.error for call in calls)


def test_tag_calls() -> None:
    text = '2<call> reward </call>a <call>search: {"words": [":"]}</call><call>calculate: 2 : 3\n</call><call>a'
    *calls, unfinished = find_calls(text, "tags")
    assert calls == [Call("reward", ""), Call("search", '{"words": [":"]}'), Call("calculate", "2 : 3")]
    arguments = [keyword_arguments(call, getattr(Tools, call.name)) for call in calls]
    assert arguments == [{}, {"words": [":"]}, {"expression": "2 : 3"}]
    assert unfinished == Call("", {}, "the end tag is missing")
    for text in ("2 + 3", "[1]", "[" * 100_000):
        with pytest.raises(MalformedCall, match="the arguments"):
            keyword_arguments(Call("search", text), Tools.search)
    assert not find_calls(hermes(("look", {})), "tags")
