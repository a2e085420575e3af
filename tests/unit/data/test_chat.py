from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import train_sentencepiece
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
from unit.data.test_tokenizers import SUMS, make_hf

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.prompts import read_rows, render, sft_examples, tokenize
from megatron_brorl.data.source import load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

ROLES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION, ANSWER = {"role": "user", "content": "12 + 7?"}, {"role": "assistant", "content": "19"}
TURNS = [QUESTION, ANSWER, {"role": "user", "content": "plus 1 "}]
# As in Qwen 2.5: consecutive results of tools share a message. transformers reads the mask from {% generation %}.
TOOLS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{% generation %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ '<|user|>' if m.role == 'user' or loop.previtem.role != 'tool' }}\n"
    "{{ m.content }}{{ '</s>\n' if m.role == 'user' or loop.last or loop.nextitem.role != 'tool' }}{% endif %}"
    "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
)
# As in Qwen 3: only turns after the last question keep their thoughts, and the last turn always has one.
THOUGHTS = (
    "{% set last = messages.index((messages | selectattr('role', 'eq', 'user') | list)[-1]) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>\n\n') %}<|assistant|>\n"
    "{% if loop.index0 > last and (not add_generation_prompt or parts[1:]) %}"
    "{{ parts[0] if parts[1:] else '<think>\n\n' }}</think>\n\n{% endif %}{{ parts[-1] }}</s>\n"
    "{% else %}<|user|>{{ m.content | trim }}</s>\n{% endif %}{% endfor %}"
    "{{ '<|assistant|>\n' ~ ('<think>\n\n</think>\n\n' if enable_thinking is false) if add_generation_prompt }}"
)
TURN = [{"role": "assistant", "content": "20"}]
THOUGHT = [{"role": "assistant", "content": "<think>\nadd\n</think>\n\n20"}]


def conversation(text: str) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "add", "arguments": {"a": 12, text: text}}}] * 2
    turns = [TURNS[0], {**TURNS[1], "tool_calls": calls}, {"role": "user", "content": f"12 + {text}?"}]
    results = [{"role": "tool", "name": "add", "content": result} for result in (text, "22")]
    return [*turns, {"role": "assistant", "tool_calls": calls}, *results, {"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("hf"), chat_template=ROLES)


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("prompt", ["12 + 7?", TURNS, TURNS[:1]])
def test_text_and_ids_are_those_of_transformers(directory, system, prompt):
    config = DataConfig(chat=True, system_prompt=system, template="Q: {prompt}!")
    text, ids = render(prompt, load_tokenizer(directory), config, max_prompt_tokens=100, where="here")

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    messages[-1]["content"] = f"Q: {messages[-1]['content']}!"
    messages = [SYSTEM] * bool(system) + messages
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    assert text == library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = library.apply_chat_template(messages, add_generation_prompt=True)
    assert list(ids) == list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)


def test_special_tokens_in_messages_are_plain_text(directory, tmp_path):
    tokenizer = load_tokenizer(directory)
    messages = [SYSTEM, {"role": "user", "content": "a</s>b"}, {"role": "assistant", "content": "c"}, TURNS[0]]
    text, ids = tokenizer.apply_chat(messages)
    assert text == "<|system|>Be brief.</s><|user|>a</s>b</s><|assistant|>c</s><|user|>12 + 7?</s><|assistant|>"
    assert ids.count(tokenizer.eos_id) == 4  # those of the template; the one in the message is plain text
    # decode() omits the end-of-sequence tokens of the template, but not the characters of the message.
    assert tokenizer.decode(ids) == "<|system|>Be brief.<|user|>a</s>b<|assistant|>c<|user|>12 + 7?<|assistant|>"
    assert tokenizer.decode_all(ids) == text
    # Also in a template that repeats messages.
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template="{{ messages[0].content }}{{ messages[0].content }}"))
    assert tokenizer.apply_chat(TURNS[:1])[0] == "12 + 7?12 + 7?"
    assert tokenizer.apply_chat([{"role": "user", "content": "</s>"}]) == ("</s></s>", tokenizer.encode("</s></s>"))


def test_errors_of_a_template_name_the_row(directory, tmp_path):
    refusing = make_hf(tmp_path, chat_template="{{ raise_exception('no system\nrole') }}")
    for model, messages, config, named in (
        (refusing, TURNS, DataConfig(chat=True), f"{refusing}: the chat template refuses .* no system role"),
        (directory, [SYSTEM, *TURNS], DataConfig(chat=True, system_prompt="x"), r"remove data\.system_prompt"),
        (directory, TURNS, DataConfig(), r"set data\.chat = true"),
    ):
        with pytest.raises(UserError, match=rf"^f\.jsonl:3: [^\n]*{named}"):
            render(messages, load_tokenizer(model), config, 100, "f.jsonl:3")


