"""Tests of the memory plan against bytes counted by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from random_model import qwen2_config

from megatron_brorl.cli import memory_plan as memory
from megatron_brorl.cli.run_folder import checkpoint_bytes
from megatron_brorl.config.load import load_table
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import parse_shape

# DeepSeek-R1-Distill-Qwen-1.5B. Per layer: queries, keys and values 2048 x 1536 with their bias, output 1536 x 1536,
# MLP 3 x 1536 x 8960, two norms; twice the vocabulary; the last norm.
SIZES = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
SHAPE = replace(parse_shape(qwen2_config(**SIZES), "test"), tied=False)
LAYER = 2048 * 1536 + 2048 + 1536 * 1536 + 3 * 1536 * 8960 + 2 * 1536
EMBEDDING = 151936 * 1536
WEIGHTS = 28 * LAYER + 2 * EMBEDDING + 1536  # 1.78 billion
H100 = 80 * 2**30

TABLES = {
    "model": {"path": "model", "dtype": "bf16", "context": 16384},
    "rollout": {"engine": "trtllm", "dtype": "bf16", "max_num_seqs": 1024},
    "engine": {"memory_fraction": 0.85},
    "train": {"tokens_per_micro_batch": 32768, "recompute": "full", "offload": True},
}


def plan_of(ranks=1, stage=0, **changes):
    """Return the plan with some keys changed."""
    tables = {name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {*TABLES, *changes}}
    config = load_table(tables, "test", ())
    return memory.plan_stage(config, SHAPE, memory.Machines(ranks, 8, H100), stage)


def test_the_1_5b_model_on_one_gpu():
    plan = plan_of()
    assert WEIGHTS == 1_777_088_000
    activations = 32768 * 2 * (28 * 1536 + 4 * 1536 + 2 * 1536 + 2 * 256 + 3 * 8960)
    assert plan.training == {
        "weights": 2 * WEIGHTS,
        "optimizer": 12 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "activations (estimate)": activations,
        "CUDA contexts (estimate)": 2**30,
    }
    graphs = 16 * 2**20 * (3 + 7 + 12 + 13)  # with 1, 2, 4, 8 to 56, 64 to 240, 256 to 1,024 rows
    assert plan.generation == {
        "CUDA contexts (estimate)": 2**30,  # of the trainer and of the engine
        "engine's weights": 2 * WEIGHTS,
        "table of log-probs": 4 * 1024 * 16384,
        "CUDA graphs (estimate)": graphs,
    }
    assert plan.offloaded == 14 * WEIGHTS
    assert plan.shared == 4 * WEIGHTS
    assert plan.kv_per_token == 28 * 1024
    assert plan.kv_tokens(H100) == int(0.85 * (H100 - 2 * WEIGHTS - 2**26 - 2**30 - graphs)) // 28672 == 2_389_946
    assert plan.rows(H100) == 145
    lines = memory.plan_lines(plan, memory.Machines(1, 8, H100))
    for line, amounts in zip(lines, ("35.7 80.0 3.3 19.9", "63.8", "28 2389946 145 16384", "6.6 185.4"), strict=True):
        assert set(amounts.split()) <= set(re.findall(r"[\d.]+", line)), line


def test_tensor_and_pipeline_parallelism_with_zero_1():
    """A rank has half of every matrix, whole norms, and half of the layers; ZeRO-1 spans four ranks."""
    half = 1024 * 1536 + 1024 + 768 * 1536 + 3 * 1536 * 4480 + 2 * 1536
    first = 14 * half + EMBEDDING // 2
    changes = {
        "parallel": {"tensor": 2, "pipeline": 2, "distributed_optimizer": True},
        "train": {"tokens_per_micro_batch": 1000, "recompute": "none", "offload": False},
        "rollout": {"max_num_seqs": 8, "max_tokens": 500},
        "model": {"context": 1000},
        "engine": {"tensor": 2},
    }
    plan = plan_of(16, **changes)
    whole = 4 * 1536 + (2 * 1536 + 2 * 256 + 3 * 8960) // 2
    assert plan.training == {
        "weights": 2 * first,
        "optimizer": 3 * first,
        "gradients": 4 * first,
        "activations (estimate)": 1000 * 2 * 2 * 14 * whole,  # two micro-batches in flight
        "CUDA contexts (estimate)": 2**30,
    }
    assert plan.generation == {
        "trainer's weights": 2 * first,
        "trainer's optimizer": 3 * first,
        "CUDA contexts (estimate)": 2**30,
        "engine's weights": WEIGHTS,
        "table of log-probs": 32_000,
        "CUDA graphs (estimate)": 4 * 16 * 2**20,
    }
    assert (plan.offloaded, plan.kv_per_token) == (0, 14 * 1024)
    last = plan_of(16, stage=1, **changes).training
    assert last["weights"] == 2 * (first + 1536)  # the last stage also has the last norm
    assert last["activations (estimate)"] == 1000 * 2 * 14 * whole


def test_experts_are_distributed_over_the_ranks_of_a_stage():
    """Qwen3-30B-A3B on 16 ranks: a stage has 8, on which each expert is twice; ZeRO-1 spans 4 ranks for the others."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 151936, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128}
    raw = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 8, "norm_topk_prob": True, **sizes}
    shape = parse_shape(raw | {"tie_word_embeddings": False}, "test")
    assert memory.size_line(shape) == "model: 30,532.1 million parameters, 3,353.0 million active per token"

    parallel = {"tensor": 2, "pipeline": 2, "expert": 4, "sequence": True, "distributed_optimizer": True}
    train = {"tokens_per_micro_batch": 1000}
    config = load_table({"model": {"dtype": "bf16"}, "parallel": parallel, "train": train}, "test", ())
    training = memory.plan_stage(config, shape, memory.Machines(16, 8, H100), 1).training
    # Half of the queries, keys, values and output, and whole norms and routers.
    others = 24 * (2048 * (16 + 2 + 2 + 16) * 128 + 2 * 2048 + 2 * 128 + 128 * 2048) + 151936 * 1024 + 2048
    experts = 24 * 32 * 3 * 2048 * 768
    assert training["weights"] == 2 * (others + experts)
    assert training["gradients"] == 4 * (others + experts)
    assert training["optimizer"] == 12 * (others // 4 + experts // 2)
    layer = 4 * 2048 + (2 * (32 + 4) * 128 + 8 * (3 * 768 + 2 * 2048)) // 2
    assert training["activations (estimate)"] == 1000 * 2 * (24 * layer + 2 * 8 * 2048 // 2)


def test_a_rank_on_a_cpu_has_the_engine_in_the_same_process():
    """SmolLM2-135M, counted as above, with 250 held-out prompts of at most 49 tokens."""
    sizes = {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152, "context": 8192}
    shape = replace(parse_shape(qwen2_config(**sizes), "test"), family="llama")
    embedding = 49152 * 576
    layer = (9 + 3 + 3 + 9) * 64 * 576 + 3 * 576 * 1536 + 2 * 576
    weights = 30 * layer + embedding + 576
    assert weights == 134_515_008

    def parts_of(train_on=0, **rollout):
        keys = {"prompts": 4, "max_tokens": 6, **rollout}
        config = load_table({"rollout": keys, "algo": {"mini_batches": 4, "train_on": train_on}}, "test", ())
        plan = memory.plan_stage(config, shape, memory.Machines(1, 1, 0), prompts=memory.PromptSizes(49, 250))
        for parts in (plan.training, plan.generation):
            assert sum(parts.values()) == 2**29 + int(1.2 * sum(list(parts.values())[:-2]))
        return plan.training, plan.generation

    training, generation = parts_of(n=512)
    states = {name: training[name] for name in ("weights", "gradients", "optimizer")}
    assert states == {"weights": 4 * weights, "gradients": 4 * weights, "optimizer": 8 * weights}
    # Inputs of the norms, attention with its output, gate and up.
    per_token = 30 * (2 * 576 + (9 + 2 * 3 + 9) * 64 + 2 * 1536)
    assert training["activations (estimate)"] == 4 * 2048 * per_token
    assert training["LM head"] == 4 * (512 * 49152 + embedding)
    assert generation["engine's weights"] == 4 * (weights + embedding)
    page = 30 * 3 * 16 * 2 * 64 * 4
    assert generation["keys and values"] == (250 * 4 + 250 * 8) * page  # four pages per prompt, one per response
    assert training["rollouts"] == generation["rollouts"] == 10 * 2**10 * 4 * 512
    assert "gradients" not in generation

    # Here a mini-batch is shorter than a micro-batch, and the limit of keys and values is lower.
    training, generation = parts_of(n=128, kv_cache_mib=100)
    assert training["activations (estimate)"] == 4 * (128 * 6 + 4 * 49) * per_token
    assert generation["keys and values"] == 100 * 2**20
    training, _ = parts_of(n=512, train_on=128)
    assert training["activations (estimate)"] == 4 * (128 * 6 + 4 * 49) * per_token


def test_ranks_on_cpus_must_fit_the_memory_of_their_node():
    """Keys and values take half of the memory that is free when a rank allocates them, unless a key sets their size."""
    shape = replace(parse_shape(qwen2_config(**{**SIZES, "layers": 1}), "test"), family="llama")
    free = 64 * 2**30
    machines = memory.Machines(4, 2, 0, free=free)

    def plan_with(**keys):
        rollout = {"prompts": 64, "n": 512, "max_tokens": 8192, "max_num_seqs": 8192, **keys}
        return memory.plan_stage(load_table({"rollout": rollout}, "test", ()), shape, machines)

    parts = plan_with().generation
    others = sum(parts[name] for name in ("weights", "optimizer", "engine's weights"))
    assert parts["keys and values"] == (free // 2 - others) // 2
    assert 2 * sum(parts.values()) < 1.2 * free

    plan = plan_with(kv_cache_mib=40 * 1024)
    assert plan.generation["keys and values"] == 40 * 2**30
    need = 2 * sum(plan.generation.values())
    memory.check_plan(plan, machines, host=need, shared=2**40, folder="/dev/shm")
    assert any("GiB are free" in line for line in memory.plan_lines(plan, machines))
    with pytest.raises(UserError, match=r"keys and values, 40\.0 GiB of a rank: lower rollout\.kv_cache_mib"):
        memory.check_plan(plan, machines, host=need - 1, shared=2**40, folder="/dev/shm")


def test_critic_and_reference_are_included():
    algo = {"advantage": "gae", "kl_coef": 0.1}
    plan = plan_of(algo=algo, model={"dtype": "fp32"}, engine={"kv_dtype": "fp8"})
    assert plan.training["critic's optimizer"] == plan.training["optimizer"] == 8 * WEIGHTS
    assert plan.training["reference"] == 4 * WEIGHTS
    assert plan.offloaded == (2 * (4 + 8) + 4) * WEIGHTS
    assert plan.kv_per_token == 14 * 1024


def test_with_lora_only_adapters_have_gradients_and_optimizer_states():
    """The base is in bf16, the critic trains all weights, and the reference has only adapters."""
    adapters = 18_464_768  # rank 16 on Qwen2.5-1.5B, as print_trainable_parameters() of PEFT counts them
    options = {"lora": {"rank": 16}, "algo": {"advantage": "gae", "kl_coef": 0.1}}
    plan = plan_of(**options)
    activations = plan.training["activations (estimate)"] - plan_of().training["activations (estimate)"]
    assert activations == 32768 * 2 * 7 * 16
    assert {name: x for name, x in plan.training.items() if "activations" not in name} == {
        "weights": 2 * WEIGHTS,
        "adapters": 2 * adapters,
        "optimizer": 12 * adapters,
        "gradients": 4 * adapters,
        "critic's weights": 2 * WEIGHTS,
        "critic's optimizer": 12 * WEIGHTS,
        "critic's gradients": 4 * WEIGHTS,
        "reference": 2 * adapters,
        "CUDA contexts (estimate)": 2**30,
    }
    config = load_table({"model": {"path": "model", "dtype": "bf16"}, **options}, "test", ())
    assert checkpoint_bytes(config, SHAPE) == 14 * adapters + 14 * WEIGHTS + 2 * adapters


def test_the_weights_of_a_teacher_are_added(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(qwen2_config(**{**SIZES, "layers": 4})))  # with a tied head
    keys = {"algo": {"distill_coef": 1.0, "dynamic_sampling": False}, "teacher": {"path": str(tmp_path)}}
    weights = 2 * (4 * LAYER + EMBEDDING + 1536)
    assert plan_of(**keys).offloaded == plan_of().offloaded + weights
    half = 1024 * 1536 + 1024 + 768 * 1536 + 3 * 1536 * 4480 + 2 * 1536
    split = plan_of(4, parallel={"tensor": 2, "pipeline": 2}, train={"offload": False}, **keys)
    assert split.generation["trainer's teacher"] == 2 * (2 * half + EMBEDDING // 2)


def test_fp8_weights_take_half_plus_scales():
    scales = 28 * 4 * (12 * 12 + 2 * 2 * 12 + 12 * 12 + 3 * 12 * 70)
    linears = 28 * (2048 * 1536 + 1536 * 1536 + 3 * 1536 * 8960)
    sent = plan_of(engine={"quantization": "fp8"}).generation["engine's weights"]
    assert sent == pytest.approx(2 * WEIGHTS - linears + scales, abs=64 * 28 * 7)


# Without offload the optimizer stays on the GPU while the engine generates.
STAYING = {"train": {"offload": False, "tokens_per_micro_batch": 1}, "model": {"context": 131_072}}


@pytest.mark.parametrize(
    ("keys", "gpu", "host", "shared", "message"),
    [
        ({}, 30, 1024, 16, r"about 35\.7 GiB on a GPU, which has 30\.0 GiB: lower train\.tokens_per_micro"),
        ({}, 80, 128, 16, r"192\.0 GiB of host memory .* 128\.0 GiB: set train\.offload = false"),
        ({}, 80, 1024, 1, r"/dev/shm .* 1\.0 GiB and a node needs 6\.6 GiB, .* --shm-size=7g"),
        ({}, 0, 128, 16, r"285\.\d GiB of host memory while training \(ranks: 8\), .* 128\.0 GiB: .*optimizer, 19\.9"),
        (STAYING, 31, 1024, 16, r"keys and values fit .* may take 131072: set train\.offload = true"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(keys, gpu, host, shared, message):
    memory.check_plan(plan_of(), memory.Machines(8, 8, H100), 2**40, 2**34, "/dev/shm")
    with pytest.raises(UserError, match=message):
        memory.check_plan(plan_of(**keys), memory.Machines(8, 8, gpu * 2**30), host * 2**30, shared * 2**30, "/dev/shm")
