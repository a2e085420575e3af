"""Verifier `reasoning_gym`: allowed tasks, and checks that their scorers neither execute nor overpay answers."""

from __future__ import annotations

import inspect
import json
import math
import re
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS
from rows import row

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifiers import gym

ITEM = {"question": "1 + 2", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}


def item(name: str, index: int) -> dict[str, Any]:
    return json.loads(json.dumps(gym.create(name, seed=11, config={}, where="test")[index]))


def reward(answer: str, metadata: dict[str, Any]) -> float:
    return gym.verify(answer, row(**metadata)).reward


def score(name: str, answer: str, entry: dict[str, Any]) -> float | None:
    """Return the reward, or None if the scorer raises, which the pool counts as 0."""
    try:
        return reward(answer, {"source_dataset": name, "entry": entry})
    except Exception:
        return None


def test_tasks_are_either_refused_or_among_the_checked_ones():
    assert gym.REFUSED.keys() < set(DATASETS)
    assert len(gym.allowed()) == 80


@pytest.mark.parametrize("name", gym.allowed())
def test_allowed_scorers_neither_execute_nor_overpay_answers(name, tmp_path, capfd):
    marker = tmp_path / "marker"
    attack = f"__import__('os').system('touch {marker}')"
    entry = item(name, 10**9)  # The stream of items is endless.
    oracle = entry["answer"]
    if oracle is not None:
        assert score(name, oracle, entry) == 1.0
    quoted = attack.replace("'", '"')
    for text in (attack, quoted, f"[{attack}]", f"f'{{{quoted}}}'", f"{oracle} {attack}", json.dumps([[attack]])):
        score(name, text, entry)
        assert not marker.exists(), text
    # The board of another item may also solve this one.
    others = [str(item(name, index)["answer"]) for index in (1, 2)] if name != "n_queens" else []
    for text in ("nan", "-inf", "", " ", "banana", "[]", "{}", "None", "9" * 4000, "1e99999999", *others):
        result = score(name, text, entry)
        same = text.strip() == oracle or (_number(text) is not None and _number(text) == _number(oracle))
        assert same or result is None or result <= gym.PARTIAL_CREDIT_CAP, text
    source = inspect.getsource(DATASETS[name][0].score_answer)
    assert name in gym.EXECUTING or not re.search(r"\b(eval|exec|parse_expr|sympify|literal_eval|compile)\(", source)
    capfd.readouterr()  # some scorers print


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
        return value if math.isfinite(value) else None
    except ValueError:
        return None


def test_scorer_uses_the_config_of_its_task():
    entry = {"answer": "0.5", "metadata": {}}
    fine = {"source_dataset": "decimal_arithmetic", "entry": entry}
    coarse = {**fine, "config": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}}
    assert reward("0.55", fine) == 0.0
    assert reward("0.55", coarse) == 1.0  # tolerance 10 ** -1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_termz": 2}, "'chain_sum' .*min_termz"),
        ({"min_terms": 5, "max_terms": 2}, "'chain_sum' does not accept its config"),
        ({"seed": 1}, "seed is set by this program; remove it"),
        ({"size": 10}, "size is set by this program; remove it"),
    ],
)
def test_invalid_task_config_is_an_error_in_one_line(config, message):
    with pytest.raises(UserError, match=rf"^data\.tasks\[0\]: [^\n]*{message}[^\n]*$"):
        gym.create("chain_sum", seed=1, config=config, where="data.tasks[0]")


def test_other_versions_of_the_library_are_refused(monkeypatch):
    monkeypatch.setattr(gym.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(UserError, match=r"0\.2\.0 is installed.*pip install reasoning-gym==0\.1\.25"):
        gym.allowed.__wrapped__()


@pytest.mark.parametrize("name", sorted(gym.EXECUTING))
def test_executed_answers_match_a_harmless_pattern(name):
    for index in range(50):
        entry = item(name, index)
        gym.check_row(row(source_dataset=name, entry=entry), "f.jsonl:1")
        assert gym.harmless(name, entry["answer"])
    calls = ("__import__('os')", "print()", "open", "lambda: 0")
    powers = ("9**9**9**9", "x**9**9", "9 * * 9", "x**999", "9**9")
    for text in (*calls, *powers, " " * 5000, "1" * 40):
        assert not gym.harmless(name, text)


def test_partial_credit_is_capped():
    assert reward("13", {"source_dataset": "chain_sum", "entry": ITEM}) == 0.5  # one of two characters
    long = {"source_dataset": "caesar_cipher", "entry": {"answer": "A" * 199, "metadata": {}}}
    assert reward("A" * 199, long) == 1.0
    assert reward("A" * 199 + "B", long) == 0.98  # 199 / 200 in the library
