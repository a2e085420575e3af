"""Turns and the tokens between them, against the rendering of whole conversations by transformers."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from unit.data.test_tokenizers import SUMS, make_hf

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.prompts import read_rows, sft_examples, tokenize
from megatron_brorl.data.sentencepiece import train_sentencepiece
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

PROMPT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
# As in SmolLM2: the name of every role.
PLAIN = (
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' + m.role }}\n{{ m.content }}"
    "</s>\n{% endfor %}" + PROMPT
)
# As in Qwen 2.5: consecutive results of tools share a message. transformers finds the mask by the {% generation %} tags.
TOOLS = (
    "{% if tools %}<|user|>tools\n{{ tools | tojson }}</s>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|user|>{% endif %}<tool_response>{{ m.content }}"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}</s>\n{% endif %}{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "</s>{% endgeneration %}{{ '\n' }}{% else %}<|user|>{{ m.content }}</s>\n{% endif %}{% endfor %}" + PROMPT
)
# As in Qwen 3: only turns after the last question keep their thoughts, and the last turn has one in any case.
THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}<|assistant|>\n"
    "{% if loop.index0 > ns.last and (loop.last or parts | length > 1) %}<think>\n"
    "{{ parts[0].split('<think>\n')[-1] if parts | length > 1 else '\n' }}</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}</s>\n"
    "{% else %}<|user|>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endif %}{% endfor %}"
    + PROMPT
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
WITHOUT_STOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + PROMPT
NO_TOOLS = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{{ m.content }}</s>{% endfor %}"

RESULTS = [{"role": "tool", "name": "add", "content": "12 + 7 = 19"}, {"role": "tool", "content": " two\nlines "}]
OBSERVATION = [{"role": "user", "content": "higher"}]
TURN = [{"role": "assistant", "content": "19"}]
THOUGHT = [{"role": "assistant", "content": "<think>\nadd\n</think>\n\n19"}]


def conversation(text: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": {"a": 12, "b": text}}
    return [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "tool_calls": [{"function": function}]},
        {"role": "user", "content": f"12 + {text}?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [{"function": function}]},
        {"role": "tool", "name": "add", "content": text},
        {"role": "tool", "content": "22"},
        {"role": "assistant", "tool_calls": [{"function": function}, {"function": function}]},
        {"role": "tool", "content": "34"},
        {"role": "assistant", "content": f"It is {text}"},
    ]


def read(folder: Path, row: dict[str, Any], tokenizer: Any, **config: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the prompt and of the response for supervised training, and its mask."""
    (folder / "f.jsonl").write_text(json.dumps(row) + "\n")
    prompts = tokenize(read_rows(folder / "f.jsonl"), tokenizer, DataConfig(**config), 500)
    ((ids, response),) = sft_examples(prompts, tokenizer)
    return ids, list(response.token_ids), list(map(int, response.trained))


@pytest.mark.parametrize("text", ["19", "</s> <|assistant|>\u2039turn\u203a<s>"])
def test_turns_for_supervised_training_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    """Control tokens in the row stay text. Arguments may be a string of JSON, as OpenAI has them."""
    directory = make_hf(tmp_path / "hf", chat_template=TOOLS)
    tokenizer = load_tokenizer(directory)
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    frame = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    options = {**frame, "return_dict": True, "return_assistant_tokens_mask": True}
    whole = library.apply_chat_template(conversation("19"), **options)
    begin = len(library.apply_chat_template(conversation("19")[:3], add_generation_prompt=True, **options)["input_ids"])

    row = conversation(text)
    row[3]["tool_calls"] = [{"function": {"name": "add", "arguments": json.dumps({"a": 12, "b": text})}}]
    asked, response, trained = read(tmp_path, {"prompt": row}, tokenizer, chat=True, chat_template_kwargs=frame)
    ids = [*asked, *response, *library("\n").input_ids]  # The template ends with a line break.
    assert ids == whole["input_ids"] or text != "19"

    def spans(ids: list[int], mask: list[int]) -> list[tuple[int, int, str]]:
        """Return the control token or 4, the mask and the text of parts."""
        groups = groupby(zip(ids, mask, strict=True), lambda pair: (min(pair[0], 4), pair[1]))
        return [(*key, library.decode([i for i, _ in pairs])) for key, pairs in groups]

    expected = spans(whole["input_ids"], [0] * begin + whole["assistant_masks"][begin:])
    found = spans(ids, [0] * len(asked) + trained + [0])
    assert found == [(token, own, part.replace("19", text)) for token, own, part in expected]


