"""Tests that environment classes are checked and described, and that tool calls are parsed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import validate_call
from transformers.utils import get_json_schema

from megatron_brorl.environments.calculator import Calculator
from megatron_brorl.environments.calls import Call, MalformedCall, find_calls, keyword_arguments
from megatron_brorl.environments.episodes import Episodes
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

    number, helper = 3, staticmethod(len)  # Both are public, but neither is a method of an object.

    def _private(self) -> None: ...


def make(body: str) -> type:
    scope = {"__name__": __name__, "asyncio": asyncio}
    exec(f"class Game:\n    def reset(self, row): ...\n    def reward(self): ...\n    {body}", scope)
    return scope["Game"]


def test_the_tools_are_the_public_methods():
    assert describe(Tools).tools == (get_json_schema(Tools.calculate), get_json_schema(Tools.search))
    assert describe(make("def step(self, text): ...")).tools == ()


ACT = "def act(self): 'Act.'"
BAD = {
    "reward = None": "environment Game: has no method reward; define it",
    "def _act(self): ...": "neither tools .* nor a method step; define one",
    "def act(self, a): 'Act.'": "tool act: .*type hint.*'?a",
    "def act(self, a: slice): 'Act.'": "tool act: .*slice",
    "def act(self, a: int): 'Act.'": "tool act: .*argument 'a'",
    "def act(): 'Act.'": "tool act: .*define it with self",
    "def act(self, a: str): 'Act.\\n\\nArgs:\\n    a: A (choices: [1,\\n      2])'": "tool act: .*choices",
    "def __init__(self, size): ...": "environment Game: .*size.*; read data in reset",
    f"{ACT}; yield 1": "act is async or a generator",
    f"async {ACT}; yield 1": "act is async or a generator",
    "step = staticmethod(asyncio.sleep)": "step is async or a generator",
    "def step(self): ...": "step is called with 1 arguments after self",
    f"{ACT}\n    def final(self, text, row): ...": "final is called with 1 arguments .*'row'",
    f"{ACT}\n    def reward(self, row): ...": "reward is called with 0 arguments .*'row'",
    **{
        f"{ACT}\n    async def {name}(self, *_): 'Act.'": f"{name} is async or a generator"
        for name in ("reset", "reward", "step", "final", "act")
    },
    **{
        f"def act(self, {argument}): 'Act.\\n\\nArgs:\\n    a: A.'": "tool act: .*define it with self, and without /"
        for argument in ("a: int, /", "*a: int", "**a: int")
    },
}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("missing.py:Game", "environment missing.py:Game: no such file"),
        (f"{Calculator.__module__}:_value", f"{Calculator.__module__}:_value: is not a class"),
        *((make(body), message) for body, message in BAD.items()),
    ],
)
def test_a_class_that_cannot_be_used_is_a_user_error(factory, message):
    with pytest.raises(UserError, match=message):
        describe(factory)


class Choices:
    def reset(self, row: Any) -> None: ...

    def reward(self) -> None: ...

    def convert(self, unit: str, digits: int = 7, tags: list[str] | None = None, way: Literal["up"] = "up") -> str:
        """Convert.

        Args:
            unit: The unit: a name
                of one word (choices: ["m", " ft "])
            digits (int): Digits. (Choices: [1, 2])
            tags: Tags (choices: ["x", "y"])
            way: The way.

        Returns:
            note: a text (choices are free)
        """
        return f"{unit} {digits} {tags} {way}"


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"unit": "ft", "digits": "2", "tags": ["y", "x"]}, "ft 2 ['y', 'x'] up"),
        ({"unit": "m", "tags": None, "way": "up"}, "m 7 None up"),
        ({"unit": "M"}, 'error: convert: argument unit must be one of ["m", "ft"]'),
        ({"unit": "m", "digits": 3}, "error: convert: argument digits must be one of [1, 2]"),
        ({"unit": "m", "tags": ["x", "z"]}, 'error: convert: argument tags must be one of ["x", "y"]'),
        ({"unit": "m", "way": "left"}, "error: convert: argument way: Input should be 'up'"),
    ],
)
def test_choices_of_the_docstring_and_literals_are_enforced(arguments, result):
    pytest.importorskip("transformers", "5.24", "older ones refuse this docstring")
    assert describe(Choices).tools == (get_json_schema(Choices.convert),)
    episodes = Episodes(Choices)
    episodes.reset(0, {})
    outcome = episodes.step(0, f"<call>convert: {json.dumps(arguments)}</call>", last=False, format="tags")
    assert outcome.messages[0]["content"] == result
    assert outcome.malformed == result.startswith("error")


NO_END = "the end tag is missing"
TAGS = ["</think>", "</tool_call>", "</call>", "<think>", "<tool_call>{", "</parameter> </function>", 'a"\n{}', ""]


def written(format: str, value: str) -> str:
    """Return a call of the tool `look` with `value` as its argument `a`, as chat templates of a format write it."""
    arguments = json.dumps({"a": value})
    return {
        "hermes": f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>',
        "xml": f"<tool_call>\n<function=look>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "json": f'{{"name": "look", "parameters": {arguments}}}',
        "tags": f"<call>look: {arguments}</call>",
    }[format]


def read_back(format: str, text: str, **options: bool) -> list[Any]:
    """Return the argument `a` of each call, or the error of a malformed one. Format "hermes" includes "xml"."""
    calls = find_calls(text, "hermes" if format == "xml" else format, **options)
    return [c.error or (json.loads(c.arguments) if isinstance(c.arguments, str) else c.arguments)["a"] for c in calls]


@pytest.mark.parametrize("value", TAGS)
@pytest.mark.parametrize("format", ["hermes", "xml", "json", "tags"])
def test_tags_in_an_argument_are_part_of_it(format, value):
    calls = [written(format, text) for text in (value, "b", value)]
    assert read_back(format, "\n".join(calls)) == [value, "b", value]
    thought = f"look? {calls[0]}\n</think>\n\n"
    for text, in_thought in ((thought, True), (f"<think>{thought}", False), (f"\n<think>\n{thought}", False)):
        if "</think>" not in value:  # A thought ends with the first such tag, even within a call.
            assert read_back(format, text + calls[1], in_thought=in_thought) == ["b"]
            assert not read_back(format, text.partition("</think>")[0] + calls[1], in_thought=in_thought)


HERMES, XML = written("hermes", "a"), written("xml", "b")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", "A <tool_call> tag opens a call, and </tool_call> ends it. It is written <tool_call>", []),
        ("hermes", "Between <tool_call>\nand\n</tool_call> I wrote <function=f> once. </think>", []),
        ("hermes", 'So <tool_call>{"name": "look", "arguments": {"a": "</tool_call', [NO_END]),
        ("hermes", "<tool_call>[" + HERMES.removeprefix("<tool_call>\n"), ["the call cannot be parsed as JSON"]),
        ("hermes", "First.\n" + HERMES.removesuffix("</tool_call>") + XML, [NO_END, "b"]),
        ("hermes", XML.replace("</parameter>", ""), ["</parameter> must end each parameter"]),
        ("json", '{"name": "Ada", "born": 1815}', []),
        ("json", 'The call is {"name": "look", "parameters": {"a": "b"}}', []),
        ("json", '{"x": 1', []),
        ("json", '{"name": "look", "parameters": {"a": "b', ["the call cannot be parsed as JSON"]),
        ("json", '{"name": "look", "parameters": "b"}', ['the call needs a "name"']),
        ("json", f'<|python_tag|>{{"parameters": {{"a": 1}}, "name": "look"}}; {written("json", "2")}', [1, "2"]),
        ("tags", f"The <call> tag opens a call, {HERMES} does not, and it ends with <call>.", []),
        ("tags", "A call is <call>name: text", [NO_END]),
    ],
)
def test_tags_in_prose_are_text_and_unfinished_calls_are_malformed(format, text, expected):
    for result, beginning in zip(read_back(format, text), expected, strict=True):
        assert result == beginning or result.startswith(beginning)


def test_texts_become_the_types_of_the_parameters():
    class Typed:
        def act(self, a: str, b: int, c: list[int], d: bool, e: str | int, f: Literal[1, 2], g: Any = None) -> None: ...

        def double(self, a: int) -> None: ...

    texts = {"a": "7", "b": "7", "c": "[1, 2]", "d": "True", "e": "7", "f": "2", "g": "x", "h": "8"}
    arguments = keyword_arguments(Call("act", texts, texts=True), validate_call(Typed.act))
    assert arguments == {"a": "7", "b": 7, "c": [1, 2], "d": "True", "e": "7", "f": 2, "g": "x", "h": "8"}
    for text, value in (("2", 2), ("07", "07"), ("x", "x")):
        assert keyword_arguments(Call("double", text), Typed.double) == {"a": value}


def test_tag_calls():
    text = '2<call> reward </call>a <call>search: {"words": [":"]}</call><call>calculate: 2 : 3\n</call><call>a'
    *calls, unfinished = find_calls(text, "tags")
    assert calls == [Call("reward", ""), Call("search", '{"words": [":"]}'), Call("calculate", "2 : 3")]
    arguments = [keyword_arguments(call, getattr(Tools, call.name)) for call in calls]
    assert arguments == [{}, {"words": [":"]}, {"expression": "2 : 3"}]
    assert unfinished == Call("", {}, NO_END)
    # Free text ends with the first end tag.
    text = "<call>calculate: 2 </think> <tool_call>{</call> 7 <call>calculate: {2} + 1</call>"
    assert [call.arguments for call in find_calls(text, "tags")] == ["2 </think> <tool_call>{", "{2} + 1"]
    for text in ("2 + 3", "[1]", "[" * 100_000):
        with pytest.raises(MalformedCall, match="the arguments"):
            keyword_arguments(Call("search", text), Tools.search)
