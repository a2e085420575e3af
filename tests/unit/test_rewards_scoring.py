from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.pool import RewardPool
from megatron_brorl.rewards.scoring import score_groups
from megatron_brorl.types import FinishReason, Prompt, Rollout, RolloutGroup


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2, 20.0) as pool:
        yield pool


def group(prompt: Prompt, finishes: list[FinishReason]) -> RolloutGroup:
    rollouts = tuple(Rollout(i, torch.tensor([5]), torch.tensor([-1.0]), f) for i, f in enumerate(finishes))
    return RolloutGroup(prompt, rollouts, 0)


def gym(answer: str) -> Prompt:
    entry = {"question": "?", "answer": answer, "metadata": {"source_dataset": "chain_sum"}}
    return Prompt(f"gym{answer}", "?", (1,), answer, "reasoning_gym", {"source_dataset": "chain_sum", "entry": entry})


def test_strict_rewards(pool: RewardPool) -> None:
    exact = Prompt("e", "?", (1,), "yes", "exact")
    groups = [group(exact, ["stop", "length", "stop"]), group(gym("3"), ["stop", "stop", "stop", "length"])]
    texts = [["yes\n", "yes", "no"], ["3", "13", "x" * 5000, "3"]]
    scored, counts, raised = score_groups(groups, texts, pool, RewardConfig())
    assert [s.group for s in scored] == groups
    assert [s.rewards.tolist() for s in scored] == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert all(s.rewards.dtype == torch.float32 for s in scored)
    assert scored[0].rewards.untyped_storage().nbytes() == 12  # its own storage, so saving one saves no other
    assert [s.answers for s in scored] == [("yes", None, "no"), ("3", "13", None, None)]
    assert counts == {
        "ok": 4,
        "no_answer": 1,
        "length": 2,
        **dict.fromkeys(["timeout", "error", "broken", "invalid", "crash"], 0),
    }
    assert raised == {}


def test_partial_credit(pool: RewardPool) -> None:
    scored, counts, _ = score_groups(
        [group(gym("3"), ["stop", "stop", "length"])],
        [["3", "13", "3"]],
        pool,
        RewardConfig(strict=False, cut_off_factor=1.0),
    )
    assert scored[0].rewards.tolist() == [1.0, 0.5, 1.0]
    assert counts["ok"] == 3
    assert counts["length"] == 0


def test_extraction_is_applied(pool: RewardPool) -> None:
    scored, counts, _ = score_groups(
        [group(gym("3"), ["stop"] * 3)],
        [[r"\boxed{3}", r"\boxed{3} or \boxed{4}", "3"]],
        pool,
        RewardConfig(extract="boxed"),
    )
    assert scored[0].rewards.tolist() == [1.0, 0.0, 0.0]
    assert counts["no_answer"] == 2


def test_texts_must_match_rollouts(pool: RewardPool) -> None:
    with pytest.raises(ValueError, match="shorter"):
        score_groups([group(gym("3"), ["stop", "stop"])], [["3"]], pool, RewardConfig())


def test_no_groups(pool: RewardPool) -> None:
    scored, counts, raised = score_groups([], [], pool, RewardConfig())
    assert scored == []
    assert set(counts.values()) == {0}
    assert raised == {}


def test_the_first_exception_of_a_verifier_is_given(pool: RewardPool) -> None:
    entry = {"question": "?", "answer": "2 \u00d7 3", "metadata": {"number": 6, "factors": [2, 3]}}
    data = {"source_dataset": "prime_factorization", "entry": entry}
    primes = Prompt("p", "?", (1,), "2 \u00d7 3", "reasoning_gym", data)
    hollow = Prompt("h", "?", (1,), "3", "reasoning_gym", {**data, "source_dataset": "maze", "entry": {}})
    scored, counts, raised = score_groups(
        [group(primes, ["stop"] * 4), group(hollow, ["stop"] * 2)],
        [["six", "2 \u00d7 3", "seven", "3 \u00d7 2"], ["3", "4"]],
        pool,
        RewardConfig(),
    )
    assert scored[0].rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert (counts["ok"], counts["error"], counts["broken"]) == (2, 2, 2)
    assert raised == {
        "verifier reasoning_gym (prime_factorization) raised on an answer, which scores 0 (figure verdict_errors)": (
            "ValueError: invalid literal for int() with base 10: 'six'"
        ),
        "verifier reasoning_gym (maze) is broken: it raises on a reference answer too": "KeyError: 'answer'",
    }


def test_exact() -> None:
    exact = registry.verifier("exact")
    assert exact(" 42\n", "42", {}) == 1.0
    assert exact("42.0", "42", {}) == 0.0
    assert exact("", None, {}) == 0.0
    assert exact("", "", {}) == 1.0


def test_an_unknown_verifier_lists_the_known() -> None:
    with pytest.raises(UserError, match="no verifier is called 'maths'; known: exact, reasoning_gym"):
        registry.verifier("maths")
