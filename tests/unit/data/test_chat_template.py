"""Compare variables and dates of chat templates with transformers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from unit.data.test_tokenizers import make_hf

from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.prompts import render, sft_examples
from megatron_brorl.data.source import load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

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
# The date in a macro, after {% generation %}, and with the time of day.
MACRO = (
    "{% macro now() %}{{ strftime_now('%Y-%m-%d %H:%M') }}{% endmacro %}{% for m in messages %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% endfor %}{{ now() }}"
)
MESSAGES = [{"role": "user", "content": "12 + 7?"}]
DAY = datetime.date(2026, 1, 31)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False},
        {"effort": "high", "style": {"tone": ["short", 1]}},
    ],
)
def test_prompts_are_those_of_transformers_with_the_same_variables(tmp_path: Path, variables: dict[str, Any]) -> None:
    directory = make_hf(tmp_path / "hf", chat_template=THINKING)
    tokenizer = load_tokenizer(directory)
    text, ids = render("a</s>b", tokenizer, DataConfig(chat=True, chat_template_kwargs=variables), 200, "here")
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    messages = [{"role": "user", "content": "a</s>b"}]
    assert text == library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert tokenizer.decode_all(ids) == text
    assert ("<think>\n\n</think>" in text) == (variables.get("enable_thinking") is False)


def test_every_reader_of_rows_passes_the_variables_on(tmp_path: Path) -> None:
    """Test training, held-out rows, benchmarks and supervised examples. The digest of rows depends on the variables."""
    tokenizer = load_tokenizer(make_hf(tmp_path / "hf", chat_template=THINKING))
    rows = tmp_path / "f.jsonl"
    rows.write_text(json.dumps({"prompt": "12 + 7?", "answer": "19"}) + "\n")
    digests = []
    for variables, end in (({}, "<think>\n"), ({"enable_thinking": False}, "</think>\n\n")):
        config = DataConfig(train=(str(rows),), held_out=(str(rows),), chat=True, chat_template_kwargs=variables)
        sources = load_sources(config, tokenizer, 100, 0)
        (asked,), (kept,) = sources.train.prompts(0, 1), sources.held_out
        benchmark = load_benchmarks([f"b={rows}"], config, tokenizer, 100)[0]["b"][0]
        for prompt in (asked, kept, benchmark):
            assert prompt.text.endswith(end)
            assert tokenizer.decode_all(prompt.token_ids) == prompt.text
        assert sft_examples([asked], tokenizer)[0][0] == list(asked.token_ids)
        digests.append(sources.digests(tmp_path / "hf", None))
    assert digests[0]["tokenizer"] == digests[1]["tokenizer"]
    assert digests[0]["train"] != digests[1]["train"]
    assert digests[0]["held_out"] != digests[1]["held_out"]


@pytest.mark.parametrize("name", ["enable_thinkng", "tokenize"])
def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path, name: str) -> None:
    directory = make_hf(tmp_path, chat_template=THINKING + DATED)
    config = DataConfig(chat=True, chat_template_kwargs={name: 1})
    with pytest.raises(UserError) as e:
        render("a", load_tokenizer(directory), config, 200, "f.jsonl:3")
    assert str(e.value).startswith(f"f.jsonl:3: data.chat_template_kwargs.{name}: the chat template of {directory} ")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("template", "variables", "text"),
    [
        (DATED, {}, "Today: 31 Jan 2026\n<|user|>12 + 7?<|assistant|>"),
        (DATED, {"date_string": "26 Jul 2024"}, "Today: 26 Jul 2024\n<|user|>12 + 7?<|assistant|>"),
        (MACRO, {}, "12 + 7?2026-01-31 00:00"),
    ],
)
def test_templates_write_the_date_of_the_run(tmp_path: Path, template: str, variables: Any, text: str) -> None:
    directory = make_hf(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(directory, DAY)
    assert tokenizer.apply_chat(MESSAGES, variables)[0] == text
    assert tokenizer.template_date == DAY
    assert load_tokenizer(directory).template_date == datetime.date.today()


@pytest.mark.parametrize("begin", ["\n", "  {% if true %}x{% endif %}\n", "{# c #}\n"])
@pytest.mark.parametrize("form", ["%d %b %Y", "%A, %B %-d, %y", "%%d %H:%M:%S %j %U", "", "Y%Yé%", "%F %T %e %p %Z"])
def test_dates_and_text_are_those_of_transformers_on_that_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, form: str
) -> None:
    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Day:
            return cls(2026, 1, 31)

    template = f"[{{{{ strftime_now('{form}') }}}}]\n{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}} \n"
    directory = make_hf(tmp_path, chat_template=begin + template)
    text = load_tokenizer(directory, DAY).apply_chat(MESSAGES)[0]
    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    library = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    assert text == library.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
