"""Recorded decoding steps: a tape that repeats ops on their memory stands for a GPU's graph; against plain steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_brorl.model_shape import read_shape
from megatron_brorl.models.hf_names import hf_shapes
from megatron_brorl.ops.fused import sampling as fused_sampling
from megatron_brorl.ops.fused.decode import FusedDecode
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native import graphs
from megatron_brorl.rollout.native.engine import TorchEngine
from megatron_brorl.rollout.native.graphs import padded_pages, padded_rows
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.types import Prompt

STOPS = (2, 5, 7, 11)


class Tape(TorchDispatchMode):
    """Ops with the tensors that they were given and gave; repeating them runs no other code, as a graph does not."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "an op that waits for the device"
        given = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, given))
        return given

    def repeat(self) -> None:
        for func, args, kwargs, first in self.ops:
            for to, now in zip(tree_leaves(first), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(to, torch.Tensor) and to is not now:
                    to.copy_(now)


class Tapes:
    """A recorder; what was recorded has then run once too often, which leaves the same behind."""

    def __init__(self) -> None:
        self.repeats: list[int] = []  # of each tape

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        tape, number = Tape(), len(self.repeats)
        self.repeats.append(0)
        with tape:
            run()

        def repeat() -> None:
            self.repeats[number] += 1
            tape.repeat()

        return repeat


def engine_of(pair, recorder, max_rows=1000, memory=0):
    shape, device = read_shape(pair[0]), torch.device("cpu")
    engine = TorchEngine(
        *(shape, hf_shapes(shape), device, torch.float32, max_rows),
        fused_sampling.sample_tokens,
        FusedDecode(),
        memory * page_bytes(shape, torch.float32),
        recorder=recorder,
    )
    engine.update_weights([(n, p) for n, p in pair[1].state_dict().items() if n in engine.names], version=3)
    return engine


def asked(lengths=(3, 9, 1, 40), n=12, first=0):
    g = torch.Generator().manual_seed(first)
    ids = [tuple(torch.randint(12, tiny.VOCAB, (length,), generator=g).tolist()) for length in lengths]
    return [Request(Prompt(f"p{first + i}", "", x, None, "exact"), 7 + first + i, n) for i, x in enumerate(ids)]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.token_ids.tolist() == y.token_ids.tolist()
            assert x.finish == y.finish
            torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=[("qwen3", False), ("gemma3", True)], ids=str)
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, *request.param)


@pytest.mark.parametrize(("max_rows", "memory"), [(1000, 0), (20, 0), (1000, 24)])
def test_rollouts_are_those_of_plain_steps(pair, max_rows, memory):
    """Rows that end, wait for slots, and make room for others; over two calls, whose graphs serve both."""
    tapes, sampling = Tapes(), Sampling(1.0, 0.95, 0, 60, STOPS)
    plain, recorded = (engine_of(pair, x, max_rows, memory) for x in (None, tapes))
    assert_same(recorded.generate(asked(), sampling), plain.generate(asked(), sampling))
    before = len(tapes.repeats)
    assert before > 3
    more = asked((5, 7), 24, first=9)
    assert_same(recorded.generate(more, sampling), plain.generate(more, sampling))
    assert sum(tapes.repeats) > 2 * len(tapes.repeats)


def test_longer_responses_and_more_prompts_get_larger_memory(pair, monkeypatch):
    """Tables of 1, 2 and 4 pages in one call, then more prompts, and longer ones."""
    monkeypatch.setattr(graphs, "LEAST_PAGES", 1)
    tapes = Tapes()
    plain, recorded = (engine_of(pair, x) for x in (None, tapes))
    for requests, tokens in ((asked((3,), 2), 40), (asked((3, 4, 5, 6), 2, 4), 40), (asked((90, 33), 3, 20), 90)):
        sampling = Sampling(1.0, 1.0, 0, tokens, ())
        assert_same(recorded.generate(requests, sampling), plain.generate(requests, sampling))
    assert len(tapes.repeats) >= 8


def test_new_weights_are_recorded_anew(pair):
    tapes, sampling = Tapes(), Sampling(1.0, 1.0, 0, 20, ())
    recorded = engine_of(pair, tapes)
    first = recorded.generate(asked(n=4), sampling)
    weights = {n: p * 1.5 for n, p in pair[1].state_dict().items()}
    plain = engine_of(pair, None)
    for engine in (recorded, plain):
        engine.update_weights([(n, weights[n]) for n in engine.names], version=4)
    got = recorded.generate(asked(n=4), sampling)
    assert_same(got, plain.generate(asked(n=4), sampling))
    assert got[0][0].token_ids.tolist() != first[0][0].token_ids.tolist()


def test_sizes():
    """Brute force: the least allowed size that is not below."""
    allowed = sorted({m << k for m in (1, 2, 3, 4, 5, 6, 7, 8) for k in range(14)})
    for rows in range(1, 5000):
        assert padded_rows(rows) == min(a for a in allowed if a >= rows)
    assert [padded_pages(n) for n in (1, 32, 33, 64, 65, 1000)] == [32, 32, 64, 64, 128, 1024]
