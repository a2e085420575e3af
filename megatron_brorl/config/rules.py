"""Rules between configuration keys, and the keys that a resumed run must keep."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import (
    ADVANTAGE_NAMES,
    BINARY_ADVANTAGES,
    CALL_END,
    POLICY_LOSS_NAMES,
    AlgoConfig,
    Config,
)
from megatron_brorl.errors import UserError, shown
from megatron_brorl.user_functions import is_function

Rule = tuple[str, bool, str]  # key for the message, whether the rule is broken, what to do


def check(config: Config, where: Callable[[str], str]) -> None:
    """Raise UserError that names the first broken rule's key and its source, which is where(key)."""
    for rules in (
        _functions,
        _rollout,
        _environment,
        _agent,
        _parallel,
        _fp8,
        _lora,
        _evaluation,
        _advantages,
        _updates,
        _distillation,
        _data,
    ):
        _refuse(config, where, rules(config))


def check_model(config: Config, family: str, experts: int, where: str) -> None:
    """Raise UserError, prefixed by `where`, for the first key that does not fit to a model.

    experts: number of experts of a layer, 0 for a dense model.
    """
    _refuse(config, lambda key: where, _experts(config, family, experts))


def replays_routes(config: Config, experts: int) -> bool:
    """Return whether a model with this many experts in a layer is trained with the experts that the engine chose."""
    quantized = config.rollout.engine != "torch" and config.engine.quantization != "none"
    # The sequences of an agent have routes of their own, which are not kept.
    auto = (config.rollout.dtype != config.model.dtype or quantized) and not config.agent.function
    return experts > 0 and {"auto": auto, "always": True, "never": False}[config.rollout.replay_routes]


def _refuse(config: Config, where: Callable[[str], str], rules: Iterable[Rule]) -> None:
    for key, broken, message in rules:
        if broken:
            section, name = key.split(".")
            raise UserError(f"{where(key)}: {key} = {shown(getattr(getattr(config, section), name))}: {message}")


def parse_benchmark(benchmark: str) -> tuple[str, str]:
    """Return name and file of a value of evaluate.benchmarks: "name=FILE", or FILE whose stem is the name."""
    name, equals, file = benchmark.partition("=")
    if equals and "/" not in name:  # a slash before = belongs to a folder such as lr=3/
        return name.strip(), file
    return Path(benchmark).stem, benchmark


def _functions(config: Config) -> Iterator[Rule]:
    algo = config.algo
    for name, value, known in (
        ("advantage", algo.advantage, ADVANTAGE_NAMES),
        ("policy_loss", algo.policy_loss, POLICY_LOSS_NAMES),
    ):
        choices = ", ".join(known)
        unknown = value not in known and not is_function(value)
        yield f"algo.{name}", unknown, f'known: {choices}; a function of your own is "my_algo.py:{name}"'
    group, share = config.reward.group_function, config.reward.majority_share
    unknown = group not in ("", "majority") and not is_function(group)
    yield "reward.group_function", unknown, 'known: majority; a function of your own is "my.py:score"'
    yield "reward.majority_share", share > 0 and group != "majority", 'must be 0 without group_function = "majority"'
    # A critic does not see the group. Strict and length rewards would train on the judgement of verifiers.
    why = f"cannot be combined with reward.group_function = {group}"
    for path in ("reward.strict", "shaping.cosine_coef", "environment.factory", "agent.function"):
        section, key = path.split(".")
        yield path, bool(group and getattr(getattr(config, section), key)), why
    yield "algo.advantage", bool(group) and algo.advantage in ("gae", *BINARY_ADVANTAGES), why

    # A user's loss computes its own ratio and its own bounds, so these keys would have no effect.
    own = is_function(algo.policy_loss)
    setting = f"algo.policy_loss = {algo.policy_loss}"
    for key in ("eps_low", "eps_high", "dual_clip", "ratio"):
        default = getattr(AlgoConfig(), key)
        why = f"must be {default!r} (the default) with {setting}, which does not receive it"
        yield f"algo.{key}", own and getattr(algo, key) != default, why
    yield "algo.policy_loss", own and config.parallel.context > 1, "needs whole sequences: parallel.context must be 1"


