"""The figures of what a step made of its rollouts: the updates, and whether engine and trainer agree."""

from __future__ import annotations

from megatron_brorl.glossary.form import NUMBER, SHARE, Figure, Section

POLICY = Section(
    "The actor's update",
    "Means over the trained tokens of all optimizer steps, unless something else is said.",
    (
        Figure(
            "loss",
            "1",
            "any",
            "of the actor, mean over optimizer steps; near 0 without penalties, as advantages have mean 0. Of "
            "`brorl sft`: nats per token of the targets",
            "null: not finite; the size says nothing about progress, but for `brorl sft`",
        ),
        Figure(
            "grad_norm",
            "1",
            NUMBER,
            "of the gradient before clipping, mean over optimizer steps",
            "growing without bound: lower `optim.lr`; 0: nothing was trained",
        ),
        Figure("lr", "1", NUMBER, "learning rate of the last optimizer step taken; 0 where none was"),
        Figure(
            "updates",
            "optimizer steps",
            NUMBER,
            "taken in this step; mini-batches without a row and skipped updates do not count",
            "0: no group was kept, the critic warms up, or every update was skipped",
        ),
        Figure(
            "updates_skipped",
            "optimizer steps",
            NUMBER,
            "not applied, because the gradient was not finite",
            "above 0: lower `optim.lr`, train in fp32; `train.max_nonfinite_steps` ends the run",
        ),
        Figure("trained_tokens", "tokens", NUMBER, "of responses in the losses, each once per epoch"),
        Figure(
            "finite_rows",
            "rollouts",
            NUMBER,
            "to train on whose log-probabilities and values are finite",
        ),
        Figure(
            "nonfinite_rows",
            "rollouts",
            NUMBER,
            "left out of the losses, because a log-probability or a value was not finite",
            "above 0: the engine or the trainer overflows; fp32, a smaller `optim.lr`",
        ),
        Figure(
            "masked_share",
            "share of tokens",
            SHARE,
            "that `algo.mismatch_mask` takes out of the loss",
            "high: engine and trainer compute different things",
        ),
        Figure(
            "entropy",
            "nats",
            "[0, log of the vocabulary]",
            "of the distribution at each token, at `rollout.temperature`",
            "falling to 0: the policy collapses and siblings are alike; `algo.entropy_coef`, a smaller `optim.lr`",
        ),
        Figure(
            "clipped_low",
            "share of tokens",
            SHARE,
            "on which the ratio's lower bound acts (`algo.eps_low`)",
            "high: the optimizer steps are too large for one batch; lower `optim.lr`, fewer `algo.mini_batches`",
        ),
        Figure(
            "clipped_high",
            "share of tokens",
            SHARE,
            "the same of the upper bound (`algo.eps_high`)",
            "as `clipped_low`",
        ),
        Figure("clipped_dual", "share of tokens", SHARE, "the same of `algo.dual_clip`; 0 where that is off"),
        Figure(
            "approx_kl",
            "nats",
            NUMBER,
            "of the policy that the batch began with to the one being trained (estimator k3)",
            "growing from step to step: updates are too large",
        ),
        Figure(
            "ratio_mean",
            "1",
            NUMBER,
            "importance ratio of the trained to the old policy; 0: nothing was trained",
            "far from 1: as `approx_kl`, or engine and trainer disagree",
        ),
        Figure("ratio_max", "1", NUMBER, "the largest one of a token (of a sequence with `algo.ratio`)"),
        Figure(
            "reference_kl",
            "nats",
            "at least 0 (k1: any)",
            "to the reference policy, by `algo.kl_estimator`; with `algo.kl_coef`",
            "growing without a gain of pass@1: raise `algo.kl_coef`",
        ),
        Figure("reference_reset", "0 or 1", "0, 1", "whether the reference is the actor's copy from this step on"),
    ),
    group="policy",
)


