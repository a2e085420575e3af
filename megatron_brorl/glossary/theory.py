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
        # Of final answers.
        Figure("theory_good_turing/distinct", "answers", NUMBER, "different ones in a group, mean over groups"),
        Figure("theory_good_turing/singletons", "answers", NUMBER, "that came once"),
        Figure("theory_good_turing/doubletons", "answers", NUMBER, "that came twice"),
        Figure(
            "theory_good_turing/unseen_mass",
            "probability",
            SHARE,
            "of answers that no sibling gave",
            "high: a larger `rollout.n` would see more",
        ),
        Figure("theory_good_turing/low", "probability", SHARE, "lower end of its 95% interval in a group"),
        Figure("theory_good_turing/high", "probability", SHARE, "its upper end"),
        Figure("theory_good_turing/unseen_right", "probability", SHARE, "its part on right answers"),
        Figure("theory_good_turing/unseen_wrong", "probability", SHARE, "its part on wrong ones"),
        Figure("theory_hold_out/unsampled_mass_{h}", "probability", SHARE, "of answers that N - h siblings lack"),
        Figure("theory_hold_out/unsampled_mass_{h}_{side}", "probability", SHARE, "an end of its 95% interval"),
        Figure("theory_hold_out/u_pos2_{h}", _SQUARE, SHARE, "sum of p^2 over right answers that N - h siblings lack"),
        Figure("theory_hold_out/u_pos2_{h}_{side}", _SQUARE, SHARE, "an end of its 95% interval"),
        Figure("theory_hold_out/u_neg2_{h}", _SQUARE, SHARE, "the same over wrong ones"),
        Figure("theory_hold_out/u_neg2_{h}_{side}", _SQUARE, SHARE, "an end of its 95% interval"),
    ),
    group="theory",
)
