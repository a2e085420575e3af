"""A run of a mixture of experts whose engine computes in bfloat16, on two processes with expert parallelism."""

from __future__ import annotations

import tiny
from e2e.runs import brorl, metric_lines
from tiny_tokenizer import train_sentencepiece


def test_a_run_replays_routes_of_carried_rollouts_after_it_is_resumed(config, tmp_path):
    """With a learning rate of 0, log-probabilities of engine and trainer differ only by rounding and by experts."""
    model = tmp_path / "model"
    words = [f"{i * i} {i:x} {'abcdefgh'[i % 8 :]}{'hgfedcba'[i // 8 % 8 :]}" for i in range(2000)]
    eos = train_sentencepiece(words, model, 512).eos_id
    tiny.make_model(model, "qwen3_moe", tied=False, vocab_size=512, eos_token_id=eos, hidden_size=64)
    # Every response needs two steps, so that the checkpoint of each step has unfinished rollouts.
    sizes = ("rollout.max_tokens=16", "rollout.partial_tokens=8", "rollout.dtype=bf16", "parallel.expert=2")
    # Experts that differ move a log-probability by up to 3 nats here, so the check of the weights needs a wide bound.
    checked = ("train.verify_weights=always", "train.verify_tolerance=1.0")
    options = ("optim.lr=0.0", "algo.dynamic_sampling=false", "data.held_out=[]", *checked)
    gaps = {}
    for replay, stops in (("auto", (2, 3)), ("never", (3,))):  # The first run is resumed after two steps.
        run = tmp_path / replay
        command = ["train", "--processes", "2", config, f"model.path={model}", f"run.dir={run}", *sizes, *options]
        for steps in stops:
            result = brorl(*command, f"rollout.replay_routes={replay}", f"train.steps={steps}")
            assert result.returncode == 0, result.stderr
        lines = [line for line in metric_lines(run) if line["step"] > 0]
        assert all(line["trained_tokens"] and line["carried_rollouts"] for line in lines)
        gaps[replay] = [(line["logprob_gap_mean"], line["reshard_gap_mean"]) for line in lines]
    result = brorl(*command, "rollout.replay_routes=auto", "train.steps=4")  # The run with "never" has no routes.
    assert result.returncode == 2
    assert "rollout.replay_routes: " in result.stderr
    for (gap, reshard_gap), (gap_without, reshard_gap_without) in zip(gaps["auto"], gaps["never"], strict=True):
        assert gap < gap_without / 1.5
        assert reshard_gap < reshard_gap_without
