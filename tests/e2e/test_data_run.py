"""Tests of `brorl data prepare` on rows of published data sets, followed by `brorl train` on a mixture of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from e2e.runs import brorl, make_model, metric_lines

from megatron_brorl.cli.main import main
from megatron_brorl.rollout_log import FOLDER, entries, read_groups

GSM8K = [{"question": f"Ann has {i} nuts and gets {i}. How many?", "answer": f"#### {2 * i}"} for i in range(12)]
DEEPSCALER = [{"problem": f"Find ${i}^2$.", "answer": str(i * i), "solution": ""} for i in range(13)]
OWN = [{"q": f"Größe von {i} Äpfeln?", "a": f"{i} ✓"} for i in range(11)]
TOML = """
data.template = "{{prompt}} "
data.mixture = [
  {{ name = "school", files = ["{gsm8k}"], weight = 0.5 }},
  {{ files = ["{deepscaler}"], weight = 0.3 }},
  {{ files = ["{own}"], weight = 0.2, verifier = "exact" }},
]
rollout = {{ n = 4, prompts = 10, max_tokens = 4 }}
reward.workers = 1
algo.dynamic_sampling = false
train = {{ steps = 2, tokens_per_micro_batch = 600 }}
"""


def test_a_mixture_of_prepared_files(tmp_path: Path) -> None:
    """Prepare three files, and train on a mixture of them on two processes."""
    files = {}
    columns = ["--prompt", "q", "--answer", "a"]
    for name, raw, options in (("gsm8k", GSM8K, []), ("deepscaler", DEEPSCALER, []), ("custom", OWN, columns)):
        source = tmp_path / f"{name}.raw.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in raw))
        files[name] = tmp_path / f"{name}.jsonl"
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["data", "prepare", name, str(source), "--out", str(files[name]), *options])

    config = tmp_path / "run.toml"
    config.write_text(TOML.format(gsm8k=files["gsm8k"], deepscaler=files["deepscaler"], own=files["custom"]))
    make_model(config, tmp_path / "model", "--vocab", "600", "--context", "128")

    run = tmp_path / "run"
    result = brorl("train", "--processes", 2, config, f"model.path={tmp_path / 'model'}", f"run.dir={run}")
    assert result.returncode == 0, result.stderr
    assert "data.mixture[0]: school has 50.0% of the prompts" in result.stderr
    assert [row["rollouts"] for row in metric_lines(run)] == [10 * 4] * 2
    assert (run / "model" / "model.safetensors").is_file()

    # Each step has 5, 3 and 2 prompts of the sources, and no prompt occurs twice in an epoch.
    steps = [entry for entry in entries(run / FOLDER) if entry.kind == "step"]
    prompt_ids = [read_groups(run / FOLDER, step)["prompt_id"].to_pylist() for step in steps]
    sources = [Counter(prompt_id.split(":")[0] for prompt_id in ids) for ids in prompt_ids]
    assert sources == [{"gsm8k": 5, "deepscaler": 3, "custom": 2}] * 2
    assert len({prompt_id for ids in prompt_ids for prompt_id in ids}) == 2 * 10
