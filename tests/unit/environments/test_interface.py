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


class Base:
    def reset(self, row: Any) -> None: ...

    def reward(self) -> float:
        return 0.0


class Tools(Base):
    number = 3

    def search(self, words: list[str], most: int = 3) -> str:
        """Search for words.

        Args:
            words: The words.
            most: The largest number of results.
        """
        return ""

    def look(self) -> dict[str, int]:
        """Look around."""
        return {}

    @staticmethod
    def helper() -> int:
        return 0

    def _private(self) -> None: ...


def test_the_tools_are_the_public_methods() -> None:
    assert describe(Tools).tools == (get_json_schema(Tools.look), get_json_schema(Tools.search))
    assert describe(make("step(self, text): ...")).tools == ()


def make(body: str, base: type = Base) -> type:
    """Return a class with a method `act` that begins with `body`."""
    scope: dict[str, Any] = {"Base": base, "__name__": __name__}
    exec(f"class Game(Base):\n    def {body}", scope)
    return scope["Game"]


ARGS = "act(self, a{}):\n        '''Act.\n\n        Args:\n            a: A number.'''"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("missing.py:Game", "environment missing.py:Game: no such file"),
        (f"{Calculator.__module__}:_value", "is not a class"),
        (make("reset(self, row): ...", object), "environment Game: has no method reward"),
        (make("_act(self): ..."), "neither tools .* nor a method step"),
        (make(ARGS.format("")), "tool act: .*missing a type hint"),
        (make(ARGS.format(": Base")), "tool act: .*Base"),
        (make("act(self, a: int): 'Act.'"), "tool act: .*no description for the argument 'a'"),
        (make("__init__(self, size): ..."), "cannot be created without arguments: .*size"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_user_error(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(factory)


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


TEXTS = [
    "No call.",
    "First.\n" + hermes(("look", {}), ("search", {"words": ["ä", "<b>"], "most": 2})),
    "<think>\n<tool_call>{}</tool_call>\n</think>\n\n" + hermes(("look", {"a": {"b": [None, 1.5, "\n"]}})),
]


@pytest.mark.parametrize("text", TEXTS)
def test_hermes_calls_are_those_that_transformers_finds(text: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    serving = pytest.importorskip("transformers.cli.serving.utils")
    (template,) = (template for names, template in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in names)
    expected = parsing.parse_response(f"{text}<|im_end|>", template, prefix="").get("tool_calls") or []
    calls = find_calls(text, "hermes")
    assert [{"name": call.name, "arguments": call.arguments} for call in calls] == [c["function"] for c in expected]
    assert not any(call.error for call in calls)


def test_tag_calls() -> None:
    text = '2<call> look </call>a <call>search: {"words": [":"]}</call><call>calculate: 2 : 3\n</call>'
    calls = find_calls(text, "tags")
    assert calls == [Call("look", ""), Call("search", '{"words": [":"]}'), Call("calculate", "2 : 3")]
    arguments = [
        keyword_arguments(call, tool)
        for call, tool in zip(calls, (Tools.look, Tools.search, Calculator.calculate), strict=True)
    ]
    assert arguments == [{}, {"words": [":"]}, {"expression": "2 : 3"}]
    for text in ("2 + 3", "[1]", "[" * 100_000):
        with pytest.raises(MalformedCall, match="the arguments"):
            keyword_arguments(Call("search", text), Tools.search)
    assert find_calls("<call>a</call><call>b", "tags") == [Call("a", ""), Call("", {}, "the end tag is missing")]
    assert not find_calls(hermes(("look", {})), "tags")
