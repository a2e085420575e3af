"""Combinations against their arithmetic, by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from megatron_brorl.config.schema import CombinationConfig, PartConfig, RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.verifier import Entry, Score, VerifierRow

TEXT = "<think>{}</think><answer>{}</answer>"


def share(answer: str, row: VerifierRow) -> float:
    """The answer itself, as a user's function would return it."""
    return float(answer)


def config(how: Any, *weights: float, **reward: Any) -> RewardConfig:
    parts = tuple(PartConfig(v, w) for v, w in zip(("format", "exact", "share"), weights, strict=False))
    return RewardConfig(combination=(CombinationConfig("mix", how, parts),), **reward)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    tag = registry.ENTRIES["reasoning_gym"].find
    entries = {
        "share": Entry("the answer", lambda: share, tag, lambda row, where: None),  # type: ignore[arg-type, return-value]
        "exact": Entry("in the tag", registry.ENTRIES["exact"].load, tag, registry.ENTRIES["exact"].check_row),
    }
    for name, entry in entries.items():
        monkeypatch.setitem(registry.ENTRIES, name, entry)


def judged(how: Any, text: str, reference: str, *weights: float) -> Score:
    """Through the text that workers get."""
    settings = config(how, *weights)
    answer = registry.entry("mix", "x", settings).find(text)
    assert answer is not None
    verify = registry.verifier(registry.for_workers(["mix"], settings)["mix"])
    return verify(answer, VerifierRow(id="r", prompt="?", answer=reference, metadata={}))


WRONG = "exact: not the reference answer"
FORM = "format: <think> occurs 0 times, not once"


@pytest.mark.parametrize(
    ("how", "weights", "text", "reward", "reasons"),
    [
        ("sum", (0.1, 0.6, 0.3), TEXT.format("a", "0.5"), 0.1 + 0.6 + 0.15, ""),
        ("sum", (0.1, 0.6, 0.3), TEXT.format("a", "0.25"), 0.1 + 0.075, WRONG),
        ("sum", (0.1, 0.6, 0.3), "<answer>0.5</answer>", 0.6 + 0.15, FORM),
        ("sum", (0.1, 0.9, 0.0), "no", 0.0, f"{FORM}; exact: no answer; share: no answer"),
        ("product", (1, 1, 1), TEXT.format("a", "0.5"), 0.5, ""),
        ("product", (1, 1, 1), TEXT.format("a", "0.25"), 0.0, WRONG),
        ("gate", (1, 1, 1), TEXT.format("a", "0.5"), 0.5, ""),
        ("gate", (1, 1, 1), "<answer>0.5</answer>", 0.0, FORM),
    ],
)
def test_rewards(how: str, weights: tuple[float, ...], text: str, reward: float, reasons: str) -> None:
    score = judged(how, text, "0.5", *weights)
    assert math.isclose(score.reward, reward)
    assert score.reason == reasons
    assert list(score.parts) == ["format", "exact", "share"]


@pytest.mark.parametrize(
    ("how", "said", "reward"),
    [
        ("sum", "-2", 0.1 + 0.6 - 0.3 * 2),
        ("sum", "5", 0.1 + 0.6 + 0.3 * 5),
        ("product", "-2", -2.0),
        ("product", "5", 5.0),
        ("gate", "-2", -2.0),
    ],
)
def test_parts_may_have_any_reward(how: str, said: str, reward: float) -> None:
    weights = (0.1, 0.6, 0.3) if how == "sum" else (1, 1, 1)
    assert math.isclose(judged(how, TEXT.format("a", said), said, *weights).reward, reward)