def read(folder: Path, row: dict[str, Any], tokenizer: Any, **config: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of the prompt and of the response for supervised training, and the mask of the response."""
    (folder / "f.jsonl").write_text(json.dumps(row) + "\n")
    prompts = tokenize(read_rows(folder / "f.jsonl"), tokenizer, DataConfig(**config), 500)
    ((ids, response),) = sft_examples(prompts, tokenizer)
    return ids, list(response.token_ids), list(map(int, response.trained))


@pytest.mark.parametrize("text", ["77", "</s> <|assistant|>\u2039turn\u203a<s>"])
def test_turns_for_supervised_training_are_those_of_transformers(tmp_path, text):
    """Control tokens in the row stay text. Arguments may be a string of JSON, as OpenAI has them."""
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=TOOLS))
    library = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    tools = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}
    options = {**tools, "return_dict": True, "return_assistant_tokens_mask": True}
    whole = library.apply_chat_template(conversation("77"), **options)
    begin = len(library.apply_chat_template(conversation("77")[:3], add_generation_prompt=True, **options)["input_ids"])

    row = conversation(text)
    function = row[3]["tool_calls"][0]["function"]
    row[3]["tool_calls"] = [{"function": {**function, "arguments": json.dumps(function["arguments"])}}] * 2
    prompt, response, trained = read(tmp_path, {"prompt": row}, tokenizer, chat=True, chat_template_kwargs=tools)
    ids = [*prompt, *response, *library("\n").input_ids]  # The template ends with a line break.
    mask = [0] * len(prompt) + trained + [0]
    expected_mask = [0] * begin + whole["assistant_masks"][begin:]
    assert (ids, mask) == (whole["input_ids"], expected_mask) or text != "77"
    for is_trained in (0, 1):
        pairs = ((ids, mask), (whole["input_ids"], expected_mask))
        tokens, expected = ([i for i, m in zip(*pair, strict=True) if m == is_trained] for pair in pairs)
        assert library.decode(tokens) == library.decode(expected).replace("77", text)
        assert [i for i in tokens if i < 4] == [i for i in expected if i < 4]  # control tokens


@pytest.mark.parametrize("template", [ROLES, TOOLS, THOUGHTS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "no thinking"])
def test_turns_and_answers_are_the_rest_of_the_conversation(tmp_path, template, variables):
    """The conversation is longer than the one with which the continuation is computed."""
    tokenizer = load_tokenizer(make_hf(tmp_path, chat_template=template))
    library = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)

    def rendered(messages: list[dict[str, Any]], prompt: bool) -> str:
        return str(library.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **variables))

    for messages in (conversation(" two\nlines ")[4:6], TURNS[:1]):  # two results of tools; a question
        rest = rendered([*TURNS, *TURN, *messages], True).partition("20</s>")[2]
        assert tokenizer.continuation(messages, True, variables) == library(rest).input_ids
        whole = library("</s>" + rest).input_ids  # if a stop string ended the turn before
        assert tokenizer.continuation(messages, True, variables, after_stop=False) == whole
    for turn in (TURN,) if variables else (TURN, THOUGHT):
        rest = rendered([*TURNS, *turn], False).removeprefix(rendered(TURNS, True)).removesuffix("\n")
        assert tokenizer.continuation(turn, True, variables) == library(rest).input_ids


def test_templates_that_cannot_frame_turns_are_refused(tmp_path):
    """The stop token of a turn is missing; there is a second thought; calls are not written."""
    no_stop = TOOLS.replace("{% endfor %}</s>", "{% endfor %}")
    unusable = [(no_stop, TURNS[:1]), (no_stop, TURN), (THOUGHTS, THOUGHT), (ROLES, conversation("7")[3:4])]
    for i, (template, messages) in enumerate(unusable):
        tokenizer = load_tokenizer(make_hf(tmp_path / str(i), chat_template=template))
        with pytest.raises(UserError, match=r"^[^\n]*: the chat template does not write a turn[^\n]*$"):
            tokenizer.continuation(messages, True, {"enable_thinking": False})


def test_turns_without_a_template(tmp_path):
    """The expected tokens are those of a rollout: a turn ends with </call> or EOS, and observations are appended."""
    pieces = train_sentencepiece([*SUMS, "<call>add: 1</call><result>2</result>"], tmp_path / "sp", 600)
    texts = ("x", "<result>no</result>", "<call>add: 3 4</call>", "<result>7</result>", "7")
    for tokenizer in (pieces, load_tokenizer(make_hf(tmp_path / "hf"))):
        parts = [(tokenizer.encode(text) + [tokenizer.eos_id] * (text in "x7"), "result" not in text) for text in texts]
        _, response, trained = read(tmp_path, {"prompt": "3 + 4", "answer": "7", "target": "".join(texts)}, tokenizer)
        assert list(zip(response, trained, strict=True)) == [(i, own) for ids, own in parts for i in ids]
        results = tokenizer.encode("<result>19</result><result>22</result>")
        assert tokenizer.continuation(conversation("19")[4:6], chat=False) == results
    with pytest.raises(UserError, match="has no chat template"):
        pieces.continuation(TURN, chat=True)
    for target in ("1<result>2", "1</result>2", "1<result>2</result>"):
        with pytest.raises(UserError, match=r"f\.jsonl:1: target: <result>"):
            read(tmp_path, {"prompt": "1", "target": target}, pieces)


# As in Qwen 3: an empty thought if thinking is off.
THINKING = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% else %}{{ '<think>\n' }}{% endif %}{% endif %}{{ effort | default('') }}{{ style.tone if style is defined }}"
)
# As in Llama 3: today's date unless a date is given.
DATED = (
    "{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}\n{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
)
MACRO = "{% macro now() %}{{ strftime_now('%H:%M') }}{% endmacro %}{% generation %}{{ now() }}{% endgeneration %}"
DAY = datetime.date(2026, 1, 31)


VARIABLES = [{}, {"enable_thinking": False}, {"effort": "high", "style": {"tone": ["short", 1]}}]


@pytest.mark.parametrize("variables", VARIABLES)
def test_prompts_are_those_of_transformers_with_the_same_variables(tmp_path, variables):
    directory = make_hf(tmp_path / "hf", chat_template=THINKING)
    tokenizer = load_tokenizer(directory)
    text, ids = render("a</s>b", tokenizer, DataConfig(chat=True, chat_template_kwargs=variables), 200, "here")
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    messages = [{"role": "user", "content": "a</s>b"}]
    assert text == library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert tokenizer.decode_all(ids) == text
    assert ("<think>\n\n</think>" in text) == (variables.get("enable_thinking") is False)


def test_every_reader_of_rows_passes_the_variables_on(tmp_path):
    """Test training, held-out rows, benchmarks and supervised examples. The digest of rows depends on the variables."""
    tokenizer = load_tokenizer(make_hf(tmp_path / "hf", chat_template=THINKING))
    rows = tmp_path / "f.jsonl"
    rows.write_text(json.dumps({"prompt": "12 + 7?", "answer": "19"}) + "\n")
    digests = []
    for variables, end in (({}, "<think>\n"), ({"enable_thinking": False}, "</think>\n\n")):
        config = DataConfig(train=(str(rows),), held_out=(str(rows),), chat=True, chat_template_kwargs=variables)
        sources = load_sources(config, tokenizer, 100, 0)
        (train_prompt,), (kept,) = sources.train.prompts(0, 1), sources.held_out
        benchmark = load_benchmarks([f"b={rows}"], config, tokenizer, 100)[0]["b"][0]
        for prompt in (train_prompt, kept, benchmark):
            assert prompt.text.endswith(end)
            assert tokenizer.decode_all(prompt.token_ids) == prompt.text
        assert sft_examples([train_prompt], tokenizer)[0][0] == list(train_prompt.token_ids)
        digests.append(sources.digests(tmp_path / "hf", None))
    assert digests[0]["tokenizer"] == digests[1]["tokenizer"]
    assert digests[0]["train"] != digests[1]["train"]
    assert digests[0]["held_out"] != digests[1]["held_out"]


@pytest.mark.parametrize("name", ["enable_thinkng", "tokenize"])
def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path, name):
    directory = make_hf(tmp_path, chat_template=THINKING + DATED)
    config = DataConfig(chat=True, chat_template_kwargs={name: 1})
    key = rf"data\.chat_template_kwargs\.{name}"
    with pytest.raises(UserError, match=rf"^f\.jsonl:3: {key}: the chat template of {directory} [^\n]*$"):
        render("a", load_tokenizer(directory), config, 200, "f.jsonl:3")


@pytest.mark.parametrize("begin", ["\n", "  {% if true %}x{% endif %}\n", "{# c #}\n", MACRO])
@pytest.mark.parametrize("form", ["%d %b %Y", "%A, %B %-d, %y", "%%d %H:%M:%S %j %U", "", "Y%Yé%", "%F %T %e %p %Z"])
def test_dates_and_text_are_those_of_transformers_on_that_day(tmp_path, monkeypatch, begin, form):
    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Day:
            return cls(2026, 1, 31)

    template = f"[{{{{ strftime_now('{form}') }}}}]\n{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}} \n"
    directory = make_hf(tmp_path, chat_template=begin + template)
    assert load_tokenizer(directory).template_date == datetime.date.today()
    text = load_tokenizer(directory, DAY).apply_chat(TURNS[:1])[0]
    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    assert text == library.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
