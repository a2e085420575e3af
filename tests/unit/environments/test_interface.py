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
from megatron_brorl.environments.interface import choices, describe
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
    scope = {"__name__": __name__, "asyncio": asyncio}
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
        (make("async def reset(self, row): ...\n    def step(self, text): ..."), "reset is async or a generator"),
        (make("async def reward(self): ...\n    def step(self, text): ..."), "reward is async or a generator"),
        (make("async def step(self, text): ..."), "step is async or a generator"),
        (make("async def final(self, text): ...\n    def act(self): 'Act.'"), "final is async or a generator"),
        (make("async def act(self): 'Act.'"), "act is async or a generator"),
        (make("def act(self): 'Act.'; yield 1"), "act is async or a generator"),
        (make("async def act(self): 'Act.'; yield 1"), "act is async or a generator"),
        (make("step = staticmethod(asyncio.sleep)"), "step is async or a generator"),
        (make("def step(self): ..."), "step is called with 1 arguments after self"),
        (
            make("def final(self, text, row): ...\n    def act(self): 'Act.'"),
            "final is called with 1 arguments .*'row'",
        ),
        (
            make("def reward(self, row): ...\n    def step(self, text): ..."),
            "reward is called with 0 arguments .*'row'",
        ),
        (make("def act(self, a: int, /): 'Act.\\n\\nArgs:\\n    a: A.'"), "tool act: arguments are passed by name"),
        (make("def act(self, *a: int): 'Act.\\n\\nArgs:\\n    a: A.'"), "tool act: arguments are passed by name"),
        (make("def act(self, **a: int): 'Act.\\n\\nArgs:\\n    a: A.'"), "tool act: arguments are passed by name"),
        (make("def act(): 'Act.'"), "tool act: arguments .* define it with self"),
        (make("def act(self, a: str): 'Act.\\n\\nArgs:\\n    a: A (choices: [1,\\n      2])'"), "must be on one line"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_user_error(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(factory)


class Choices:
    def reset(self, row: Any) -> None: ...

    def reward(self) -> float:
        return 1.0

    def convert(
        self, unit: str, digits: int = 7, tags: list[str] | None = None, way: Literal["up", "down"] = "up"
    ) -> str:
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
        ({"unit": "m"}, "m 7 None up"),
        ({"unit": "ft", "digits": "2", "tags": ["y", "x"]}, "ft 2 ['y', 'x'] up"),
        ({"unit": "m", "tags": None, "way": "down"}, "m 7 None down"),
        ({"unit": "M"}, 'error: convert: argument unit must be one of ["m", "ft"]'),
        ({"unit": "m", "digits": 3}, "error: convert: argument digits must be one of [1, 2]"),
        ({"unit": "m", "tags": ["x", "z"]}, 'error: convert: argument tags must be one of ["x", "y"]'),
        ({"unit": "m", "way": "left"}, "error: convert: argument way: Input should be 'up' or 'down'"),
    ],
)
def test_choices_of_the_docstring_and_literals_are_enforced(arguments: dict[str, Any], result: str) -> None:
    properties = get_json_schema(Choices.convert)["function"]["parameters"]["properties"]
    assert choices(Choices.convert) == {k: v["enum"] for k, v in properties.items() if "enum" in v and k != "way"}
    assert describe(Choices).tools == (get_json_schema(Choices.convert),)
    episodes = Episodes(Choices)
    episodes.reset(0, {})
    outcome = episodes.step(0, hermes(("convert", arguments)), False, "hermes")
    assert outcome.messages[0]["content"] == result
    assert outcome.malformed == result.startswith("error")


def xml(**calls: dict[str, str]) -> str:
    """Return calls as the template of Qwen3.5 writes them."""
    texts = []
    for name, arguments in calls.items():
        values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(texts)


