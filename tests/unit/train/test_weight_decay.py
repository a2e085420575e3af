"""Weight decay: AdamW steps without a gradient against p (1 - lr wd), also after a resume."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.models import CriticWorker
from megatron_brorl.train.sft import sft_optim
from megatron_brorl.train.worker import StageOptions, Worker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # inside Megatron
PROMPTS = [torch.tensor([5, 9])]
RESPONSES = [torch.tensor([7, 4, 2])]
OPTIM = OptimConfig(lr=0.5, weight_decay=0.25, clip_grad=1.0)
LR = 0.125  # learning rates of the steps


def stage_of(kind, directory, processes, optim, distributed=False):
    options = StageOptions(1000, backend("fused", torch.device("cpu")), distributed_optimizer=distributed)
    stage = kind(read_shape(directory), processes, options, optim)
    stage.load_hf(directory)
    return stage


def step(stage):
    """Take one optimizer step with a gradient of zero; return the parameters before and after it."""

    def loss(_batch, head):
        found = head if isinstance(stage, CriticWorker) else head.log_probs()[0]
        return 0.0 * found.sum(), None

    before = {name: p.detach().clone() for name, p in stage.module.named_parameters()}
    head = stage.critic.values if isinstance(stage, CriticWorker) else stage.head(1.0)
    update, _ = stage.train(PROMPTS, RESPONSES, loss, head, LR)
    assert (update.applied, update.grad_norm) == (True, 0.0)
    return before, dict(stage.module.named_parameters())


def assert_decayed(before, after):
    kinds = {True: 0, False: 0}
    for name, old in before.items():
        spared = old.dim() == 1
        kinds[spared] += 1
        expected = old.double() * (1.0 if spared else 1 - LR * OPTIM.weight_decay)
        torch.testing.assert_close(after[name].double(), expected, rtol=0 if spared else 1e-6, atol=0, msg=name)
    assert kinds[False] > 10
    assert kinds[True] > 0
    return {name for name, old in before.items() if old.dim() == 1}


@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
@pytest.mark.parametrize(("family", "some"), [("qwen2", "linear_qkv.bias"), ("qwen3", "q_layernorm.weight")])
@pytest.mark.parametrize("kind", [Worker, CriticWorker])
def test_only_matrices_decay(processes, tmp_path, kind, family, some, distributed):
    tiny.make_model(tmp_path, family, tied=False)
    spared = assert_decayed(*step(stage_of(kind, tmp_path, processes, OPTIM, distributed)))
    assert {"decoder.final_layernorm.weight", f"decoder.layers.3.self_attention.{some}"} <= spared


def test_sft_follows_optim_weight_decay():
    optim = OptimConfig(lr=1.0, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3, clip_grad=7.0)
    found = sft_optim(SftConfig(lr=0.25), optim)
    differing = {f.name for f in dataclasses.fields(optim) if getattr(found, f.name) != getattr(optim, f.name)}
    assert differing == {"lr", "warmup_steps", "weight_decay"}
    assert (found.lr, found.warmup_steps, found.weight_decay) == (0.25, 10, 0.01)
