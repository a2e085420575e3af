from __future__ import annotations

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.verifier import VerifierRow

BOTH = r"<answer>1</answer> \boxed{2}"


def test_an_unknown_name_gets_suggestions() -> None:
    with pytest.raises(UserError, match=r"^f:3: no verifier is called 'exakt'; did you mean exact\?"):
        registry.entry("exakt", "f:3")
    with pytest.raises(UserError, match=r"^f:3: no verifier is called ''; known: .*exact, .*reasoning_gym"):
        registry.entry("", "f:3")


def test_each_verifier_has_its_own_extraction() -> None:
    assert registry.entry("exact", "x").find(BOTH) == BOTH
    assert registry.entry("reasoning_gym", "x").find(BOTH) == "1"
    assert registry.entry("my.py:score", "x").find(BOTH) == BOTH


@pytest.mark.parametrize(("how", "answer"), [("full", BOTH), ("answer_tag", "1"), ("boxed", "2")])
def test_reward_extract_overrides_the_verifier(how: str, answer: str) -> None:
    for name in ("exact", "reasoning_gym", "my.py:score"):
        assert registry.entry(name, "x", RewardConfig(extract=how)).find(BOTH) == answer  # type: ignore[arg-type]


def test_the_smaller_character_limit_applies() -> None:
    assert registry.entry("reasoning_gym", "x").max_chars == 4096
    assert registry.entry("reasoning_gym", "x", RewardConfig(max_chars=5000)).max_chars == 4096
    assert registry.entry("reasoning_gym", "x", RewardConfig(max_chars=10)).max_chars == 10
    assert registry.entry("exact", "x").max_chars == registry.entry("my.py:score", "x").max_chars == 65536


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [(" 42\n", "42", 1.0), ("42.0", "42", 0.0), ("", None, 0.0), ("", "", 1.0), ("a b", " a b ", 1.0)],
)
def test_exact(answer: str, reference: str | None, reward: float) -> None:
    found = registry.verify("exact", answer, VerifierRow(id="r", prompt="?", answer=reference, metadata={}))
    assert (found.reward, found.reason) == (reward, "" if reward else "not the reference answer")


def test_exact_needs_a_reference() -> None:
    with pytest.raises(UserError, match=r'^f:1: verifier "exact" needs a reference; add "answer"$'):
        registry.entry("exact", "x").check_row(VerifierRow(id="r", prompt="?", answer=None, metadata={}), "f:1")


def test_a_response_without_an_answer_scores_0() -> None:
    row = VerifierRow(id="r", prompt="?", answer="4", metadata={})
    assert registry.verify("reasoning_gym", "4", row) == (0.0, "no answer in the response", {})
