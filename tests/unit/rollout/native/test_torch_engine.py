"""The built-in engine against transformers and against the actor that it samples for."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import tiny
import torch
from attention_kernels import kernels_on_cpu  # noqa: F401

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.fused import decode as fused_decode
from megatron_brorl.ops.fused.decode import FlashDecode, FusedDecode
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.ops.reference.decode import DecodeOps
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native import torch_engine
from megatron_brorl.rollout.native.pages import page_bytes
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.types import Prompt, Rollout

STOPS = (2, 5, 7, 11)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=40, stop_ids=STOPS)


def make_engine(
    directory, _model, max_rows=1000, sample=sample_tokens, ops=None, memory=0, decode=None, dtype=torch.float32
):
    shape = read_shape(directory)
    device = torch.device("cpu")
    ops = ops or FusedDecode()
    engine = TorchEngine(shape, hf_shapes(shape), device, dtype, max_rows, sample, ops, memory, decode)
    engine.update_weights(tiny.weights(directory).items(), version=3)
    return engine


def prompts(lengths=(3, 9, 1, 5)):
    g = torch.Generator().manual_seed(0)
    return [
        Prompt(f"p{i}", "", tuple(torch.randint(3, tiny.VOCAB, (n,), generator=g).tolist()), None, "exact")
        for i, n in enumerate(lengths)
    ]


# `make test-fast` runs two dense families, one with a tied head and one with an untied head.
MOE = ("qwen3_moe", False)
FAST = [("qwen2", False), ("gemma3", True), MOE]
CASES = [*FAST, ("llama", True), ("qwen3", True), ("qwen2_moe", False)]
FAMILIES = [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def pair(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return directory, tiny.make_model(directory, *request.param)


@pytest.fixture(params=["csrc", "flash"])
def ops(request, monkeypatch):
    """Return the decode ops of CPUs, and those of GPUs with torch's kernels and CUDA graphs replaced."""
    if request.param == "csrc":
        return FusedDecode()
    request.getfixturevalue("kernels_on_cpu")
    monkeypatch.setattr(torch_engine, "record", lambda run, memory: run)
    return FlashDecode()