def _rollout(config: Config) -> Iterator[Rule]:
    rollout = config.rollout
    algo = config.algo
    yield "run.dir", not config.run.dir.strip(), "name a folder for the results; '.' is the working directory"
    yield "rollout.stop_strings", not all(rollout.stop_strings), "an empty string would stop every response"
    only_tokens = rollout.engine == "trtllm" and bool(rollout.stop_strings)
    yield "rollout.stop_strings", only_tokens, 'rollout.engine = "trtllm" stops only at tokens: leave it empty'
    # Groups that wait for the next step have log-probabilities of older weights than the actor's.
    waiting = "rollout.partial_tokens" if rollout.partial_tokens else "rollout.refills" if rollout.refills else ""
    yield "algo.old_log_probs", bool(waiting) and algo.old_log_probs != "actor", f'must be "actor" with {waiting}'
    yield "rollout.refills", bool(rollout.refills and rollout.partial_tokens), "must be 0 with rollout.partial_tokens"
    yield "rollout.refills", bool(rollout.refills) and not algo.dynamic_sampling, "needs algo.dynamic_sampling = true"
    too_many = config.shaping.overlong_tokens > rollout.max_tokens
    yield "shaping.overlong_tokens", too_many, f"must be at most rollout.max_tokens = {rollout.max_tokens}"


def _environment(config: Config) -> Iterator[Rule]:
    environment = config.environment
    rollout = config.rollout
    on = bool(environment.factory)
    name = f"environment.factory = {environment.factory}"
    form = 'name a class as "my_env.py:Calculator" or "package.module:Calculator"'
    yield "environment.factory", on and not is_function(environment.factory), form
    yield from _without_effect(config, "environment")
    # An unfinished rollout of a checkpoint would lack the object of its environment.
    yield "rollout.partial_tokens", on and bool(rollout.partial_tokens), f"must be 0 with {name}"
    why = f'with {name}, turns end at {CALL_END}, but rollout.engine = "trtllm" stops only at tokens'
    yield "data.chat", on and not config.data.chat and rollout.engine == "trtllm", why
    has_tools = "tools" in config.data.chat_template_kwargs
    yield "data.chat_template_kwargs", on and has_tools, f"remove tools: the template receives those of {name}"


def _agent(config: Config) -> Iterator[Rule]:
    agent = config.agent
    on = bool(agent.function)
    name = f"agent.function = {agent.function}"
    form = 'name a function as "my_agent.py:solve" or "package.module:solve"'
    yield "agent.function", on and not is_function(agent.function), form
    yield "agent.function", on and bool(config.environment.factory), "give either an agent or environment.factory"
    yield from _without_effect(config, "agent")
    yield "data.chat", on and not config.data.chat, f"must be true with {name}, which calls the model with messages"
    yield "data.system_prompt", on and bool(config.data.system_prompt), f"remove it: {name} writes the messages"
    yield "data.template", on and config.data.template != "{prompt}", f"remove it: {name} writes the messages"
    yield "rollout.engine", on and config.rollout.engine == "trtllm", f'must be "torch" or "vllm" with {name}'
    yield "rollout.partial_tokens", on and bool(config.rollout.partial_tokens), f"must be 0 with {name}"
    yield "algo.advantage", on and config.algo.advantage == "gae", f'must not be "gae" with {name}'
    in_reward = config.algo.kl_coef > 0 and config.algo.kl_in == "reward"
    yield "algo.kl_in", on and in_reward, f'must be "loss" with {name}'
    yield "rollout.replay_routes", on and config.rollout.replay_routes == "always", f'must be "never" with {name}'


def _without_effect(config: Config, section: str) -> Iterator[Rule]:
    """Refuse changed values in a section whose first key, which names a class or function, is empty."""
    values, defaults = dataclasses.asdict(getattr(config, section)), dataclasses.asdict(getattr(Config(), section))
    first, *others = values
    for key in others:
        changed = values[key] != defaults[key]
        yield f"{section}.{key}", changed and not values[first], f"needs {section}.{first}"


