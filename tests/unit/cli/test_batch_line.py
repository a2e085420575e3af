"""The line about batch sizes against packing itself."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_brorl.cli.train import batch_line
from megatron_brorl.config.schema import AlgoConfig, Config, RolloutConfig
from megatron_brorl.parallel.packing import pack


def line(prompts, n, max_tokens, mini_batches=1, epochs=1, longest=1, limit=32768, replicas=1, context=1):
    rollout = RolloutConfig(n=n, prompts=prompts, max_tokens=max_tokens)
    config = Config(rollout=rollout, algo=AlgoConfig(mini_batches=mini_batches, epochs=epochs))
    return batch_line(config, longest, limit, replicas, context)


def test_in_words():
    assert line(128, 512, 1024, mini_batches=8, longest=1, replicas=4) == (
        "128 prompts x 512 rollouts = 65,536 -> 8 optimizer steps -> each at most 64 micro-batches of up to 32,768 "
        "tokens per rank"
    )
    assert line(1, 2, 8) == (
        "1 prompt x 2 rollouts = 2 -> 1 optimizer step -> at most 1 micro-batch of up to 32,768 tokens per rank"
    )
    assert "-> 6 optimizer steps ->" in line(4, 4, 8, mini_batches=2, epochs=3)


@pytest.mark.parametrize(
    ("prompts", "n", "longest", "most", "limit"), [(3, 5, 4, 6, 30), (2, 7, 9, 4, 12), (2, 2, 9, 9, 8)]
)
def test_as_many_as_packing_makes(prompts, n, longest, most, limit):
    texts = [torch.arange(longest) + i for i in range(prompts)]
    rows = [text for text in texts for _ in range(n)]
    found = re.search(r"at most (\d+) micro-batch", line(prompts, n, most, longest=longest, limit=limit))
    full = [torch.ones(most, dtype=torch.int64)] * len(rows)
    assert int(found[1]) == len(pack(rows, full, limit))

    # Shorter responses, and prompts that siblings share, take no more.
    shorter = [torch.ones(1 + i % most, dtype=torch.int64) for i in range(len(rows))]
    assert len(pack(rows, shorter, limit)) <= int(found[1])
    assert len(pack(rows, full, limit, share=True)) <= int(found[1])
