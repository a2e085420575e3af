"""Tests of reward functions that users write: their forms, and one-line messages for mistakes."""

from __future__ import annotations

import hashlib
import sys

import pytest

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.preflight import CheckedVerifiers, check_verifiers
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, ScoreResult

GOOD = """
import neighbour  # a module in the same folder

print("a module may print")

def score(response: str, row: dict) -> float:
    return float(response == row["answer"]) * neighbour.ONE

def full(response, row):
    return {"reward": 0.5, "reason": f"{row['id']} {row['prompt']} {row['metadata']['n']}", "parts": {"a": 1}}

def count(response, row, calls=[]):
    calls.append(1)
    return min(1.0, len(calls) / 4)

full.pure = True
number = 3
def alone(response): return 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, which file names are relative to."""
    (tmp_path / "my_rewards.py").write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*names: str) -> CheckedVerifiers:
    return check_verifiers(names, RewardConfig())


def ask(name: str, *answers: str) -> list[ScoreRequest]:
    prompt = Prompt("row7", "text", token_ids=(1,), answer="4", verifier=name, metadata={"n": 2})
    return [ScoreRequest(prompt, answer) for answer in answers]


def test_a_function_in_a_file(folder):
    with RewardPool(workers=1, timeout_s=20.0) as pool:
        assert pool.score(ask("my_rewards.py:score", "4", "5")) == [ScoreResult(1.0, "ok"), ScoreResult(0.0, "ok")]
        (score,) = pool.score(ask("my_rewards.py:full", "4"))
    assert (score.reward, score.reason, score.parts) == (0.5, "row7 text 2", {"a": 1.0})


def test_equal_answers_are_scored_once_if_the_function_is_pure(folder):
    verifiers = checked("my_rewards.py:count", "my_rewards.py:full", "exact")
    sha256 = hashlib.sha256(GOOD.encode()).hexdigest()
    hashes = {"my_rewards.py:count": sha256, "my_rewards.py:full": sha256}
    assert verifiers == CheckedVerifiers(sha256=hashes, impure=frozenset(["my_rewards.py:count"]))
    with RewardPool(workers=1, timeout_s=20.0, impure=verifiers.impure) as pool:
        scores = pool.score(ask("my_rewards.py:count", *"aaaa"))
    assert [score.reward for score in scores] == [0.25, 0.5, 0.75, 1.0]


def test_a_module_is_imported_in_workers_only(folder, monkeypatch):
    source = "def score(response, row): return len(response) / 10\n"
    (folder / "letters.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    assert checked("letters:score").sha256 == {"letters:score": hashlib.sha256(source.encode()).hexdigest()}
    assert "letters" not in sys.modules
    with RewardPool(workers=1, timeout_s=20.0) as pool:
        assert pool.score(ask("letters:score", "abcd")) == [ScoreResult(0.4, "ok")]


def test_a_function_can_combine_verifiers(folder):
    (folder / "both.py").write_text(
        "from megatron_brorl.rewards.registry import verify\n"
        "def score(response, row):\n"
        "    return verify('format', response, row).reward - 2 * verify('short_answer', response, row).reward\n"
    )
    responses = ["<think>a</think><answer>4</answer>", "<answer>4</answer>", "<think>a</think><answer>5</answer>", "5"]
    with RewardPool(workers=1, timeout_s=20.0) as pool:
        assert [score.reward for score in pool.score(ask("both.py:score", *responses))] == [-1, -2, 1, 0]


@pytest.mark.parametrize("parameters", ["completion, row", "solution_str, ground_truth, extra_info=None", "a, b, *c"])
def test_parameters_may_have_any_name(folder, parameters):
    (folder / "other.py").write_text(f"def score({parameters}): return 1\n")
    assert list(checked("other.py:score").sha256) == ["other.py:score"]


TRL = r"takes \(.* as a reward function of TRL does; .*"


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        # From TRL's documentation and published training scripts. Several accept a response and a row as well.
        ("def f(completions, answer, **kwargs): return [1.0 for c in completions]", "f", TRL),
        ("def f(*, prompts, completions, **kwargs): return [1.0 for c in completions]", "f", TRL),
        ("def f(prompts, completions): return [1.0 for c in completions]", "f", TRL),
        ("def f(completions): return [1.0 for c in completions]", "f", TRL),
        ("def score(:\n", "score", r"SyntaxError: .*\(mine\.py, line 1\)"),
        ("\n1 / 0\n", "score", r"ZeroDivisionError: division by zero \(mine\.py, line 2\)"),
        ("import sys\nsys.exit(3)\n", "score", r"SystemExit: 3 \(mine\.py, line 2\)"),
        ("import os\nos._exit(3)\n", "score", r"exit code 3; fix its file"),
        (GOOD, "scores", r"'scores'.*"),
        (GOOD, "number", r"'number'.*"),
        (GOOD, "alone", r"\(response, row\): too many positional arguments"),
        (None, "score", r"no such file in .*; paths start at the working directory"),
    ],
)
def test_mistakes_name_file_and_function(folder, source, function, message):
    if source is not None:
        (folder / "mine.py").write_text(source)
    with pytest.raises(UserError, match=rf"^verifier mine\.py:{function}: [^\n]*{message}$"):
        checked(f"mine.py:{function}")
