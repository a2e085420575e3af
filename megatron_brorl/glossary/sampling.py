"""The figures of what a step sampled, and of what the verifiers and the held-out prompts say of it."""

from __future__ import annotations

from megatron_brorl.glossary.form import NUMBER, SHARE, Figure, Section

REWARD = Section(
    "Rewards and groups",
    "Over the groups that closed in the step: all siblings have ended or are lost.",
    (
        Figure(
            "reward",
            "1",
            "any",
            "mean reward of the rollouts: after `reward.strict` and `reward.cut_off_factor`, before `[shaping]`; in "
            "[0, 1] with `reward.strict`",
            "0 with `reward.strict`: nothing is right, or no answer is found where `reward.extract` looks",
        ),
        Figure(
            "reward_std",
            "1",
            NUMBER,
            "standard deviation of these rewards",
            "0: all rewards of the step are equal, so that it has nothing to learn from",
        ),
        Figure(
            "kept_share",
            "share of groups",
            SHARE,
            "groups that are trained on: with `algo.dynamic_sampling` those whose rewards differ",
            "near 0: steps without a signal: other prompts, a larger `rollout.n`, `rollout.refills`",
        ),
        Figure(
            "all_right_share",
            "share of groups",
            SHARE,
            "groups in which every response is correct (`reward.correct_at`)",
            "rising towards 1: the prompts are used up; take harder ones",
        ),
        Figure(
            "all_wrong_share",
            "share of groups",
            SHARE,
            "groups in which no response is correct (`reward.correct_at`)",
            "near 1: too hard, or the verifier finds no answer (see `answered_share`)",
        ),
        Figure(
            "answered_share",
            "share of rollouts",
            SHARE,
            "in which an answer was found, right or wrong",
            "low: the model does not write the form that is looked for: `data.template`, `reward.extract`",
        ),
        Figure("shaped_reward", "1", "any", "mean reward after `[shaping]`; only where that section is on"),
    ),
    group="reward",
)


EVALUATE = Section(
    "Held-out prompts",
    "In rows of steps that `evaluate.every` divides.",
    (
        Figure(
            "pass_at_{k}",
            "share",
            SHARE,
            "chance that one of k samples is right, mean over prompts; unbiased",
            "pass@1 rising and pass@k falling: prompts are lost ([troubleshooting](troubleshooting.md))",
        ),
        Figure("pass_at_1_low", "share", SHARE, "lower end of the 95% interval of pass@1 over prompts"),
        Figure("pass_at_1_high", "share", SHARE, "its upper end"),
        Figure("held_out_reward", "1", "any", "mean reward of the samples, each prompt counting alike"),
        Figure("held_out_reward_low", "1", "any", "lower end of its 95% interval over prompts"),
        Figure("held_out_reward_high", "1", "any", "its upper end"),
    ),
    group="evaluate",
)


ROLLOUTS = Section(
    "Rollouts",
    "What was sampled, and what did not come through.",
    (
        Figure("rollouts", "rollouts", NUMBER, "of the groups that closed, without lost ones"),
        Figure(
            "response_tokens",
            "tokens",
            "[0, `rollout.max_tokens`]",
            "mean length of a response, the token that ended it included",
            "at the limit: responses are cut off; falling to a few: the model gives up reasoning",
        ),
        Figure(
            "cut_off_share",
            "share of rollouts",
            SHARE,
            "that `rollout.max_tokens` ended",
            "high: raise it, or look whether the model writes its end token; what is cut off scores 0 by default",
        ),
        Figure(
            "lost_share",
            "share of rollouts",
            SHARE,
            "that never came through",
            "above 0: an engine died or hung; above `rollout.max_lost_share` the run ends",
        ),
        Figure(
            "late",
            "rollouts",
            NUMBER,
            "not ended half-way to `rollout.timeout_s`; stderr names them",
            "above 0: an engine is stuck or overloaded, or the time-out is too short",
        ),
        Figure(
            "groups_lost",
            "groups",
            NUMBER,
            "with fewer than two survivors, which have no signal",
            "above 0: as `lost_share`",
        ),
        Figure("prompts_sampled", "prompts", NUMBER, "asked in this step, over its rounds; with `rollout.refills`"),
        Figure(
            "rounds",
            "rounds",
            "[1, 1 + `rollout.refills`]",
            "of sampling in this step; with `rollout.refills`",
            "always the most: too few groups are kept",
        ),
        Figure("carried_groups", "groups", NUMBER, "kept beyond `rollout.prompts`, which wait for the next step"),
        Figure("carried", "rollouts", NUMBER, "that go on in the next step; with `rollout.partial_tokens`"),
        Figure(
            "staleness_mean",
            "optimizer steps",
            NUMBER,
            "between the weights that sampled a trained token and those that train on it, mean over tokens",
            "high: far off-policy; raise `rollout.partial_tokens`",
        ),
        Figure("staleness_max", "optimizer steps", NUMBER, "the same of the oldest token"),
    ),
    group="rollout",
)


HANDED_ON = Section(
    "Rollouts of other engines",
    "With `rollout.pull` an engine that runs out goes on with what others have begun.",
    (
        Figure("handed_on", "rollouts", NUMBER, "that engines handed on to others half done, over all ranks"),
        Figure(
            "tokens_again",
            "tokens",
            NUMBER,
            "of these rollouts, whose keys and values were computed again",
            "not far below what was sampled: `rollout.pull = false`",
        ),
    ),
    group="rollout",
    timed=True,
)


VERDICTS = Section(
    "Verdicts",
    "What the verifiers did, over all ranks.",
    (
        Figure(
            "unscored_share",
            "share of responses",
            SHARE,
            "without a verdict: time-out, crash, no finite number, a verifier that is broken; they score 0",
            "above 0: rewards are too low; above 0.5 the run ends",
        ),
        Figure(
            "verdict_errors",
            "answers",
            NUMBER,
            "on which the verifier raised, though it can judge the prompt's reference answer; they score 0",
            "above 0: mend the verifier; stderr names it",
        ),
        Figure(
            "verdict_timeouts",
            "answers",
            NUMBER,
            "over which it took longer than `reward.timeout_s`",
            "above 0: raise that, or mend the verifier",
        ),
        Figure("verdict_hit_share", "share of answers", SHARE, "that had been judged in this step, of pure verifiers"),
        Figure(
            "reward_worker_restarts",
            "processes",
            NUMBER,
            "of scoring that were killed or died, and started again",
            "above 0: as `verdict_timeouts`, or too little memory",
        ),
    ),
    group="verdicts",
)
