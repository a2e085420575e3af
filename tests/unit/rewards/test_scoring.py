from __future__ import annotations

import re
import threading
from typing import Any, get_args

import numpy as np
import pytest
import torch
from forks import until

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.scoring import Scorer, Scores, final_reward
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.types import Episode, Prompt, Rollout, ScoreResult, Status


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, timeout_s=20.0) as pool:
        yield pool


def score(tasks: list[tuple[Prompt, str]], texts: list[str], pool: RewardPool, config: RewardConfig) -> Scores:
    """Score responses that finish in reverse order. Each response has one token, the index of its text.

    tasks: prompts, each with the finish reasons of its responses, separated by spaces.
    """
    rows: Any = [(prompt, finish) for prompt, finishes in tasks for finish in finishes.split()]
    with Scorer([prompt for prompt, _ in rows], lambda ids: texts[ids[0]], [], pool, config) as scorer:
        for request, (_, finish) in reversed(list(enumerate(rows))):
            scorer.finished(request, Rollout(0, torch.tensor([request]), torch.tensor([-1.0]), finish))
        return scorer.scores([(request, 0) for request in range(len(rows))])


def gym(answer: str) -> Prompt:
    entry = {"question": "?", "answer": answer, "metadata": {"source_dataset": "chain_sum"}}
    return Prompt(f"gym{answer}", "?", (1,), answer, "reasoning_gym", {"source_dataset": "chain_sum", "entry": entry})


def test_rewards_with_and_without_partial_credit(pool):
    exact = Prompt("e", text="?", token_ids=(1,), answer="yes", verifier="exact")
    tasks = [(exact, "stop length stop"), (gym("3"), "stop stop stop length")]
    texts = ["yes\n", "yes", "no", "3", "13", "x" * 5000, "3"]  # An answer to a gym task has at most 4096 characters.
    partial = score(tasks, texts, pool, RewardConfig(extract="full", cut_off_factor=1.0))
    assert partial.rewards.tolist() == [1.0, 1.0, 0.0, 1.0, 0.5, 0.0, 1.0]
    assert partial.right == [True, True, False, True, False, False, True]
    scores = score(tasks, texts, pool, RewardConfig(extract="full", strict=True))
    assert scores.rewards.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert scores.rewards.dtype == torch.float32
    assert scores.answers == ["yes", None, "no", "3", "13", None, None]
    others = dict.fromkeys(["timeout", "error", "broken", "invalid", "crash"], 0)
    assert scores.counts == {"ok": 4, "no_answer": 1, "length": 2, **others}
    assert scores.raised == {}


def test_each_failing_verifier_is_reported_once_with_its_first_failure(pool, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, row): return float(response) * 2\n")
    own_row = Prompt("rows.jsonl:7", "?", (1,), answer="1", verifier=f"{tmp_path}/mine.py:score")
    maze = Prompt("h", "?", (1,), "3", "reasoning_gym", metadata={"source_dataset": "maze", "entry": {}})
    texts = ["0.5", "0.75", "nan", "six", "inf", "seven", "3", "4"]
    scores = score([(own_row, "stop " * 6), (maze, "stop stop")], texts, pool, RewardConfig(extract="full"))
    assert scores.rewards.tolist() == [1.0, 1.5, *[0.0] * 6]
    assert scores.right == [True, True, *[False] * 6]
    assert [scores.counts[status] for status in ("ok", "invalid", "error", "broken")] == [2, 2, 2, 2]
    place = re.compile(r" \(\w+\.py, line \d+\)$")
    assert {text: place.sub("", reason) for text, reason in scores.raised.items()} == {
        f"verifier {own_row.verifier} returned no valid score, so its answer scores 0": (
            "row rows.jsonl:7: returned nan for a reward, not a finite number (1e+30 at most)"
        ),
        f"verifier {own_row.verifier} raised on an answer, which scores 0 (metric verifier_errors)": (
            "ValueError: could not convert string to float: 'six'"
        ),
        "verifier reasoning_gym (maze) is broken: it raises on a reference answer too": "KeyError: 'answer'",
    }