def test_greedy_equals_transformers_generate(pair, ops):
    """Every token is equal, also after rows have allocated further pages."""
    engine = make_engine(*pair, ops=ops)
    greedy = replace(SAMPLING, temperature=0, max_tokens=70, stop_ids=(2,))
    groups = engine.generate([Request(p, key=1, n=2) for p in prompts()], greedy)
    for prompt, group in zip(prompts(), groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = pair[1].generate(ids, do_sample=False, max_new_tokens=70, eos_token_id=2, pad_token_id=0)
        for rollout in group:
            assert rollout.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


def test_log_probs_are_those_of_the_sampling_distribution(pair):
    engine = make_engine(*pair)
    groups = engine.generate([Request(p, key=7, n=40) for p in prompts()], replace(SAMPLING, temperature=0.8))
    for prompt, group in zip(prompts(), groups, strict=True):
        assert [r.index for r in group] == list(range(40))
        for rollout in group:
            assert rollout.spans == ((3, len(rollout.token_ids)),)
            expected = tiny.log_probs(pair[1], prompt.token_ids, rollout.token_ids, temperature=0.8)
            torch.testing.assert_close(rollout.log_probs, expected, atol=1e-4, rtol=0)
            body = rollout.token_ids[:-1].tolist()
            last = int(rollout.token_ids[-1])
            assert not set(body) & set(STOPS)
            assert rollout.finish == ("stop" if last in STOPS else "length")
            assert rollout.finish == "stop" or len(rollout.token_ids) == 40


def equal_share(a, b) -> float:
    """Return the share of rollouts with equal tokens."""
    pairs = list(zip(a, b, strict=True))
    return sum(x.token_ids.tolist() == y.token_ids.tolist() for x, y in pairs) / len(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(model, dtype):
    """Decode one rollout of a prompt or several, next to others, with one or two threads, in one call or several."""
    first, prompt, *others = prompts()

    def bits(n, tokens_per_call=0, max_rows=1000, before=(), after=()):
        engine = make_engine(*model, dtype=dtype, max_rows=max_rows)
        sampling = replace(SAMPLING, top_p=0.95, max_tokens=24, stop_ids=(), tokens_per_call=tokens_per_call)
        group = engine.generate([*before, Request(prompt, key=3, n=n), *after], sampling)[len(before)]
        while group[0].finish == "cut":
            (group,) = engine.generate([Request(prompt, key=3, n=n, begun=tuple(group))], sampling)
        return [(r.token_ids.tolist(), r.log_probs.tolist()) for r in group]

    whole, continued = bits(32), bits(32, tokens_per_call=9)
    for n in (1, 2, 5, 17):
        assert bits(n) == whole[:n]
        assert bits(n, tokens_per_call=9) == continued[:n]
    assert bits(8, max_rows=1) == whole[:8]
    others = [Request(p, key=stream_key(0, 4, p.id), n=50) for p in others]
    assert bits(9, before=[Request(first, key=7, n=40)], after=others, max_rows=50) == whole[:9]
    assert bits(9, before=[Request(prompt, key=3, n=8, first=9)]) == whole[:9]
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert bits(1) == whole[:1]
    finally:
        torch.set_num_threads(threads)


class Drawer:
    """A supply that returns a limited number of requests at a time and records the room that it was given."""

    def __init__(self, requests, rows):
        self.left = list(requests)
        self.rows = rows
        self.prompt_tokens = 9
        self.rooms = []

    def next_requests(self, room):
        self.rooms.append(room)
        taken = []
        rows = 0
        while self.left and rows < room:
            taken.append(self.left.pop(0))
            rows += taken[-1].n
        return taken

    def has_more(self):
        return False


@pytest.mark.parametrize("pages", [0, 24])
def test_rollouts_from_a_supply_equal_those_of_one_call(model, pages, ops):
    """With few slots or few pages, rows in flight fit, the whole supply is sampled, and tokens are the same."""
    shape = model[0]
    sampling = replace(SAMPLING, top_p=0.95, max_tokens=30)
    requests = [Request(p, key=stream_key(0, 4, p.id), n=64) for p in prompts()]
    together = make_engine(*model).generate(requests, sampling)

    # This rank has the first request. The supply has the others, in pieces of eight rollouts.
    pieces = [Request(r.prompt, r.key, n=8, first=first) for r in requests[1:] for first in range(0, 64, 8)]
    supply = Drawer(pieces, 3 * 64)
    page = page_bytes(read_shape(shape), torch.float32, 64 if ops.contiguous else 16, ops.contiguous)
    engine = make_engine(*model, max_rows=20, memory=pages * page, ops=ops)
    own, *rest = engine.generate(requests[:1], sampling, supply=supply)
    assert not supply.left
    assert all(1 <= room <= 20 for room in supply.rooms)
    if pages and not ops.contiguous:
        assert max(supply.rooms) <= pages // 2  # a row needs two pages at its end
    assert len(rest) == len(pieces)
    regrouped = [own, *([r for part in rest[8 * i : 8 * i + 8] for r in part] for i in range(3))]
    for whole, parts in zip(together, regrouped, strict=True):
        assert [r.index for r in parts] == list(range(64))
        assert equal_share(whole, parts) >= 0.98  # others differ by rounding
    # Calls without requests of this rank.
    assert engine.generate([], sampling, supply=Drawer([], 0)) == []
    assert [len(rollouts) for rollouts in engine.generate([], sampling, supply=Drawer(pieces[:2], 16))] == [8, 8]


@pytest.mark.parametrize("sample", [sample_tokens, fused_decode.sample_tokens])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_ends_the_call(model, sample, value):
    def broken(logits, *places):
        logits[-1, 7] = value
        return sample(logits, *places)

    with pytest.raises(ValueError, match=r"logits.*(NaN|nan|inf)"):
        make_engine(*model, sample=broken).generate([Request(prompts()[0], 1, n=4)], replace(SAMPLING, max_tokens=5))


def test_sleep_drops_the_weights(model):
    engine = make_engine(*model)
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate([Request(prompts()[0], key=1, n=1)], replace(SAMPLING, max_tokens=5, stop_ids=()))


def test_context_overflow_and_stop_strings_without_a_decoder_are_errors(model):
    requests = [Request(prompts()[0], key=1, n=1)]
    with pytest.raises(UserError, match="exceeds the model's context of 256"):
        make_engine(*model).generate(requests, replace(SAMPLING, max_tokens=254, stop_ids=()))
    with pytest.raises(ValueError, match="stop strings need"):
        make_engine(*model).generate(requests, replace(SAMPLING, max_tokens=3, stop_ids=(), stop_strings=("z",)))


class Callbacks:
    """Callbacks that count finished rollouts and cancel the call after `limit` of them."""

    def __init__(self, limit=10**9):
        self.limit = limit
        self.ended = []

    def finished(self, request, rollout):
        self.ended.append((request, rollout.index))

    def cancelled(self):
        return len(self.ended) >= self.limit


def test_evicted_rows_continue_with_the_equal_share(model):
    """With pages for a third of the rows' tokens, rows are evicted and continue; tokens are the same."""
    sampling = replace(SAMPLING, max_tokens=100)
    requests = [Request(p, key=stream_key(0, 4, p.id), n=40) for p in prompts((30, 9, 17))]
    large = make_engine(*model)
    expected = large.generate(requests, sampling)
    page = page_bytes(large.shape, torch.float32)
    small = make_engine(*model, memory=40 * page)
    callbacks = Callbacks()
    evicted = small.generate(requests, sampling, callbacks)
    assert large._pool.size > 3 * small._pool.size
    assert sorted(callbacks.ended) == [(i, j) for i in range(3) for j in range(40)]
    for a, b in zip(expected, evicted, strict=True):
        assert [r.index for r in b] == list(range(40))
        assert [sum(n for _, n in r.spans) for r in b] == [len(r.token_ids) for r in b]
        assert equal_share(a, b) >= 0.97
    with pytest.raises(UserError, match=r"rollout.kv_cache_mib: the longest prompt with one response of 100 tokens"):
        make_engine(*model, memory=8 * page).generate(requests, sampling)


def test_cut_rollouts_continue_unchanged(model, ops):
    engine = make_engine(*model, ops=ops)
    initial = [Request(p, key=stream_key(0, 4, p.id), n=32) for p in prompts()]
    whole = engine.generate(initial, replace(SAMPLING, max_tokens=50))
    engine.version = 5
    limited = replace(SAMPLING, max_tokens=50, tokens_per_call=13)
    requests = initial
    rounds = 0
    finished = {}
    while requests:
        groups = engine.generate(requests, limited)
        pairs = list(zip(requests, groups, strict=True))
        finished |= {(a.prompt.id, r.index): r for a, g in pairs for r in g if r.finish != "cut"}
        requests = [replace(a, n=1, first=r.index, begun=(r,)) for a, g in pairs for r in g if r.finish == "cut"]
        rounds += 1
        engine.version += 1
    assert rounds == 4  # 13, 26, 39, 50 tokens
    assert len(finished) == 4 * 32
    pairs = [(x, finished[a.prompt.id, x.index]) for a, g in zip(initial, whole, strict=True) for x in g]
    same = [(x, y) for x, y in pairs if torch.equal(x.token_ids, y.token_ids)]
    assert len(same) >= 0.98 * len(pairs)
    for x, y in same:
        assert x.finish == y.finish
        torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-4, rtol=0)
        if len(x.token_ids) == 50:
            assert y.spans == ((5, 13), (6, 13), (7, 13), (8, 11))
    assert any(len(x.token_ids) == 50 for x, _ in same)


def test_a_cancelled_call_returns_unfinished_rollouts(model, ops):
    engine = make_engine(*model, max_rows=60, ops=ops)
    requests = [Request(p, key=stream_key(0, 4, p.id), n=50) for p in prompts()]
    sampling = replace(SAMPLING, max_tokens=60)
    whole = engine.generate(requests, sampling)
    callbacks = Callbacks(limit=20)
    groups = engine.generate(requests, sampling, callbacks)
    assert [[r.index for r in g] for g in groups] == [list(range(50))] * 4
    ended = {(i, r.index) for i, g in enumerate(groups) for r in g if r.finish != "cut"}
    assert ended == set(callbacks.ended)
    assert 20 <= len(ended) < 100
    cut = [(x, y) for a, b in zip(whole, groups, strict=True) for x, y in zip(a, b, strict=True)]
    cut = [(x, y) for x, y in cut if y.finish == "cut"]
    same = sum(x.token_ids[: len(y.token_ids)].tolist() == y.token_ids.tolist() for x, y in cut)
    assert same >= 0.98 * len(cut)
    assert any(len(y.token_ids) == 0 for _, y in cut)  # rows that were waiting
    repeated = engine.generate(requests, sampling)
    assert all(equal_share(a, b) == 1 for a, b in zip(whole, repeated, strict=True))


def test_a_withdrawn_request_ends_and_the_others_do_not(model, ops):
    """One of its rollouts is decoded when it is withdrawn, and the others wait."""
    engine = make_engine(*model, max_rows=6, ops=ops)
    sampling = replace(SAMPLING, max_tokens=60)
    first, second = (Request(p, key=stream_key(0, 4, p.id), n=5) for p in prompts()[:2])
    (expected,) = engine.generate([first], sampling)
    whole = engine.generate([second], sampling)[0][0]
    withdrawn = threading.Event()

    class Withdrawing(Callbacks):
        def cancelled(self):
            withdrawn.set()
            return False

    kept, ended = engine.generate([first, replace(second, withdrawn=withdrawn)], sampling, Withdrawing())
    assert [r.token_ids.tolist() for r in kept] == [r.token_ids.tolist() for r in expected]
    assert [r.finish for r in ended] == ["cut"]
    tokens = ended[0].token_ids.tolist()
    assert 0 < len(tokens) < len(whole.token_ids)
    assert tokens == whole.token_ids[: len(tokens)].tolist()


@pytest.mark.parametrize("ops", [FusedDecode, FlashDecode, DecodeOps])
def test_bfloat16_weights_give_logits_in_float32(model, ops):
    decoder = make_engine(*model, ops=ops(), dtype=torch.bfloat16)._decoder
    hidden = torch.randn(5, decoder.shape.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = hidden.double() @ decoder.embedding.double().T
    torch.testing.assert_close(decoder.logits(hidden), expected.float(), atol=1e-6, rtol=1e-5)


@pytest.fixture(scope="module", params=[True, False], ids=["norm_topk_prob", "plain_weights"])
def moe(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    return directory, tiny.make_model(directory, *MOE, norm_topk_prob=request.param)


ROUTES = replace(SAMPLING, stop_ids=(2,), routes=True)
# The last two share a block of 64 tokens.
LONG_PROMPTS = [replace(p, token_ids=prompts((70,))[0].token_ids + p.token_ids) for p in prompts((9, 1))]
ROUTED = [Request(p, key=5, n=6) for p in (prompts()[2], *LONG_PROMPTS)]


def assert_routes(model, groups, dtype=torch.uint8):
    """Compare the experts and the log-probs of sampled tokens with transformers."""
    for request, group in zip(ROUTED, groups, strict=True):
        for rollout in group:
            ids = torch.tensor([[*request.prompt.token_ids, *rollout.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids, output_router_logits=True).router_logits
            routes = [x[:-1].topk(model.config.num_experts_per_tok).indices for x in logits]
            assert torch.equal(rollout.routes, torch.stack(routes, dim=1).to(dtype))
            sampled = rollout.log_probs != 0  # not the tokens of an observation
            log_probs = tiny.log_probs(model, request.prompt.token_ids, rollout.token_ids)
            torch.testing.assert_close(rollout.log_probs[sampled], log_probs[sampled], atol=5e-5, rtol=0)


@pytest.mark.parametrize(("rows", "pages"), [(1000, 0), (1, 0), (5, 0), (1000, 25)])
def test_experts_are_recorded_in_any_batch(moe, rows, pages, ops):
    """The batch has all rows, one row or five rows; with 25 pages of 16 tokens, rows are evicted and continue later."""
    memory = pages * page_bytes(read_shape(moe[0]), torch.float32)
    engine = make_engine(*moe, max_rows=rows, memory=memory, ops=ops)
    groups = engine.generate(ROUTED, ROUTES)
    assert_routes(moe[1], groups)
    # An evicted row counts its prompt again.
    if pages and not ops.contiguous:
        assert engine.kv_usage().prompt_tokens > sum(r.n * len(r.prompt.token_ids) for r in ROUTED)
    together = make_engine(*moe, ops=DecodeOps()).generate(ROUTED, replace(ROUTES, routes=False))
    for group, other in zip(groups, together, strict=True):
        assert [r.token_ids.tolist() for r in group] == [r.token_ids.tolist() for r in other]
        assert all(r.routes is None for r in other)


def test_experts_of_continued_rollouts_and_observations_are_recorded(moe, ops):
    """A call adds 9 tokens to a rollout, then an environment adds 4."""
    requests = ROUTED
    new = torch.tensor([7, 50, 3, 9])
    for _ in range(2):
        groups = make_engine(*moe, ops=ops).generate(requests, replace(ROUTES, stop_ids=(), tokens_per_call=9))
        assert_routes(moe[1], groups)
        requests = []
        for request, group in zip(ROUTED, groups, strict=True):
            columns = [(torch.cat((r.token_ids, new)), torch.cat((r.log_probs, torch.zeros(4)))) for r in group]
            requests.append(replace(request, begun=tuple(Rollout(i, *c, "cut") for i, c in enumerate(columns))))
    assert {len(r.token_ids) for group in groups for r in group} == {22}


def test_more_than_256_experts_are_recorded(tmp_path):
    model = tiny.make_model(tmp_path, *MOE, num_experts=300, num_experts_per_tok=3, num_hidden_layers=2)
    groups = make_engine(tmp_path, model).generate(ROUTED, ROUTES)
    assert_routes(model, groups, torch.int16)
    assert max(int(r.routes.max()) for group in groups for r in group) > 255
