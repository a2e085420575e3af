from __future__ import annotations

import decimal
import json
import random
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from tiny_tokenizer import train_sentencepiece

from megatron_brorl.cli.main import main
from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.generate import GeneratedPrompts, generated_rows
from megatron_brorl.data.prompts import read_rows
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import Score, VerifierRow
from megatron_brorl.rewards.verifiers import gym

SUMS = TaskConfig("chain_sum", 3.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 2})
BITS = TaskConfig("count_bits", 1.0, r"number (.*)\?", {"max_n": 1 << 30})
MIX = DataConfig(tasks=(SUMS, BITS), template="{prompt}=")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    return train_sentencepiece(["".join(map(chr, range(32, 127))) + "\n"] * 9, path, 128)


def stream(config: DataConfig, tokenizer: Tokenizer, seed: int = 5, limit: int = 1000, **kw: Any) -> GeneratedPrompts:
    return GeneratedPrompts(config, seed, tokenizer, limit, **kw)


def test_prompts_and_rows_have_correct_answers(tokenizer):
    prompts = stream(MIX, tokenizer).prompts(0, 60)
    for i, prompt in enumerate(prompts):
        assert prompt.id == f"{prompt.metadata['source_dataset']}:5:{i}"
        assert prompt.token_ids == tuple(tokenizer.encode(prompt.text))
        assert prompt.verifier == "reasoning_gym"
        assert prompt.metadata["entry"]["metadata"]["source_index"] == i
    rows = list(generated_rows(MIX.tasks, 5, 80))
    assert len({row["prompt"] for row in rows}) == 80
    # Error messages count lines from 1, and ids have the same numbers.
    assert [row["id"].rpartition(":")[2] for row in rows] == [str(line) for line in range(1, 81)]

    examples = [(p.text.removesuffix("="), p.answer, p.metadata) for p in prompts]
    for text, answer, metadata in [*examples, *((row["prompt"], row["answer"], row["metadata"]) for row in rows)]:
        assert json.loads(json.dumps(metadata)) == metadata
        is_sum = metadata["source_dataset"] == "chain_sum"
        assert answer == str(eval(text) if is_sum else int(text).bit_count())
        row = VerifierRow(id="", prompt=text, answer=answer, metadata=metadata)
        assert gym.verify(answer, row) == Score(1.0)
        assert gym.verify("banana", row).reward < 0.99


def test_a_prompt_is_a_pure_function_of_its_index(tokenizer):
    random.seed(0)
    state, precision = random.getstate(), decimal.getcontext().prec
    forward = stream(MIX, tokenizer).prompts(0, 30)
    other = stream(MIX, tokenizer)
    assert [other.prompts(i, 1)[0] for i in reversed(range(30))] == forward[::-1]
    assert random.getstate() == state
    assert decimal.getcontext().prec == precision
    assert other.prompts(10**9, 1) == stream(MIX, tokenizer).prompts(10**9, 1)


def test_one_task_does_not_change_the_items_of_another(tokenizer):
    long_numbers = TaskConfig("decimal_chain_sum", config={"min_digits": 14, "max_digits": 14})  # more than 12 digits
    rounding = TaskConfig("decimal_arithmetic")  # sets the precision of the process to 12
    mixed = stream(DataConfig(tasks=(long_numbers, rounding)), tokenizer)
    mixed.prompts(0, 20)
    sums = [p for p in mixed.prompts(0, 20) if p.id.startswith("decimal_chain_sum")]
    assert sums
    for prompt in sums:
        (expression,) = re.findall(r"[-+\d. ]{20,}", prompt.text)
        numbers = re.findall(r"[-+]?\d+\.?\d*", expression.replace(" ", ""))
        with decimal.localcontext(decimal.DefaultContext):  # another test may have set 12 digits
            assert decimal.Decimal(prompt.answer or "") == sum(map(decimal.Decimal, numbers))


@pytest.mark.slow
def test_prompts_do_not_depend_on_the_hash_seed(tokenizer):
    code = f"""
import sys
from pathlib import Path
from megatron_brorl.config.schema import ColumnsConfig, DataConfig, TaskConfig
from megatron_brorl.data.generate import GeneratedPrompts
from megatron_brorl.data.tokenizers import load_tokenizer
stream = GeneratedPrompts({MIX!r}, 5, load_tokenizer(Path({str(tokenizer.directory)!r})), 1000)
print([prompt.text for prompt in stream.prompts(0, 20)])
"""
    command, environment = [sys.executable, "-c", code], {"PYTHONHASHSEED": "77"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([prompt.text for prompt in stream(MIX, tokenizer).prompts(0, 20)])


def test_tasks_are_drawn_by_weight(tokenizer):
    names = Counter(prompt.id.split(":")[0] for prompt in stream(MIX, tokenizer).prompts(0, 2000))
    assert abs(names["chain_sum"] - 1500) < 4 * (2000 * 0.75 * 0.25) ** 0.5  # four standard deviations


def test_held_out_prompts_are_different_and_excluded(tokenizer):
    small = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    config = DataConfig(tasks=(small,))
    held_out = stream(config, tokenizer, 2).held_out(100)  # there are 9 * 9 * 2 or 10 * 10 * 2
    texts = {p.text for p in held_out.values()}
    assert len(texts) == 100
    assert [p.id for p in held_out.values()] == [f"chain_sum:2:{i}" for i in range(100)]
    train = stream(config, tokenizer, 1, excluded=held_out.keys())
    prompts = train.prompts(0, 500)
    assert not texts & {p.text for p in prompts}
    assert train.prompts(499, 1) == prompts[499:]
    free = stream(config, tokenizer, 1).prompts(0, 500)
    same = sum(a == b for a, b in zip(free, prompts, strict=True))
    assert 100 < same < 450  # only held-out prompts, 100 of 162 or 200, were replaced: 190 to 250 are expected to stay
    with pytest.raises(UserError, match=r"data\.tasks: 1000 draws in a row .*ask for fewer"):
        stream(config, tokenizer, 2).held_out(300)


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (TaskConfig("puzzle24"), r"data\.tasks\[1\]: .*'puzzle24'"),
        (TaskConfig("gcd", prompt_regex="("), r"data\.tasks\[1\]\.prompt_regex = '\('"),
        (TaskConfig("gcd", prompt_regex="x"), r"data\.tasks\[1\]\.prompt_regex = 'x': needs a group"),
        (TaskConfig("gcd", config={"numbers": 2}), r"data\.tasks\[1\]: .*'numbers'"),
    ],
)
def test_bad_tasks_are_named(tokenizer, task, named):
    with pytest.raises(UserError, match=named):
        stream(DataConfig(tasks=(SUMS, task)), tokenizer)


def test_brorl_data_generate_writes_a_data_file(tmp_path, capsys):
    config, out = tmp_path / "tasks.toml", tmp_path / "gym.jsonl"
    config.write_text('[[data.tasks]]\nname = "gcd"\n')
    for count, file, status, line in [
        ("7", out, 0, f"{out}: 7 rows of gcd"),
        ("0", out, 2, "--count 0: "),
        ("1", config, 2, "must end in .jsonl"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(["data", "generate", str(config), "--count", count, "--out", str(file)])
        assert end.value.code == status
        captured = capsys.readouterr()
        assert line in captured.out + captured.err
    assert [row.id for row in read_rows(out)] == [f"gcd:0:{line}" for line in range(1, 8)]
