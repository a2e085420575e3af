"""What an engine does with seeds, on leaves of which it is known."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from megatron_brorl.rollout.remote import seeds
from megatron_brorl.rollout.remote.protocol import Completion


class Leaf:
    """Draws by a generator for each request, or by one for all that is seeded once, or never anything else."""

    def __init__(self, kind, vocab=50, context=40):
        self.kind, self.options = kind, SimpleNamespace(vocab=vocab, context=context)
        self.shared, self.asked = random.Random(7), []

    def params(self, temperature, top_p, top_k, tokens, seed):
        assert (temperature, top_p, top_k) == (1.0, 1.0, 0)
        return tokens, seed

    def submit(self, ids, params):
        self.asked.append((list(ids), params[0]))
        return params

    async def completion(self, handle):
        tokens, seed = handle
        drawn = {"request": random.Random(seed), "shared": self.shared, "deaf": random.Random(7)}[self.kind]
        return Completion.of([drawn.randrange(self.options.vocab) for _ in range(tokens)], "length", [])


@pytest.mark.parametrize(("kind", "own"), [("request", True), ("shared", False), ("deaf", False)])
def test_whose_seed_decides(kind, own):
    assert asyncio.run(seeds.of_requests(Leaf(kind))) is own
    if own:
        asyncio.run(seeds.require_of_requests(Leaf(kind), "Other 1"))
    else:
        with pytest.raises(ValueError, match="Other 1 takes no seed per request: siblings on different engines would"):
            asyncio.run(seeds.require_of_requests(Leaf(kind), "Other 1"))


def test_a_draw_stays_within_context_and_vocabulary():
    leaf = Leaf("request", vocab=3, context=10)
    assert len(asyncio.run(seeds.draw(leaf, 1)).token_ids) == 5
    assert leaf.asked == [([0, 1, 2, 0, 1], 5)]


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "cut"), (None, "cut")]
)
def test_an_ending_in_an_engines_words(reason, finish):
    assert Completion.of((4, 5), reason, []) == Completion([4, 5], finish, [])
