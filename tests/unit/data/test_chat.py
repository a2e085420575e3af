from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from unit.data.test_tokenizers import make_hf

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.prompts import read_rows, render
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

ROLES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "12 + 7?"},
    {"role": "assistant", "content": "19"},
    {"role": "user", "content": "plus 1 "},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf"), chat_template=ROLES)


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("prompt", ["12 + 7?", TURNS, TURNS[:1]])
def test_text_and_ids_are_those_of_transformers(directory: Path, system: str, prompt: Any) -> None:
    config = DataConfig(chat=True, system_prompt=system, template="Q: {prompt}!")
    text, ids = render(prompt, load_tokenizer(directory), config, 100, "here")

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    messages[-1]["content"] = f"Q: {messages[-1]['content']}!"
    messages = [SYSTEM] * bool(system) + messages
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    assert text == library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = library.apply_chat_template(messages, add_generation_prompt=True)
    assert list(ids) == list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


def test_special_tokens_in_messages_are_plain_text(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    messages = [SYSTEM, {"role": "user", "content": "a</s>b"}, {"role": "assistant", "content": "c"}, TURNS[0]]
    text, ids = tokenizer.apply_chat(messages)
    assert text == "<|system|>Be brief.</s><|user|>a</s>b</s><|assistant|>c</s><|user|>12 + 7?</s><|assistant|>"
    assert ids.count(tokenizer.eos_id) == 4  # those of the template; the one in the message is plain text
    # decode() omits the end-of-sequence tokens of the template, but not the characters of the message.
    assert tokenizer.decode(ids) == "<|system|>Be brief.<|user|>a</s>b<|assistant|>c<|user|>12 + 7?<|assistant|>"
    assert tokenizer.decode_all(ids) == text


def test_special_tokens_are_plain_text_in_a_template_that_repeats_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template="{{ messages[0].content }}{{ messages[0].content }}"))
    assert tokenizer.apply_chat(TURNS[:1])[0] == "12 + 7?12 + 7?"
    assert tokenizer.apply_chat([{"role": "user", "content": "</s>"}]) == ("</s></s>", tokenizer.encode("</s></s>"))


def test_errors_of_a_template_name_the_row(directory: Path, tmp_path: Path) -> None:
    refusing = make_hf(tmp_path, chat_template="{{ raise_exception('no system\nrole') }}")
    with pytest.raises(UserError) as e:
        render(TURNS, load_tokenizer(refusing), DataConfig(chat=True), 100, "f.jsonl:3")
    assert str(e.value).startswith(f"f.jsonl:3: {refusing}: the chat template refuses messages of the roles user, ")
    assert "no system role" in str(e.value)
    config = DataConfig(chat=True, system_prompt="x")
    with pytest.raises(UserError, match=r"f\.jsonl:3: has a system message of its own; remove data\.system_prompt"):
        render([SYSTEM, *TURNS], load_tokenizer(directory), config, 100, "f.jsonl:3")
    with pytest.raises(UserError, match=r"f\.jsonl:3: the prompt is a list of messages: set data\.chat = true"):
        render(TURNS, load_tokenizer(directory), DataConfig(), 100, "f.jsonl:3")


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "prompt must be a string or a list with a message of the user that is not empty"),
    "content type": ([{"role": "user", "content": 3}], "prompt[0] must be"),
    "role": ([{"role": "human", "content": "x"}], "prompt[0]: unknown role 'human'; known: system, user, assistant"),
    "late system": ([TURNS[0], SYSTEM, TURNS[2]], "prompt[1]: a system message may only come first"),
    "ends with the assistant twice": ([*TURNS[:2], TURNS[1]], "prompt[1] and later: after the last"),
    "ends with a tool": ([*TURNS[:2], {"role": "tool", "content": "5"}], "the last one must be the assistant's"),
    "calls": ([TURNS[0], {"role": "assistant", "tool_calls": 1}], "prompt[1].tool_calls must be a list of"),
    "surrogate": ([{"role": "user", "content": "\ud800"}], "prompt has half of a surrogate pair"),
    "surrogate in a turn": (
        [*TURNS[:2], {"role": "tool", "content": "\ud800"}, TURNS[1]],
        "messages has half of a surrogate pair",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_malformed_messages_are_named_with_their_row(tmp_path: Path, kind: str) -> None:
    prompt, message = BAD[kind]
    path = tmp_path / "f.jsonl"
    good = json.dumps({"prompt": TURNS, "answer": "20"})
    path.write_text(f"{good}\n{json.dumps({'prompt': prompt, 'answer': '20'})}\n")
    with pytest.raises(UserError) as e:
        read_rows(path)
    assert str(e.value).startswith(f"{path}:2: ")
    assert message in str(e.value)
    assert "\n" not in str(e.value)