ENGINE = Section(
    "Engine against trainer",
    "Whether both compute the same. Of the first optimizer step, in which both have the same weights. `logprob_gap_*` "
    "are left out with `rollout.top_p` below 1 or `rollout.top_k`: the engine then renormalises over the tokens left.",
    (
        Figure(
            "logprob_gap_mean",
            "nats",
            NUMBER,
            "mean difference of the sampled tokens' log-probabilities, engine against trainer",
            "above that of the first steps: weights did not arrive, or the arithmetic differs; 2e-7 in the quickstart",
        ),
        Figure(
            "logprob_gap_max",
            "nats",
            NUMBER,
            "the largest one; carried tokens of older weights count too",
            "growing: `train.verify_reshard = 'always'` finds out which; `algo.is_cap` bounds the damage",
        ),
        Figure(
            "reshard_gap_mean",
            "nats",
            NUMBER,
            "mean log-probability difference of the worst engine on random prompts after the weight sync; see "
            "`train.verify_reshard`",
            "above `train.verify_tolerance`: engine processes are restarted once, then the run ends",
        ),
        Figure(
            "reshard_gap_p99",
            "nats",
            NUMBER,
            "99% quantile of the same differences over all engines",
            "above 4 times `train.verify_tolerance`: as for the mean",
        ),
        Figure(
            "reshard_gap_max",
            "nats",
            NUMBER,
            "maximum of the same differences",
            "above 10 times `train.verify_tolerance`: as for the mean; below that, rounding in bf16",
        ),
        Figure(
            "refit_again",
            "times",
            "0, 1",
            "that the weights had to be sent once more, because an engine refused them",
            "above 0: stderr says why",
        ),
    ),
    group="engine",
)


CRITIC = Section(
    "The critic",
    'With `algo.advantage = "gae"`.',
    (
        Figure(
            "explained_variance",
            "1",
            "at most 1",
            "1 - variance of returns minus values, over variance of returns",
            "0: no better than a constant; below 0: worse; `critic.warmup_steps`, another `critic.lr`",
        ),
        Figure("value_loss", "1", NUMBER, "half the clipped squared error per token, mean over optimizer steps"),
        Figure(
            "value_clipped", "share of tokens", SHARE, "whose gradient `critic.clip` removed", "high: lower `critic.lr`"
        ),
        Figure(
            "value_mean",
            "1",
            "any",
            "mean predicted return of a token",
            "far from `return_mean`: as `explained_variance`",
        ),
        Figure("return_mean", "1", "any", "mean return of a token, that the critic learns"),
        Figure("critic_grad_norm", "1", NUMBER, "as `grad_norm`", "as `grad_norm`"),
        Figure("critic_lr", "1", NUMBER, "as `lr`"),
        Figure("critic_updates", "optimizer steps", NUMBER, "as `updates`"),
        Figure("critic_updates_skipped", "optimizer steps", NUMBER, "as `updates_skipped`", "as `updates_skipped`"),
        Figure(
            "critic_nonfinite_rows",
            "rollouts",
            NUMBER,
            "as `nonfinite_rows`, in the critic's update",
            "as `nonfinite_rows`",
        ),
    ),
    group="critic",
)


STEP = Section(
    "The step as a whole",
    "What its work was like.",
    (
        Figure(
            "update_balance",
            "share",
            "(0, 1]",
            "mean over largest predicted cost of a replica's rows: what waiting leaves of the replicas' time",
            "below 0.9: a few long responses, or fewer rows than replicas",
        ),
        Figure("moved_mib", "MiB", NUMBER, "of rollouts that went to another rank to be trained on"),
        Figure(
            "token_gain",
            "times",
            "at least 1",
            "tokens of plain rows over those computed (`train.share_prompt`)",
        ),
        Figure("tokens", "tokens", NUMBER, "of the targets of a step of `brorl sft`, and of that alone"),
    ),
    group="step",
)
