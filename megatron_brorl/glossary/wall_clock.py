"""The figures of time: phases of a step, who waits for whom, what a device gets done."""

from __future__ import annotations

from megatron_brorl.glossary.form import NUMBER, SHARE, Figure, Section

TIME = Section(
    "Seconds of a step",
    "Under `time`, which differs from run to run. Of the rank that writes the file, with its wait for the others.",
    (
        Figure("step", "s", NUMBER, "the whole step, without the evaluation after it"),
        Figure("generate", "s", NUMBER, "sampling while the engine has rows, with verdicts made meanwhile"),
        Figure(
            "score",
            "s",
            NUMBER,
            "verdicts that were not there when sampling ended",
            "more than a little: raise `reward.workers`",
        ),
        Figure("exchange", "s", NUMBER, "rows to the replicas that train on them"),
        Figure("train", "s", NUMBER, "log-probabilities, values, advantages and optimizer steps"),
        Figure("refit", "s", NUMBER, "new weights to the engines"),
        Figure("record", "s", NUMBER, "writing `rollouts/`", "more than a little: a slow disk; `run.record_groups`"),
        Figure("diagnose", "s", NUMBER, "the live mass balance, `[theory]`"),
        Figure("evaluate", "s", NUMBER, "held-out prompts, after the step and not part of `step`"),
        Figure(
            "checkpoint", "s", NUMBER, "that the checkpoint after the step before held up the run, without the wait"
        ),
        Figure(
            "checkpoint_wait",
            "s",
            NUMBER,
            "for the one before it, which was still being written",
            "above 0: a slow disk; raise `train.checkpoint_every`",
        ),
        Figure("verdict_queue_mean", "s", NUMBER, "that an answer waited for a scoring process"),
        Figure("verdict_queue_max", "s", NUMBER, "the longest wait", "near `generate`: raise `reward.workers`"),
    ),
    group="time",
    timed=True,
)

RANKS = Section(
    "Who waits for whom",
    "Under `time`. Seconds of a rank's own work in a phase; [how they are counted](cluster.md#figures-of-a-cluster).",
    (
        Figure(
            "ranks/idle",
            "share of the step",
            SHARE,
            "what a device loses to the slowest rank of each phase",
            "above 0.1: see which phase, below",
        ),
        Figure("ranks/step_slowest", "s", NUMBER, "the step of the slowest rank; `train.max_seconds` counts these"),
        Figure("ranks/{phase}_slowest", "s", NUMBER, "of the slowest rank"),
        Figure("ranks/{phase}_mean", "s", NUMBER, "of the mean rank"),
        Figure("ranks/{phase}_fastest", "s", NUMBER, "of the fastest rank"),
        Figure(
            "ranks/{phase}_idle",
            "share of the phase",
            SHARE,
            "1 - mean / slowest",
            "of `generate`: uneven responses, `rollout.pull`; of `train`: see `update_balance`; else a slow device",
        ),
    ),
    group="ranks",
    timed=True,
)

THROUGHPUT = Section(
    "What a device gets done",
    "Under `time`. A device is a rank; the slowest rank's seconds count.",
    (
        Figure(
            "throughput/tokens_per_s", "tokens/s per device", NUMBER, "response tokens sampled, over the whole step"
        ),
        Figure(
            "throughput/generate_tokens_per_s",
            "tokens/s per device",
            NUMBER,
            "the same over `generate`; what a process before had sampled is not counted",
        ),
        Figure("throughput/train_tokens_per_s", "tokens/s per device", NUMBER, "`trained_tokens` over `train`"),
        Figure("throughput/forward_tflops", "TFLOP/s per device", NUMBER, "of passes that only score"),
        Figure("throughput/update_tflops", "TFLOP/s per device", NUMBER, "of optimizer steps"),
        Figure(
            "throughput/forward_mfu",
            "share of the peak",
            NUMBER,
            "`forward_tflops` over the device's peak, where it is known",
        ),
        Figure(
            "throughput/update_mfu",
            "share of the peak",
            NUMBER,
            "the same of optimizer steps",
            "low on a GPU: raise `train.tokens_per_micro_batch`",
        ),
        Figure(
            "throughput/mfu",
            "share of the peak",
            NUMBER,
            "of both over the whole step, in which generation counts nothing",
            "above 1: `run.peak_tflops` is not the device's",
        ),
    ),
    group="throughput",
    timed=True,
)

KV_CACHE = Section(
    "The engine's cache",
    "Under `time`; of the built-in engine.",
    (
        Figure(
            "kv_cache/peak",
            "share of pages",
            SHARE,
            "that held keys and values, at most",
            "1: rollouts wait; raise `rollout.kv_cache_mib`, where there is memory",
        ),
        Figure("kv_cache/mean", "share of pages", SHARE, "the same in the mean over turns of decoding"),
        Figure(
            "kv_cache/rows",
            "rollouts",
            NUMBER,
            "decoded together on a device, mean over turns: so many share one reading of the weights",
            "far below `rollout.max_num_seqs`: the last long responses are decoded by few; see `rollout.pull`",
        ),
        Figure(
            "kv_cache/prompt_hits",
            "share of prompt tokens",
            SHARE,
            "found computed, by siblings or behind a beginning that prompts share; where one engine has all siblings "
            "at least 1 - 1 / N",
            "far below that: siblings are on several engines, or rollouts begin again for want of pages",
        ),
    ),
    group="kv_cache",
    timed=True,
)
