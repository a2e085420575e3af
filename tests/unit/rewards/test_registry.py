from __future__ import annotations

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.verifier import VerifierRow

BOTH = r"<answer>1</answer> \boxed{2}"


def row(answer: str | None) -> VerifierRow:
    return VerifierRow(id="r", prompt="?", answer=answer, metadata={})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("exakt", r"did you mean exact\?"),
        ("", "known: .*exact, .*reasoning_gym"),
        ("builtins:exec", "known: "),
        ("os:system", "known: "),
    ],
)
def test_an_unknown_name_gets_suggestions(name, remedy):
    with pytest.raises(UserError, match=rf"^f:3: no verifier is called '{name}'; {remedy}"):
        registry.entry(name, "f:3")


@pytest.mark.parametrize(
    ("how", "answers"), [("", [BOTH, "1", BOTH]), ("full", [BOTH] * 3), ("answer_tag", ["1"] * 3), ("boxed", ["2"] * 3)]
)
def test_reward_extract_overrides_the_extraction_of_a_verifier(how, answers):
    config = RewardConfig(extract=how) if how else RewardConfig()
    names = ("exact", "reasoning_gym", "my.py:score")
    assert [registry.entry(name, "x", config).find(BOTH) for name in names] == answers


def test_character_limits():
    limits = {"reasoning_gym": 4096, "exact": 65536, "my.py:score": 65536}
    assert {name: registry.entry(name, "x").max_chars for name in limits} == limits


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [(" 42\n", "42", 1.0), ("42.0", "42", 0.0), ("", None, 0.0), ("", "", 1.0), ("a b", " a b ", 1.0)],
)
def test_exact(answer, reference, reward):
    score = registry.verify("exact", answer, row(reference))
    assert (score.reward, score.reason) == (reward, "" if reward else "not the reference answer")


def test_a_response_without_an_answer_scores_0():
    assert registry.verify("reasoning_gym", "4", row("4")) == (0.0, "no answer in the response", {})
