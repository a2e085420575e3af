"""Prompts chosen by how often a model was right, as a data file that a run reads back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import make_tiny_model
import select_prompts

from megatron_brorl.config.load import load
from megatron_brorl.data.source import load_sources
from megatron_brorl.data.tokenizers import load_tokenizer

CONFIG = """
[data]
held_out_prompts = 12
template = "Q: {prompt}="
[[data.tasks]]
name = "gcd"
prompt_regex = 'numbers: (.+)\\. Give'
config = { min_numbers = 2, max_numbers = 2, min_value = 1, max_value = 99 }
[rollout]
max_tokens = 8
"""


@pytest.fixture(scope="module")
def pilot(tmp_path_factory):
    """A configuration, a model's directory, and an evaluation in which prompt i was right i times."""
    root = tmp_path_factory.mktemp("pilot")
    (root / "run.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", str(root / "run.toml"), str(root / "model"), "--hidden", "32", "--texts", "50"])
        make_tiny_model.main()
    config = load(root / "run.toml")
    prompts = load_sources(config.data, load_tokenizer(root / "model"), 100, config.run.seed).held_out
    rows = [
        {"benchmark": "held_out", "id": p.id, "samples": 16, "right": i, "tokens": 2.0} for i, p in enumerate(prompts)
    ]
    rows.append({"benchmark": "other", "id": prompts[0].id, "samples": 16, "right": 3, "tokens": 2.0})
    (root / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root, prompts


def choose(root, monkeypatch, *options):
    files = [str(root / "run.toml"), str(root / "evaluation.jsonl"), str(root / "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["", *files, f"model.path={root / 'model'}", *options])
    select_prompts.main()


def test_chosen_prompts_are_read_back_as_they_were(pilot, monkeypatch):
    root, prompts = pilot
    choose(root, monkeypatch, "--right", "2", "5", "--count", "4")
    out = f'data.held_out=["{root / "out.jsonl"}"]'
    files = [f'data.train=["{root / "out.jsonl"}"]', out, "data.tasks=[]", "data.template={prompt}"]
    config = load(root / "run.toml", files)
    found = load_sources(config.data, load_tokenizer(root / "model"), 100, 0).held_out
    assert sorted(found, key=lambda p: p.id) == sorted(prompts[2:6], key=lambda p: p.id)


def test_fewer_are_a_part_of_more(pilot, monkeypatch):
    root, _ = pilot
    chosen = []
    for count in ("3", "6"):
        choose(root, monkeypatch, "--right", "1", "8", "--count", count)
        chosen.append((root / "out.jsonl").read_text().splitlines())
    assert chosen[1][:3] == chosen[0]


def test_too_few_prompts_are_a_mistake(pilot, monkeypatch):
    root, _ = pilot
    with pytest.raises(select_prompts.UserError, match="4 held-out prompts have 2 to 5 right samples, 5 were asked"):
        choose(root, monkeypatch, "--right", "2", "5", "--count", "5")
