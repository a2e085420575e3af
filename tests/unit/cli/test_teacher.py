"""A teacher that cannot score the rollouts of a run is refused before any model is loaded."""

from __future__ import annotations

import re

import pytest
import tiny
from unit.data.test_tokenizers import make_hf

from megatron_brorl.cli.teacher import check_teacher
from megatron_brorl.config.load import load_table
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

SIZES = {"vocab_size": 320, "num_hidden_layers": 3, "max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("sizes", "token", "overrides", "message"),
    [
        ({}, "<|user|>", [], ""),  # another family and shape, with a padded vocabulary
        ({}, "<|human|>", [], "its tokenizer is not that of model.path: '<|human|>' is no token here"),
        ({"vocab_size": 299}, "<|user|>", [], "has 300 tokens and vocab_size = 299: copy its files again"),
        ({"max_position_embeddings": 39}, "<|user|>", [], "max_position_embeddings = 39 is less than the 40 tokens"),
        ({}, "<|user|>", ["parallel.tensor=3"], "parallel.tensor = 3 does not divide num_attention_heads = 4"),
        ({}, "<|user|>", ["parallel.pipeline=2"], "parallel.pipeline = 2 does not divide num_hidden_layers = 3"),
    ],
)
def test_the_first_problem_is_reported(tmp_path, monkeypatch, sizes, token, overrides, message):
    monkeypatch.chdir(tmp_path)
    tiny.make_model(tmp_path / "teacher", "llama", tied=False, **{**SIZES, **sizes})
    path = make_hf(tmp_path / "teacher") / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", token))
    distillation = ["teacher.path=teacher", "algo.distill_coef=1", "algo.dynamic_sampling=false"]
    config = load_table({}, "run.toml", [*distillation, *overrides])
    student = load_tokenizer(make_hf(tmp_path / "student"))
    if not message:
        assert check_teacher(config, student, context=40).vocab == 320
        return
    with pytest.raises(UserError, match=f"^teacher.path = teacher: {re.escape(message)}"):
        check_teacher(config, student, context=40)
