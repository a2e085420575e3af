"""The ops on chunks of logits: products, statistics of parts of the vocabulary and their merge."""

from __future__ import annotations

import pytest
import torch
from ops.linear_cases import close

from megatron_brorl.ops.fused import softmax
from megatron_brorl.ops.fused.softmax import Shard

OPS = torch.ops.brorl

SIZES = [  # m, n, k of products [m, k] @ [k, n]
    (5, 7, 3),
    (1, 1, 1),
    (1, 40, 30),
    (40, 1, 30),
    (40, 30, 1),
    (130, 70, 515),
    (64, 64, 512),
    (200, 33, 1025),
    (97, 150, 1600),
    (9, 2900, 1000),  # several groups of packed columns
]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_keep_at_least_float32(m, n, k, transposed, dtype):
    g = torch.Generator().manual_seed(m)
    a, b = (torch.randn(*shape, generator=g).to(dtype) for shape in ((m, k), (k, n)))
    layouts = zip((a, b), transposed, strict=True)
    left, right = (x.t().contiguous().t() if by_columns else x for x, by_columns in layouts)
    start = torch.randn(m, n, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32)
    for accumulate in (False, True):
        out = start.clone()
        softmax.gemm_(out, left, right, accumulate)
        assert close(out, a.double() @ b.double() + accumulate * start, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_of_rows_that_overlap(dtype):
    """A repeated row (stride 0), and sliding windows over a vector."""
    g = torch.Generator().manual_seed(7)
    row = torch.randn(1, 80, generator=g).to(dtype)
    vector = torch.randn(200, generator=g).to(dtype)
    windows = vector.as_strided((80, 90), (1, 1))
    for a, b in ((row.expand(70, 80), windows), (windows[:70, :80], row.expand(80, 80).t())):
        out = torch.zeros(len(a), b.shape[1], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        softmax.gemm_(out, a, b, accumulate=False)
        assert close(out, a.double() @ b.double(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shard_sizes", [(0, 2000), (1, 1999), (700, 1300), (1024, 976)])
def test_parts_of_the_vocabulary_merge(dtype, shard_sizes):
    """Merge two shards with the sums that two ranks would exchange, and compare with log_softmax in float64."""
    g = torch.Generator().manual_seed(shard_sizes[0])
    logits = (4 * torch.randn(6, 2000, dtype=torch.float64, generator=g)).to(dtype)
    logits[0, :1500] = float("-inf")  # a whole block and a whole shard have no probability
    ids = torch.tensor([1600, 0, 699, 700, 1999, 1023])
    temperature = 0.6
    statistics = []
    start = 0
    for shard_logits in logits.split(list(shard_sizes), dim=1):
        shard = Shard(start, live=shard_logits.shape[1], temperature=temperature, group=None)
        statistics.append(softmax.softmax_statistics(shard_logits.contiguous(), ids, shard).unbind(1))
        start += shard_logits.shape[1]
    largest = torch.stack([maximum for maximum, *_ in statistics]).amax(0)
    sums = torch.zeros(6, 3, dtype=torch.float64)
    for maximum, total, weighted, logit_of_id in statistics:
        shift = torch.where(total == 0, 0.0, (maximum - largest) / temperature)
        terms = (shift.exp() * total, shift.exp() * (weighted + shift * total), logit_of_id)
        sums += torch.stack(terms, dim=1)
    expected = (logits.double() / temperature).log_softmax(-1)
    log_probs = (sums[:, 2] - largest) / temperature - sums[:, 0].log()
    assert close(log_probs, expected.gather(1, ids[:, None])[:, 0], 1e-6 if dtype == torch.float32 else 1e-13)
    entropy = -(expected.exp() * expected.clamp(min=-1e300)).sum(-1)  # 0 * -1e300, not 0 * -inf
    assert close(sums[:, 0].log() - sums[:, 1] / sums[:, 0], entropy, 1e-6 if dtype == torch.float32 else 1e-13)


def test_wrong_shapes_and_dtypes_are_refused():
    logits = torch.zeros(3, 4)
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="logits must be float32 or float64"):
        OPS.softmax_statistics(logits.half(), ids, start=0, temperature=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        OPS.softmax_statistics(logits.t(), torch.zeros(4, dtype=torch.int64), start=0, temperature=1.0)
    options = {"entropy_gradient": None, "start": 0, "temperature": 1.0, "narrow": False}
    with pytest.raises(ValueError, match=r"statistics must be \[3, 4\] float64"):
        OPS.softmax_gradient_(logits, ids, torch.zeros(3, 4), torch.zeros(3), **options)
    with pytest.raises(ValueError, match=r"cannot write \[2, 3\] times \[4, 5\]"):
        OPS.gemm_(torch.zeros(2, 5), torch.zeros(2, 3), torch.zeros(4, 5), accumulate=False)
    with pytest.raises(TypeError, match="cannot multiply BFloat16 by BFloat16 to BFloat16"):
        OPS.gemm_(*(torch.zeros(2, 2, dtype=torch.bfloat16) for _ in range(3)), accumulate=False)
    tensors = {name: torch.zeros(2) for name in ("log_probs", "entropy", "rollout", "advantages", "weights")}
    good = {**tensors, "old": None, "reference": None, "policy_loss": "clip", "constants": [0.8, 1.2, 0.0]}
    good |= {"is_cap": 0.0, "kl_coef": 0.0, "kl_estimator": "k1", "entropy_coef": 0.0}
    with pytest.raises(ValueError, match="kl_estimator must be k1, k2 or k3, got k4"):
        OPS.ppo_tokens(**good | {"kl_estimator": "k4"})
    with pytest.raises(ValueError, match="has no policy_loss clap"):
        OPS.ppo_tokens(**good | {"policy_loss": "clap"})
    with pytest.raises(ValueError, match="policy_loss clip takes 3 constants, got 2"):
        OPS.ppo_tokens(**good | {"constants": [0.8, 1.2]})
