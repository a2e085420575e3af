"""What a benchmark is called, and names that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_brorl.config.benchmarks import named
from megatron_brorl.config.schema import Config, EvaluateConfig
from megatron_brorl.config.validate import validate
from megatron_brorl.errors import UserError


@pytest.mark.parametrize(
    ("benchmark", "name", "file"),
    [
        ("math500=data/m.jsonl", "math500", "data/m.jsonl"),
        ("data/math.v2.parquet", "math.v2", "data/math.v2.parquet"),
        ("a=lr=3/m.jsonl", "a", "lr=3/m.jsonl"),
        ("runs/lr=3/m.jsonl", "m", "runs/lr=3/m.jsonl"),  # a slash before =: a file
    ],
)
def test_names(benchmark: str, name: str, file: str) -> None:
    assert named(benchmark) == (name, file)


@pytest.mark.parametrize(
    ("benchmarks", "message"),
    [
        (("=m.jsonl",), "each must be a file, or a name without |, then = and a file"),
        (("m=",), "each must be a file"),
        (("",), "each must be a file"),
        (("a|b=m.jsonl",), "each must be a file"),
        (("a/m.jsonl", "b/m.jsonl"), "two are called 'm': give one of them another name, as in \"m_2=FILE\""),
        (("a=x.jsonl", "b=x.jsonl", "a=y.jsonl"), "two are called 'a'"),
    ],
)
def test_names_that_are_wrong(benchmarks: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(replace(Config(), evaluate=EvaluateConfig(benchmarks=benchmarks)), "run.toml")
    assert str(caught.value).startswith("run.toml: evaluate.benchmarks = ")
    assert message in str(caught.value)


def test_one_file_under_two_names() -> None:
    validate(replace(Config(), evaluate=EvaluateConfig(benchmarks=("a=x.jsonl", "b=x.jsonl"))), "run.toml")