def _parallel(config: Config) -> Iterator[Rule]:
    parallel = config.parallel
    yield "parallel.sequence", parallel.sequence and parallel.tensor == 1, "needs parallel.tensor > 1"
    # Context parallelism distributes the tokens of one sequence, so no rank has a whole sequence or a whole prompt.
    splits = parallel.context > 1
    yield "train.share_prompt", splits and config.train.share_prompt, "must be false with parallel.context > 1"
    yield "algo.ratio", splits and config.algo.ratio != "token", "must be 'token' with parallel.context > 1"


def _experts(config: Config, family: str, experts: int) -> Iterator[Rule]:
    parallel = config.parallel
    dense = experts == 0
    model = f"{family} model"
    yield "parallel.expert", dense and parallel.expert > 1, f"must be 1 for a {model}, which has no experts"
    yield "train.freeze_router", dense and config.train.freeze_router, f"must be false for a {model}, which has none"
    yield "rollout.replay_routes", dense and config.rollout.replay_routes == "always", f"needs experts, not a {model}"
    if dense:
        return
    with_tensor = f"with parallel.tensor > 1 for a {model}"
    yield "parallel.sequence", parallel.tensor > 1 and not parallel.sequence, f"must be true {with_tensor}"
    # Experts are not split over tensor-parallel ranks, and Megatron would not sum their gradients over these.
    yield "parallel.expert", parallel.tensor > 1 and parallel.expert == 1, f"must be above 1 {with_tensor}"
    yield "parallel.expert", bool(experts % parallel.expert), f"must divide the {experts} experts of a layer"
    yield "fp8.recipe", config.fp8.recipe != "none", f"must be 'none' for a {model}"
    mlp = [target for target in ("gate_proj", "up_proj", "down_proj") if target in config.lora.targets]
    yield "lora.targets", bool(config.lora.rank and mlp), f"remove {', '.join(mlp)}: experts cannot have adapters"


def _fp8(config: Config) -> Iterator[Rule]:
    fp8 = config.fp8
    off = fp8.recipe == "none"
    yield "model.dtype", not off and config.model.dtype != "bf16", "must be 'bf16' with an fp8.recipe"
    yield "fp8.parameters", off and fp8.parameters, "needs an fp8.recipe"
    why = "needs parallel.distributed_optimizer = true, which keeps fp32 weights that are not rounded to FP8"
    yield "fp8.parameters", fp8.parameters and not config.parallel.distributed_optimizer, why
    yield "fp8.bf16_layers", off and bool(fp8.bf16_layers), "needs an fp8.recipe"
    yield "fp8.bf16_layers", fp8.recipe == "delayed" and bool(fp8.bf16_layers), 'must be 0 with fp8.recipe = "delayed"'
    yield "train.offload", config.train.offload and fp8.parameters, "must be false with fp8.parameters"


def _lora(config: Config) -> Iterator[Rule]:
    targets = config.lora.targets
    on = config.lora.rank > 0
    yield "lora.targets", len(set(targets)) < len(targets), "names a layer twice"
    yield "lora.rank", on and config.parallel.context > 1, "must be 0 with parallel.context > 1"
    yield "lora.rank", on and config.fp8.recipe != "none", 'must be 0 unless fp8.recipe = "none"'


def _evaluation(config: Config) -> Iterator[Rule]:
    evaluate = config.evaluate
    yield "train.keep_best", bool(config.train.keep_best) and not evaluate.every, "needs evaluate.every above 0"
    # Names must be unique, because results are listed by name.
    benchmarks = [parse_benchmark(benchmark) for benchmark in evaluate.benchmarks]
    names = [name for name, _ in benchmarks]
    valid = all(name and file and "|" not in name for name, file in benchmarks)
    yield "evaluate.benchmarks", not valid, "each must be a file, or a name without |, then = and a file"
    twice = next((name for name in names if names.count(name) > 1), "")
    yield "evaluate.benchmarks", bool(twice), f'two are called {twice!r}: rename one, as in "{twice}_2=FILE"'


