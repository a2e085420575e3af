"""The pieces under the TensorRT-LLM engine, each against an independent definition."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_brorl.ops.fp8_blocks import BLOCK
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.rollout.duplicates import LEAST_NATS, improbable
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.registry import ENGINES
from megatron_brorl.rollout.remote import process
from megatron_brorl.rollout.remote.fp8_blocks import dequantize, quantize
from megatron_brorl.rollout.remote.log_probs import log_prob_limits, sampled_log_probs
from megatron_brorl.rollout.remote.messages import Message, ProtocolError, decode, encode
from megatron_brorl.rollout.remote.shared_weights import HostWeights, TensorRecord
from megatron_brorl.types import Prompt, Rollout


def test_messages_arrive_as_they_were():
    sent = Message(
        "generate",
        {"call": 3, "temperature": 0.1, "names": ["a", "ü"]},
        {"ids": torch.tensor([1, -(2**62), 5]), "none": torch.empty(0, dtype=torch.int64), "lp": torch.tensor([-0.1])},
    )
    got = decode(encode(sent))
    assert (got.kind, got.fields) == (sent.kind, sent.fields)
    assert got.tensors.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: [f[0].replace(b'"protocol": 4', b'"protocol": 5'), f[1]], "different protocols (5 and 4)"),
        (lambda f: [b"\x00\x01"], "not a message"),
        (lambda f: [json.dumps([1]).encode()], "not a message"),
        (lambda f: f[:1], "0 tensors came, the header lists 1"),
        (lambda f: [f[0], f[1][:-1]], "ids has 15 bytes, not 2 of int64"),
    ],
)
def test_what_is_no_message_of_this_version_is_refused(spoil, message):
    with pytest.raises(ProtocolError) as caught:
        decode(spoil(encode(Message("rollout", {}, {"ids": torch.tensor([1, 2])}))))
    assert message in str(caught.value)


def test_buckets_keep_scales_with_their_weights(tmp_path):
    sizes = {"a": 60, "b": 14, "c.weight": 9100, "c.weight_scale_inv": 8, "d": 16}
    records = tuple(TensorRecord(name, "uint8", (size,), 0, 0) for name, size in sizes.items())
    held = HostWeights(tmp_path / "w", 5, records)
    assert [[record.name for record in bucket] for bucket in held.buckets(70)] == [
        ["a"],
        ["b"],
        ["c.weight", "c.weight_scale_inv"],
        ["d"],
    ]
    assert [record for bucket in held.buckets(1 << 30) for record in bucket] == list(records)


def test_fp8_blocks_against_loops():
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(BLOCK + 3, 2 * BLOCK + 5, generator=g) * torch.linspace(0.01, 30, 2 * BLOCK + 5)
    weight[:BLOCK, BLOCK : 2 * BLOCK] = 0  # a block of zeros
    fp8, scale = quantize(weight)
    assert scale.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            most = max(abs(x) for row in block.tolist() for x in row)
            assert float(scale[i, j]) == pytest.approx(most / 448 if most else 1.0, rel=1e-6)
            back = dequantize(fp8, scale)[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            # float8_e4m3fn has three fraction bits: half a step is 1/16 of a number, or 2^-10 of scale below 2^-6.
            allowed = torch.maximum(block.abs() / 16, scale[i, j] * 2**-10) * (1 + 1e-5)
            assert bool(((back - block).abs() <= allowed).all())


def top(log_probs: torch.Tensor, k: int, token: int) -> dict[int, float]:
    kept = {token, *log_probs.topk(k).indices.tolist()} if k else {token}
    return {t: float(log_probs[t]) for t in kept}


@pytest.mark.parametrize("kind", ["raw", "tempered", "processed"])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 6), (1.6, 0.75, 9), (0.4, 0.3, 4)]
)
def test_log_probs_of_the_sampling_distribution(kind, temperature, top_p, top_k):
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(2)).double() * 2
    expected = sampling_log_probs(logits, temperature, top_p, top_k)
    tokens = torch.multinomial(expected.exp(), 1, generator=torch.Generator().manual_seed(3))[:, 0].tolist()
    seen = {"raw": logits, "tempered": logits / temperature, "processed": expected}[kind].log_softmax(-1)
    reported = [top(row, top_k if kind != "processed" else 0, t) for row, t in zip(seen, tokens, strict=True)]
    found = sampled_log_probs(tokens, reported, kind, temperature, top_p, top_k)
    for row, token, value in zip(expected, tokens, found, strict=True):
        assert value == pytest.approx(float(row[token]), abs=2e-6)


def test_what_was_not_sampled_so_is_refused():
    with pytest.raises(ValueError, match="no log-prob of the sampled token 7"):
        sampled_log_probs([7], [{3: -0.1}], "raw", 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        sampled_log_probs([7, 8], [{7: -0.1}], "raw", 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="outside of top_p"):
        sampled_log_probs([2], [{1: math.log(0.9), 2: math.log(0.1)}], "raw", 1.0, 0.5, 2)
    assert sampled_log_probs([2, 3], [{}, {}], "raw", 0.0, 1.0, 0) == [0.0, 0.0]


def test_where_log_probs_cannot_be_had():
    def limits(kind, *sampling):
        return bool(log_prob_limits(kind, *sampling))

    table = [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.95, 0), (0.6, 0.95, 0), (0.6, 0.95, 20), (0.0, 0.9, 0)]
    assert [limits("processed", *s) for s in table] == [False] * 6
    assert [limits("tempered", *s) for s in table] == [False, False, True, True, False, False]
    assert [limits("raw", *s) for s in table] == [False, True, True, True, False, False]


def test_duplicates_are_told_from_likely_repeats():
    def rollout(index, ids, nats):
        return Rollout(index, torch.tensor(ids), torch.full((len(ids),), -nats / len(ids)), "length")

    prompts = [Request(Prompt(str(k), "", (1,), None, ""), k, 3) for k in (4, 5)]
    likely, rare = LEAST_NATS - 1, LEAST_NATS + 1
    first = [rollout(0, [1, 2], rare), rollout(1, [1, 2], rare), rollout(2, [1, 3], rare)]
    second = [rollout(0, [1, 2], rare), rollout(1, [9, 9], likely), rollout(2, [9, 9], likely)]
    nan = Rollout(3, torch.tensor([1, 2]), torch.full((2,), float("nan")), "length")
    hashes, names = improbable(prompts, [first, [*second, nan]])
    assert names == [f"prompt 4: sibling {i}" for i in range(3)] + ["prompt 5: sibling 0"]
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == 3  # another prompt's rollouts are others
    again = Request(prompts[0].prompt, 6, 3)  # a second group of the prompt, by a key of its own
    assert improbable([again], [first[:1]])[0] == hashes[0]


def test_the_engine_is_not_taken_for_a_rank(monkeypatch, tmp_path):
    for name in ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "LOCAL_RANK", "MASTER_ADDR", "KEPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    env = process.environment(tmp_path, [2, 3], {"ITS_OWN": "2"})
    assert not {"SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "LOCAL_RANK", "MASTER_ADDR"} & env.keys()
    assert (env["KEPT"], env["ITS_OWN"]) == ("1", "2")
    assert ENGINES["trtllm"].environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"  # else Ray is on all interfaces
    assert env["PYTHONPATH"] == f"{tmp_path}/code:/other"
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert process.environment(tmp_path, [2, 3], {})["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("engine", "old", "new"),
    [
        ("vllm", ["0.31.9", "0.4.1", "0.32.0rc1"], ["0.32", "0.32.0", "0.32.0+cpu", "0.33.1.dev5+g12ab", "1.0", "dev"]),
        ("trtllm", ["1.2.1", "1.3.0rc20", "1.3.0rc9"], ["1.3.0rc21", "1.3.0rc22.post1", "1.3.0", "1.4.0rc1"]),
    ],
)
def test_versions_that_are_too_old(engine, old, new):
    kind = ENGINES[engine]
    for version in old:
        assert kind.too_old(version) == f"{kind.name} {version} is too old: install {kind.least} or newer"
    assert [kind.too_old(version) for version in new] == [""] * len(new)


def test_folders_of_trainers_that_are_gone_are_removed(tmp_path):
    gone = tmp_path / f"{process.PREFIX}{2**22 + 1}-x"  # above the largest process number
    gone.mkdir()
    (gone / "weights_1").touch()
    mine = process.make_folder(str(tmp_path), "x.shared_memory")
    second = process.make_folder(str(tmp_path), "x.shared_memory")
    assert not gone.exists()
    assert mine.is_dir()
    assert second != mine
    assert mine.stat().st_mode & 0o077 == 0
    assert (mine / "code" / "megatron_brorl" / "types.py").samefile(Path(process.__file__).parents[2] / "types.py")
