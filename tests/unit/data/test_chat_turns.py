"""Targets with several turns: the tokens and the mask of chat templates and of plain tags."""

from __future__ import annotations

import json
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
from megatron_brorl.types import Prompt

# Calls and results as in Qwen's templates. transformers finds the mask by the {% generation %} tags.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "</s>{% endgeneration %}{{ '\n' }}{% else %}<|user|>{% if m.role == 'tool' %}<tool_response>{{ m.content }}"
    "</tool_response>{% else %}{{ m.content }}{% endif %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Only the last two messages keep their text.
REWRITING = TEMPLATE.replace("{{ m.content }}{% for c", "{% if loop.revindex < 3 %}{{ m.content }}{% endif %}{% for c")


def call(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


CONVERSATION = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "12 + 7 + 3?"},
    {**call(a=12, b=7), "content": "First 12 + 7."},
    {"role": "tool", "name": "add", "content": "19"},
    call(a=19, b=3),
    {"role": "tool", "content": "22"},
    {"role": "assistant", "content": "It is 22"},
]


def read(folder: Path, row: dict[str, Any], tokenizer: Any, chat: bool) -> Prompt:
    (folder / "f.jsonl").write_text(json.dumps(row) + "\n")
    return tokenize(read_rows(folder / "f.jsonl"), tokenizer, DataConfig(chat=chat), 200)[0]


@pytest.mark.parametrize("as_text", [False, True])
def test_turns_of_a_template_are_those_of_transformers(tmp_path: Path, as_text: bool) -> None:
    """Compare with return_assistant_tokens_mask. Arguments may be a string of JSON, as OpenAI has them."""
    directory = make_hf(tmp_path / "hf", chat_template=TEMPLATE)
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    rendered = library.apply_chat_template(
        CONVERSATION, return_assistant_tokens_mask=True, return_dict=True, add_generation_prompt=False
    )
    given = json.loads(json.dumps(CONVERSATION))
    for message in given if as_text else ():
        for own in message.get("tool_calls", ()):
            own["function"]["arguments"] = json.dumps(own["function"]["arguments"])
    prompt = read(tmp_path, {"prompt": given}, load_tokenizer(directory), chat=True)

    (asked, response), *_ = sft_examples([prompt], load_tokenizer(directory))
    whole = [*asked, *response.token_ids]
    assert rendered["input_ids"][: len(whole)] == whole
    assert library.decode(rendered["input_ids"][len(whole) :]) == "\n"
    assert rendered["assistant_masks"][len(asked) : len(whole)] == list(map(int, response.trained))
    assert library.decode(asked).endswith("12 + 7 + 3?</s>\n<|assistant|>")
    assert prompt.answer == "It is 22"


def test_turns_in_tags_are_encoded_apart(tmp_path: Path) -> None:
    """The expected tokens are those of a rollout: a turn ends with </call> or EOS, and observations are appended."""
    tokenizer = train_sentencepiece([*SUMS, "<call>add: 1</call><result>2</result>"], tmp_path / "sp", 600)
    row = {"prompt": "3 + 4", "answer": "7", "target": "x<result>no</result><call>add: 3 4</call><result>7</result>7"}
    ((_, response),) = sft_examples([read(tmp_path, row, tokenizer, chat=False)], tokenizer)
    expected: list[tuple[int, bool]] = []
    for text in ("x", "<result>no</result>", "<call>add: 3 4</call>", "<result>7</result>"):
        expected += [(i, "result" not in text) for i in tokenizer.encode(text)]
        expected += [(tokenizer.eos_id, True)] if text == "x" else []
    expected += [(i, True) for i in (*tokenizer.encode("7"), tokenizer.eos_id)]
    assert list(zip(response.token_ids, response.trained, strict=True)) == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [("1<result>2", "do not match"), ("1</result>2", "do not match"), ("1<result>2</result>", "ends with an observ")],
)
def test_targets_without_matching_tags_are_refused(tmp_path: Path, target: str, message: str) -> None:
    tokenizer = train_sentencepiece(["12<result></result>"], tmp_path / "sp", 60)
    with pytest.raises(UserError, match=rf"f\.jsonl:1: target: .*{message}"):
        read(tmp_path, {"prompt": "1", "target": target}, tokenizer, chat=False)


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        (REWRITING, "19", "changes earlier text when a turn"),
        (TEMPLATE.replace("</s>{% endgen", "{% endgen"), "19", "ends a turn of the assistant without a stop token"),
        (TEMPLATE, "a</s>", "a message contains a special token"),
    ],
)
def test_templates_whose_turns_cannot_be_found_are_refused(
    tmp_path: Path, template: str, content: str, message: str
) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path / "hf", chat_template=template))
    turns = [*CONVERSATION[2:4], {"role": "tool", "content": content}, CONVERSATION[-1]]
    with pytest.raises(UserError, match=rf"f\.jsonl:1: .*{message}") as e:
        read(tmp_path, {"prompt": turns}, tokenizer, chat=True)
    assert "\n" not in str(e.value)
