"""Test reading a TOML file with overrides. A mistake is an error of one line that names file and key."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from command_line import error_line

from megatron_brorl.config.foreign_keys import FOREIGN_KEYS, foreign_key_hint
from megatron_brorl.config.load import json_schema, keys, load, load_table, suggestion
from megatron_brorl.config.schema import RolloutConfig
from megatron_brorl.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_replace_values_of_the_file(tmp_path):
    path = write(tmp_path, "[rollout]\nn = 64\ntemperature = 1\n[optim]\nbetas = [0.9, 0.95]\n")
    config = load(path, ["rollout.n=512", "model.path=/some/where", "optim.lr=3e-4"])
    assert (config.rollout.n, config.model.path) == (512, "/some/where")
    assert type(config.rollout.temperature) is float
    assert (config.optim.betas, config.optim.lr) == ((0.9, 0.95), 3e-4)

    path = write(tmp_path, "[data.columns]\nprompt = 'question'\n")
    columns = load(path, ["data.columns.prompt=problem", "data.columns.answer=solution.text"]).data.columns
    assert (columns.prompt, columns.answer) == ("problem", "solution.text")


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[rollout]\r\nn = 64\r\n")
    assert load(path).rollout.n == 64


def test_a_section_is_a_frozen_dataclass_that_checks_its_values():
    section = dataclasses.replace(RolloutConfig(n=4), prompts=2)
    assert dataclasses.asdict(section)["n"] == 4
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RolloutConfig(n=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.n = 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rollout]\nm = 4", "rollout.m; known here: n, prompts"),
        ("[rolout]\nn = 4", "rolout; did you mean rollout?"),
        ("[rollout]\ntemprature = 1", "rollout.temprature; did you mean rollout.temperature?"),
        ("[train]\nn = 4", "train.n; did you mean rollout.n?"),
        ("[rollout]\nn = 'four'\nprompt = 3", "rollout.prompt; did you mean rollout.prompts?"),
        ("[train]\nnum_generations = 8", "train.num_generations; this trainer calls it rollout.n"),
        ("[grpo]\nnum_generations_per_prompt = 8", "grpo; grpo.num_generations_per_prompt: this"),
        ("[train]\nuse_dynamic_bsz = 8", "train.use_dynamic_bsz; there is no such key here: micro-batches always hold"),
        ("[train]\npeft_config = 8", "train.peft_config; this trainer calls it lora.rank (and lora.alpha"),
        ("[critic]\nlr_warmup_steps = 8", "critic.lr_warmup_steps; this trainer calls it optim.warmup_steps"),
        ("[evaluate]\ntop_k = 8", "evaluate.top_k; there is no such key here: its value is fixed now"),
        ("[[data.tasks]]\nname = 'gcd'\nwheight = 2", "data.tasks[0].wheight; did you mean data.tasks[].weight?"),
        ("[[data.tasks]]\nweight = 2", "data.tasks[0].name is missing"),
        ("[data]\nmixture = [{files = ['b'], weight = 0}]", "data.mixture[0].weight = 0: must be greater than 0"),
        ("[rollout]\nn = 'four'", 'rollout.n = "four": must be a valid integer'),
        ("[rollout]\nn = true", "rollout.n = true: must be a valid integer"),
        ("[rollout]\nn = 0", "rollout.n = 0: must be greater than or equal to 1"),
        ("[rollout]\nengine = 'tgi'", "rollout.engine = \"tgi\": must be 'torch', 'trtllm' or 'vllm'"),
        ("[data]\ntrain = 'a.jsonl'", 'data.train = "a.jsonl": must be a valid list'),
        ("[run]\nlog = ['tensorbord']", "run.log[0] = \"tensorbord\": must be 'tensorboard'"),
        ("[optim]\nbetas = [0.9]", "optim.betas[1] is missing"),
        ("[optim]\nbetas = [0.9, 0.9, 0.9]", "optim.betas = [0.9, 0.9, 0.9]: must have 2 values"),
        ("[optim]\nbetas = [0.9, 1.0]", "optim.betas[1] = 1.0: must be less than 1"),
        ("[lora]\ntargets = []", "lora.targets = []: must not be empty"),
        ("[optim]\nlr = nan", "optim.lr = nan: must be a finite number"),
        ("rollout = 3", "rollout = 3: must be a table"),
        ("[rollout", "not valid TOML"),
    ],
)
def test_an_error_names_file_key_and_remedy(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=f"^{path}: .*{re.escape(message)}"):
        load(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout=3", 'override "rollout=3": expected section.key=value'),
        ("num_generations=8", 'override "num_generations=8": this trainer calls it rollout.n'),
        ("actor_rollout_ref.rollout.n_resp_per_prompt=8", "this trainer calls it rollout.n"),
        ("rollout.n.m=4", 'rollout.n = {"m": 4}: must be a valid integer'),
    ],
)
def test_a_wrong_override_is_reported(tmp_path, override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load(write(tmp_path, ""), [override])


@pytest.mark.parametrize(
    ("table", "override", "source"),
    [
        ({"rollout": {"n": "x"}}, "rollout.num=1", "override"),  # an unknown key is reported before a wrong value
        ({"rollout": {"n": 4}}, "rollout.n=x", "override"),
        ({"data": {"template": "x"}}, "rollout.n=4", "run.toml: data.template"),
        ({}, "data.tasks=[{name=1}]", "override"),
        ({"data": {"tasks": [{"name": 1}]}}, "data.task=x", "override"),
        ({}, "optim.lr.x=1", "override"),
        ({"optimm": {"lr": 1}}, "optim.lr=1", "run.toml: unknown key optimm"),
    ],
)
def test_an_error_names_the_file_or_the_override_of_the_key(table, override, source):
    prefix = f'override "{override}": ' if source == "override" else source
    with pytest.raises(UserError, match=f"^{re.escape(prefix)}"):
        load_table(table, "run.toml", [override])


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("examples/**/*.toml")), ids=lambda path: path.name)
def test_every_example_loads_and_fits_the_json_schema(path):
    load(path)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.Draft202012Validator(json_schema()).validate(tomllib.loads(path.read_text(encoding="utf-8")))


def test_keys_of_other_trainers_are_mapped_to_existing_keys():
    names = [name for table in FOREIGN_KEYS.values() for name in table]
    assert not set(names) & {path.rpartition(".")[2] for path in keys()}
    sections = {path.partition(".")[0] for path in keys()}
    for name in names:
        named = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", foreign_key_hint(name)))
        assert {path for path in named if path.partition(".")[0] in sections} <= keys().keys(), name
        assert named or "no such key" in foreign_key_hint(name), name


def test_each_key_on_the_page_for_users_of_other_trainers_is_answered(tmp_path, capsys):
    """The first key of a cell is answered with the key of its row, the others with any key. Parentheses hold values."""
    page = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|(.*)\|(.*)\|(.*)\|$", page, flags=re.M)
    names_and_answers = [("trainer.n_gpus_per_node", "--processes"), ("logging_steps", "every step")]
    for ours, trl, verl, nemo in rows:
        verl = re.sub("`(actor|rollout|model)[.]", r"`actor_rollout_ref.\1.", verl)
        for names in (re.findall(r"`([\w.]+)`", re.sub(r"\(.*?\)", "", cell)) for cell in (trl, verl, nemo)):
            names_and_answers += [(name, "." if i else ours) for i, name in enumerate(names)]  # any key has a "."
    assert len(names_and_answers) > 100
    for name, answer in names_and_answers:
        line = error_line(capsys, "train", write(tmp_path, ""), f"{name}=1")
        assert name in keys() or re.search(rf'^brorl: override "{name}=1": .*{re.escape(answer)}', line), line


# 8 GPUs, 64 prompts of 16 responses per step, 4 optimizer steps per step, 200 steps, 6,400 rows.
SAME_RUN = {  # key of another trainer -> (its value, other values of that trainer, value here)
    "per_device_train_batch_size": (4, {"devices": 8, "steps_per_generation": 32, "num_generations": 16}, 64),
    "steps_per_generation": (32, {"gradient_accumulation_steps": 8}, 4),
    "max_steps": (800, {}, 200),
    "num_train_epochs": (2, {}, 200),
    "save_steps": (40, {}, 10),
    "ppo_mini_batch_size": (16, {"train_batch_size": 64}, 4),
    "ppo_micro_batch_size_per_gpu": (4, {}, 8192),
    "max_prompt_length": (512, {"max_response_length": 1536}, 2048),
    "max_num_gen_batches": (5, {}, 4),
    "dynamic_sampling_max_gen_batches": (5, {}, 4),
    "train_global_batch_size": (256, {"num_prompts_per_step": 64, "num_generations_per_prompt": 16}, 4),
}


@pytest.mark.parametrize("name", SAME_RUN)
def test_conversions_of_values_are_correct(name):
    value, other_values, expected = SAME_RUN[name]
    formula = re.search(r"\((.+)\)$", suggestion(f"train.{name}"))[1]
    expression = re.sub(r"\b(?:algo|rollout|model)\.| of data.train", "", formula.replace(" x ", " * "))
    ours = {"mini_batches": 4, "epochs": 1, "prompts": 64, "context": 2048, "rows": 6400}
    assert eval(expression, {}, {name: value, **other_values, **ours}) == expected
