"""Rules of a configuration that need nothing but itself: the bounds of single keys, and what keys demand of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_brorl.config.benchmarks import named
from megatron_brorl.config.bounds import broken
from megatron_brorl.config.schema import Config
from megatron_brorl.config.update_rules import Rule, update_rules
from megatron_brorl.errors import UserError, shown


def validate(config: Config, where: str) -> None:
    """Raise UserError naming `where` (the file), the first key that breaks a bound or a rule, its value and why."""
    for section in dataclasses.fields(config):
        for key, message in broken(getattr(config, section.name)):
            _refuse(config, where, f"{section.name}.{key}", message)

    # Later rules may count on earlier ones.
    for rules in (_run, _rollout, _engine, _parallel, _fp8, _train, _evaluation, _algo, _recipe, _data):
        for kept, key, message in rules(config):
            if not kept:
                _refuse(config, where, key, message)


def _refuse(config: Config, where: str, key: str, message: str) -> None:
    section, name = key.split(".")
    raise UserError(f"{where}: {key} = {shown(getattr(getattr(config, section), name))}: {message}")


def _run(config: Config) -> Iterator[Rule]:
    yield bool(config.run.dir.strip()), "run.dir", "results need a folder; the working directory is '.'"


def _rollout(config: Config) -> Iterator[Rule]:
    rollout, algo = config.rollout, config.algo
    # Every text contains the empty one.
    yield all(rollout.stop_strings), "rollout.stop_strings", "an empty string would stop everything"

    # Partial rollouts.
    if rollout.partial_tokens:
        steps = -(-rollout.max_tokens // rollout.partial_tokens)  # rounded up

        # The longest response must be done before it counts as too old.
        yield (
            rollout.max_carried_steps >= steps - 1,
            "rollout.max_carried_steps",
            f"a response of rollout.max_tokens = {rollout.max_tokens} at {rollout.partial_tokens} tokens per step "
            f"(rollout.partial_tokens) is carried over {steps - 1} steps: all long responses would be lost",
        )

        # The engine's log-probs of its parts come from different weights.
        yield (
            algo.old_log_probs == "actor",
            "algo.old_log_probs",
            "partial rollouts (rollout.partial_tokens) come from older weights than the actor's: must be 'actor'",
        )


def _engine(config: Config) -> Iterator[Rule]:
    yield (
        config.engine.tensor == 1 or config.engine.transport != "cuda_ipc",
        "engine.transport",
        'with engine.tensor > 1 a rank reaches its own GPU alone: must be "host" or "auto"',
    )
    yield (
        config.rollout.engine != "trtllm" or not config.rollout.stop_strings,
        "rollout.stop_strings",
        'rollout.engine = "trtllm" stops at tokens alone: must be empty',
    )


def _parallel(config: Config) -> Iterator[Rule]:
    p = config.parallel
    # It spreads over tensor-parallel ranks what they would all hold.
    yield not p.sequence or p.tensor > 1, "parallel.sequence", "sequence parallelism needs parallel.tensor > 1"

    # Context parallelism cuts sequences over ranks.
    yield (
        p.context == 1 or not config.train.share_prompt,
        "train.share_prompt",
        "parallel.context > 1 cuts sequences that hold their own prompt: must be false",
    )

    # A ratio per sequence is a mean over its tokens, which no rank holds alone.
    yield (
        p.context == 1 or config.algo.ratio == "token",
        "algo.ratio",
        "parallel.context > 1 puts the tokens of a sequence on several ranks: must be 'token'",
    )

    # Only that optimizer leaves each rank a part of the weights to gather.
    yield (
        not p.overlap_param_gather or p.distributed_optimizer,
        "parallel.overlap_param_gather",
        "weights are gathered with parallel.distributed_optimizer = true alone",
    )


def _fp8(config: Config) -> Iterator[Rule]:
    f = config.fp8
    on = f.recipe != "none"
    yield not on or config.model.dtype == "bf16", "model.dtype", "fp8.recipe works beside bf16: must be 'bf16'"
    yield on or not f.parameters, "fp8.parameters", "needs an fp8.recipe"
    yield (
        not f.parameters or config.parallel.distributed_optimizer,
        "fp8.parameters",
        "needs parallel.distributed_optimizer = true, which alone can keep float32 masters that are not rounded to FP8",
    )
    yield on or not f.bf16_layers, "fp8.bf16_layers", "needs an fp8.recipe"
    yield f.recipe != "delayed" or not f.bf16_layers, "fp8.bf16_layers", 'must be 0 with fp8.recipe = "delayed"'


def _train(config: Config) -> Iterator[Rule]:
    t = config.train
    yield (
        not (t.recompute and t.recompute_attention),
        "train.recompute_attention",
        "train.recompute recomputes attention too: give one of them",
    )
    yield (
        not (t.offload and config.fp8.parameters),
        "train.offload",
        "FP8 parameters (fp8.parameters) cannot be moved: must be false",
    )
    yield (
        not (t.keep_best and config.evaluate.every == 0),
        "train.keep_best",
        'no step is evaluated with evaluate.every = 0: set that, or this to ""',
    )


def _evaluation(config: Config) -> Iterator[Rule]:
    e = config.evaluate
    yield (
        all(1 <= k <= e.samples for k in e.pass_at),
        "evaluate.pass_at",
        f"pass@k takes k samples per prompt: each must be in [1, evaluate.samples = {e.samples}]",
    )

    # Names are those of a table's lines.
    benchmarks = [named(benchmark) for benchmark in e.benchmarks]
    names = [name for name, _ in benchmarks]
    yield (
        all(name and file and "|" not in name for name, file in benchmarks),
        "evaluate.benchmarks",
        "each must be a file, or a name without |, then = and a file",
    )
    # Two lines of one name could not be told apart.
    again = next((name for name in names if names.count(name) > 1), "")
    yield (
        not again,
        "evaluate.benchmarks",
        f'two are called {again!r}: give one of them another name, as in "{again}_2=FILE"',
    )


def _algo(config: Config) -> Iterator[Rule]:
    algo, rollout = config.algo, config.rollout

    # Advantages.
    for key, value in (("algo.gamma", algo.gamma), ("algo.lam", algo.lam)):
        # Refused, not ignored: a value that changes nothing would pass for one that does.
        yield value == 1 or algo.advantage == "gae", key, 'only algo.advantage = "gae" discounts: must be 1'

    # k rollouts, and one more whose others they are.
    at_k = algo.advantage == "pass_at_k"
    yield (
        1 <= algo.pass_k < rollout.n if at_k else algo.pass_k == 0,
        "algo.pass_k",
        f"must be in [1, rollout.n - 1 = {rollout.n - 1}]" if at_k else 'of algo.advantage = "pass_at_k": must be 0',
    )

    # MaxRL divides by the mean reward, and the others are made of counts of correct responses.
    counts = algo.advantage in ("maxrl", "pass_at_k")
    reason = f'algo.advantage = "{algo.advantage}" needs rewards of 0 and 1'
    # A factor in between makes rewards that are neither.
    yield not counts or config.reward.strict, "reward.strict", f"{reason}: must be true"
    yield (
        not counts or config.reward.cut_off_factor in (0, 1),
        "reward.cut_off_factor",
        f"{reason}: must be 0 or 1",
    )
    yield (
        not counts or not config.shaping.is_on,
        "algo.advantage",
        "needs rewards of 0 and 1, which [shaping] changes: choose another, or leave out [shaping]",
    )

    # One rollout is its own group mean: its advantage would always be 0.
    yield (
        # A critic needs no group; selecting groups by their spread does.
        rollout.n >= 2 or (algo.advantage == "gae" and not algo.dynamic_sampling),
        "rollout.n",
        "a group baseline needs at least 2 rollouts per prompt, and so does algo.dynamic_sampling",
    )

    # The policy loss.
    yield (
        # A lower bound would cut ratios that the clip lets pass.
        algo.dual_clip == 0 or algo.dual_clip > 1 + algo.eps_high,
        "algo.dual_clip",
        "must be 0 (off) or above 1 + algo.eps_high",
    )

    # Only the clipped loss has a use for it.
    yield (
        algo.dual_clip == 0 or algo.policy_loss == "clip",
        "algo.dual_clip",
        f'algo.policy_loss = "{algo.policy_loss}" has no such bound: must be 0 (off)',
    )

    # There is no length that would suit every task, hence no default.
    yield (
        algo.aggregation != "fixed" or algo.aggregation_tokens > 0,
        "algo.aggregation_tokens",
        'algo.aggregation = "fixed" divides by it: give the tokens per sequence, for example rollout.max_tokens',
    )

    # How a step is cut: by whole groups, or every group by its siblings.
    by_prompts = algo.mini_batch_of == "prompts"
    pieces, of = (rollout.prompts, "prompts (rollout.prompts)") if by_prompts else (rollout.n, "siblings (rollout.n)")
    yield (
        pieces >= algo.mini_batches,
        "algo.mini_batches",
        f"cannot cut {pieces} {of} into that many mini-batches",
    )


def _recipe(config: Config) -> Iterator[Rule]:
    # The penalty sets in that many tokens before the longest response.
    algo, rollout = config.algo, config.rollout
    yield (
        config.shaping.overlong_tokens <= rollout.max_tokens,
        "shaping.overlong_tokens",
        f"a response has rollout.max_tokens = {rollout.max_tokens} tokens at most",
    )

    # Log-probabilities of the engine, and the learning rate.
    yield from update_rules(config)

    # The reference policy.
    for key, value in dataclasses.asdict(config.reference).items():
        # Key by key, so that the message names the one that was set.
        yield not value or algo.kl_coef > 0, f"reference.{key}", "without algo.kl_coef there is no reference policy"

    # Groups that are kept for the next step.
    yield (
        # Without a selection every group is kept, and there is nothing to make up for.
        not rollout.refills or (algo.dynamic_sampling and not rollout.partial_tokens and algo.old_log_probs == "actor"),
        "rollout.refills",
        'needs algo.dynamic_sampling, rollout.partial_tokens = 0 and algo.old_log_probs = "actor" (what is kept for '
        "the next step comes from older weights)",
    )


def _data(config: Config) -> Iterator[Rule]:
    data = config.data

    # One kind of source, in one frame.
    yield "{prompt}" in data.template, "data.template", "must contain {prompt}"
    yield (
        not (data.tasks and (data.train or data.mixture or data.held_out)),
        "data.tasks",
        "give either generated tasks or files (data.train, data.mixture, data.held_out), not both",
    )
    yield not (data.train and data.mixture), "data.train", "give either data.train or data.mixture, not both"
    yield not data.system_prompt or data.chat, "data.system_prompt", "is a message of a chat: needs data.chat = true"
    kwargs = data.chat_template_kwargs
    yield not kwargs or data.chat, "data.chat_template_kwargs", "needs data.chat = true"
    # One seed would make the same rows twice, trained on and held out.
    yield data.train_seed != data.held_out_seed, "data.held_out_seed", "must differ from data.train_seed"
    yield (
        not data.tasks or data.verifier == "exact",
        "data.verifier",
        "rows of data.tasks are judged by the scorers of their tasks: leave it out",
    )
