"""Tests of the model card, with its metadata read by pyyaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from megatron_brorl import __version__
from megatron_brorl.checkpoints.model_card import CARD, InitialModel, TrainingFacts, model_card

BASE = InitialModel(name="Qwen/Qwen2.5-0.5B", hub="Qwen/Qwen2.5-0.5B", licence={"license": "apache-2.0"})
BEFORE = {"pass_at_1": {"mean": 0.25, "low": 0.125, "high": 0.3751}, "pass_at_k": {"1": 0.25, "2": 0.4, "8": 0.75}}
BEFORE |= {"mean_reward": {"mean": 0.3, "low": 0.2, "high": 0.45}, "prompts": 1200, "samples": 8}
AFTER = {**BEFORE, "pass_at_1": {"mean": 0.5, "low": 0.4, "high": 0.6}, "pass_at_k": {"1": 0.5, "2": 0.6, "8": 0.81239}}
TRAINING = TrainingFacts(
    run="sums",
    how="reinforcement learning with verifiable rewards",
    tag="reinforcement-learning",
    base=BASE,
    sizes=[("steps", "30"), ("rollouts per prompt (N)", "512"), ("prompts per step", "24")],
    files=[("data.train", "/home/me/secret place/rows.jsonl", 12345), ("data.held_out", "data/test.jsonl", 1200)],
    verifiers=["math", "/home/me/mine.py:score"],
    began=86400.0 * 365 + 3599,  # 1971-01-01 00:59:59 UTC
    before=BEFORE,
    after=AFTER,
)


def parts(card: str) -> tuple[dict, str]:
    """Return metadata and body of a card."""
    empty, front, body = card.split("---\n", 2)
    assert not empty
    return yaml.safe_load(front), body


def cells(body: str, first_cell: str) -> list[str]:
    """Return the other cells of the table row that starts with `first_cell`."""
    (line,) = [line for line in body.splitlines() if line.startswith(f"| {first_cell} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_metadata_and_tables():
    front, body = parts(model_card(TRAINING))
    assert front == {
        "license": "apache-2.0",
        "base_model": "Qwen/Qwen2.5-0.5B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron-brorl", "reinforcement-learning"],
    }
    assert cells(body, "trained by") == [f"megatron-brorl {__version__}, {TRAINING.how}"]
    assert cells(body, "began") == ["1971-01-01 (UTC)"]
    assert cells(body, "rollouts per prompt (N)") == ["512"]
    assert cells(body, "`rows.jsonl`") == ["`data.train`", "12,345"]
    assert cells(body, "`data/test.jsonl`") == ["`data.held_out`", "1,200"]
    assert "scored by `math`, `mine.py:score`." in body
    assert "/home/me" not in body


def test_metrics_before_and_after():
    _, body = parts(model_card(TRAINING))
    assert "1,200 held-out prompts, 8 samples each" in body
    assert cells(body, "pass@1 (95% interval)") == ["0.2500 (0.1250 to 0.3751)", "0.5000 (0.4000 to 0.6000)"]
    assert cells(body, "mean reward (95% interval)") == ["0.3000 (0.2000 to 0.4500)"] * 2
    assert cells(body, "pass@8") == ["0.7500", "0.8124"]
    _, body = parts(model_card(dataclasses.replace(TRAINING, before=None, after=None, began=0.0)))
    assert not any(absent in body for absent in ("pass@", "| began |"))


LINKED = {"license": "other", "license_name": "theirs", "license_link": "https://example.org/terms"}


@pytest.mark.parametrize(
    ("base_card", "front"),
    [
        (None, {"license": "other"}),
        ("license: llama3\nbase_model: meta-llama/Llama-3", {"license": "llama3", "base_model": "meta-llama/Llama-3"}),
        ("\n".join(f"{key}: {value}" for key, value in LINKED.items()), LINKED),
        ("license: {", {"license": "other"}),
    ],
)
def test_licence_and_base_model_come_from_the_card_of_the_base_model(tmp_path: Path, base_card, front):
    if base_card:
        (tmp_path / CARD).write_text(f"---\n{base_card}\n---\n# Theirs\nTheir own words.\n")
    base = InitialModel.of(str(tmp_path), tmp_path)
    assert base.name == tmp_path.name
    card = model_card(dataclasses.replace(TRAINING, base=base))
    metadata, body = parts(card)
    keys = {"license", "license_name", "license_link", "base_model"}
    assert {key: value for key, value in metadata.items() if key in keys} == front
    assert "Their" not in body
    assert str(tmp_path) not in card


def test_the_model_of_a_run_is_named_after_the_run(tmp_path: Path):
    assert InitialModel.of("runs/sums/sft/model", tmp_path) == InitialModel(name="sft", hub="", licence={})
