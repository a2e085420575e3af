"""Turns and the tokens between them, against the rendering of whole conversations by transformers."""

from __future__ import annotations

import json
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
# As in Qwen 2.5: consecutive results of tools share a message. transformers reads the mask from {% generation %}.
TOOLS = (
    "{% if tools %}<|user|>tools\n{{ tools | tojson }}</s>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|user|>{% endif %}<tool_response>{{ m.content }}"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}</s>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "</s>{% endgeneration %}{{ '\n' }}{% else %}<|user|>{{ m.content }}</s>\n{% endif %}{% endfor %}" + PROMPT
)
# As in Qwen 3: only turns after the last question keep their thoughts, and the last turn always has one.
THOUGHTS = (
    "{% set last = messages.index((messages | selectattr('role', 'eq', 'user') | list)[-1]) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>\n\n') %}<|assistant|>\n"
    "{% if loop.index0 > last and (loop.last or parts[1:]) %}{{ parts[0] if parts[1:] else '<think>\n\n' }}</think>\n\n"
    "{% endif %}{{ parts[-1] }}</s>\n{% else %}<|user|>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endif %}"
    "{% endfor %}"
    + PROMPT
    + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
WITHOUT_STOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + PROMPT

RESULTS = [{"role": "tool", "name": "add", "content": "12 + 7 = 19"}, {"role": "tool", "content": " two\nlines "}]
OBSERVATION = [{"role": "user", "content": "higher"}]
TURN = [{"role": "assistant", "content": "19"}]
THOUGHT = [{"role": "assistant", "content": "<think>\nadd\n</think>\n\n19"}]


def conversation(text: str) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "add", "arguments": {"a": 12, "b": text}}}]
    return [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "tool_calls": calls},
        {"role": "user", "content": f"12 + {text}?"},
        {"role": "assistant", "tool_calls": calls * 2},
        *({"role": "tool", "name": "add", "content": result} for result in (text, "22")),
        {"role": "assistant", "content": f"It is {text}"},
    ]


def read(folder: Path, row: dict[str, Any], tokenizer: Any, **config: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the prompt and of the response for supervised training, and the mask of the response."""
    (folder / "f.jsonl").write_text(json.dumps(row) + "\n")
    prompts = tokenize(read_rows(folder / "f.jsonl"), tokenizer, DataConfig(**config), 500)
    ((ids, response),) = sft_examples(prompts, tokenizer)
    return ids, list(response.token_ids), list(map(int, response.trained))


@pytest.mark.parametrize("text", ["19", "</s> <|assistant|>\u2039turn\u203a<s>"])
def test_turns_for_supervised_training_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    """Control tokens in the row stay text. Arguments may be a string of JSON, as OpenAI has them."""
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=TOOLS))
    library = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    tools = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    options = {**tools, "return_dict": True, "return_assistant_tokens_mask": True}
    whole = library.apply_chat_template(conversation("19"), **options)
    begin = len(library.apply_chat_template(conversation("19")[:3], add_generation_prompt=True, **options)["input_ids"])

    row = conversation(text)
    function = row[3]["tool_calls"][0]["function"]
    row[3]["tool_calls"] = [{"function": {**function, "arguments": json.dumps(function["arguments"])}}] * 2
    asked, response, trained = read(tmp_path, {"prompt": row}, tokenizer, chat=True, chat_template_kwargs=tools)
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
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "no thinking"])
def test_turns_and_answers_are_the_rest_of_the_conversation(tmp_path: Path, template: str, variables: Any) -> None:
    """The conversation is longer than the one with which the continuation is computed."""
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=template))
    library = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)

    def rendered(messages: list[dict[str, Any]], prompt: bool) -> str:
        return str(library.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables))

    history = conversation("7")[:3]
    for messages in (RESULTS, OBSERVATION):
        rest = rendered([*history, *TURN, *messages], True).partition("19</s>")[2]
        assert tokenizer.continuation(messages, True, variables) == library(rest).input_ids
    for turn in (TURN,) if variables else (TURN, THOUGHT):
        rest = rendered([*history, *turn], False).removeprefix(rendered(history, True)).removesuffix("\n")
        assert tokenizer.continuation(turn, True, variables) == library(rest).input_ids


@pytest.mark.parametrize(
    ("template", "messages"),
    [(WITHOUT_STOP, OBSERVATION), (WITHOUT_STOP, TURN), (THOUGHTS, THOUGHT), (PLAIN, conversation("7")[3:4])],
    ids=["answer", "turn", "two thoughts", "no calls"],
)
def test_templates_that_cannot_frame_turns_are_refused(tmp_path: Path, template: str, messages: Any) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=template))
    with pytest.raises(UserError, match=r"^[^\n]*: the chat template does not write a turn[^\n]*$"):
        tokenizer.continuation(messages, True, {"enable_thinking": False})


def test_turns_without_a_template(tmp_path: Path) -> None:
    """The expected tokens are those of a rollout: a turn ends with </call> or EOS, and observations are appended."""
    pieces = train_sentencepiece([*SUMS, "<call>add: 1</call><result>2</result>"], tmp_path / "sp", 600)
    row = {"prompt": "3 + 4", "answer": "7", "target": "x<result>no</result><call>add: 3 4</call><result>7</result>7"}
    for tokenizer in (pieces, load_tokenizer(make_hf(tmp_path / "hf"))):
        expected: list[tuple[int, int]] = []
        for text in ("x", "<result>no</result>", "<call>add: 3 4</call>", "<result>7</result>", "7"):
            ids = tokenizer.encode(text) + [tokenizer.eos_id] * (text in "x7")
            expected += [(i, int("result" not in text)) for i in ids]
        _, response, trained = read(tmp_path, row, tokenizer)
        assert list(zip(response, trained, strict=True)) == expected
        observed = tokenizer.encode("<result>12 + 7 = 19</result><result> two\nlines </result>")
        assert tokenizer.continuation(RESULTS, False) == observed
    with pytest.raises(UserError, match="has no chat template"):
        pieces.continuation(OBSERVATION, True)
    for target in ("1<result>2", "1</result>2", "1<result>2</result>"):
        with pytest.raises(UserError, match=r"f\.jsonl:1: target: <result>"):
            read(tmp_path, {"prompt": "1", "target": target}, pieces)
