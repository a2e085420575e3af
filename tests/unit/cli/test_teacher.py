"""A teacher that cannot score the rollouts of a run is refused before any model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from unit.data.test_tokenizers import make_hf

from megatron_brorl.cli.teacher import check_teacher
from megatron_brorl.config.load import load_table
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

CONTEXT = 40
SIZES = {"vocab_size": 304, "num_hidden_layers": 3, "max_position_embeddings": CONTEXT}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A function that checks ./teacher, with the given sizes, for a student whose tokenizer has 300 tokens."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(make_hf(tmp_path / "student"))

    def found(sizes, *overrides):
        tiny.make_model(tmp_path / "teacher", "llama", False, **{**SIZES, **sizes})
        config = load_table(
            {"algo": {"distill_coef": 1.0, "dynamic_sampling": False}},
            "run.toml",
            ["teacher.path=teacher", *overrides],
        )
        return check_teacher(config, tokenizer, CONTEXT)

    return found


def test_shape_and_padding_may_differ(check):
    make_hf(Path("teacher"))
    shape = check({"vocab_size": 320, "hidden_size": 64})
    assert (shape.vocab, shape.hidden, shape.layers, shape.family) == (320, 64, 3, "llama")


@pytest.mark.parametrize(
    ("sizes", "overrides", "said"),
    [
        ({"vocab_size": 299}, [], "has 300 tokens and vocab_size = 299: copy its files again"),
        ({"max_position_embeddings": 39}, [], "max_position_embeddings = 39 is less than the 40 tokens"),
        ({}, ["parallel.tensor=3"], "parallel.tensor = 3 does not divide num_attention_heads = 4"),
        ({}, ["parallel.pipeline=2"], "parallel.pipeline = 2 does not divide num_hidden_layers = 3"),
    ],
)
def test_models_that_do_not_fit_are_refused(check, sizes, overrides, said):
    make_hf(Path("teacher"))
    with pytest.raises(UserError) as caught:
        check(sizes, *overrides)
    assert str(caught.value).startswith(f"teacher.path = teacher: {said}")


def test_another_tokenizer_or_none_is_refused(check):
    with pytest.raises(UserError, match=r"no tokenizer\.json and no tokenizer\.model"):
        check({})
    path = make_hf(Path("teacher")) / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "<|human|>"))
    with pytest.raises(UserError) as caught:
        check({})
    said = "teacher.path = teacher: its tokenizer is not that of model.path: '<|human|>' is no token here"
    assert str(caught.value).startswith(said)