def _advantages(config: Config) -> Iterator[Rule]:
    algo = config.algo
    reward = config.reward
    n = config.rollout.n
    gae = algo.advantage == "gae"
    at_k = algo.advantage == "pass_at_k"
    for key, value in (("algo.gamma", algo.gamma), ("algo.lam", algo.lam)):
        yield key, value != 1 and not gae, 'must be 1 without algo.advantage = "gae"'
    yield "algo.pass_k", at_k and not 1 <= algo.pass_k < n, f"must be from 1 to rollout.n - 1 = {n - 1}"
    yield "algo.pass_k", not at_k and algo.pass_k != 0, 'must be 0 without algo.advantage = "pass_at_k"'

    # These estimators divide by the mean reward, or count correct responses.
    if algo.advantage in BINARY_ADVANTAGES:
        why = f'with algo.advantage = "{algo.advantage}", which needs rewards of 0 and 1'
        yield "reward.strict", not reward.strict, f"must be true {why}"
        yield "reward.cut_off_factor", reward.cut_off_factor not in (0, 1), f"must be 0 or 1 {why}"
        yield "algo.advantage", config.shaping.is_on, "needs rewards of 0 and 1: choose another, or remove [shaping]"

    # The mean of a single rollout is its reward. A critic needs no groups, unless groups are selected, and training
    # without a verifier needs none.
    needs_groups = (not gae or algo.dynamic_sampling) and not _is_unscored(config)
    why = "a group baseline needs at least 2 rollouts per prompt, and so does algo.dynamic_sampling"
    yield "rollout.n", n < 2 and needs_groups, why


def _updates(config: Config) -> Iterator[Rule]:
    algo = config.algo
    rollout = config.rollout
    # A bound of 1 + eps_high or less would clip ratios that eps_high allows.
    clips = algo.dual_clip != 0
    yield "algo.dual_clip", clips and algo.dual_clip <= 1 + algo.eps_high, "must be 0 (off) or above 1 + algo.eps_high"
    why = f'must be 0 (off) with algo.policy_loss = "{algo.policy_loss}"'
    yield "algo.dual_clip", clips and algo.policy_loss != "clip", why
    why = 'give the tokens per sequence that algo.aggregation = "fixed" divides by, for example rollout.max_tokens'
    yield "algo.aggregation_tokens", algo.aggregation == "fixed" and algo.aggregation_tokens == 0, why

    of_prompts = algo.mini_batch_of == "prompts"
    pieces, kind = (rollout.prompts, "prompts (rollout.prompts)") if of_prompts else (rollout.n, "siblings (rollout.n)")
    yield "algo.mini_batches", algo.mini_batches > pieces, f"cannot divide {pieces} {kind} into that many mini-batches"
    yield "algo.train_on", algo.train_on == 1, "must be 0 (all) or at least 2, because one reward has no spread"
    yield "algo.train_on", algo.train_on > rollout.n, f"must be at most rollout.n = {rollout.n}"
    divides = of_prompts or not algo.train_on or algo.mini_batches <= algo.train_on
    yield "algo.mini_batches", not divides, f"cannot divide algo.train_on = {algo.train_on} siblings into that many"
    # Advantages of a critic and KL rewards would be normalised over the tokens of the subset only.
    yield "algo.train_on", bool(algo.train_on) and algo.advantage == "gae", 'must be 0 with algo.advantage = "gae"'
    kl_in_reward = algo.kl_coef > 0 and algo.kl_in == "reward"
    yield "algo.train_on", bool(algo.train_on) and kl_in_reward, 'must be 0 with algo.kl_in = "reward"'
    for name, value in dataclasses.asdict(config.reference).items():
        yield f"reference.{name}", bool(value) and algo.kl_coef == 0, "needs algo.kl_coef above 0"

    optim = config.optim
    constant = optim.lr_schedule == "constant"
    yield "optim.min_lr_ratio", optim.min_lr_ratio > 0 and constant, 'must be 0 with optim.lr_schedule = "constant"'
    masked = algo.mismatch_mask != "off"
    from_engine = algo.old_log_probs == "rollout"
    yield "algo.mismatch_mask", masked and from_engine, 'needs algo.old_log_probs = "actor" to compare with'

    # With top_p or top_k, the engine renormalises its log-probabilities and the trainer does not. As old
    # log-probabilities they would cause clipping before the first update, and they would distort the mismatch ratio.
    with_cut = f"with rollout.top_p = {rollout.top_p:g} and rollout.top_k = {rollout.top_k}"
    is_cut = rollout.top_p < 1 or rollout.top_k > 0
    yield "algo.old_log_probs", is_cut and from_engine, f'must be "actor" {with_cut}'
    yield "algo.mismatch_mask", is_cut and masked, f'must be "off" {with_cut}'


