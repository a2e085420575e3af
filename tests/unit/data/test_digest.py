"""Hashes of what a run is fed change with what it is fed, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_brorl.data.digest import of_prompts, of_tokenizer
from megatron_brorl.data.tokenizers import train_sentencepiece
from megatron_brorl.types import Prompt

PROMPT = Prompt("a", "1+1=", (3, 4), "2", "exact", {"b": 1, "a": [2.5, None]})


@pytest.mark.parametrize(
    "change",
    [{"id": "b"}, {"token_ids": (3, 5)}, {"answer": None}, {"verifier": "math"}, {"metadata": {"b": 2}}],
)
def test_every_part_of_a_row_counts(change):
    assert of_prompts([PROMPT]) != of_prompts([replace(PROMPT, **change)])


def test_rows_count_in_their_order_and_keys_in_any():
    other = replace(PROMPT, id="b")
    assert of_prompts([PROMPT, other]) != of_prompts([other, PROMPT])
    assert of_prompts([PROMPT]) == of_prompts([replace(PROMPT, metadata={"a": [2.5, None], "b": 1})])


def test_two_swapped_pieces_are_another_tokenizer(tmp_path):
    train_sentencepiece(["abc", "1+1=2"] * 20, tmp_path, 40)
    before = of_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert of_tokenizer(tmp_path) == before
    path = tmp_path / "tokenizer.model"
    swapped = path.read_bytes().replace(b"\x0a\x01a", b"\x0a\x01?").replace(b"\x0a\x01b", b"\x0a\x01a")
    path.write_bytes(swapped.replace(b"\x0a\x01?", b"\x0a\x01b"))
    changed = of_tokenizer(tmp_path)
    assert changed != before
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    two = of_tokenizer(tmp_path)
    assert two != changed
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert of_tokenizer(tmp_path) not in (changed, two)
