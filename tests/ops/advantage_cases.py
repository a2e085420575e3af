"""Cases of the advantage ops, for the CPU and GPU tests, and the formulas written as loops over Python floats."""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch
from torch import Tensor

from megatron_brorl.algo.advantage import Moments


@dataclasses.dataclass(frozen=True)
class GaeCase:
    """Inputs in float64 that float32 holds exactly. NaN and infinities lie under the mask."""

    rewards: Tensor  # [T]
    values: Tensor  # [T]
    starts: Tensor  # [S + 1]
    mask: Tensor | None  # [T]
    bootstrap: Tensor | None  # [S]
    gamma: float
    lam: float

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> tuple:
        """In the order that gae takes them."""
        mask = None if self.mask is None else self.mask.to(device)
        bootstrap = None if self.bootstrap is None else self.bootstrap.to(device, dtype)
        tensors = (self.rewards.to(device, dtype), self.values.to(device, dtype), self.starts.to(device))
        return (*tensors, mask, bootstrap, self.gamma, self.lam)


def gae_by_hand(case: GaeCase) -> tuple[Tensor, Tensor]:
    """Not the recursion but the sum it stands for: A_t = sum_l (gamma lam)^l delta_{t + l} over unmasked tokens."""
    advantages, returns = torch.zeros_like(case.rewards), torch.zeros_like(case.rewards)
    for s in range(len(case.starts) - 1):
        tokens = range(int(case.starts[s]), int(case.starts[s + 1]))
        tokens = [t for t in tokens if case.mask is None or case.mask[t]]
        after = 0.0 if case.bootstrap is None else case.bootstrap[s].item()
        values = [case.values[t].item() for t in tokens] + [after]
        deltas = [case.rewards[t].item() + case.gamma * values[i + 1] - values[i] for i, t in enumerate(tokens)]
        for i, t in enumerate(tokens):
            terms = ((case.gamma * case.lam) ** k * x for k, x in enumerate(deltas[i:]))
            advantages[t] = math.fsum(terms)
            returns[t] = advantages[t] + values[i]
    return advantages, returns


def gae_case(lengths: list[int], masked: float, cut_off: bool, gamma: float, lam: float) -> GaeCase:
    g = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    rewards, values = torch.randn(2, total, generator=g)
    mask = None
    if masked:
        mask = torch.rand(total, generator=g) >= masked
        rewards[~mask], values[~mask] = float("nan"), float("inf")
    bootstrap = torch.randn(len(lengths), generator=g).double() if cut_off else None
    return GaeCase(rewards.double(), values.double(), starts, mask, bootstrap, gamma, lam)


LENGTHS = [0, 1, 2, 31, 32, 33, 0, 0, 64, 65, 100, 1, 300, 0]  # about the 32 tokens of a warp
GAE_CASES = {
    "plain": gae_case(LENGTHS, 0, False, 0.99, 0.95),
    "cut off": gae_case(LENGTHS, 0, True, 0.99, 0.95),
    "masked": gae_case(LENGTHS, 0.3, True, 0.97, 0.9),
    "nearly all masked": gae_case(LENGTHS, 0.97, True, 1.0, 1.0),
    "all masked": gae_case(LENGTHS, 1.1, True, 1.0, 1.0),
    "undiscounted": gae_case(LENGTHS, 0.3, True, 1.0, 1.0),
    "one step": gae_case(LENGTHS, 0.3, True, 0.9, 0.0),
    "myopic": gae_case(LENGTHS, 0.3, True, 0.0, 0.7),
    "one segment": gae_case([700], 0, True, 0.999, 0.98),
    "no segments": gae_case([], 0, True, 0.9, 0.9),
    "no tokens": gae_case([0, 0], 0.5, True, 0.9, 0.9),
}


@dataclasses.dataclass(frozen=True)
class GroupCase:
    rewards: Tensor  # [B] float64
    starts: Tensor  # [G + 1]
    mask: Tensor | None  # [B]

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
        mask = None if self.mask is None else self.mask.to(device)
        return self.rewards.to(device, dtype), self.starts.to(device), mask


