"""Tests of tools/make_tiny_model.py."""

from __future__ import annotations

import json

import make_tiny_model

from megatron_brorl.config.load import load


def test_the_corpus_follows_template_and_columns(tmp_path):
    """The tokenizer is trained on prompts in their template, answers and worked solutions."""
    rows = [{"question": "1+1?", "answer": "1+1=2\n#### 2"}, {"question": "2+1?", "answer": "#### 3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = ["{tmp_path}/rows.jsonl"]\ntemplate = "Q: {{prompt}}"\nverifier = "math"\n'
        'columns = { prompt = "question", answer = "answer", answer_regex = "#### (.+)" }\n'
    )
    corpus = list(make_tiny_model._corpus(load(tmp_path / "run.toml"), count=0))
    assert corpus == ["Q: 1+1?", "2", "1+1=2\n#### 2", "Q: 2+1?", "3", "#### 3"]
