"""Steps with reward.group_function in worker processes, and with algo.train_on, against steps written out by hand."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import fakes
import pytest
from by_hand import assert_update, responses, without_stop
from dist.steps import configured, make_trainer

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.group import majority
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.train.group_rewards import try_group_function

N = 32
LOST = {("p/0", 5), ("p/1", 0), ("p/1", 31)}
SCORE = """
def score(row, responses, answers):
    {statement}
    mean = sum(map(len, responses)) / len(responses)
    return [float(answer is not None and len(answer) > mean) for answer in answers]
"""


def step(model, grid, pool, prompts, **changes):
    config = configured({"rollout": {"n": N}, **changes})
    trainer = make_trainer(model[0], grid, config, fakes.Engine(lose=LOST), pool=pool, batch=prompts)
    trainer.sync_weights()
    return trainer.train_step()[0]


def survivors(prompt):
    """Return the surviving responses of a prompt, their texts, and their answers: None for those that were cut off."""
    rows = responses(seed=3, prompt=prompt, n=N, tokens=12, lost=LOST)
    texts = [" ".join(map(str, without_stop(row))) for row in rows]
    return rows, texts, [text if row[-1] == fakes.STOP else None for row, text in zip(rows, texts, strict=True)]


def test_the_step_trains_on_the_scores_of_groups_without_lost_rollouts(processes, model, tmp_path):
    """The function gives rewards, the verifier correctness. The third group's call times out: it is not trained on."""
    (tmp_path / "mine.py").write_text(SCORE.format(statement="while row['id'] == 'p/2': pass"))
    prompts = [replace(p, answer="") for p in fakes.prompts(3)]  # only an empty answer is right
    with RewardPool(workers=1, timeout_s=2.0) as pool:
        values = step(model, processes, pool, prompts, reward={"group_function": f"{tmp_path}/mine.py:score"})
    groups = []
    for prompt in prompts[:2]:
        rows, texts, answers = survivors(prompt)
        mean = sum(map(len, texts)) / len(texts)
        groups.append((prompt, rows, [float(a is not None and len(a) > mean) for a in answers]))
    assert_update(values, model[1], groups, configured({}).algo.is_cap)
    assert (values["group_errors"], values["kept_share"]) == (1 / 3, 2 / 3)
    assert values["reward"] == pytest.approx(sum(sum(rewards) for _, _, rewards in groups) / (3 * N - len(LOST)))
    assert values["all_wrong_share"] == sum("" not in survivors(prompt)[2] for prompt in prompts) / 3


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("return [1.0] * (len(answers) - 1) + [float('nan')]", "returned nan for rollout 30, .* of row 'p/1'"),
        ("return [1.0] * 32", "returned 32 scores for the 30 rollouts of row 'p/1'"),
        ("return 1 / 0", "failed on 1 of 1 groups: ZeroDivisionError"),
    ],
)
def test_scores_that_are_missing_or_not_finite_end_the_run(processes, model, tmp_path, statement, message):
    """Rollouts 0 and 31 of row p/1 are lost, so the last of the 30 answers is that of rollout 30."""
    (tmp_path / "mine.py").write_text(SCORE.format(statement=statement))
    reward = {"group_function": f"{tmp_path}/mine.py:score"}
    with pytest.raises(UserError, match=f"^step 1: reward.group_function = .*/mine.py:score:? {message}"):
        step(model, processes, fakes.Pool(), fakes.prompts(1, first=1), reward=reward)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [len(a) for a in answers]", r"TypeError: .* \(mine\.py, line 2\), for a group of row p/0; "),
        ("return [1.0]", r"returned 1 scores for the 4 rollouts of row 'p/0'; "),
        ("return [1, 0, None, 1] if row['id'] == 'p/1' else 1 / 0", r"returned None for rollout 2, .* of row 'p/1'; "),
    ],
)
def test_a_function_that_fails_before_the_run_is_refused(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(f"def score(row, responses, answers):\n    {body}\n")
    with pytest.raises(UserError, match=f"^reward.group_function = .*/mine.py:score: {message}"):
        try_group_function(fakes.Pool(), f"{tmp_path}/mine.py:score", fakes.prompts(2), n=4)


def test_a_function_is_tried_with_references_and_prompts(tmp_path):
    """The function fails on the second row. A row without a reference has responses without an answer."""
    (tmp_path / "mine.py").write_text("""
def score(row, responses, answers):
    assert answers == [row["answer"], None] * 2
    assert responses == [row["answer"] or row["prompt"], row["prompt"]] * 2
    return [1 / len(row["metadata"])] * 4
""")
    first, second = fakes.prompts(2)
    prompts = [replace(first, text="2 + 2", metadata={"level": 1}), replace(second, text="2 + 3", answer="5")]
    function = f"{tmp_path}/mine.py:score"
    assert try_group_function(fakes.Pool(), function, prompts[:1], n=4) == []
    (warning,) = try_group_function(fakes.Pool(), function, prompts, n=4)
    assert warning.startswith(f"reward.group_function = {function}: ZeroDivisionError")
    assert "for a group of row p/1" in warning


@pytest.mark.parametrize(
    ("verifier", "answers", "scores"),
    [
        ("math", ["4", "5", "4.0", "5", r"\boxed{4}", None], [1, 0, 1, 0, 1, 0]),
        ("exact", ["4", "5", "4.0", "5", None], [0, 1, 0, 1, 0]),
        ("math", [None, "b", "a", "a", "B"], [0, 1, 0, 0, 1]),  # equal votes: the answer that occurs first
        ("choice", ["(A)", "b", "A.", "B", "C", "a"], [1, 0, 1, 0, 0, 1]),
    ],
)
def test_the_most_frequent_answer_is_the_label(verifier, answers, scores):
    assert majority(answers, verifier) == scores


def test_votes_are_compared_with_reference_answers(processes, model):
    """Most finished responses are empty, which is correct for two prompts. The third prompt has no reference."""
    references = ["", "7", None, ""]
    prompts = [replace(p, answer=a) for p, a in zip(fakes.prompts(4), references, strict=True)]
    prompts[2] = replace(prompts[2], verifier="none")
    answers_of_prompts = [survivors(prompt)[2] for prompt in prompts]
    shares = [answers.count("") / len(answers) for answers in answers_of_prompts]
    threshold = sorted(shares)[1]  # One group of four is below it.
    with RewardPool(workers=1, timeout_s=9.0) as pool:
        reward = {"group_function": "majority", "majority_share": threshold}
        values = step(model, processes, pool, prompts, reward=reward)
    assert values["kept_share"] == sum(share >= threshold for share in shares) / 4 < 1
    assert values["majority_share"] == pytest.approx(sum(shares) / 4)
    judged = [a for a, share in zip(references, shares, strict=True) if share >= threshold and a is not None]
    assert values["majority_right_share"] == pytest.approx(judged.count("") / len(judged))


def quarters(answer):
    """Return the share of even tokens in quarters, so that some rewards are not in the subset."""
    ids = [int(word) for word in answer.split()]
    return round(4 * sum(i % 2 == 0 for i in ids) / max(len(ids), 1)) / 4


@pytest.mark.parametrize("judge", [lambda answer: float(fakes.reward(answer)), quarters], ids=["0 and 1", "quarters"])
def test_the_gradient_of_a_subset_equals_a_float64_loop(processes, model, judge):
    """Only 7 rollouts of a group are in the update. Their advantages depend on all surviving rollouts."""
    k = 7
    groups = []
    factors = {}  # the factor of the loss and the tokens in the divisor, by rollout
    pool = fakes.Pool()
    pool.judge = judge
    values = step(model, processes, pool, fakes.prompts(2), algo={"train_on": k}, reward={"cut_off_factor": 1.0})
    for prompt in fakes.prompts(2):
        rows, texts, _ = survivors(prompt)
        rewards = [judge(text) for text in texts]
        groups.append((prompt, rows, rewards))
        ranked = sorted(rewards)
        subsets = [ranked[: k - i] + ranked[len(ranked) - i :] for i in range(k + 1)]  # k - i lowest, i highest rewards
        chosen = Counter(max(subsets, key=statistics.pvariance))
        tokens = sum(len(row) for row, reward in zip(rows, rewards, strict=True) if reward in chosen)
        for reward, count in chosen.items():
            siblings = [i for i, other in enumerate(rewards) if other == reward]
            factors |= {(prompt.id, i): (len(siblings) / count, tokens / k) for i in siblings[:count]}
    assert_update(values, model[1], groups, configured({}).algo.is_cap, factors=factors)
