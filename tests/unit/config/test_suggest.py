"""An unknown key is answered by the one that was meant."""

from __future__ import annotations

import re

import pytest

from megatron_brorl.config.describe import keys
from megatron_brorl.config.foreign import FOREIGN
from megatron_brorl.config.load import load
from megatron_brorl.config.suggest import suggestion
from megatron_brorl.errors import UserError


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("rollout.nn", "did you mean rollout.n?"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("rolout", "did you mean rollout?"),
        ("train.n", "did you mean rollout.n?"),  # of another section
        ("rollout.lr", "did you mean critic.lr or optim.lr or sft.lr?"),
        ("data.tasks[].wheight", "did you mean data.tasks[].weight?"),
        ("train.num_generations", "did you mean rollout.n? (TRL calls it num_generations)"),
        ("actor_rollout_ref.actor.clip_ratio_high", "did you mean algo.eps_high? (verl calls it clip_ratio_high)"),
        ("n_resp_per_prompt", "did you mean rollout.n? (verl calls it n_resp_per_prompt)"),
        ("grpo.num_prompts_per_step", "did you mean rollout.prompts? (NeMo RL calls it num_prompts_per_step)"),
        # Other units: the conversion follows from the definitions of the other trainer.
        (
            "train.per_device_train_batch_size",
            "did you mean rollout.prompts? TRL's per_device_train_batch_size counts completions per device and "
            "micro-batch: rollout.prompts = per_device_train_batch_size x devices x steps_per_generation / "
            "num_generations",
        ),
        (
            "actor.ppo_mini_batch_size",
            "did you mean algo.mini_batches? verl's ppo_mini_batch_size counts prompts: algo.mini_batches = "
            "train_batch_size / ppo_mini_batch_size",
        ),
        (
            "train.peft_config",
            "TRL's peft_config has no counterpart: all weights are trained; there are no adapters (LoRA)",
        ),
        ("rollout.zebra", ""),
    ],
)
def test_what_was_meant(path, answer):
    assert suggestion(path) == answer


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[grpo]\nnum_generations_per_prompt = 8", [], "unknown key grpo; did you mean rollout.n? (NeMo RL calls"),
        (
            "[actor_rollout_ref.rollout]\nn_resp_per_prompt = 8",
            [],
            "unknown key actor_rollout_ref; did you mean rollout.n",
        ),
        ("", ["actor_rollout_ref.rollout.n=8"], "override 'actor_rollout_ref.rollout.n=8': did you mean rollout.n?"),
        ("", ["num_generations=8"], "override 'num_generations=8': did you mean rollout.n? (TRL calls it"),
        ("", ["rollout=3"], "override 'rollout=3': expected section.key=value"),
        ("[rollout]\nzebra = 1", [], "unknown key rollout.zebra; known here: n, prompts"),
    ],
)
def test_the_loader_says_so(tmp_path, text, overrides, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert message in str(caught.value)


def test_every_foreign_name_leads_to_a_key_and_is_none_itself():
    known = {key.path for key in keys()}
    rows = [(name, answer.partition(": ")) for table in FOREIGN.values() for name, answer in table.items()]
    assert [(name, key) for name, (key, _, _) in rows if key not in known | {"none"}] == []
    assert [name for name, (key, _, note) in rows if key == "none" and not note] == []
    own = {path.rpartition(".")[2] for path in known}
    # A note names keys of ours that exist, too.
    named = {word for _, (_, _, note) in rows for word in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", note)}
    sections = {path.partition(".")[0] for path in known}
    assert {word for word in named if word.partition(".")[0] in sections} - known == set()
    assert own & {name for table in FOREIGN.values() for name in table} == set()


# What each of these counts in the other trainer's documentation, where the key here counts something else.
UNITS = {
    "per_device_train_batch_size": "completions",
    "generation_batch_size": "completions",
    "gradient_accumulation_steps": "micro-batches per optimizer step",
    "steps_per_generation": "micro-batches",
    "max_steps": "optimizer steps",
    "save_steps": "optimizer steps",
    "eval_steps": "optimizer steps",
    "num_train_epochs": "passes over the data",
    "total_epochs": "passes over the data",
    "max_num_epochs": "passes over the data",
    "ppo_mini_batch_size": "prompts",
    "train_prompt_mini_bsz": "prompts",
    "ppo_micro_batch_size_per_gpu": "sequences",
    "log_prob_micro_batch_size_per_gpu": "sequences",
    "train_micro_batch_size": "sequences",
    "train_global_batch_size": "responses per optimizer step",
    "max_prompt_length": "tokens of a prompt",
    "max_num_gen_batches": "the first batch too",
}


@pytest.mark.parametrize(("name", "unit"), UNITS.items())
def test_a_key_with_another_unit_is_answered_with_the_unit_and_the_conversion(name, unit):
    answer = suggestion(f"train.{name}", 8)
    key = re.match(r"did you mean ([\w.]+)\?", answer)[1]
    assert unit in answer
    assert re.search(rf"{re.escape(key)} = .*\b{name}\b", answer), answer


def test_conversions_give_the_same_run():
    """Evaluate the formulas: 8 GPUs, 64 prompts of 16 responses per step, 4 optimizer steps, 6,400 rows, 2 passes."""
    given = {
        # TRL: 8 x 4 x 32 = 1,024 completions per round, of which 8 micro-batches make an optimizer step.
        "per_device_train_batch_size": 4,
        "devices": 8,
        "steps_per_generation": 32,
        "num_generations": 16,
        "gradient_accumulation_steps": 8,
        "generation_batch_size": 1024,
        "max_steps": 800,
        "num_train_epochs": 2,
        "save_steps": 40,
        "eval_steps": 20,
        # verl: 64 prompts per round, 16 in an optimizer step.
        "train_batch_size": 64,
        "ppo_mini_batch_size": 16,
        "total_epochs": 2,
        "ppo_micro_batch_size_per_gpu": 4,
        "max_prompt_length": 512,
        "max_response_length": 1536,
        "max_num_gen_batches": 5,
        "gen_batch_size": 192,
        # NeMo RL: 256 responses in an optimizer step.
        "num_prompts_per_step": 64,
        "num_generations_per_prompt": 16,
        "train_global_batch_size": 256,
        "train_micro_batch_size": 4,
        "max_total_sequence_length": 2048,
        "max_num_epochs": 2,
        "rows": 6400,
        "mini_batches": 4,
        "epochs": 1,
        "prompts": 64,
    }
    wanted = {
        "rollout.prompts": 64,
        "algo.mini_batches": 4,
        "train.steps": 200,
        "train.checkpoint_every": 10,
        "evaluate.every": 5,
        "train.tokens_per_micro_batch": 8192,
        "model.context": 2048,
        "rollout.refills": 4,
        "rollout.max_oversample": 3,
    }
    checked = set()
    for name in given:
        answer = suggestion(f"train.{name}")
        formula = re.search(r"([\w.]+) = ([^=;]+?)(?:;|$)", answer)
        if formula and formula[1] in wanted:
            python = re.sub(r"\b(?:algo|rollout)\.", "", formula[2].replace(" x ", " * "))
            python = python.replace("rows of data.train", "rows")
            assert eval(python, {}, given) == wanted[formula[1]], (name, formula[0])
            checked.add(name)
    assert len(checked) == 17, sorted(checked)
