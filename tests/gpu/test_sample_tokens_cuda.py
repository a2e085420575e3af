"""The sampler's CUDA kernel on the cases of the CPU op, against the same brute force."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_device import DEVICE, EMULATED, MARKS
from sampling_cases import CASES, Case, check, normal

from megatron_brorl.ops.fused import sampling as fused_sampling

pytestmark = MARKS
ROWS = 10  # of an emulated case
if EMULATED:  # rows are drawn apart, and there one after another
    CASES = {name: dataclasses.replace(case, logits=case.logits[:ROWS]) for name, case in CASES.items()}


def on_gpu(case: Case, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    moved = (x.to(DEVICE) for x in (case.logits if logits is None else logits, *case.stream))
    ids, log_probs = fused_sampling.sample_tokens(*moved, case.temperature, case.top_p, case.top_k)
    return ids.cpu(), log_probs.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name, dtype):
    check(fused_sampling.sample_tokens, CASES[name], DEVICE, dtype)


@pytest.mark.parametrize("name", CASES)
def test_draws_what_the_cpu_draws(name):
    case = CASES[name]
    ids, log_probs = on_gpu(case)
    settings = (case.temperature, case.top_p, case.top_k)
    expected, expected_log_probs = fused_sampling.sample_tokens(case.logits, *case.stream, *settings)
    same = ids == expected
    assert same.float().mean() >= 0.97  # the rest is a uniform within rounding of a step of the CDF
    torch.testing.assert_close(log_probs[same], expected_log_probs[same], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["plain-1031", "top-p-cold", "top-k", "both", "ties-both", "greedy"])
def test_rows_depend_on_nothing_else(name):
    """Bit for bit: again, alone, and as rows of a wider tensor."""
    case = CASES[name]
    ids, log_probs = on_gpu(case)
    rows, vocab = case.logits.shape
    wide = torch.full((2 * rows, vocab + 9), float("nan"), device=DEVICE)
    wide[::2, 3:-6] = case.logits.to(DEVICE)
    for logits in (case.logits, wide[::2, 3:-6]):
        again = on_gpu(case, logits)
        assert torch.equal(again[0], ids)
        assert torch.equal(again[1], log_probs)
    keys, index, position = (x[5:6].to(DEVICE) for x in case.stream)
    settings = (case.temperature, case.top_p, case.top_k)
    token, log_prob = fused_sampling.sample_tokens(case.logits[5:6].to(DEVICE), keys, index, position, *settings)
    assert (token.item(), log_prob.item()) == (ids[5].item(), log_probs[5].item())


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.9, 5)])
def test_a_row_without_a_distribution_gets_no_token(temperature, top_p, top_k):
    logits = normal(6, 1031)
    logits[1, 900], logits[3, 0], logits[4] = float("nan"), float("inf"), float("-inf")
    ids, log_probs = on_gpu(Case(logits, temperature, top_p, top_k))
    assert (ids == -1).tolist() == log_probs.isnan().tolist() == [False, True, False, True, True, False]


def test_opcheck():
    case = CASES["both"]
    moved = (x.to(DEVICE) for x in (case.logits, *case.stream))
    arguments = (*moved, case.temperature, case.top_p, case.top_k)
    torch.library.opcheck(torch.ops.brorl.sample_tokens.default, arguments)
