"""A run's configuration from a TOML file and `section.key=value` overrides.

Strict: an unknown section, an unknown key or a value of the wrong type is an error that names it. What can be
checked without loading anything is checked here; what needs the model or the world size is checked where those
are known (`parallel.grid`, `models.gpt`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_brorl.config.schema import Config
from megatron_brorl.config.toml import build, override
from megatron_brorl.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_AT_LEAST_ONE = (
    "rollout.n rollout.prompts rollout.max_tokens rollout.max_rows reward.workers reward.max_chars algo.mini_batches "
    "algo.epochs parallel.tensor parallel.pipeline parallel.context train.keep_checkpoints train.max_nonfinite_steps "
    "evaluate.samples evaluate.bootstrap sft.examples_per_step data.held_out_prompts "
    "trtllm.tensor trtllm.max_num_tokens fp8.amax_history theory.prompts theory.depth theory.measure_samples"
)
_NOT_NEGATIVE = (
    "train.steps train.checkpoint_every evaluate.every optim.warmup_steps sft.steps sft.warmup_steps rollout.top_k "
    "evaluate.top_k model.context algo.is_cap optim.lr optim.clip_grad sft.lr evaluate.temperature algo.entropy_coef "
    "critic.lr critic.lr_warmup_steps critic.steps_alone critic.clip algo.aggregation_tokens rollout.memory_mib "
    "rollout.partial_tokens rollout.max_carried_steps rollout.refills rollout.adaptive_first reward.cut_off_factor "
    "shaping.overlong_tokens shaping.cosine_on shaping.cosine_off shaping.repetition_ngram "
    "shaping.repetition_penalty algo.kl_coef algo.mismatch_low optim.lr_for_rollouts "
    "reference.reset_every reference.reset_after_stalls "
    "reference.reset_above_kl train.seconds train.stalls train.stall_margin "
    "train.tokens_per_micro_batch trtllm.restarts fp8.bf16_layers theory.every theory.positions theory.measure_every"
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check the result.

    Raises UserError naming the file and key for anything unknown, mistyped or out of range.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not valid TOML: {e}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    for item in overrides:
        override(table, item)
    config = build(Config, table, str(path), "")
    validate(config, str(path))
    return config


def validate(config: Config, where: str) -> None:
    """Range checks that need nothing but the configuration itself."""

    def need(ok: bool, key: str, what: str) -> None:
        if not ok:
            section, name = key.split(".")
            value = getattr(getattr(config, section), name)
            raise UserError(f"{where}: {key} = {value!r}: {what}")

    for key in _AT_LEAST_ONE.split():
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) >= 1, key, "must be at least 1")
    for key in _NOT_NEGATIVE.split():
        section, name = key.split(".")
        need(getattr(getattr(config, section), name) >= 0, key, "must not be negative")
    need(bool(config.run.dir.strip()), "run.dir", "results need a folder; the working directory is '.'")
    need(config.rollout.temperature > 0, "rollout.temperature", "must be above 0 (sampling needs randomness)")
    need(0 < config.rollout.top_p <= 1, "rollout.top_p", "must be in (0, 1]")
    need(all(config.rollout.stop_strings), "rollout.stop_strings", "an empty string would stop everything")
    need(0 < config.evaluate.top_p <= 1, "evaluate.top_p", "must be in (0, 1]")
    need(config.rollout.timeout_s > 0, "rollout.timeout_s", "must be above 0")
    need(0 <= config.rollout.max_lost_share <= 1, "rollout.max_lost_share", "must be in [0, 1]")
    _validate_partial(config, need)
    _validate_adaptive(config, need)
    _validate_trtllm(config, need)
    _validate_parallel(config, need)
    _validate_fp8(config, need)
    _validate_memory(config, need)
    need(
        not config.theory.measure_every
        or (config.theory.every > 0 and config.theory.measure_every % config.theory.every == 0),
        "theory.measure_every",
        f"a measurement is compared with a prediction: must be a multiple of theory.every = {config.theory.every}",
    )
    need(config.reward.timeout_s > 0, "reward.timeout_s", "must be above 0")
    need(config.train.verify_tolerance > 0, "train.verify_tolerance", "must be above 0")
    need(config.parallel.timeout_s > 0, "parallel.timeout_s", "must be above 0")
    need(
        all(1 <= k <= config.evaluate.samples for k in config.evaluate.pass_at),
        "evaluate.pass_at",
        f"pass@k takes k samples per prompt: each must be in [1, evaluate.samples = {config.evaluate.samples}]",
    )
    _validate_advantage(config, need)
    _validate_recipe(config, need)
    need(0 < config.algo.eps_low < 1, "algo.eps_low", "must be in (0, 1)")
    need(config.algo.eps_high > 0, "algo.eps_high", "must be above 0")
    need(config.algo.tau_pos > 0, "algo.tau_pos", "must be above 0")
    need(config.algo.tau_neg > 0, "algo.tau_neg", "must be above 0")
    need(
        config.algo.dual_clip == 0 or config.algo.dual_clip > 1 + config.algo.eps_high,
        "algo.dual_clip",
        "must be 0 (off) or above 1 + algo.eps_high",
    )
    need(
        config.algo.dual_clip == 0 or config.algo.policy_loss == "clip",
        "algo.dual_clip",
        f'algo.policy_loss = "{config.algo.policy_loss}" has no such bound: must be 0 (off)',
    )
    need(
        config.algo.aggregation != "fixed" or config.algo.aggregation_tokens > 0,
        "algo.aggregation_tokens",
        'algo.aggregation = "fixed" divides by it: give the tokens per sequence, for example rollout.max_tokens',
    )
    need(all(0 <= b < 1 for b in config.optim.betas), "optim.betas", "must be in [0, 1)")
    need("{prompt}" in config.data.template, "data.template", "must contain {prompt}")
    need(
        not (config.data.tasks and (config.data.train or config.data.held_out)),
        "data.tasks",
        "give either generated tasks or files (data.train, data.held_out), not both",
    )
    need(config.data.train_seed != config.data.held_out_seed, "data.held_out_seed", "must differ from data.train_seed")
    need(
        config.rollout.prompts >= config.algo.mini_batches,
        "algo.mini_batches",
        f"cannot cut {config.rollout.prompts} prompts (rollout.prompts) into that many mini-batches",
    )


def _validate_parallel(config: Config, need: Callable[[bool, str, str], None]) -> None:
    p = config.parallel
    need(
        not p.sequence or p.tensor > 1,
        "parallel.sequence",
        "sequence parallelism needs parallel.tensor > 1",
    )
    need(
        p.context == 1 or not config.train.share_prompt,
        "train.share_prompt",
        "parallel.context > 1 cuts sequences that hold their own prompt: must be false",
    )
    need(
        p.context == 1 or config.algo.ratio == "token",
        "algo.ratio",
        "parallel.context > 1 puts the tokens of a sequence on several ranks: must be 'token'",
    )
    need(
        not p.overlap_param_gather or p.distributed_optimizer,
        "parallel.overlap_param_gather",
        "weights are gathered with parallel.distributed_optimizer = true alone",
    )


def _validate_advantage(config: Config, need: Callable[[bool, str, str], None]) -> None:
    algo = config.algo
    for key, value in (("algo.gamma", algo.gamma), ("algo.lam", algo.lam)):
        need(0 <= value <= 1, key, "must be in [0, 1]")
        need(value == 1 or algo.advantage == "gae", key, 'only algo.advantage = "gae" discounts: must be 1')
    need(
        config.rollout.n >= 2 or (algo.advantage == "gae" and not algo.dynamic_sampling),
        "rollout.n",
        "a group baseline needs at least 2 rollouts per prompt, and so does algo.dynamic_sampling",
    )


def _validate_recipe(config: Config, need: Callable[[bool, str, str], None]) -> None:
    algo, rollout, reference = config.algo, config.rollout, config.reference
    need(config.reward.cut_off_factor <= 1, "reward.cut_off_factor", "must be in [0, 1]")
    need(
        config.shaping.overlong_tokens <= rollout.max_tokens,
        "shaping.overlong_tokens",
        f"a response has rollout.max_tokens = {rollout.max_tokens} tokens at most",
    )
    need(
        algo.mismatch_low < algo.mismatch_high,
        "algo.mismatch_high",
        f"must be above mismatch_low = {algo.mismatch_low}",
    )
    need(
        algo.mismatch_mask == "off" or algo.old_log_probs == "actor",
        "algo.mismatch_mask",
        'algo.old_log_probs = "rollout" takes the engine for the trainer: no mismatch could show; set it to "actor"',
    )
    for key, value in dataclasses.asdict(reference).items():
        need(not value or algo.kl_coef > 0, f"reference.{key}", "without algo.kl_coef there is no reference policy")
    need(
        not rollout.refills or (algo.dynamic_sampling and not rollout.partial_tokens and algo.old_log_probs == "actor"),
        "rollout.refills",
        'needs algo.dynamic_sampling, rollout.partial_tokens = 0 and algo.old_log_probs = "actor" (what is kept for '
        "the next step comes from older weights)",
    )


def _validate_partial(config: Config, need: Callable[[bool, str, str], None]) -> None:
    rollout = config.rollout
    if not rollout.partial_tokens:
        return
    steps = -(-rollout.max_tokens // rollout.partial_tokens)
    need(
        rollout.max_carried_steps >= steps - 1,
        "rollout.max_carried_steps",
        f"a response of rollout.max_tokens = {rollout.max_tokens} at {rollout.partial_tokens} tokens per step "
        f"(rollout.partial_tokens) is carried over {steps - 1} steps: all long responses would be lost",
    )
    need(
        config.algo.old_log_probs == "actor",
        "algo.old_log_probs",
        "partial rollouts (rollout.partial_tokens) come from older weights than the actor's: must be 'actor'",
    )


def _validate_adaptive(config: Config, need: Callable[[bool, str, str], None]) -> None:
    rollout, algo = config.rollout, config.algo
    if rollout.adaptive == "off":
        return
    need(rollout.n >= 8, "rollout.n", "rollout.adaptive cuts a prompt's rollouts in two rounds: must be at least 8")
    need(
        rollout.adaptive_first == 0 or 2 <= rollout.adaptive_first <= rollout.n - 2,
        "rollout.adaptive_first",
        f"each of two rounds needs 2 rollouts per prompt: must be in [2, rollout.n - 2 = {rollout.n - 2}], or 0",
    )
    need(
        algo.advantage == "reinforce_pp_baseline" and not (algo.kl_coef and algo.kl_in == "reward"),
        "rollout.adaptive",
        'its weights are for algo.advantage = "reinforce_pp_baseline" without a KL in the reward: must be "off"',
    )
    need(
        not rollout.partial_tokens and not rollout.refills,
        "rollout.adaptive",
        'a step\'s rollouts are allocated within the step (rollout.partial_tokens, rollout.refills): must be "off"',
    )


def _validate_trtllm(config: Config, need: Callable[[bool, str, str], None]) -> None:
    t = config.trtllm
    need(0 < t.memory_fraction < 1, "trtllm.memory_fraction", "must be in (0, 1)")
    need(t.start_timeout_s > 0, "trtllm.start_timeout_s", "must be above 0")
    need(t.silent_s >= 5, "trtllm.silent_s", "must be at least 5: an engine process reports twice a second")
    need(
        t.tensor == 1 or t.transport != "cuda_ipc",
        "trtllm.transport",
        'with trtllm.tensor > 1 a rank reaches its own GPU alone: must be "host" or "auto"',
    )
    need(
        config.rollout.engine != "trtllm" or not config.rollout.stop_strings,
        "rollout.stop_strings",
        'rollout.engine = "trtllm" is given token ids and stops at tokens alone: must be empty',
    )


def _validate_fp8(config: Config, need: Callable[[bool, str, str], None]) -> None:
    f = config.fp8
    on = f.recipe != "none"
    need(not on or config.model.dtype == "bf16", "model.dtype", "fp8.recipe works beside bf16: must be 'bf16'")
    need(on or not f.parameters, "fp8.parameters", "needs an fp8.recipe")
    need(on or not f.bf16_layers, "fp8.bf16_layers", "needs an fp8.recipe")
    need(f.recipe != "delayed" or not f.bf16_layers, "fp8.bf16_layers", 'must be 0 with fp8.recipe = "delayed"')


def _validate_memory(config: Config, need: Callable[[bool, str, str], None]) -> None:
    t = config.train
    need(
        not (t.recompute and t.recompute_attention),
        "train.recompute_attention",
        "train.recompute recomputes attention too: give one of them",
    )
    need(
        not (t.offload and config.fp8.parameters),
        "train.offload",
        "FP8 parameters (fp8.parameters) cannot be moved: must be false",
    )
