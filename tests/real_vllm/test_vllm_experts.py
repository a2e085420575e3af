"""A mixture of experts on the real vLLM: tokens, log-probabilities, weight sync and chosen experts."""

from __future__ import annotations

import pytest
import tiny
from checksums import with_checksums
from vllm_engines import GREEDY, Model, draw


class Experts(Model):
    """A tiny mixture of experts. transformers keeps the experts of a layer in one tensor and writes them separately."""

    def stream(self):
        self.module.save_pretrained(self.directory)
        return with_checksums(tiny.weights(self.directory).items())


def test_log_probs_match_transformers_after_every_update(start, tmp_path):
    model = Experts(tmp_path, "qwen3_moe", tied=False)
    engine = start(model, options={"max_rows": 16})
    for version in range(3):
        engine.update_weights(model.stream(), version)
        (greedy,) = draw(engine, 1, sampling=GREEDY)
        assert greedy.token_ids.tolist() == model.logits(greedy).argmax(-1).tolist()
        gap = model.gap(draw(engine, 8, key=version))
        print("GAP", gap)
        assert gap < 1e-4
        model.change(version, std=0.05)
