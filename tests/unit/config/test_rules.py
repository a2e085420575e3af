"""Test the rules between configuration keys."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from megatron_brorl.config.load import load_table
from megatron_brorl.config.rules import check_model, parse_benchmark
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.remote.remote_engine import connect_engine
from megatron_brorl.train.sampling_params import context, training_sampling_params

GAE = ["algo.advantage=gae"]
TOOLS = ["environment.factory=my_env.py:Calculator"]
OWN_LOSS = ["algo.policy_loss=mine.py:loss"]
CONTEXT = ["parallel.context=2", "train.share_prompt=false"]
FP8 = ["model.dtype=bf16", "fp8.recipe=tensorwise"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.dir="], 'run.dir = "": name a folder for the results'),
        (["rollout.stop_strings=['']"], 'rollout.stop_strings = [""]: an empty string would stop every response'),
        (["rollout.engine=trtllm", "rollout.stop_strings=['a']"], "stops only at tokens: leave it empty"),
        (["rollout.partial_tokens=512", "algo.old_log_probs=rollout"], 'must be "actor" with rollout.partial_tokens'),
        (["rollout.refills=1", "algo.old_log_probs=rollout"], 'must be "actor" with rollout.refills'),
        (["rollout.refills=1", "rollout.partial_tokens=512"], "rollout.refills = 1: must be 0 with"),
        (["rollout.refills=1", "algo.dynamic_sampling=false"], "rollout.refills = 1: needs algo.dynamic_sampling"),
        (["shaping.overlong_tokens=2000"], "shaping.overlong_tokens = 2000: must be at most rollout.max_tokens"),
        (["environment.factory=Calculator"], 'name a class as "my_env.py:Calculator"'),
        (["environment.max_tool_seconds=3.0"], "environment.max_tool_seconds = 3.0: needs environment.factory"),
        (["environment.max_turns=3"], "environment.max_turns = 3: needs environment.factory"),
        ([*TOOLS, "rollout.partial_tokens=512"], "must be 0 with environment.factory = my_env.py:Calculator"),
        ([*TOOLS, "rollout.engine=trtllm"], "turns end at </call>, but rollout.engine"),
        ([*TOOLS, "data.chat=true", "data.chat_template_kwargs={tools = []}"], "remove tools: the template receives"),
        (["parallel.sequence=true"], "parallel.sequence = true: needs parallel.tensor > 1"),
        (["parallel.context=2"], "train.share_prompt = true: must be false with parallel.context > 1"),
        ([*CONTEXT, "algo.ratio=sequence"], "must be 'token' with parallel"),
        (["fp8.recipe=tensorwise"], "model.dtype = \"fp32\": must be 'bf16' with an fp8.recipe"),
        (["fp8.parameters=true"], "fp8.parameters = true: needs an fp8.recipe"),
        (["fp8.bf16_layers=1"], "fp8.bf16_layers = 1: needs an fp8.recipe"),
        (["model.dtype=bf16", "fp8.recipe=delayed", "fp8.bf16_layers=1"], "fp8.bf16_layers = 1: must be 0"),
        ([*FP8, "fp8.parameters=true"], "fp8.parameters = true: needs parallel.distributed_optimizer = true"),
        (
            [*FP8, "fp8.parameters=true", "parallel.distributed_optimizer=true", "train.offload=true"],
            "train.offload = true: must be false with fp8.parameters",
        ),
        (["lora.targets=['q_proj', 'q_proj']"], 'lora.targets = ["q_proj", "q_proj"]: names a layer twice'),
        (["lora.targets=['qkv_proj']"], 'lora.targets[0] = "qkv_proj"'),
        (["lora.rank=8", *CONTEXT], "lora.rank = 8: must be 0 with parallel"),
        ([*FP8, "lora.rank=8"], "lora.rank = 8: must be 0 unless fp8.recipe"),
        (["train.keep_best=pass_at_1"], 'train.keep_best = "pass_at_1": needs evaluate.every above 0'),
        (["evaluate.benchmarks=['=m.jsonl']"], "each must be a file, or a name without |, then = and a file"),
        (["evaluate.benchmarks=['a/m.jsonl', 'b/m.jsonl']"], "two are called 'm': rename one, as in \"m_2=FILE\""),
        (["algo.gamma=0.9"], 'algo.gamma = 0.9: must be 1 without algo.advantage = "gae"'),
        (["algo.advantage=pass_at_k"], "algo.pass_k = 0: must be from 1 to rollout.n - 1 = 511"),
        (["algo.pass_k=8"], "algo.pass_k = 8: must be 0 without"),
        (["algo.advantage=maxrl"], 'reward.strict = false: must be true with algo.advantage = "maxrl"'),
        (["algo.advantage=maxrl", "reward.strict=true", "reward.cut_off_factor=0.5"], "must be 0 or 1 with"),
        (["algo.advantage=maxrl", "reward.strict=true", "shaping.overlong_tokens=9"], "or remove [shaping]"),
        (["rollout.n=1"], "rollout.n = 1: a group baseline needs at least 2 rollouts per prompt"),
        (["algo.advantage=grop"], "known: reinforce_pp_baseline, grpo, rloo, dr_grpo, maxrl, pass_at_k, gae; a"),
        (["algo.policy_loss=os:system"], "known: clip, cispo, sapo; a function of your own is"),
        ([*OWN_LOSS, "algo.eps_low=0.1"], "must be 0.2 (the default) with algo.policy_loss = mine.py:loss"),
        ([*OWN_LOSS, "algo.ratio=sequence"], "algo.ratio = \"sequence\": must be 'token' (the default) with"),
        ([*OWN_LOSS, *CONTEXT], "needs whole sequences: parallel.context must be"),
        (["algo.dual_clip=1.2"], "algo.dual_clip = 1.2: must be 0 (off) or above 1 + algo.eps_high"),
        (["algo.dual_clip=3", "algo.policy_loss=cispo"], 'must be 0 (off) with algo.policy_loss = "cispo"'),
        (["algo.mini_batches=9", "rollout.prompts=8"], "algo.mini_batches = 9: cannot divide 8 prompts"),
        (["algo.mini_batches=9", "algo.mini_batch_of=siblings", "rollout.n=8"], "cannot divide 8 siblings"),
        (["reward.group_function=best"], "known: majority; a function of your own is"),
        (["reward.strict=true", "reward.group_function=majority"], "cannot be combined with reward.group_function"),
        ([*GAE, "reward.group_function=my.py:score"], 'algo.advantage = "gae": cannot be combined with reward.group'),
        (["algo.train_on=1"], "algo.train_on = 1: must be 0 (all) or at least 2"),
        (["algo.train_on=513"], "algo.train_on = 513: must be at most rollout.n = 512"),
        (["algo.train_on=4", "algo.mini_batches=5", "algo.mini_batch_of=siblings"], "divide algo.train_on = 4"),
        (["algo.train_on=4", *GAE], 'algo.train_on = 4: must be 0 with algo.advantage = "gae"'),
        (["reference.reset_every=3"], "reference.reset_every = 3: needs algo.kl_coef above 0"),
        (["algo.distill_coef=1", "algo.dynamic_sampling=false"], "algo.distill_coef = 1.0: needs teacher.path"),
        (["teacher.path=t"], 'teacher.path = "t": needs algo.distill_coef above 0'),
        (["algo.distill_coef=1", "teacher.path=t"], "algo.dynamic_sampling = true: must be false with"),
        (["data.verifier=none"], 'data.verifier = "none": all rewards would be 0'),
        (["algo.mismatch_mask=token", "algo.old_log_probs=rollout"], 'needs algo.old_log_probs = "actor"'),
        (["rollout.top_p=0.9", "algo.old_log_probs=rollout"], 'must be "actor" with rollout.top_p = 0.9'),
        (["rollout.top_k=9", "algo.mismatch_mask=token"], 'must be "off" with rollout.top_p = 1 and rollout.top_k = 9'),
        (["optim.min_lr_ratio=0.1"], 'optim.min_lr_ratio = 0.1: must be 0 with optim.lr_schedule = "constant"'),
        (["data.template=x"], 'data.template = "x": must contain {prompt}'),
        (["data.tasks=[{name='gcd'}]", "data.train=['a']"], "give either data.tasks or files"),
        (["data.train=['a']", "data.mixture=[{files=['b'], weight=1}]"], "give either data.train or data.mixture"),
        (["data.system_prompt=x"], 'data.system_prompt = "x": needs data.chat = true'),
        (["agent.function=a.py:f", "data.chat=true", "data.template=Q: {prompt}"], "remove it: agent.function = a.py"),
    ],
)
def test_a_broken_rule_names_the_key_and_its_place(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_table({}, "run.toml", overrides)
    assert str(caught.value).startswith(("run.toml: ", *(f"override {json.dumps(item)}: " for item in overrides)))


@pytest.mark.parametrize(
    ("experts", "overrides", "message"),
    [
        (0, "parallel.expert=2", "parallel.expert = 2: must be 1 for a qwen model, which has no experts"),
        (0, "rollout.replay_routes=always", 'rollout.replay_routes = "always": needs experts, not a qwen model'),
        (0, "train.freeze_router=true", "train.freeze_router = true: must be false for a qwen model"),
        (8, "parallel.tensor=2 parallel.expert=2", "parallel.sequence = false: must be true with parallel.tensor"),
        (8, "parallel.tensor=2 parallel.sequence=true", "parallel.expert = 1: must be above 1 with parallel.tensor"),
        (6, "parallel.expert=4", "parallel.expert = 4: must divide the 6 experts of a layer"),
        (8, "model.dtype=bf16 fp8.recipe=tensorwise", "fp8.recipe = \"tensorwise\": must be 'none' for a qwen model"),
        (8, "lora.rank=4 lora.targets=['q_proj','up_proj']", "remove up_proj: experts cannot have adapters"),
    ],
)
def test_keys_that_do_not_fit_to_the_experts_of_a_model_are_refused(experts, overrides, message):
    config = load_table({}, "run.toml", overrides.split())
    with pytest.raises(UserError, match=f"^DIR: .*{re.escape(message)}"):
        check_model(config, "qwen", experts, "DIR")


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.n=1", "algo.dynamic_sampling=false", "algo.gamma=0.9", *GAE],  # a critic needs no group
        ["algo.mini_batches=8", "algo.mini_batch_of=siblings", "rollout.prompts=4"],
        ["evaluate.benchmarks=['a=x.jsonl', 'b=x.jsonl']"],  # one file under two names
    ],
)
def test_valid_combinations_are_accepted(overrides):
    load_table({}, "run.toml", overrides)


@pytest.mark.parametrize(
    ("benchmark", "name", "file"),
    [
        ("math500=data/m.jsonl", "math500", "data/m.jsonl"),
        ("data/math.v2.parquet", "math.v2", "data/math.v2.parquet"),
        ("a=lr=3/m.jsonl", "a", "lr=3/m.jsonl"),
        ("runs/lr=3/m.jsonl", "m", "runs/lr=3/m.jsonl"),  # a slash before = belongs to a file
    ],
)
def test_the_name_of_a_benchmark(benchmark, name, file):
    assert parse_benchmark(benchmark) == (name, file)


def test_lengths_up_to_the_context_of_the_model_are_accepted():
    shape = SimpleNamespace(context=64)
    assert context(load_table({}, "", ["model.context=64", "rollout.max_tokens=63"]), shape) == 64
    for key, other in (("model.context=65", "rollout.max_tokens=9"), ("rollout.max_tokens=64", "model.context=64")):
        with pytest.raises(UserError, match=key.replace("=", " = ")):
            context(load_table({}, "", [key, other]), shape)


def test_experts_are_replayed_where_engine_and_trainer_round_differently():
    fp8 = "model.dtype=bf16 rollout.dtype=bf16 rollout.engine=vllm engine.quantization=fp8"
    for overrides, experts, expected in (
        ("rollout.dtype=fp32", 8, False),
        ("rollout.dtype=bf16", 8, True),
        ("rollout.dtype=bf16", 0, False),
        ("rollout.dtype=bf16 model.dtype=bf16", 8, False),
        (fp8, 8, True),
        ("rollout.replay_routes=always", 8, True),
        ("rollout.dtype=bf16 rollout.replay_routes=never", 8, False),
    ):
        config = load_table({}, "run.toml", overrides.split())
        assert training_sampling_params(config, stop_ids=(2,), experts=experts).routes is expected
    config = load_table({}, "run.toml", ["rollout.engine=trtllm", "rollout.dtype=bf16"])
    with pytest.raises(UserError, match=r"replay_routes = \"auto\": TensorRT-LLM does not return .* set \"never\""):
        connect_engine(config, names={}, context=200, vocab=304, stop_ids=(2,), routes=True)
