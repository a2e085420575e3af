"""Attention of training by the kernels of a GPU, against the matrix of all scores in float64 on the GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.models.layers.attention import Segments, attend
from megatron_brorl.parallel.packing import PackedGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# PackedGroup(tokens of the shared prompt, ((count, length of a segment), ...)). A kernel computes pieces of 512 queries
# (gpu_attention.PIECE). SHARED has prompts above and below 512 tokens, a group without one, and segments of one token.
SHARED = (PackedGroup(700, ((3, 1), (2, 300), (1, 531))), PackedGroup(0, ((2, 90),)), PackedGroup(33, ((40, 20),)))
PLAIN = (PackedGroup(0, ((1, 1), (5, 64), (1, 1000))),)


def results(attention, groups, tensors, dtype):
    """Compute the output and the gradients of query, key and value in dtype, and convert them to float64."""
    *inputs, grad = (x.to(dtype, copy=True) for x in tensors)
    out = attention(*(x.requires_grad_() for x in inputs), groups)
    out.backward(grad)
    return [x.detach().double() for x in (out, *(tensor.grad for tensor in inputs))]


def kernels(query, key, value, groups):
    return attend(query, key, value, Segments(groups=groups), scale=None)


def by_definition(query, key, value, groups):
    """Let each token attend to its segment up to itself, and to the prompt of its group."""
    table = Segments(groups=groups).table.cuda()  # start and length of each segment and of its prompt
    start, _, prompt_start, prompt_length = table.repeat_interleave(table[:, 1], dim=0).T.unsqueeze(2)  # [queries, 1]
    j = torch.arange(len(start), device="cuda")  # keys
    in_prompt = (j >= prompt_start) & (j < prompt_start + prompt_length)
    i = j[:, None]  # queries
    mask = (j <= i) & ((j >= start) | in_prompt)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


# Neither heads of size 12 nor float64 have a kernel, so scaled_dot_product_attention computes them.
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (12, 2, 128), (4, 4, 80), (6, 2, 12)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 0.02), (torch.float16, 0.004), (torch.float32, 2e-5), (torch.float64, 1e-12)],
)
@pytest.mark.parametrize("groups", [SHARED, PLAIN], ids=["shared", "plain"])
def test_attention_agrees_with_float64_and_repeats_bit_for_bit(groups, dtype, tolerance, heads, kv_heads, size):
    generator = torch.Generator("cuda").manual_seed(size)
    total = int(Segments(groups=groups).table[:, 1].sum())
    tensors = [
        torch.randn(total, n, size, generator=generator, device="cuda", dtype=torch.float64).to(dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    first = results(kernels, groups, tensors, dtype)
    for result, exact in zip(first, results(by_definition, groups, tensors, torch.float64), strict=True):
        assert float((result - exact).norm() / exact.norm()) < tolerance
    if size % 8 == 0 and dtype != torch.float64:
        second = results(kernels, groups, tensors, dtype)
        assert all(map(torch.equal, first, second))