@pytest.mark.parametrize(
    ("reward", "correct_at", "right"),
    [
        # By the rule: reward >= correct_at, both rounded to float32.
        (1.0, 1.0, True),
        (0.7 + 0.2 + 0.1, 1.0, True),  # the largest float64 below 1
        (1 - 1e-6, 1.0, False),
        (2.0, 1.0, True),
        (0.3 + 0.6, 0.9, True),  # 0.8999999999999999
        (float(np.float32(0.9)), 0.9, True),  # 0.8999999761581421
        (-0.0, 0.0, True),
        (-0.5, -0.5, True),
        (-0.6, -0.5, False),
    ],
)
def test_a_reward_is_correct_from_correct_at_on(reward, correct_at, right):
    result = ScoreResult(reward, "ok")
    config, strict = RewardConfig(correct_at=correct_at), RewardConfig(correct_at=correct_at, strict=True)
    assert final_reward(result, cut_off=False, config=config) == (reward, right)
    assert final_reward(result, cut_off=False, config=strict) == (float(right), right)


@pytest.mark.parametrize(
    ("reward", "factor", "strict", "expected", "right"),
    [
        (2.0, 0.5, False, 1.0, False),  # The reward reaches correct_at, but cut-off responses are not correct.
        (2.0, 1.0, False, 2.0, True),
        (2.0, 0.5, True, 0.5, False),
        (0.5, 0.5, False, 0.25, False),
        (-1.0, 0.5, False, -1.0, False),  # A cut-off response scores no higher than a wrong one.
        (-1.0, 0.0, True, 0.0, False),
    ],
)
def test_rewards_of_cut_off_responses(reward, factor, strict, expected, right):
    config = RewardConfig(cut_off_factor=factor, strict=strict)
    assert final_reward(ScoreResult(reward, "ok"), cut_off=True, config=config) == (expected, right)


@pytest.mark.parametrize("status", [status for status in get_args(Status) if status != "ok"])
def test_a_response_without_a_score_is_never_correct(status):
    """This holds even if a reward of 0 counts as correct."""
    for config in (RewardConfig(correct_at=0.0), RewardConfig(correct_at=-1.0, strict=True)):
        assert final_reward(ScoreResult(0.0, status), cut_off=False, config=config) == (0.0, False)


def test_cut_off_responses_are_scored_if_rewards_may_be_negative(pool, tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, row): return 1 if response == row['answer'] else -1\n")
    own_row = Prompt("a", "?", (1,), answer="yes", verifier=f"{tmp_path}/mine.py:score")
    exact = Prompt("b", text="?", token_ids=(1,), answer="yes", verifier="exact")
    tasks = [(own_row, "stop stop length length"), (exact, "length")]
    texts = ["yes", "no", "yes", "no", "yes"]
    scores = score(tasks, texts, pool, RewardConfig())
    assert scores.rewards.tolist() == [1.0, -1.0, 0.0, -1.0, 0.0]
    assert scores.right == [True, False, False, False, False]
    assert (scores.counts["ok"], scores.counts["length"]) == (4, 1)
    # With strict rewards of 0 and 1, cut-off responses need no score.
    strict = score(tasks, texts, pool, RewardConfig(strict=True))
    assert strict.rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert strict.counts["length"] == 3