@pytest.mark.parametrize("template", [PLAIN, TOOLS, THOUGHTS])
@pytest.mark.parametrize("messages", [RESULTS, OBSERVATION, TURN, THOUGHT], ids=["tools", "user", "turn", "thought"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "no thinking"])
def test_continuations_are_the_rest_of_the_conversation(
    tmp_path: Path, template: str, messages: list[dict[str, str]], variables: dict[str, Any]
) -> None:
    """The conversation is longer than the one with which the continuation is computed."""
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=template))
    library = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    history = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "12 + 7?"},
    ]
    options = {"tokenize": False, **variables}
    if messages[0]["role"] == "assistant":
        asked = library.apply_chat_template(history, add_generation_prompt=True, **options)
        whole = library.apply_chat_template([*history, *messages], **options)
        rest = whole.removesuffix("\n").removeprefix(asked)
    else:
        history.append({"role": "assistant", "content": "I add 12 and 7"})
        whole = library.apply_chat_template([*history, *messages], add_generation_prompt=True, **options)
        rest = whole.split("I add 12 and 7</s>")[1]
    if (template, messages) == (THOUGHTS, THOUGHT) and variables:  # The turn would begin with two thoughts.
        with pytest.raises(UserError, match="does not begin a turn of the assistant as it asks for one"):
            tokenizer.continuation(messages, True, variables)
    else:
        assert tokenizer.continuation(messages, True, variables) == library(rest).input_ids


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (WITHOUT_STOP, OBSERVATION, "the chat template does not begin a turn"),
        (WITHOUT_STOP, TURN, "the chat template does not begin a turn"),
        (NO_TOOLS, RESULTS, "the chat template refuses messages of the roles user, assistant, tool, tool: no tools"),
    ],
)
def test_templates_that_cannot_frame_turns_are_refused(
    tmp_path: Path, template: str, messages: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(f'{tmp_path}: {message}')}[^\n]*$"):
        load_tokenizer(make_hf(tmp_path, chat_template=template)).continuation(messages, True)


def test_turns_without_a_template(tmp_path: Path) -> None:
    """The expected tokens are those of a rollout: a turn ends with </call> or EOS, and observations are appended."""
    pieces = train_sentencepiece([*SUMS, "<call>add: 1</call><result>2</result>"], tmp_path / "sp", 600)
    row = {"prompt": "3 + 4", "answer": "7", "target": "x<result>no</result><call>add: 3 4</call><result>7</result>7"}
    for tokenizer in (pieces, load_tokenizer(make_hf(tmp_path / "hf"))):
        parts = ("x", "<result>no</result>", "<call>add: 3 4</call>", "<result>7</result>", "7")
        ends = {"x": [tokenizer.eos_id], "7": [tokenizer.eos_id]}
        expected = [
            (i, int("result" not in part)) for part in parts for i in tokenizer.encode(part) + ends.get(part, [])
        ]
        _, response, trained = read(tmp_path, row, tokenizer)
        assert list(zip(response, trained, strict=True)) == expected
        observed = tokenizer.encode("<result>12 + 7 = 19</result><result> two\nlines </result>")
        assert tokenizer.continuation(RESULTS, False) == observed
    with pytest.raises(UserError, match="has no chat template"):
        pieces.continuation(OBSERVATION, True)
    for target in ("1<result>2", "1</result>2", "1<result>2</result>"):
        with pytest.raises(UserError, match=r"f\.jsonl:1: target: <result>"):
            read(tmp_path, {"prompt": "1", "target": target}, pieces)
