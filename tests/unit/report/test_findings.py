"""The findings of runs that learned nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_brorl.config.schema import Config, OptimConfig, RewardConfig
from megatron_brorl.report.findings import findings

FINE = {"kept_share": 0.5, "cut_off_share": 0.25, "answered_share": 0.8, "reward": 0.4, "reward_std": 0.49}
FINE |= {"all_right_share": 0.0, "rollouts": 2000, "updates": 4, "updates_skipped": 0}


def evaluation(**by_task):
    tasks = {name: {"mean": share} for name, share in by_task.items()}
    return {"pass_at_1": {"mean": sum(by_task.values()) / len(by_task)}, "by_task": tasks}


HELD_OUT = evaluation(gcd=0.5, spell=0.2)


def findings_of(rows, config=Config(), before=HELD_OUT, after=HELD_OUT, differ=True):  # noqa: B008  (frozen)
    return findings(config, [FINE | row for row in rows], before, after, differ)


def test_a_run_that_learns_has_no_findings():
    assert findings_of([{}, {"kept_share": 0.0, "reward": 0.0}]) == {}
    # Rewards that differ are a signal even if nothing is correct.
    assert findings_of([{"kept_share": 1.0, "reward": -0.5}]) == {}
    assert findings_of([{"kept_share": 1.0, "reward": 0.0}]) == {}  # the mean of +1 and -1


@pytest.mark.parametrize(("share", "right", "std"), [(1, 0, 2), (0.9, 0, 2), (1, 0.1, 2), (1, 0, 0)])
def test_different_rewards_that_never_reach_correct_at_are_a_finding(share, right, std):
    evaluated = {"pass_at_1": {"mean": right}, "by_task": {}}
    row = {"kept_share": 1.0, "all_wrong_share": share, "reward": -7.25, "reward_std": std}
    sentence = findings_of([row], before=evaluated, after=evaluated).get("never correct", "")
    assert ("reward.correct_at = 1 (mean -7.25)" in sentence) == ((share, right, std) == (1, 0, 2))


NOTHING = {"answered_share": 0.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("row", "name", "parts"),
    [
        ({**NOTHING, "cut_off_share": 1.0}, "cut off", ["every one of 4,000", "rollout.max_tokens = 1024"]),
        (NOTHING, "no answer", ['reward.extract = "boxed"', r"\boxed{...}", "25% were cut off"]),
        ({"reward": 0.0}, "none right", ["4,000", "warm start (brorl sft)"]),
        ({"reward": 1.0, "all_right_share": 1.0}, "all right", ["harder prompts"]),
        ({"reward": 0.5, "reward_std": 0.0}, "none right", ["(mean reward 0.5, reward.correct_at = 1)"]),
        ({"all_right_share": 0.4}, "no mixed group", ["rollout.n = 512"]),
    ],
)
def test_no_group_had_a_signal(row, name, parts):
    config = Config(reward=RewardConfig(extract="boxed"))
    sentences = findings_of([{"kept_share": 0.0, **row}] * 2, config, differ=False)
    assert list(sentences) == [name]  # Unchanged weights are a consequence, not a finding of their own.
    assert [part for part in parts if part not in sentences[name]] == []


@pytest.mark.parametrize(
    ("row", "optim", "part"),
    [
        ({}, OptimConfig(lr=0.0), "optim.lr = 0: raise it"),
        ({"updates": 0, "updates_skipped": 4}, OptimConfig(), "every update was skipped"),
        ({"updates": 0}, OptimConfig(), "critic.warmup_steps"),
        ({}, OptimConfig(lr=1e-12), "8 updates at optim.lr = 1e-12 are too small for weights in bf16"),
    ],
)
def test_weights_unchanged(row, optim, part):
    config = Config()
    config = replace(config, optim=optim, model=replace(config.model, dtype="bf16"))
    sentences = findings_of([row, row], config, differ=False)
    assert list(sentences) == ["weights unchanged"]
    assert sentences["weights unchanged"].startswith("the trained weights are those of model.path: ")
    assert part in sentences["weights unchanged"]


def test_only_the_first_update_is_judged_by_its_kl():
    waiting = {"updates": 0, "approx_kl": 0.0}
    config = Config(optim=OptimConfig(lr=3e-5))
    sentences = findings_of([waiting, {"approx_kl": 0.29}, {"approx_kl": 0.01}], config)
    assert list(sentences) == ["large first update"]
    assert [part for part in ("0.29 nats", "optim.lr = 3e-05") if part not in sentences["large first update"]] == []
    assert findings_of([waiting, {"approx_kl": 0.2}, {"approx_kl": 0.29}], config) == {}
    assert findings_of([{"approx_kl": None}], config) == {}  # not finite


def test_a_run_without_evaluation_or_steps():
    assert list(findings_of([{}], before=None, after=None)) == ["no held-out"]
    assert list(findings_of([], differ=False)) == ["no step"]


def test_a_task_without_a_right_response_is_named():
    before, after = evaluation(gcd=0.5, spell=0.0, other=0.0), evaluation(gcd=0.7, spell=0.0, other=0.1)
    (sentence,) = findings_of([{}], before=before, after=after).values()
    assert sentence.startswith("no held-out response to spell was right, before or after")
    # If no response was right, no task is named.
    assert findings_of([{}], before=evaluation(gcd=0.0), after=evaluation(gcd=0.0)) == {}


@pytest.mark.parametrize(("errors", "name"), [(25, "raised"), (13, "none right")])
def test_most_responses_raised(errors, name):
    row = {"kept_share": 0.0, "reward_std": 0.0, "all_right_share": 0.0, "rollouts": 26, "verifier_errors": errors}
    sentences = findings(Config(), [row], before=None, after=None, weights_differ=False, raised="Maze.step: (w.py, 3)")
    assert {"raised", "none right"} & sentences.keys() == {name}
    assert ("(w.py, 3)" in sentences[name]) == (name == "raised")
