"""Check that each recipe sets every key that affects the method, and cites the source of each value."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from random_model import qwen2_config

from megatron_brorl.cli.memory_plan import Machines, plan_run, plan_stage
from megatron_brorl.config.load import load, load_table
from megatron_brorl.config.schema import Config
from megatron_brorl.families.shape import parse_shape
from megatron_brorl.train.learning_rate import scaled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "recipes"
# Keys that depend on the machine or the run and not on the method.
NOT_OF_THE_METHOD = {
    "rollout": {"engine", "max_num_seqs", "pull", "kv_cache_mib", "replay_routes", "timeout_s", "max_lost_share"},
    "reward": {"workers", "timeout_s", "unsandboxed"},
    "evaluate": {"benchmarks"},
}
SECTIONS = ("rollout", "reward", "shaping", "algo", "critic", "reference", "optim", "evaluate")


def without_effect(config: Config) -> set[str]:
    """Return the keys (section.key, or a whole section) that another key disables."""
    algo = config.algo
    off_conditions = {
        "critic algo.gamma algo.lam": algo.advantage != "gae",
        "reference algo.kl_estimator algo.kl_in": not algo.kl_coef,
        "algo.distill_coef": not config.teacher.path,
        "algo.train_on": not algo.train_on,
        "reward.group_function reward.majority_share": not config.reward.group_function,
        "algo.pass_k": algo.advantage != "pass_at_k",
        "algo.aggregation_tokens": algo.aggregation != "fixed",
        "optim.min_lr_ratio": config.optim.lr_schedule == "constant",
    }
    return {key for keys, is_off in off_conditions.items() if is_off for key in keys.split()}


@pytest.mark.parametrize("name", ["prorlv2", "brorl", "dapo", "ppo"])
def test_a_recipe_sets_all_relevant_keys_and_cites_sources(name):
    path = RECIPES / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    table, config = tomllib.loads(text), load(path)
    unused_keys = without_effect(config)
    assert tuple(table) == tuple(section for section in SECTIONS if section not in unused_keys)
    for section in table:
        names = {f.name for f in fields(getattr(config, section))}
        unstated = NOT_OF_THE_METHOD.get(section, set()) | {k for k in names if f"{section}.{k}" in unused_keys}
        assert names - table[section].keys() == unstated, section
    references = set(re.findall(r"\[[A-Za-z0-9+-]+\]", text.split("\n\n")[0]))
    for line in text.split("\n\n", 1)[1].splitlines():
        if " = " in line:
            source = line.partition(" # ")[2]
            cited = set(re.findall(r"\[[A-Z][A-Za-z0-9+-]*\]|\[(?:blog|script|ppo2)\]", source))
            assert cited <= references, line
            assert cited or re.search("choice|not part of the method|verl's default", source), line


def test_the_recipes_differ_as_published():
    prorl, brorl, dapo, ppo = (load(RECIPES / f"{name}.toml") for name in ("prorlv2", "brorl", "dapo", "ppo"))
    assert (prorl.rollout.n * prorl.rollout.prompts, brorl.rollout.n * brorl.rollout.prompts) == (8192, 65536)
    rates = [scaled(c.optim, c.rollout.n * c.rollout.prompts).lr for c in (prorl, brorl)]  # for full batches
    assert rates == pytest.approx([1e-6, 1e-6 * math.sqrt(8)])
    assert prorl.algo.mini_batches == brorl.algo.mini_batches  # the same number, but each has more rollouts
    assert dapo.rollout.prompts * dapo.rollout.n / dapo.algo.mini_batches == 512
    assert ppo.algo.advantage == "gae"


def keys_of(name: str) -> dict[str, Any]:
    table = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    return {f"{section}.{key}": value for section, keys in table.items() for key, value in keys.items()}


def test_the_table_has_every_key_in_which_brorl_differs_from_prorlv2():
    """Check the table in docs/recipes.md: key, both TOML values ("-" if the key has no effect) and the reason."""
    prorl, brorl = keys_of("prorlv2"), keys_of("brorl")
    differing = {
        key: tuple("-" if (v := side.get(key)) is None else json.dumps(v) for side in (prorl, brorl))
        for key in prorl.keys() | brorl.keys()
        if prorl.get(key) != brorl.get(key)
    }
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_0-9]+)` \| `?([^|`]+)`? \| `?([^|`]+)`? \| ([^|]+) \|$", page, flags=re.M)
    assert {key: (before, after) for key, before, after, _ in rows} == differing
    assert len(rows) == len(differing)
    assert all(len(reason.split()) >= 4 for *_, reason in rows)


def test_recipes_agree_on_the_length_of_responses():
    """All training files use one length. The evaluation at 32,768 tokens keeps the same room for prompts."""
    brorl, example = load(RECIPES / "brorl.toml"), load(ROOT / "examples" / "brorl_1.5b.toml")
    assert brorl.rollout.max_tokens == example.rollout.max_tokens == 16384 - 1024
    assert example.model.context == 16384
    longer = load(RECIPES / "evaluate_32k.toml")
    assert (longer.model.context, longer.rollout.max_tokens) == (32768, 32768 - 1024)
    assert longer.evaluate == replace(brorl.evaluate, every=longer.evaluate.every)
    assert longer.reward == brorl.reward
    names = (f.name for f in fields(longer.rollout))
    differing = {name for name in names if getattr(longer.rollout, name) != getattr(brorl.rollout, name)}
    assert differing <= {"max_tokens", "refills", "n", "prompts"}  # keys without effect in an evaluation


@pytest.mark.parametrize("overrides", [(), ("lora.rank=0", "optim.lr=1e-6")], ids=["LoRA", "all weights"])
def test_one_gpu_of_80_gb_has_room_for_1024_responses(overrides):
    """The responses have the full length. test_memory_plan.py counts the bytes of this model."""
    config = load(ROOT / "examples" / "one_gpu.toml", overrides)
    sizes = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 32768}
    machines = Machines(ranks=1, ranks_per_node=1, gpu=79 * 2**30, here=False)
    plan = plan_run(config, parse_shape(qwen2_config(**sizes), "test"), machines)[0]
    assert config.rollout.max_num_seqs == 1024
    assert plan.rows(machines.gpu) >= 1024


QWEN = {  # hidden, layers, heads, kv_heads, ffn, vocab as published; the smaller two are tied
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}


@pytest.mark.parametrize(("gpu_gib", "column"), [(22, 1), (79, 2), (139, 3)])
def test_table_of_models_and_machines_is_the_memory_plan(gpu_gib, column):
    """Check memory and numbers of responses, and that no setting fits where the table has a dash."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| Qwen2.5-(\S+) \| all weights \| (.+) \|\n\| \| LoRA \| (.+) \|$", page, flags=re.M)
    assert [model for model, *_ in rows] == list(QWEN)
    names = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
    for model, *cells in rows:
        *sizes, tied = QWEN[model]
        published = qwen2_config(**dict(zip(names, sizes, strict=True)), context=32768)
        shape = parse_shape(published | {"tie_word_embeddings": tied}, "test")
        for rank, cell in zip((0, 16), cells, strict=True):
            text = cell.split(" | ")[column]
            needs = []  # (bytes for training, responses that fit) for each length. Prompts have 512 tokens.
            for tokens in (1024, 7680):
                keys = {"model.dtype": "bf16", "rollout.dtype": "bf16", "rollout.engine": "vllm", "lora.rank": rank}
                keys |= {"rollout.max_tokens": tokens, "model.context": tokens + 512, "data.train": '["x.jsonl"]'}
                keys |= {"train.recompute": "full"} if "(r" in text or text == "-" else {}  # "(r)" or "(r, o)"
                keys |= {"train.offload": "true"} if "o)" in text or text == "-" else {}
                config = load_table({}, "test", [f"{key}={value}" for key, value in keys.items()])
                plan = plan_stage(config, shape, Machines(ranks=1, ranks_per_node=1, gpu=gpu_gib * 2**30, here=False))
                needs.append((sum(plan.training.values()), plan.rows(gpu_gib * 2**30)))
            if text == "-":
                assert needs[0][0] > gpu_gib * 2**30, (model, rank)
            else:
                memory, *responses = re.findall(r"[\d,.]*\d", text)
                assert f"{needs[0][0] / 2**30:.1f}" == memory
                assert [f"{rows:,}" for _, rows in needs] == responses