def groups_by_hand(case: GroupCase, kind: str) -> Tensor:
    advantages = torch.zeros_like(case.rewards)
    for g in range(len(case.starts) - 1):
        members = range(int(case.starts[g]), int(case.starts[g + 1]))
        members = [i for i in members if case.mask is None or case.mask[i]]
        rewards = [case.rewards[i].item() for i in members]
        if len(set(rewards)) < 2:
            continue
        divisor = statistics.stdev(rewards) + 1e-6 if kind == "mean_std" else 1.0
        for i in members:
            advantages[i] = (case.rewards[i].item() - statistics.mean(rewards)) / divisor
    return advantages


def group_case(sizes: list[int], masked: float, binary: bool = False) -> GroupCase:
    g = torch.Generator().manual_seed(sum(sizes))
    starts = torch.tensor([0, *sizes]).cumsum(0)
    rewards = torch.randn(int(starts[-1]), generator=g)
    rewards = (rewards > 1).float() if binary else rewards
    mask = None
    if masked:
        mask = torch.rand(len(rewards), generator=g) >= masked
        rewards[~mask] = float("nan")
    return GroupCase(rewards.double(), starts, mask)


SIZES = [0, 1, 2, 3, 0, 31, 32, 33, 1, 512, 513, 100, 700]  # about a warp, and what one holds of a group
GROUP_CASES = {
    "plain": group_case(SIZES, 0),
    "lost": group_case(SIZES, 0.3),
    "nearly all lost": group_case(SIZES, 0.97),
    "all lost": group_case(SIZES, 1.1),
    "binary": group_case([8] * 40, 0.1, binary=True),
    "equal": GroupCase(torch.full((512,), 0.95).double(), torch.tensor([0, 100, 512]), None),
    "no groups": group_case([], 0),
    "no members": group_case([0, 0], 0),
}


def moments_by_hand(values: Tensor, weights: Tensor | None) -> tuple[float, float, float]:
    """Exactly summed."""
    w = [1.0] * values.numel() if weights is None else weights.double().flatten().tolist()
    kept = [(x, y) for x, y in zip(values.double().flatten().tolist(), w, strict=True) if y]
    count = math.fsum(y for _, y in kept)
    if not count:
        return 0.0, 0.0, 0.0
    mean = math.fsum(x * y for x, y in kept) / count
    return count, mean, math.fsum(y * (x - mean) ** 2 for x, y in kept)


def assert_moments(got: Moments, values: Tensor, weights: Tensor | None) -> None:
    """Against exact sums. Means of parts are rounded by 1e-16 of themselves, so far from zero so are their gaps."""
    count, mean, m2 = moments_by_hand(values, weights)
    assert math.isclose(got.count, count, rel_tol=1e-14)
    assert math.isclose(got.mean, mean, rel_tol=1e-13, abs_tol=1e-15)
    assert math.isclose(got.m2, m2, rel_tol=1e-10 if abs(mean) > 1e5 else 1e-12, abs_tol=1e-20)


def sample(n: int, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Tensor:
    """[n] float64."""
    return mean + std * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + seed))


def hole(n: int, share: float = 0.3) -> Tensor:
    """A mask [n] bool."""
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) >= share


MOMENT_CASES: dict[str, tuple[Tensor, Tensor | None]] = {
    "few": (sample(5), None),
    "a block and one": (sample(2049), None),
    "shaped": (sample(6000).view(20, 3, 100), None),
    "more blocks than a block has threads": (sample(600_000, 2.0), None),
    "far from zero": (sample(30000, 1e6), None),
    "constant": (torch.full((5000,), 0.1, dtype=torch.float64), None),
    "weighted": (sample(9000, 3.0), sample(9000, seed=1).abs()),
    "masked": (torch.where(hole(9000), sample(9000, 1e6), float("nan")), hole(9000)),
    "weight zero": (torch.where(hole(5000), sample(5000), float("inf")), hole(5000).double() * 0.7),
    "all masked": (torch.full((5000,), float("nan")).double(), torch.zeros(5000, dtype=torch.bool)),
    "empty": (sample(0), None),
    "empty, weighted": (sample(0), sample(0)),
}