@pytest.mark.parametrize(("part", "reward"), [(2.0, 1.0), (0.7 + 0.2 + 0.1, 1.0), (0.999, 0.0), (-1.0, 0.0)])
def test_a_gate_opens_from_1_on(part: float, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(registry.ENTRIES["share"], load=lambda: lambda answer, row: Score(part))
    monkeypatch.setitem(registry.ENTRIES, "share", first)
    parts = (PartConfig("share"), PartConfig("exact"))
    settings = RewardConfig(combination=(CombinationConfig("mix", "gate", parts),))
    verify = registry.verifier(registry.for_workers(["mix"], settings)["mix"])
    assert verify("yes", VerifierRow(id="r", prompt="?", answer="yes", metadata={})).reward == reward


def test_parts_are_named() -> None:
    score = judged("sum", TEXT.format("a", "0.25"), "0.5", 0.1, 0.6, 0.3)
    assert score.parts == {"format": 1.0, "exact": 0.0, "share": 0.25}


def test_the_answer_is_what_the_parts_found() -> None:
    find = registry.entry("mix", "x", config("sum", 0.5, 0.5)).find
    answer = find(TEXT.format("one thought", "4"))
    assert answer == find(TEXT.format("another", "4")) == json.dumps(["<think>.</think><answer>.</answer>", "4"])
    assert answer != find(TEXT.format("another", "5"))
    assert json.loads(find(TEXT.format("a", "4" * 4097)) or "")[1] is None
    short = registry.entry("mix", "x", config("sum", 0.5, 0.5, max_chars=50)).find
    assert json.loads(short(TEXT.format("a", "4" * 51)) or "")[1] is None


def test_a_reference_answer_is_judged_by_every_part() -> None:
    verify = registry.verifier(registry.for_workers(["mix"], config("sum", 0.5, 0.5))["mix"])
    assert verify("0.5", VerifierRow(id="r", prompt="?", answer="0.5", metadata={})).reward == 0.5


def test_every_part_checks_the_row() -> None:
    check_row = registry.entry("mix", "x", config("sum", 0.5, 0.5)).check_row
    with pytest.raises(UserError, match=r'^f:1: verifier "exact" compares'):
        check_row(VerifierRow(id="r", prompt="?", answer=None, metadata={}), "f:1")
    with pytest.raises(UserError, match=r"^f:1: metadata\.format_tags"):
        check_row(VerifierRow(id="r", prompt="?", answer="1", metadata={"format_tags": 1}), "f:1")


@pytest.mark.parametrize(
    ("name", "how", "parts", "message"),
    [
        ("mix", "sum", {"format": 0.1, "exact": 0.8}, r"\.parts: the weights add up to 0\.9; make it 1"),
        ("mix", "sum", {"format": -0.1, "exact": 1.1}, r"\.parts\[0\]\.weight = -0\.1: must not be negative"),
        ("mix", "sum", {"format": math.nan, "exact": 1.0}, r"\.parts\[0\]\.weight = nan: must not be negative"),
        ("mix", "sum", {"format": math.inf, "exact": 1.0}, r"\.parts: the weights add up to inf"),
        ("mix", "gate", {"format": 0.1, "exact": 1.0}, r'\.parts\[0\]\.weight = 0\.1: only how = "sum" has weights'),
        ("mix", "sum", {"exact": 1.0}, r"\.parts: there are 1; a combination has 2 to 16"),
        (
            "mix",
            "gate",
            {"formt": 1.0, "exact": 1.0},
            r"\.parts\[0\]\.verifier: no verifier is called 'formt'; did you mean format\?",
        ),
        ("a b", "gate", {"format": 1.0, "exact": 1.0}, r"\.name = 'a b': must be a word"),
        ("exact", "gate", {"format": 1.0, "share": 1.0}, r"\.name = 'exact': there is a verifier of that name"),
    ],
)
def test_mistakes(name: str, how: Any, parts: dict[str, float], message: str) -> None:
    each = CombinationConfig(name, how, tuple(PartConfig(*part) for part in parts.items()))
    with pytest.raises(UserError, match=rf"^reward\.combination\[0\]{message}"):
        registry.check_combinations([each])


def test_a_part_stands_once() -> None:
    each = CombinationConfig("mix", "sum", (PartConfig("exact", 0.5), PartConfig("exact", 0.5)))
    with pytest.raises(UserError, match=r"^reward\.combination\[0\]\.parts: verifier 'exact' stands there twice"):
        registry.check_combinations([each])