def hermes(*calls: tuple[str, Any]) -> str:
    bodies = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize(
    "text",
    [
        "First.\n" + hermes(("look", {}), ("search", {"words": ["ä", "<b>"], "most": 2})),
        "<think>\n<tool_call>{}</tool_call>\n</think>\n\n" + hermes(("look", {"a": {"b": [None, 1.5, "\n"]}})),
        "<think>\n" + hermes(("look", {})),
        "An open </think> first.\n" + hermes(("look", {"a": "</think> <think> {"})),
        "a\n\n" + xml(look={}, search={"words": '["ä"]\n\n"<b>"', "most": "2"}),
        "<think>\n" + xml(look={}) + "\n</think>\n\n" + xml(look={"a": "</think> <tool_call> </tool_call>"}),
        xml(look={"a": "{ }"}) + " and " + xml(look={"a": "def f():\n    return 1"}),
    ],
)
def test_calls_are_those_that_transformers_finds(text: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    serving = pytest.importorskip("transformers.cli.serving.utils")
    model = "qwen3_5" if "<function" in text else "qwen3"
    (template,) = (template for names, template in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if model in names)
    expected = parsing.parse_response(f"{text}<|im_end|>", template, prefix="").get("tool_calls") or []
    calls = find_calls(text, "hermes")
    assert [{"name": call.name, "arguments": call.arguments} for call in calls] == [c["function"] for c in expected]
    assert not any(call.error for call in calls)


TAGS = ["</think>", "</tool_call>", "</call>", "<think>", "<tool_call>{", "</parameter> </function>", 'a"\n{}', ""]


def written(format: str, value: str) -> str:
    """Return a call of `look` with the argument `a`, as templates write it. JSON is that of CPython."""
    arguments = json.dumps({"a": value})
    return {
        "hermes": f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>',
        "xml": xml(look={"a": value}),
        "json": f'{{"name": "look", "parameters": {arguments}}}',
        "tags": f"<call>look: {arguments}</call>",
    }[format]


def read_back(format: str, text: str, **options: bool) -> list[Any]:
    """Return the argument of each call, or the error of a malformed one."""
    calls = find_calls(text, "hermes" if format == "xml" else format, **options)  # type: ignore[arg-type]
    return [c.error or (json.loads(c.arguments) if isinstance(c.arguments, str) else c.arguments)["a"] for c in calls]


@pytest.mark.parametrize("value", TAGS)
@pytest.mark.parametrize("format", ["hermes", "xml", "json", "tags"])
def test_tags_in_an_argument_are_part_of_it(format: str, value: str) -> None:
    calls = [written(format, text) for text in (value, "b", value)]
    assert read_back(format, "\n".join(calls)) == [value, "b", value]
    thought = f"look? {calls[0]}\n</think>\n\n"
    for text, in_thought in ((thought, True), (f"<think>{thought}", False), (f"\n<think>\n{thought}", False)):
        if "</think>" not in value:  # A thought ends with the first such tag, even within a call.
            assert read_back(format, text + calls[1], in_thought=in_thought) == ["b"]
            assert not read_back(format, text.partition("</think>")[0] + calls[1], in_thought=in_thought)


def test_free_text_of_a_tag_call_ends_with_the_first_end_tag() -> None:
    text = "<call>calculate: 2 </think> <tool_call>{</call> 7 <call>calculate: {2</call><call>calculate: {2} + 1</call>"
    arguments = [call.arguments for call in find_calls(text, "tags")]
    assert arguments == ["2 </think> <tool_call>{", "{2", "{2} + 1"]


@pytest.mark.parametrize(
    ("format", "text", "errors"),
    [
        ("hermes", "A <tool_call> tag opens a call, and </tool_call> ends it.", []),
        ("hermes", "Calls are written <tool_call>", []),
        ("hermes", "Between <tool_call>\nand\n</tool_call> I wrote <function=f> once. </think>", []),
        ("hermes", 'So <tool_call>{"name": "look", "arguments": {"a": "</tool_call', ["the end tag is missing"]),
        ("hermes", "<tool_call>\n<function=look>\n<parameter=a>\n1", ["the end tag is missing"]),
        ("hermes", f"<tool_call>[{written('hermes', 'a')[12:]}", ["the call cannot be parsed as JSON"]),
        ("hermes", f"{written('hermes', 'a')[:-12]}{written('xml', 'b')}", ["the end tag is missing", "b"]),
        ("xml", written("xml", "a").replace("</parameter>", ""), ["</parameter> must end each parameter"]),
        ("json", '{"name": "Ada", "born": 1815}', []),
        ("json", '[{"name": "look", "parameters": {"a": "b"}}]', []),
        ("json", 'The call is {"name": "look", "parameters": {"a": "b"}}', []),
        ("json", '{"name": "look", "parameters": {"a": "b', ["the call cannot be parsed as JSON"]),
        ("json", '{"name": "look", "parameters": "b"}', ['the call needs a "name"']),
        ("json", '{"x": 1', []),
        (
            "json",
            '<|python_tag|>{"parameters": {"a": 1}, "name": "look"}; {"name": "look", "parameters": {"a": 2}}',
            [1, 2],
        ),
        ("tags", "The <call> tag opens a call.", []),
        ("tags", "It ends with <call>.", []),
        ("tags", "A call is <call>name: text", ["the end tag is missing"]),
    ],
)
def test_a_tag_in_prose_is_text_and_an_unfinished_call_is_malformed(format: str, text: str, errors: list[Any]) -> None:
    found = read_back(format, text)
    assert len(found) == len(errors)
    for one, expected in zip(found, errors, strict=True):
        assert one == expected or (isinstance(expected, str) and one.startswith(expected))


def test_texts_become_the_types_of_the_parameters() -> None:
    class Typed:
        def act(self, a: str, b: int, c: list[int], d: bool, e: str | int, f: Literal[1, 2], g: Any = None) -> None: ...

    texts = {"a": "7", "b": "7", "c": "[1, 2]", "d": "True", "e": "7", "f": "2", "g": "x", "h": "8"}
    arguments = keyword_arguments(Call("act", texts, texts=True), validate_call(Typed.act))
    assert arguments == {"a": "7", "b": 7, "c": [1, 2], "d": "True", "e": "7", "f": 2, "g": "x", "h": "8"}
    # As in a model whose call has one parameter in tags.
    for text, expected in (("2", 2), ("07", "07"), ("[1]", [1]), ("x", "x")):
        scope: dict[str, Any] = {}
        exec(f"def act(self, a: {'list[int]' if text == '[1]' else 'int'}): ...", scope)
        assert keyword_arguments(Call("act", text), scope["act"]) == {"a": expected}


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
