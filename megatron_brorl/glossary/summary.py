"""The figures of summary.json, which `brorl train` writes at its end; a dot goes into an object."""

from __future__ import annotations

from megatron_brorl.glossary.form import NUMBER, SHARE, Figure, Section

_EVALUATION = "before the first step and after the last; null without held-out prompts"

SUMMARY = Section(
    "summary.json",
    "What a run came to. A dot goes into an object.",
    (
        Figure(
            "pass_at_1_{when}.{end}",
            "share",
            SHARE,
            f"held-out pass@1 with the ends of its 95% interval over prompts, {_EVALUATION}",
            "intervals that overlap show no gain; take more `data.held_out_prompts` or `evaluate.samples`",
        ),
        Figure("pass_at_1_{when}", "", "null", "there were no held-out prompts"),
        Figure(
            "pass_at_{k}_{when}",
            "share",
            SHARE,
            "pass@k of the largest k",
            "lower after than before: prompts were lost ([troubleshooting](troubleshooting.md))",
        ),
        Figure("mean_reward_{when}.{end}", "1", "any", "held-out mean reward with its interval; pass@1 where strict"),
        Figure("mean_reward_{when}", "", "null", "there were no held-out prompts"),
        Figure("held_out_prompts", "prompts", NUMBER, "that were evaluated", "below some hundreds: wide intervals"),
        Figure("rollouts_per_prompt", "rollouts", "at least 1", "`rollout.n`"),
        Figure("steps", "steps", NUMBER, "done"),
        Figure("best_checkpoint", "", "null", "`train.keep_best` is off, or no step was evaluated"),
        Figure("best_checkpoint.step", "steps", "at least 1", "done by the weights of `checkpoints/best`"),
        Figure("best_checkpoint.figure", "a name", "", "`train.keep_best`"),
        Figure("best_checkpoint.value", "share", SHARE, "held-out pass@1 or pass@k of that step's evaluation"),
        Figure("job_seconds", "s", NUMBER, "of the whole job, warm start included where `run.started` says so"),
        Figure("peak_rss_mib", "MiB", NUMBER, "peak resident memory, all processes added up"),
        Figure("{when}", "", "null", "there were no held-out prompts"),
        Figure("{when}.pass_at_1.{end}", "share", SHARE, "as above, of the whole evaluation"),
        Figure("{when}.pass_at_k.{k}", "share", SHARE, "pass@k, unbiased"),
        Figure(
            "{when}.by_task.{name}",
            "share",
            SHARE,
            "pass@1 by the verifier's task, or the verifier",
            "0 before and after: that task is too hard, or its verifier finds nothing",
        ),
        Figure("{when}.verifiers", "names", "", "that judged"),
        Figure("{when}.mean_reward.{end}", "1", "any", "mean reward, partial credit included, with its interval"),
        Figure("{when}.response_tokens", "tokens", NUMBER, "mean length of a response"),
        Figure("{when}.prompts", "prompts", NUMBER, "that were asked"),
        Figure("{when}.samples", "samples", "at least 1", "per prompt"),
        Figure(
            "{when}.lost",
            "samples",
            NUMBER,
            "that never ended; the figures are over the others",
            "above 0: see `lost_share`",
        ),
        Figure("findings", "", "{}", "nothing kept the run from learning"),
        Figure("findings.{name}", "a sentence", "", "why the run learned nothing, or cannot show it, and what to do"),
    ),
)
