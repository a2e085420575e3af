"""The KV cache: metrics against arithmetic, shared prefixes against brute force, the engine against transformers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tiny
import torch
from unit.rollout.native.test_torch_engine import make_engine

from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.fused import decode as fused_decode
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native import decoder
from megatron_brorl.rollout.native.pages import BLOCK, PagePool, PrefixCache, pages_for
from megatron_brorl.types import Prompt

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=20, stop_ids=())
COUNTS = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 5]


def branching(draw, length):
    """Return tokens that are constant within a block, so that prompts diverge at blocks."""
    kinds = [draw.randrange(2) for _ in range(-(-length // BLOCK))]
    return tuple(7 + kinds[i // BLOCK] for i in range(length))


@pytest.fixture
def pool(model):
    return PagePool(read_shape(model[0]), 200, torch.float32, torch.device("cpu"))


def test_found_blocks_hold_the_tokens_of_the_prompt(pool):
    """A random sequence of added and removed prompts with few pages; `written` has the tokens of each page."""
    pages = 26
    pool.size = pages
    pool.reset()
    prefixes = PrefixCache(pool)
    draw = random.Random(5)
    in_memory = []
    written: dict[int, tuple[int, ...]] = {}  # by page: all tokens up to the last one of the page
    hits = 0
    for _ in range(600):
        prompt = branching(draw, draw.choice(COUNTS))
        used_pages = {page for _, prompt_pages in in_memory for page in prompt_pages.tolist()}
        if pool.free >= prefixes.pages_needed(prompt) and draw.random() < 0.6:
            expected_free = pool.free - prefixes.pages_needed(prompt)
            prompt_pages, cached_tokens = prefixes.add(prompt)
            assert pool.free == expected_free
            assert len(prompt_pages) == pages_for(len(prompt)) == len(set(prompt_pages.tolist()))
            assert cached_tokens % BLOCK == 0
            assert cached_tokens < len(prompt)
            page = prompt_pages.tolist()
            for i in range(cached_tokens // 16):
                assert written[page[i]] == prompt[: 16 * (i + 1)]
            # A prompt writes only pages that no other prompt uses.
            assert not used_pages & set(page[cached_tokens // 16 :])
            written |= {page[i]: prompt[: 16 * (i + 1)] for i in range(cached_tokens // 16, len(page))}
            # The cache finds all blocks of the prompts in memory.
            starts = {p[:n] for p, _ in in_memory for n in range(0, len(p), BLOCK)}
            assert cached_tokens == max((n for n in range(0, len(prompt), BLOCK) if prompt[:n] in starts), default=0)
            hits += cached_tokens > 0
            in_memory.append((prompt, prompt_pages))
        elif in_memory:
            prefixes.remove(*in_memory.pop(draw.randrange(len(in_memory))))
    assert hits > 50
    for prompt, prompt_pages in in_memory:
        prefixes.remove(prompt, prompt_pages)
    assert pool.free == pages
    assert sorted(pool.allocate(pages).tolist()) == list(range(pages))  # each once


def instruction(counts, shared, seed=0):
    """Return prompts of `counts` tokens that share the first `shared` ones."""
    g = torch.Generator().manual_seed(seed)
    begin = torch.randint(3, tiny.VOCAB, (shared,), generator=g).tolist()
    return [
        Prompt(f"p{i}", "", (*begin, *torch.randint(3, tiny.VOCAB, (n - shared,), generator=g).tolist()), None, "exact")
        for i, n in enumerate(counts)
    ]


@pytest.mark.parametrize("family", [("qwen2", True), ("gemma3", False)], ids=str)
@pytest.mark.parametrize(("rows", "queries"), [(64, 1024), (3, 1024), (64, 7)])
def test_log_probs_after_a_shared_prefix_equal_transformers(tmp_path, family, rows, queries, monkeypatch):
    """For prompts that start together or later than others, also with few queries at a time."""
    monkeypatch.setattr(decoder, "QUERIES", queries)
    model = tmp_path, tiny.make_model(tmp_path, *family)
    prompts = instruction((150, 170, 131, 215, 140), 130)
    engine = make_engine(*model, rows, fused_decode.sample_tokens)
    groups = engine.generate([Request(p, key=5, n=4) for p in prompts], replace(SAMPLING, max_tokens=12, stop_ids=(2,)))
    usage = engine.kv_usage()
    # Two blocks are computed once, and the rest of a prompt once for its four rollouts.
    shared = usage.cached_prompt_tokens - sum(3 * len(p.token_ids) for p in prompts)
    # With three rows a prompt may start when no other is in memory.
    assert (4 if rows == 64 else 3) * 2 * BLOCK <= shared <= 4 * 2 * BLOCK
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            expected = tiny.log_probs(model[1], prompt.token_ids, rollout.token_ids)
            torch.testing.assert_close(rollout.log_probs, expected, atol=2e-4, rtol=0)


def test_continued_rollouts_reuse_the_shared_prefix(model):
    """Rollouts cut after 5 tokens continue with the greedy tokens of an uncut call and reuse the shared prefix."""
    prompts = instruction((140, 150), 128)
    engine = make_engine(*model, 64, fused_decode.sample_tokens)
    greedy = replace(SAMPLING, temperature=0.0)
    whole = engine.generate([Request(p, key=1, n=1) for p in prompts], greedy)
    cut = engine.generate([Request(p, key=1, n=1) for p in prompts], replace(greedy, tokens_per_call=5))
    continued = engine.generate([Request(p, 1, n=1, begun=(r,)) for p, (r,) in zip(prompts, cut, strict=True)], greedy)
    assert engine.kv_usage().cached_prompt_tokens == 128  # of the second prompt
    for (a,), (b,) in zip(whole, continued, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()


def test_kv_usage_counts_pages(model):
    """Two rollouts of 40 tokens after one page of prompt need a page each for every 16 tokens."""
    engine = make_engine(*model, max_rows=8)
    assert engine.kv_usage() is None
    prompt = Prompt("p", "", (3, 4, 5), None, "exact")
    for _ in range(2):  # a second call starts from 0
        engine.generate([Request(prompt, key=1, n=2)], replace(SAMPLING, max_tokens=40))
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
    engine = make_engine(*model, max_rows=rows)
    short, long = Prompt("p", "", (3, 4, 5), None, "exact"), Prompt("q", "", (3, 4, 5, 6, 7), None, "exact")
    for _ in range(2):  # a second call starts from 0
        groups = engine.generate([Request(short, 1, n=2), Request(long, 2, n=3)], replace(SAMPLING, max_tokens=4))
        usage = engine.kv_usage()
        assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (2 * 3 + 3 * 5, 3 + 2 * 5)
    # A continued rollout computes its prompt together with its own tokens.
    begun = groups[0][0]
    engine.generate([Request(short, key=1, n=2, begun=(begun,))], replace(SAMPLING, max_tokens=8))
    usage = engine.kv_usage()
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (2 * 3, 3)
