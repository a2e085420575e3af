"""Formats in which chat templates write tool calls, and named templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from unit.data.test_chat import ROLES, TOOLS, TURN, TURNS, conversation, read
from unit.data.test_tokenizers import make_hf

from megatron_brorl.checkpoints.hugging_face import copy_companions
from megatron_brorl.data.source import tokenizer_digest
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.environments.calls import find_calls
from megatron_brorl.errors import UserError


def template(call: str, begin: str = "<|assistant|>\n", thought: str = "") -> str:
    """Return a template that writes calls in a given form, which has the variable c."""
    return (
        "{{ 'tools: ' ~ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'assistant' %}"
        + f"{begin}{thought}{{{{ m.content }}}}{{% for t in m.tool_calls or [] %}}{{% set c = t.function %}}{call}"
        + "{% endfor %}</s>\n{% else %}<|user|>{{ m.content }}</s>\n{% endif %}{% endfor %}"
        + f"{{% if add_generation_prompt %}}{begin}{thought.partition(chr(10))[0]}{{% endif %}}"
    )


# As in Llama 3.2.
LLAMA = template('{{ \'{"name": "\' ~ c.name ~ \'", "parameters": \' ~ c.arguments | tojson ~ "}" }}')
# As in Qwen3-Coder, which writes numbers and booleans as Python does.
PARAMETERS = (
    "{% for k, v in c.arguments | items %}<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is sequence and v is"
    " not string) else v | string }}\n</parameter>\n{% endfor %}"
)
XML = "<tool_call>\n<function={{ c.name }}>\n" + PARAMETERS + "</function>\n</tool_call>"
CODER = template("\n" + XML)
# As in Qwen3.5, whose prompts end with <think> and whose turns have an empty thought.
THINKING = template(XML, thought="<think>\n\n</think>\n\n")
READABLE = {"hermes": TOOLS, "no calls": ROLES, "json": LLAMA, "xml": CODER, "xml after a thought": THINKING}
UNREADABLE = {
    "mistral": template("[TOOL_CALLS] [{{ c | tojson }}]"),
    "not escaped": template('<tool_call>{"name": "{{ c.name }}", "arguments": {{ c.arguments }}}</tool_call>'),
    "other tag": template("<function={{ c.name }}>{{ c.arguments | tojson }}</function>"),
    "other key": template('<tool_call>{"name": "{{ c.name }}", "input": {{ c.arguments | tojson }}}</tool_call>'),
    "no call": template("{# tool_calls #}"),
}


def load(directory: Path, chat_template: str) -> tuple[Any, Any]:
    """Return the tokenizer of a model directory and that of transformers."""
    make_hf(directory, chat_template=chat_template)
    return load_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


@pytest.mark.parametrize("name", READABLE)
def test_calls_that_a_template_writes_are_read_back(tmp_path, name):
    """The text is that of transformers."""
    tokenizer, library = load(tmp_path, READABLE[name])
    call_format = tokenizer.call_format({})
    assert call_format == {"json": "json"}.get(name, "hermes")
    before = library.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    nested = {"a": {"b": [None, 1.5, "<b>"]}, "path": "\n\tä\\n"} if "xml" not in name else {"path": "\n\tä\\n"}
    for arguments in ({"a": "1 </think> </tool_call>\n"}, {"a": '"', "b": "<think>"}, nested, {}):
        calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}] * 2
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        text = library.apply_chat_template([TURNS[0], turn], tokenize=False).removeprefix(before).partition("</s>")[0]
        calls_read = find_calls(text, call_format, in_thought=before.endswith("<think>"))
        expected = [] if name == "no calls" else [("add", arguments)] * 2
        assert [(call.name, call.arguments) for call in calls_read] == expected


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_template_whose_calls_cannot_be_read_is_refused(tmp_path, name):
    """Training on its rows with calls, too. Other rows can be used."""
    tokenizer, _ = load(tmp_path, UNREADABLE[name])
    message = rf"{tmp_path}[^\n]*: the chat template writes a tool call as [^\n]*environments\.md$"
    with pytest.raises(UserError, match=message):
        tokenizer.call_format({})
    with pytest.raises(UserError, match=message):
        read(tmp_path, {"prompt": conversation("7")}, tokenizer, chat=True)
    assert read(tmp_path, {"prompt": [*TURNS, *TURN]}, tokenizer, chat=True)


def test_prompts_with_tools_use_the_template_of_transformers(tmp_path):
    """Exports and digests include the template with the name tool_use."""
    directory, export = tmp_path / "model", tmp_path / "export"
    _, library = load(directory, ROLES)
    library.chat_template = {"default": ROLES, "tool_use": LLAMA + "{{ style }}{{ strftime_now('%Y') }}"}
    library.save_pretrained(str(directory))
    export.mkdir()
    copy_companions(directory, export)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for tokenizer in map(load_tokenizer, (directory, export)):
        for variables in ({}, {"tools": tools}, {"tools": tools, "style": "brief"}):
            expected = library.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True, **variables)
            assert tokenizer.apply_chat(TURNS, variables)[0] == expected
        assert expected.endswith(f"brief{tokenizer.template_date.year}")
        assert tokenizer.template_reads("tools", tools)
        assert not tokenizer.template_reads("tools")
        assert (tokenizer.call_format({}), tokenizer.call_format({"tools": tools})) == ("hermes", "json")
        result = [{"role": "tool", "content": "7"}]
        text = tokenizer.decode_all(tokenizer.continuation(result, True, {"tools": tools}))
        assert text.startswith("\n<|user|>7</s>\n<|assistant|>\n")
        assert tokenizer.continuation(result, True) == tokenizer.encode_prompt("", "<|tool|>7</s><|assistant|>")
    digest = tokenizer_digest(directory)
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA)
    assert tokenizer_digest(directory) != digest
    with pytest.raises(UserError, match=r"chat_template_kwargs\.style: the chat template of .* reads no such variable"):
        load_tokenizer(directory).apply_chat(TURNS, {"tools": tools, "style": "brief"})
