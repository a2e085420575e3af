"""The fused sampler against brute force in float64, its reference implementation, and the softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_cases import CASES, Case, check, normal
from threads import with_threads

from megatron_brorl.ops import philox
from megatron_brorl.ops.fused.decode import sample_tokens
from megatron_brorl.ops.reference import sampling


def draw(case: Case, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = changed.get("logits", case.logits)
    keys, index, position = (x[changed.get("rows", slice(None))] for x in case.stream)
    return sample_tokens(logits, keys, index, position, case.temperature, case.top_p, case.top_k)


def test_uniforms_equal_the_reference_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**63 - 1, (2000,), generator=g)
    index, position = torch.randint(0, 2**32, (2, 2000), generator=g)
    keys[:2] = torch.tensor([0, 2**63 - 1])
    index[:2] = 2**32 - 1
    position[:2] = 2**32 - 1
    result = torch.ops.brorl.uniforms(keys, index, position)
    assert torch.equal(result, philox.uniforms(keys, index, position))
    assert 0 < result.min() < result.max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name, dtype):
    check(sample_tokens, CASES[name], "cpu", dtype)


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if c.logits.shape[1] <= 5000 and c.temperature not in (1e-42, 3e3)]
)
def test_samples_equal_the_reference(name):
    """Up to 3% differ, because the cumulative sum of the reference is in float32. No temperature is extreme."""
    case = CASES[name]
    ids, log_probs = draw(case)
    expected, expected_log_probs = sampling.sample_tokens(
        case.logits, *case.stream, case.temperature, case.top_p, case.top_k
    )
    same = ids == expected
    assert same.float().mean() >= 0.97
    torch.testing.assert_close(log_probs[same], expected_log_probs[same], atol=1e-4, rtol=1e-5)


NAMES = ["plain-1031", "top-p-cold", "top-k", "both", "ties-both", "greedy"]  # of some CASES


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_batch_or_threads(name):
    """Results are bit-identical for a single row, in another order, and with any number of threads."""
    case = CASES[name]
    ids, log_probs = draw(case)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    for rows in (order, torch.tensor([5]), torch.arange(3, 9)):
        some_ids, some_log_probs = draw(case, logits=case.logits[rows], rows=rows)
        assert torch.equal(some_ids, ids[rows])
        assert torch.equal(some_log_probs, log_probs[rows])
    for other_ids, other_log_probs in with_threads(lambda: draw(case), (1, 2, 3, len(ids) + 1)):
        assert torch.equal(other_ids, ids)
        assert torch.equal(other_log_probs, log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_strided_rows(name, dtype):
    case = CASES[name]
    logits = case.logits.to(dtype)
    rows, vocab = logits.shape
    expected = draw(case, logits=logits)
    padded = torch.full((2 * rows, vocab + 9), float("nan"), dtype=dtype)
    padded[::2, 3:-6] = logits
    for strided in (padded[::2, 3:-6], logits.t().contiguous().t()):
        result = draw(case, logits=strided)
        assert torch.equal(result[0], expected[0])
        assert torch.equal(result[1], expected[1])


def test_ties():
    keys = torch.full((4000,), 3)
    index = torch.arange(4000)

    def drawn(logits: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> set[int]:
        rows = torch.tensor(logits, dtype=torch.float32).expand(4000, -1)
        return set(sample_tokens(rows, keys, index, index, temperature, top_p, top_k)[0].tolist())

    assert drawn([0, 2, 1, 2, 2], temperature=0) == {1}
    assert drawn([0, 2, 1, 2, 2], top_k=1) == {1, 3, 4}  # Logits equal to the k-th largest stay.
    assert drawn([1, 2, 1, 0, 1], top_k=2) == {0, 1, 2, 4}
    assert drawn([0, 0, 0, 0], top_p=0.5) == {0, 1}  # the first of equal logits are kept until the mass reaches top_p
    assert drawn([0, 0, 0, 0], top_p=0.51) == {0, 1, 2}
    assert drawn([-9, 0, 0, 0, 0], top_p=0.25) == {1, 2}  # The mass of token 1 is just below a quarter.
    assert drawn([0, 0, 0, 0], top_p=1e-9) == {0}
    assert drawn([0, 1, 0, 0], top_p=1e-300) == {1}
    assert drawn([0.0, -0.0, 0.0, -0.0], top_p=0.5) == {0, 1}
    assert drawn([-0.0, 0.0], temperature=0) == {0}


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int64)
    ids, log_probs = sample_tokens(torch.zeros(0, 5), none, none, none, temperature=1.0, top_p=1.0, top_k=0)
    assert (ids.tolist(), log_probs.tolist()) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.9, 5)])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nan", r"logits\[3, 900\] is nan"),
        ("inf", r"logits\[3, 900\] is inf"),
        ("-inf", r"logits\[3\] is -inf through"),
    ],
)
def test_a_row_without_a_distribution_raises(dtype, temperature, top_p, top_k, value, message):
    logits = normal(6, 1031).to(dtype)
    logits[3, slice(None) if value == "-inf" else 900] = float(value)
    with pytest.raises(ValueError, match=message):
        sample_tokens(logits, *Case(logits).stream, temperature, top_p, top_k)
    if value != "-inf":
        logits[3, :900] = float("-inf")
        with pytest.raises(ValueError, match=message):
            sample_tokens(logits, *Case(logits).stream, temperature, top_p, top_k)


FIVE = torch.zeros(5, dtype=torch.int64)
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.zeros(5)}, ValueError, r"logits must be \[B, V\]"),
    ({"logits": torch.zeros(5, 9, dtype=torch.float64)}, TypeError, "logits must be float32 or bfloat16, got Double"),
    ({"keys": FIVE.int()}, TypeError, "keys must be int64, got Int"),
    ({"keys": FIVE - 1}, ValueError, "row 0: keys must not be negative"),
    ({"index": FIVE + 2**32}, ValueError, r"index and position must be in \[0, 2\^32\)"),
    ({"temperature": -0.5}, ValueError, "temperature must be 0 or above and finite, got -0.5"),
    ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
    ({"top_k": -1}, ValueError, r"top_k must be 0 \(off\) or above, got -1"),
    ({"keys": FIVE.to("meta")}, ValueError, "tensors are on cpu, meta; all must be on one device"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MISTAKES)
def test_mistakes_raise_one_clear_error(wrong, error, message):
    good = {"logits": torch.zeros(5, 9), "keys": FIVE, "index": FIVE, "position": FIVE}
    good |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with pytest.raises(error, match=message):
        sample_tokens(**(good | wrong))
