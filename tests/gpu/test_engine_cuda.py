"""The built-in engine on a GPU, where it decodes and samples with torch ops, against transformers."""

from __future__ import annotations

import pytest
import tiny
import torch
from kernel_device import EMULATED, MARKS

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.types import Prompt

pytestmark = [*MARKS, pytest.mark.skipif(EMULATED, reason="needs a GPU")]


def test_log_probs_are_those_of_transformers(tmp_path):
    """Check 160 rollouts under top-p. The engine decodes at most 100 at a time, so 60 rollouts wait for free slots."""
    model = tiny.make_model(tmp_path, "qwen3", tied=False)
    device = torch.device("cuda")
    shape = read_shape(tmp_path)
    ops = backend("fused", device)
    requests = [Request(Prompt(str(i), "", (20 + i, 30, 40), None, "exact"), key=i, n=40) for i in range(4)]
    names = hf_shapes(shape)
    engine = TorchEngine(shape, names, device, torch.float32, max_rows=100, sample=ops.sample_tokens, ops=ops.decode)
    engine.update_weights([(n, p) for n, p in model.state_dict().items() if n in engine.names], version=0)
    sampling = Sampling(temperature=1.0, top_p=0.95, top_k=0, max_tokens=60, stop_ids=(2, 5, 7))
    for request, group in zip(requests, engine.generate(requests, sampling), strict=True):
        for rollout in group:
            ids = torch.tensor([*request.prompt.token_ids, *rollout.token_ids.tolist()])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(request.prompt.token_ids) - 1 : -1]
            assert float((rollout.log_probs - log_probs_of(logits, rollout.token_ids)).abs().max()) < 1e-3


def log_probs_of(logits, ids):
    """Return log-probabilities [T] of ids under top-p 0.95."""
    p, order = logits.double().softmax(-1).sort(-1, descending=True)
    kept = p.cumsum(-1) - p < 0.95
    kept_p = torch.zeros_like(p).scatter_(-1, order, p * kept)
    return (kept_p / kept_p.sum(-1, keepdim=True)).gather(-1, ids[:, None]).squeeze(-1).log()
