"""A mixture of experts on the real vLLM."""

from __future__ import annotations

import pytest
import torch
from dist.jobs import make_worker
from vllm_engines import GREEDY, Model, draw

from megatron_brorl.train.weight_sync import sync_weights


def assert_as_transformers(model, engine, key):
    (greedy,) = draw(engine, 1, sampling=GREEDY)
    assert greedy.token_ids.tolist() == model.logits(greedy).argmax(-1).tolist()
    rollouts = draw(engine, 16, key=key)
    assert model.gap(rollouts) < 1e-4
    return rollouts


@pytest.mark.parametrize("overrides", [{}, {"norm_topk_prob": False, "moe_intermediate_size": 48}], ids=["", "padded"])
def test_log_probs_match_transformers_after_every_weight_sync(overrides, start, tmp_path):
    """vLLM packs the weights of experts for CPUs, with padding if their size is not a multiple of 32."""
    model = Model(tmp_path, "qwen3_moe", tied=False, **overrides)
    engine = start(model, options={"max_rows": 16})
    for version in range(4):
        sync_weights(make_worker(str(tmp_path), {}), engine, version)
        rollouts = assert_as_transformers(model, engine, version)
        # Change only the experts before the next sync. With the old ones, log-probabilities would differ by over 0.01.
        with torch.no_grad():
            for name, p in model.module.named_parameters():
                if "experts" in name:
                    p.copy_(p.flip(0))
        assert model.gap(rollouts) > 0.01
        model.module.save_pretrained(tmp_path)
