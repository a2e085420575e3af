"""Verifier `reasoning_gym`: allowed tasks, and checks that their scorers neither execute nor overpay answers."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.rewards.verifiers import gym

ITEM = {"question": "1 + 2", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}


def item(name: str, index: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(gym.create(name, 11, {}, "test")[index]))
    return found


def row(metadata: dict[str, Any]) -> VerifierRow:
    return VerifierRow(id="r", prompt="?", answer=None, metadata=metadata)


def reward(answer: str, metadata: dict[str, Any]) -> float:
    return gym.verify(answer, row(metadata)).reward


def score(name: str, answer: str, entry: dict[str, Any]) -> float | None:
    """Return the reward, or None if the scorer raises, which the pool counts as 0."""
    try:
        return reward(answer, {"source_dataset": name, "entry": entry})
    except Exception:
        return None


def test_tasks_are_either_refused_or_among_the_checked_ones() -> None:
    assert gym.REFUSED.keys() < set(DATASETS)
    assert len(gym.allowed()) == 80


@pytest.mark.parametrize("name", gym.allowed())
def test_allowed_scorers_neither_execute_nor_overpay_answers(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    others = [str(item(name, index)["answer"]) for index in (1, 2)]
    for text in ("nan", "-inf", "", " ", "banana", "[]", "{}", "None", "9" * 4000, "1e99999999", *others):
        given = score(name, text, entry)
        same = text.strip() == oracle or _number(text) == _number(oracle) is not None
        same |= name == "n_queens" and _is_a_solution(text, entry["metadata"]["puzzle"])
        assert same or given is None or given <= gym.PARTIAL_CREDIT_CAP, text
    source = inspect.getsource(DATASETS[name][0].score_answer)
    assert name in gym.EXECUTING or not re.search(r"\b(eval|exec|parse_expr|sympify|literal_eval|compile)\(", source)
    capfd.readouterr()  # some scorers print


def _is_a_solution(board: str, puzzle: list[list[str]]) -> bool:
    """Return whether a board has eight queens that do not attack each other, including those of the puzzle."""
    rows = [line.split(" ") for line in board.splitlines()]
    if [len(r) for r in rows] != [8] * 8:
        return False
    queens = [(i, j) for i in range(8) for j in range(8) if rows[i][j] == "Q"]
    attacks = [a for a in queens for b in queens if a < b and (a[0] == b[0] or a[1] == b[1])]
    attacks += [a for a in queens for b in queens if a < b and abs(a[0] - b[0]) == abs(a[1] - b[1])]
    given = [(i, j) for i in range(8) for j in range(8) if puzzle[i][j] == "Q"]
    return len(queens) == 8 and not attacks and set(given) <= set(queens)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
        return value if math.isfinite(value) else None
    except ValueError:
        return None


def test_attack_succeeds_against_an_unprotected_scorer(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    dataset_class, config_class = DATASETS["string_insertion"]
    dataset_class(config_class(seed=1)).score_answer(f"__import__('os').system('touch {marker}')", {"answer": "x"})
    assert marker.exists()


def test_refused_and_unknown_tasks_raise_with_a_reason() -> None:
    with pytest.raises(UserError, match=r"^data\.tasks\[3\]: .*'puzzle24' is refused: its scorer does not ask for"):
        gym.check_task("puzzle24", "data.tasks[3]")
    with pytest.raises(UserError, match=r"^data\.tasks\[0\]: .*'chain_sums'; did you mean .*chain_sum"):
        gym.check_task("chain_sums", "data.tasks[0]")
    with pytest.raises(UserError, match="refused"):
        reward("1", {"source_dataset": "puzzle24", "entry": ITEM})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs metadata.source_dataset"),
        ({"source_dataset": 3, "entry": ITEM}, "needs metadata.source_dataset"),
        ({"source_dataset": "puzzle24", "entry": ITEM}, "'puzzle24' is refused"),
        ({"source_dataset": "chain_sum"}, "needs metadata.entry"),
        ({"source_dataset": "chain_sum", "entry": {"answer": "1"}}, "needs metadata.entry"),
        ({"source_dataset": "gcd", "entry": ITEM}, "is 'gcd', but the entry is of 'chain_sum'"),
        ({"source_dataset": "chain_sum", "entry": ITEM, "config": []}, "metadata.config must be an object"),
    ],
)
def test_rows_cannot_name_a_refused_task(metadata: dict[str, Any], message: str) -> None:
    gym.check_row(row({"source_dataset": "chain_sum", "entry": ITEM}), "f.jsonl:1")
    with pytest.raises(UserError, match=rf"^f\.jsonl:1: .*{message}"):
        gym.check_row(row(metadata), "f.jsonl:1")


def test_scorer_uses_the_config_of_its_task() -> None:
    entry = {"answer": "0.5", "metadata": {}}
    fine = {"source_dataset": "decimal_arithmetic", "entry": entry}
    coarse = {**fine, "config": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}}
    assert reward("0.55", fine) == 0.0
    assert reward("0.55", coarse) == 1.0  # tolerance 10 ** -1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_termz": 2}, "min_termz"),
        ({"min_terms": 5, "max_terms": 2}, "does not accept its config"),
        ({"seed": 1}, "seed is set by this program"),
        ({"size": 10}, "size is set by this program"),
    ],
)
def test_invalid_task_config_is_an_error_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as e:
        gym.create("chain_sum", 1, config, "data.tasks[0]")
    assert "\n" not in str(e.value)
    assert str(e.value).startswith("data.tasks[0]: ")


def test_other_versions_of_the_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(UserError, match=r"0\.2\.0 is installed.*pip install reasoning-gym==0\.1\.25"):
        gym.allowed.__wrapped__()


@pytest.mark.parametrize("name", sorted(gym.EXECUTING))
def test_executed_answers_match_a_harmless_pattern(name: str) -> None:
    for index in range(50):
        entry = item(name, index)
        assert gym.harmless(name, entry["answer"])
    calls = ("__import__('os')", "print()", "open", "lambda: 0")
    powers = ("9**9**9**9", "x**9**9", "9 * * 9", "x**999", "9**9")
    for text in (*calls, *powers, " " * 5000, "1" * 40):
        assert not gym.harmless(name, text)


def test_rows_cannot_contain_code_that_the_scorer_executes() -> None:
    for index in range(50):
        entry = item("bitwise_arithmetic", index)
        data = row({"source_dataset": "bitwise_arithmetic", "entry": entry})
        gym.check_row(data, "f.jsonl:1")
    entry["metadata"]["problem"] = "__import__('os').getcwd()"
    with pytest.raises(UserError, match=r"^f\.jsonl:1: metadata\.entry\.metadata\.problem = .*is not an expression"):
        gym.check_row(data, "f.jsonl:1")


def test_partial_credit_is_capped() -> None:
    assert reward("13", {"source_dataset": "chain_sum", "entry": ITEM}) == 0.5  # one of two characters
    long = {"source_dataset": "caesar_cipher", "entry": {"answer": "A" * 199, "metadata": {}}}
    assert reward("A" * 199, long) == 1.0
    assert reward("A" * 199 + "B", long) == 0.98  # 199 / 200 in the library
