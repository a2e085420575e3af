"""Verifiers must judge and accept the reference answers of a run's rows before the run starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.preflight import check_references
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.types import Prompt

OWN_MODULE = """
import time

def right(response, row): return float(response == row["answer"])
def never(response, row): return 0
def below(response, row): return -0.5
def raises(response, row): raise KeyError("missing")
def some(response, row): return 1 if row["metadata"].get("known") else 1 / 0
def number(response, row): return int(response)
def nothing(response, row): pass
def slow(response, row): time.sleep(60)
async def waits(response, row): return 1.0
def leaves(response, row): raise SystemExit
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("own"))
        Path("own.py").write_text(OWN_MODULE)
        with RewardPool(workers=2, timeout_s=30.0) as pool:
            yield pool


def rows(verifier: str, answers: Sequence[str | None]) -> list[Prompt]:
    return [Prompt(f"rows.jsonl:{i}", "?", (1,), answer, verifier) for i, answer in enumerate(answers, start=1)]


def references(pool: RewardPool, prompts: list[Prompt], **reward: Any) -> tuple[str, list[str]]:
    return check_references(pool, prompts, RewardConfig(**reward))


@pytest.mark.parametrize(
    ("verifier", "answers"),
    [
        ("exact", ["<answer>4</answer>", " a whole sentence.\n", "{}"]),
        ("math", ["4", r"\frac{1}{2}", r"\boxed{7}", "so 3 + 4 = 7\n#### 7", "(0, 1]"]),
        ("choice", ["A", "(B)", "c"]),
        ("short_answer", ["Paris", "9.8 m/s^2"]),
        ("own.py:right", ["4", "the whole response"]),
    ],
)
def test_bare_references_are_accepted(pool, verifier, answers):
    """A verifier that reads whole responses gets the reference as the row has it, without added text."""
    report, warnings = references(pool, rows(verifier, answers))
    assert report == f"verifier {verifier!r} gives 1 to the reference answers of {len(answers)} rows"
    assert warnings == []


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "broken: KeyError: 'missing'"),
        ("nothing", "invalid: returned None for a reward"),
        ("waits", "invalid: returned an object of type coroutine for a reward"),
        ("leaves", "broken: SystemExit"),
    ],
)
def test_a_verifier_that_fails_on_a_reference_is_refused(pool, function, reason):
    with pytest.raises(UserError, match=rf"'own\.py:{function}' .* row rows\.jsonl:1: {reason}"):
        references(pool, rows(f"own.py:{function}", ["4"]))


def test_a_verifier_that_hangs_on_a_reference_is_refused(pool):
    with RewardPool(1, 1.0) as impatient, pytest.raises(UserError, match=r"'own\.py:slow' .* timeout: no score in 1 s"):
        references(impatient, rows("own.py:slow", ["4"]))


def test_rows_are_checked_at_even_distances(pool):
    """With 17 rows and a limit of 8, the checked rows are 1, 4, 7, 10, 13 and 16."""
    prompts = [dataclasses.replace(p, metadata={"known": True}) for p in rows("own.py:some", ["4"] * 17)]
    assert references(pool, prompts)[0] == "verifier 'own.py:some' gives 1 to the reference answers of 6 rows"
    prompts[12] = dataclasses.replace(prompts[12], metadata={})
    (warning,) = references(pool, prompts)[1]
    assert "the reference answer of row rows.jsonl:13: broken: ZeroDivisionError" in warning


def test_without_references_a_function_is_tried_on_other_texts(pool):
    """A function is refused only if it raises on every text of every row."""
    with pytest.raises(UserError, match=r"row rows\.jsonl:1: error: KeyError: 'missing'"):
        references(pool, rows("own.py:raises", [None, None]))
    for function, known in (("number", False), ("some", True)):
        prompts = rows(f"own.py:{function}", [None, None])
        prompts[1] = dataclasses.replace(prompts[1], metadata={"known": known})
        references(pool, prompts)
    assert references(pool, rows("exact", [None])) == ("no row has a reference answer to try a verifier on", [])


def test_a_function_that_rejects_references_gives_a_warning(pool):
    """An error would also end valid runs whose references are not complete responses."""
    for function, reward in (("never", "0"), ("below", "-0.5")):
        _, (warning,) = references(pool, rows(f"own.py:{function}", ["4", "5"]))
        assert f"'own.py:{function}' gives {reward} to the reference answer of row rows.jsonl:1" in warning
        assert "below reward.correct_at = 1 (2 of 2 rows checked)" in warning
    assert references(pool, rows("own.py:below", ["4"]), correct_at=-0.5)[1] == []


def gym(answer: str) -> Prompt:
    """Return a row whose task has the answer 4."""
    entry = {"question": "2 + 2", "answer": "4", "metadata": {}}
    return Prompt(f"sum {answer}", "?", (1,), answer, "reasoning_gym", {"source_dataset": "chain_sum", "entry": entry})


def test_references_that_no_response_could_match_are_an_error(pool):
    """A verifier of this package compares with the reference, so it must accept the reference."""
    with pytest.raises(UserError, match=r"'reasoning_gym \(chain_sum\)' gives 0 to the reference answer of row sum 5"):
        references(pool, [gym("5"), gym("6")])
    # correct_at may be higher than any reward of the verifier.
    with pytest.raises(UserError, match=r"'exact' gives 1 to the reference answer of row .*reward\.correct_at = 2"):
        references(pool, rows("exact", ["4"]), correct_at=2.0)
    # One wrong row among right ones gives a warning.
    _, (warning,) = references(pool, [gym("4"), gym("5"), gym("4")])
    assert "gives 0 to the reference answer of row sum 5, below reward.correct_at = 1 (1 of 3 rows" in warning