def test_responses_are_decoded_in_another_thread_without_their_stop_token(pool):
    exact = Prompt("e", text="?", token_ids=(1,), answer="7 8", verifier="exact")
    threads = []

    def decode(ids: list[int]) -> str:
        threads.append(threading.get_ident())
        return " ".join(map(str, ids))

    responses = [[7, 8, 2], [7, 8], [7, 8, 2], [7, 2], [2], [], [2, 7, 8, 2], [7, 8, 3]]
    with Scorer([exact], decode, (2, 3), pool, RewardConfig()) as scorer:
        for i, ids in enumerate(responses):
            scorer.finished(0, Rollout(i, torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids)), "stop"))
        scores = scorer.scores([(0, i) for i in range(len(responses))])
    assert scores.rewards.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert len(threads) == len(responses)
    assert threading.get_ident() not in threads


def test_a_rollout_with_an_environment_has_its_score():
    """Check that no verifier is called, and that the answer is the text of the last turn of the model."""
    rollouts: list[Any] = [  # token ids, 1 for each sampled token, finish reason, score of the environment
        ([5, 6, 2, 80, 81, 7, 8, 2], [1, 1, 1, 0, 0, 1, 1, 1], "stop", ScoreResult(1.0, "ok")),
        ([80, 5, 2, 81, 82], [0, 1, 1, 0, 0], "length", ScoreResult(1.0, "ok")),  # reward.cut_off_factor is 0
        ([9, 2], [1, 1], "stop", ScoreResult(0.0, "error", "ValueError: no")),
    ]
    no_pool: Any = None
    with Scorer([Prompt("e", "?", (1,), "none of these", "exact")], str, (2,), no_pool, RewardConfig()) as scorer:
        for i, (ids, sampled, finish, result) in enumerate(rollouts):
            episode = Episode(torch.tensor(sampled).bool(), turns=2, score=result)
            scorer.finished(0, Rollout(i, torch.tensor(ids), torch.zeros(len(ids)), finish, episode=episode))
        scores = scorer.scores([(0, i) for i in range(len(rollouts))])
    assert scores.answers == ["[7, 8]", "[5]", "[9]"]
    assert (scores.rewards.tolist(), scores.right) == ([1.0, 0.0, 0.0], [True, False, False])
    assert scores.results == [result for *_, result in rollouts]
    assert (scores.counts["ok"], scores.counts["error"]) == (2, 1)
    assert list(scores.raised.values()) == ["ValueError: no"]


def test_errors_reach_the_engine_and_the_caller(pool):
    def decode(ids: list[int]) -> str:
        raise UserError(f"the tokenizer has no token {ids[0]}")

    rollouts = [Rollout(i, torch.tensor([i]), torch.zeros(1), "stop") for i in range(2)]
    exact = Prompt("e", text="?", token_ids=(1,), answer="7", verifier="exact")
    with Scorer([exact], decode, (), pool, RewardConfig()) as scorer:
        scorer.finished(0, rollouts[0])
        until(lambda: not scorer._thread.is_alive())
        with pytest.raises(UserError, match="no token 0"):
            scorer.finished(0, rollouts[1])
        with pytest.raises(UserError, match="no token 0"):
            scorer.scores([(0, 0)])


def test_a_failed_call_cancels_its_scores(tmp_path):
    (tmp_path / "mine.py").write_text("import time\ndef score(response, row):\n    time.sleep(1000)\n")
    own_row = Prompt("p", "?", (1,), answer="1", verifier=f"{tmp_path}/mine.py:score")
    exact = Prompt("e", text="?", token_ids=(1,), answer="[7]", verifier="exact")
    rollout = Rollout(0, torch.tensor([7]), torch.zeros(1), "stop")
    with RewardPool(workers=1, timeout_s=1000.0) as pool:
        with pytest.raises(ZeroDivisionError), Scorer([own_row], str, (), pool, RewardConfig()) as scorer:  # noqa: PT012
            scorer.finished(0, rollout)
            until(lambda: pool.stats.answers == 1)
            raise ZeroDivisionError
        # The only worker is free again.
        with Scorer([exact], str, (), pool, RewardConfig()) as scorer:
            scorer.finished(0, rollout)
            assert scorer.scores([(0, 0)]).rewards.tolist() == [1.0]
