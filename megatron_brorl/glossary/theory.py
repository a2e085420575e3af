"""The figures theory_HOW/WHAT: what the siblings left unsampled. docs/theory.md says what each of them is."""

from __future__ import annotations

from megatron_brorl.glossary.form import NUMBER, SHARE, Figure, Section

_SQUARE = "probability squared"
_PER_STEP = "success rate per unit of step"

THEORY = Section(
    "Theory",
    "`theory_HOW/WHAT`, where HOW is how they are known ([theory](theory.md#in-training)). None has a part in "
    "training, and few are good or bad by themselves.",
    (
        # At positions where siblings share the prefix.
        Figure(
            "theory_exact/shared_tokens",
            "share of tokens",
            SHARE,
            "of the prompts that are looked at, at prefixes that siblings share",
            "near 0: the figures of tokens say little of this task; look at `hold_out` and `good_turing`",
        ),
        Figure("theory_exact/siblings", "rollouts", "at least 2", "that share the prefix, at such a position"),
        Figure(
            "theory_exact/unsampled_mass",
            "probability",
            SHARE,
            "of next tokens that no sibling drew",
            "high: a larger `rollout.n` would see more",
        ),
        Figure("theory_exact/unsampled_2", _SQUARE, SHARE, "sum of p^2 over these tokens, U_2"),
        Figure("theory_exact/s_r", "1", "[-1, 1]", "S_R of the theorem: sum over drawn tokens of (worth - success) p"),
        Figure("theory_exact/a2", _SQUARE, SHARE, "sum of p^2 over drawn tokens that did better than the mean, A_2"),
        Figure("theory_exact/b2", _SQUARE, SHARE, "the same of those that did worse, B_2"),
        Figure("theory_estimate/success", "1", SHARE, "mean reward of the siblings at the position, Q"),
        Figure(
            "theory_estimate/sampled",
            _PER_STEP,
            "any",
            "change from tokens that one half of the siblings drew, under BroRL's surrogate, valued by the other half; "
            "null: no position has four siblings",
        ),
        Figure(
            "theory_estimate/policy_gradient",
            _PER_STEP,
            "any",
            "change under REINFORCE with the group's mean, cross-fitted: unbiased, below 0 by chance; null likewise",
        ),
        Figure(
            "theory_bound/unsampled_low", _PER_STEP, "at most 0", "change from tokens that were not drawn, at least"
        ),
        Figure("theory_bound/unsampled_high", _PER_STEP, NUMBER, "the same, at most"),
        # Of gradients, with theory.noise_every.
        Figure(
            "theory_estimate/own_effect",
            _PER_STEP,
            "any",
            "change of a prompt's success rate by a plain gradient step on it; prompts without a signal count as 0, "
            "here and below; null: fewer than two prompts",
        ),
        Figure(
            "theory_estimate/other_effect",
            _PER_STEP,
            "any",
            "change of another prompt's success rate by that step: interference",
            "below 0 over many steps: updates take right answers from other prompts",
        ),
        Figure(
            "theory_estimate/between",
            _PER_STEP,
            "any",
            "variance of a prompt's gradient over prompts, which more siblings do not lower: own minus other effect",
        ),
        Figure(
            "theory_estimate/within",
            _PER_STEP,
            NUMBER,
            "times 1 / (N - 1): its variance over a prompt's siblings; `brorl advise` weighs both",
        ),
        Figure("theory_estimate/noise_prompts", "prompts", NUMBER, "with a signal that these were measured on"),
        # Of final answers.
        Figure("theory_good_turing/distinct", "answers", NUMBER, "different ones in a group, mean over groups"),
        Figure("theory_good_turing/singletons", "answers", NUMBER, "that came once"),
        Figure("theory_good_turing/doubletons", "answers", NUMBER, "that came twice"),
        Figure(
            "theory_good_turing/unseen_mass",
            "probability",
            SHARE,
            "of answers that no sibling gave",
            "high: a larger `rollout.n` would see more; `brorl advise`",
        ),
        Figure("theory_good_turing/low", "probability", SHARE, "lower end of its 95% interval in a group"),
        Figure("theory_good_turing/high", "probability", SHARE, "its upper end"),
        Figure("theory_good_turing/unseen_right", "probability", SHARE, "its part on right answers"),
        Figure("theory_good_turing/unseen_wrong", "probability", SHARE, "its part on wrong ones"),
        Figure("theory_hold_out/s_r", "1", "[-1, 1]", "S_R with answers as tokens"),
        Figure(
            "theory_hold_out/a2", _SQUARE, "any", "A_2 likewise: right answers that were seen; may be below 0 by chance"
        ),
        Figure("theory_hold_out/b2", _SQUARE, "any", "B_2 likewise: wrong ones"),
        Figure("theory_hold_out/sampled", _PER_STEP, "any", "the theorem's terms of answers that were seen"),
        Figure("theory_hold_out/unsampled", _PER_STEP, "any", "its term of answers that were not"),
        Figure("theory_hold_out/unsampled_mass_{h}", "probability", SHARE, "of answers that N - h siblings lack"),
        Figure("theory_hold_out/unsampled_mass_{h}_{side}", "probability", SHARE, "an end of its 95% interval"),
        Figure("theory_hold_out/u_pos2_{h}", _SQUARE, SHARE, "sum of p^2 over right answers that N - h siblings lack"),
        Figure("theory_hold_out/u_pos2_{h}_{side}", _SQUARE, SHARE, "an end of its 95% interval"),
        Figure("theory_hold_out/u_neg2_{h}", _SQUARE, SHARE, "the same over wrong ones"),
        Figure("theory_hold_out/u_neg2_{h}_{side}", _SQUARE, SHARE, "an end of its 95% interval"),
        # Prediction and measurement.
        Figure(
            "theory_predicted/answers", "success rate", "any", "change by a plain gradient step, Theorem 1 at answers"
        ),
        Figure("theory_predicted/theorem", "success rate", "any", "the same, Theorem 1 at tokens"),
        Figure(
            "theory_predicted/theorem_low", "success rate", "any", "the same with the lower bound of what was not drawn"
        ),
        Figure("theory_predicted/theorem_high", "success rate", "any", "the same with the upper one"),
        Figure("theory_predicted/policy_gradient", "success rate", "any", "the same by the policy gradient"),
        Figure(
            "theory_predicted/spread",
            "success rate",
            NUMBER,
            "s (1 - s) of the prompts times the step: the null predictor, which knows neither tokens nor answers",
            "its correlation with the change is as high as a prediction's: that prediction says no more than s (1 - s)",
        ),
        Figure("theory_measured/before", "success rate", SHARE, "pass@1 of the step's prompts before the update"),
        Figure("theory_measured/after", "success rate", SHARE, "the same after it, by the same random numbers"),
        Figure(
            "theory_measured/change",
            "success rate",
            "[-1, 1]",
            "after minus before",
            "below 0 by more than 2 `change_se`: the update made its own prompts worse",
        ),
        Figure("theory_measured/change_se", "success rate", NUMBER, "its standard error over prompts"),
        Figure("theory_measured/samples", "samples", NUMBER, "that both measurements took"),
        Figure(
            "theory_measured/over_prompts_{prediction}",
            "correlation",
            "[-1, 1]",
            "of that prediction with the change, over the step's prompts; null: unknown",
        ),
    ),
    group="theory",
)
