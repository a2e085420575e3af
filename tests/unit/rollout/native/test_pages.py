"""Metrics of the built-in engine's cache, against arithmetic."""

from __future__ import annotations

import pytest
from unit.rollout.native.test_engine import make_engine

from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.types import Prompt


def test_kv_usage_counts_pages(model):
    """Two rollouts of 40 tokens after one page of prompt need a page each for every 16 tokens."""
    engine = make_engine(*model, 8)
    assert engine.kv_usage() is None
    prompt = Prompt("p", "", (3, 4, 5), None, "exact")
    for _ in range(2):  # a second call starts from 0
        engine.generate([Request(prompt, 1, 2)], Sampling(1.0, 1.0, 0, 40, ()))
        usage = engine.kv_usage()
        pages = [1 + 2 * -(-fed // 16) for fed in range(40)]  # the call needs at most 7
        assert usage.steps == 40
        assert usage.peak == max(pages) / 7 == 1.0
        assert usage.mean == pytest.approx(sum(pages) / 40 / 7)
    engine.sleep()
    assert engine.kv_usage() is None


@pytest.mark.parametrize("rows", [8, 2])
def test_kv_usage_counts_shared_prompts(model, rows):
    """Two rollouts after 3 tokens and three after 5: one of each computes the prompt, even if not all fit at once."""
    engine = make_engine(*model, rows)
    short, long = Prompt("p", "", (3, 4, 5), None, "exact"), Prompt("q", "", (3, 4, 5, 6, 7), None, "exact")
    for _ in range(2):  # a second call starts from 0
        done = engine.generate([Request(short, 1, 2), Request(long, 2, 3)], Sampling(1.0, 1.0, 0, 4, ()))
        usage = engine.kv_usage()
        assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (2 * 3 + 3 * 5, 3 + 2 * 5)
    # A continued rollout computes its prompt together with its own tokens.
    begun = done[0][0]
    engine.generate([Request(short, 1, 2, begun=(begun,))], Sampling(1.0, 1.0, 0, 8, ()))
    usage = engine.kv_usage()
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (6, 3)
