"""Training steps on Transformer Engine's layers: bf16, LoRA, every FP8 recipe, offload."""

from __future__ import annotations

import pytest
import tiny
import torch
from dist.jobs import rows

from megatron_brorl.config.schema import AlgoConfig, Fp8Config, LoraConfig, OptimConfig, ParallelConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models import fp8
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import cpu_bridge, grid
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cpu_bridge.on_gpu(), reason="no CUDA device"),
    pytest.mark.skipif(not cpu_bridge.has_transformer_engine(), reason="no Transformer Engine"),
]
CASES = [Fp8Config()] + [
    Fp8Config(recipe=recipe, parameters=parameters)  # type: ignore[arg-type]
    for recipe in ("delayed", "tensorwise", "blockwise")
    for parameters in (False, True)
]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)])
@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.recipe}{' parameters' * c.parameters}")
def test_a_step_agrees_with_fp32(config, lora, offload, tmp_path):
    """Log-probs agree with transformers in fp32; updates are finite and change the weights."""
    if config.recipe != "none" and (lora or (config.parameters and offload)):
        pytest.skip("refused by the configuration")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}
    model = tiny.make_model(tmp_path, "qwen2", tied=True, std=0.05, **sizes)
    shape = read_shape(tmp_path)
    fp8.check(config, shape, tp_size=1)
    ops = backend("fused", cpu_bridge.default_device())
    fields = fp8.settings(config)
    options = StageOptions(2048, ops, torch.bfloat16, share_prompt=False, fields=fields, offload=offload, lora=lora)
    worker = Worker(shape, grid.build(ParallelConfig()), options, OptimConfig(lr=1e-4))
    worker.load_hf(tmp_path)
    prompts, responses = map(tuple, rows(seed=2))
    worker.offload()
    log_probs = worker.log_probs(prompts, responses, temperature=1.0)
    for prompt, response, row_log_probs in zip(prompts, responses, log_probs, strict=True):
        logits = model(torch.cat((prompt, response))[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        assert float((row_log_probs.cpu() - expected).abs().mean()) < (0.05 if config.recipe == "none" else 0.3)
    advantages = tuple(a.expand(len(r)) for a, r in zip(torch.linspace(-1, 1, len(prompts)), responses, strict=True))
    experience = Experience(prompts, responses, tuple(log_probs), old_log_probs=None, advantages=advantages)
    before = {n: x.clone() for n, x in worker.hf_tensors()}
    for update in range(3):
        worker.offload()
        metrics = update_policy(worker, experience, [list(range(24))], AlgoConfig(), OptimConfig(lr=1e-4), 1.0, update)
        assert metrics["updates_skipped"] == 0
        assert 0 < metrics["grad_norm"] < 1e4
    after = dict(worker.hf_tensors())
    assert any(not torch.equal(before[n], x) for n, x in after.items())
    assert all(bool(torch.isfinite(x.float()).all()) for x in after.values())
