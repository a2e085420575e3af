"""The plan of a GPU's and a node's memory against bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_model import qwen2_config

from megatron_brorl.cli import memory_plan as memory
from megatron_brorl.cli.memory_plan import Generation, Training
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import parse_shape

# DeepSeek-R1-Distill-Qwen-1.5B. Per layer: queries, keys and values 2048 x 1536 with their bias, output 1536 x 1536,
# MLP 3 x 1536 x 8960, two norms; twice the vocabulary; the last norm.
SIZES = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
SHAPE = replace(parse_shape(qwen2_config(**SIZES), "test"), tied=False)
LAYER = 2048 * 1536 + 2048 + 1536 * 1536 + 3 * 1536 * 8960 + 2 * 1536
EMBEDDING = 151936 * 1536
WEIGHTS = 28 * LAYER + 2 * EMBEDDING + 1536  # 1.78 billion
H100 = 80 * 2**30

ALONE = Training(1, 1, 0, 1, torch.bfloat16, tokens=32768, recompute=True, offload=True)
ENGINE = Generation(1, torch.bfloat16, False, False, fraction=0.85, context=16384, rows=1024)


def test_the_1_5b_model_on_one_gpu():
    plan = memory.plan(SHAPE, ALONE, ENGINE)
    assert WEIGHTS == 1_777_088_000
    activations = 32768 * 2 * (28 * 1536 + 4 * 1536 + 2 * 1536 + 2 * 256 + 3 * 8960)
    assert plan.training == {
        "weights": 2 * WEIGHTS,
        "optimizer": 12 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "activations (estimate)": activations,
    }
    assert plan.generation == {"engine's weights": 2 * WEIGHTS, "table of log-probs": 4 * 1024 * 16384}
    assert plan.offloaded == 14 * WEIGHTS
    assert plan.shared == 4 * WEIGHTS
    assert plan.kv_per_token == 28 * 1024
    assert plan.kv_tokens(H100) == int(0.85 * (H100 - 2 * WEIGHTS - 2**26)) // 28672 == 2_439_186
    assert plan.rows(H100) == 148
    (training, generating, keys, node) = memory.lines(plan, H100, 8)
    assert training.startswith("memory of a GPU, training: 34.7 GiB of 80.0 GiB (weights 3.3 GiB, optimizer 19.9 GiB")
    assert "keys and values 65.1 GiB" in generating
    assert keys == (
        "keys and values: 28 KiB a token on each GPU, 2439186 tokens, 148 rollouts of 16384 tokens at a time"
    )
    assert node.startswith("memory of a node: 6.6 GiB shared")
    assert "185.4 GiB of offloaded states" in node


def test_a_rank_of_tensor_2_pipeline_2_data_4():
    """Halves of every matrix, whole norms, half of the layers; ZeRO-1 over four ranks; an engine on two GPUs."""
    half = 1024 * 1536 + 1024 + 768 * 1536 + 3 * 1536 * 4480 + 2 * 1536
    first = 14 * half + EMBEDDING // 2
    t = replace(ALONE, tensor=2, pipeline=2, shards=4, recompute=False, offload=False, tokens=1000)
    plan = memory.plan(SHAPE, t, replace(ENGINE, tensor=2, rows=8, context=1000))
    whole = 4 * 1536 + (2 * 1536 + 2 * 256 + 3 * 8960) // 2
    assert plan.training == {
        "weights": 2 * first,
        "optimizer": 3 * first,
        "gradients": 4 * first,
        "activations (estimate)": 1000 * 2 * 2 * 14 * whole,  # two micro-batches in flight
    }
    assert plan.generation == {
        "trainer's weights": 2 * first,
        "trainer's optimizer": 3 * first,
        "engine's weights": WEIGHTS,
        "table of log-probs": 32_000,
    }
    assert (plan.offloaded, plan.kv_per_token) == (0, 14 * 1024)
    last = memory.plan(SHAPE, replace(t, stage=1), None).training
    assert last["weights"] == 2 * (first + 1536)  # and the last norm
    assert last["activations (estimate)"] == 1000 * 2 * 14 * whole


def test_a_critic_and_a_reference_come_on_top():
    t = replace(ALONE, critic=True, reference=True, dtype=torch.float32)
    plan = memory.plan(SHAPE, t, replace(ENGINE, fp8_cache=True))
    assert plan.training["critic's optimizer"] == plan.training["optimizer"] == 8 * WEIGHTS
    assert plan.training["reference"] == 4 * WEIGHTS
    assert plan.offloaded == (2 * (4 + 8) + 4) * WEIGHTS
    assert plan.kv_per_token == 14 * 1024


def test_fp8_weights_take_half_and_their_scales():
    scales = 28 * 4 * (12 * 12 + 2 * 2 * 12 + 12 * 12 + 3 * 12 * 70)
    linears = 28 * (2048 * 1536 + 1536 * 1536 + 3 * 1536 * 8960)
    sent = memory.sent_bytes(SHAPE, torch.bfloat16, True)
    assert sent == pytest.approx(2 * WEIGHTS - linears + scales, abs=64 * 28 * 7)


def test_what_does_not_fit_is_told_in_one_line():
    plan = memory.plan(SHAPE, ALONE, ENGINE)
    shared = 16 * 2**30
    memory.check_plan(plan, H100, 2**40, shared, 8, "/dev/shm")
    for arguments, message in [
        ((30 * 2**30, 2**40, shared), r"about 34\.7 GiB on a GPU, which has 30\.0 GiB: lower train\.tokens_per_micro"),
        ((H100, 2**37, shared), r"needs 192\.0 GiB of host memory .* has 128\.0 GiB: set train\.offload = false"),
        ((H100, 2**40, 2**30), r"/dev/shm has room for 1\.0 GiB and a node needs 6\.6 GiB, .* --shm-size=7g"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            memory.check_plan(plan, *arguments, 8, "/dev/shm")
        assert "\n" not in str(caught.value)

    # Without offload the optimizer stays beside the engine.
    staying = memory.plan(SHAPE, replace(ALONE, offload=False, tokens=1), replace(ENGINE, context=300_000))
    message = r"\d{6} tokens of keys and values fit .* may take 300000: set train\.offload = true"
    with pytest.raises(UserError, match=message):
        memory.check_plan(staying, 32 * 2**30, 2**40, shared, 8, "/dev/shm")