def _distillation(config: Config) -> Iterator[Rule]:
    algo = config.algo
    distills = algo.distill_coef > 0
    yield "algo.distill_coef", distills and not config.teacher.path, "needs teacher.path"
    yield "teacher.path", bool(config.teacher.path) and not distills, "needs algo.distill_coef above 0"
    # The teacher also gives a signal for groups with equal rewards, which dynamic sampling drops.
    yield "algo.dynamic_sampling", distills and algo.dynamic_sampling, "must be false with algo.distill_coef"
    why = "all rewards would be 0: name a verifier, or set algo.distill_coef and teacher.path, or reward.group_function"
    yield "data.verifier", _is_unscored(config) and not distills, why


def _is_unscored(config: Config) -> bool:
    """Return whether no training row has a verifier, apart from rows that name one, and no function scores groups."""
    verifiers = [source.verifier or config.data.verifier for source in config.data.mixture] or [config.data.verifier]
    return set(verifiers) == {"none"} and not config.reward.group_function


def _data(config: Config) -> Iterator[Rule]:
    data = config.data
    yield "data.template", "{prompt}" not in data.template, "must contain {prompt}"
    files = bool(data.train or data.mixture or data.held_out)
    yield "data.tasks", bool(data.tasks) and files, "give either data.tasks or files"
    yield "data.train", bool(data.train and data.mixture), "give either data.train or data.mixture"
    yield "data.system_prompt", bool(data.system_prompt) and not data.chat, "needs data.chat = true"
    yield "data.chat_template_kwargs", bool(data.chat_template_kwargs) and not data.chat, "needs data.chat = true"
    own_verifier = bool(data.tasks) and data.verifier not in ("exact", "none")
    yield "data.verifier", own_verifier, 'data.tasks have their own: leave it out, or set "none"'


# A resumed run must keep the keys that determine the model, the data and its order, the meaning of a reward, or the
# content of a checkpoint. Rows are compared by content, so the files may move.
_MAY_CHANGE = {  # no other keys of these sections may change
    "data": {"train", "held_out"},
    "environment": {"max_tool_seconds"},
    "agent": {"max_seconds"},
    "reward": {"workers", "timeout_s", "unsandboxed"},
}
_MUST_NOT_CHANGE = {  # all other keys of these sections, and of sections in neither table, may change
    "run": {"seed"},
    "model": {"dtype"},
    "lora": {"rank", "alpha", "targets"},
    "rollout": {"max_tokens", "stop_strings", "partial_tokens", "refills"},
    "algo": {"gamma"},
    "optim": {"betas"},
    "train": {"freeze_router"},
    "evaluate": {"temperature", "top_p"},
}
# A resumed run must also keep these if a step carries rollouts over to the next one, because checkpoints then store the
# groups and log-probabilities of these rollouts.
_KEYS_OF_WAITING_GROUPS = {"n", "temperature", "top_p", "top_k"}


@functools.cache
def fixed_keys() -> frozenset[str]:
    """Return the section.key of every key that a resumed run must always keep."""
    fixed = {f"{section}.{key}" for section, keys in _MUST_NOT_CHANGE.items() for key in keys}
    for section, may_differ in _MAY_CHANGE.items():
        names = {f.name for f in dataclasses.fields(getattr(Config(), section))}
        fixed |= {f"{section}.{key}" for key in names - may_differ}
    return frozenset(fixed)


def may_change(path: str, old: Any, new: Any, rollout: Mapping[str, Any]) -> bool:
    """Return whether a resumed run may set the key `path` to `new` if its checkpoint was written with `old`.

    rollout: the values of section [rollout] that the checkpoint was written with.
    """
    # These keys determine whether a checkpoint has a critic or a reference.
    if path == "algo.advantage":
        return (old == "gae") == (new == "gae")
    if path == "algo.kl_coef":
        return (old > 0) == (new > 0)
    section, _, key = path.partition(".")
    waiting = bool(rollout.get("partial_tokens") or rollout.get("refills"))
    return path not in fixed_keys() and not (waiting and section == "rollout" and key in _KEYS_OF_WAITING_GROUPS)
