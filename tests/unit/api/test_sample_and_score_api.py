"""Compare Engine and score with transformers, brute force and the command line."""

from __future__ import annotations

import datetime
import math
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import tiny
import torch
from command_line import error_line, output
from transformers import AutoTokenizer
from unit.data.test_tokenizers import CHAT, make_hf

import megatron_brorl
from megatron_brorl import Engine, UserError, score
from megatron_brorl.config.schema import Config, DataConfig, EnvironmentConfig, RolloutConfig
from megatron_brorl.data.source import load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.rollout_log import printable
from megatron_brorl.tracking import run_info


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("face")
    hf_model = tiny.make_model(directory, "qwen2", tied=True, vocab_size=300, bos_token_id=0, eos_token_id=1)
    make_hf(directory, chat_template=CHAT)
    return directory, hf_model


def test_the_import_is_fast_and_exports_all_names():
    code = (
        "import sys, megatron_brorl as m; assert 'torch' not in sys.modules; "
        "assert {'Engine', 'score', 'train'} <= {*dir(m)}; from megatron_brorl.train import learning_rate; "
        "from megatron_brorl import train; "
        "assert callable(m.train) and m.train is train and train.learning_rate is learning_rate; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        _ = megatron_brorl.nothing


def test_log_probs_are_those_of_transformers(model):
    directory, hf_model = model
    prompts = ["12 + 7 =", [{"role": "user", "content": "12 + 7"}], "1"]
    with Engine.from_pretrained(directory) as engine:
        samples = engine.sample(prompts, n=3, max_tokens=5, seed=3)
        # The samples of a prompt do not depend on other prompts, earlier calls or n.
        alone = engine.sample(prompts[1:2], n=5, max_tokens=5, seed=3)
        other = engine.sample(prompts[:1], n=3, max_tokens=5, seed=4)
    assert [s.token_ids for s in alone[0][:3]] == [s.token_ids for s in samples[1]]
    assert [s.token_ids for s in other[0]] != [s.token_ids for s in samples[0]]

    # Token ids of the prompt by the tokenizer of transformers.
    reader = AutoTokenizer.from_pretrained(directory)
    texts = ["12 + 7 =", reader.apply_chat_template(prompts[1], tokenize=False, add_generation_prompt=True), "1"]
    for text, rows in zip(texts, samples, strict=True):
        prompt = reader(text, add_special_tokens=False)["input_ids"]
        for row in rows:
            expected = tiny.log_probs(hf_model, prompt, row.token_ids)
            torch.testing.assert_close(torch.tensor(row.log_probs), expected, atol=1e-4, rtol=1e-4)
            ended = row.token_ids[-1] == 1
            assert row.finish == ("stop" if ended else "length")
            assert row.text == reader.decode([i for i in row.token_ids if i != 1])


def test_variables_of_the_chat_template_reach_the_prompt(model, tmp_path):
    """Compare the first greedy token with transformers. Special tokens of a response are part of its text.

    test_tokenizers.py compares the stop tokens of a model with transformers.
    """
    directory, hf_model = model
    shutil.copytree(directory, tmp_path / "model")
    make_hf(tmp_path / "model", chat_template=CHAT + "{% if not enable_thinking %}7 + 7{% endif %}")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    reader = AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "12 + 7"}]
    prompt_ids = []
    with Engine.from_pretrained(tmp_path / "model") as engine:
        for enable in (True, False):
            variables = {"enable_thinking": enable}
            [[row]] = engine.sample([messages], n=1, max_tokens=1, temperature=0, chat_template_kwargs=variables)
            options = {"tokenize": False, "add_generation_prompt": True, **variables}
            ids = reader(reader.apply_chat_template(messages, **options), add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                assert row.token_ids == (int(hf_model(torch.tensor([ids])).logits[0, -1].argmax()),)
            prompt_ids.append(ids)
        # At this temperature, 400 draws include each of the special tokens.
        [rows] = engine.sample(["1"], n=400, max_tokens=1, temperature=50.0, stop=("<|user|>",))
    assert prompt_ids[0] != prompt_ids[1]
    expected = {2: ("<|user|>", "stop"), 3: ("<|assistant|>", "length"), 1: ("", "stop"), 7: ("", "stop")}
    for token, text_and_finish in expected.items():
        assert {(row.text, row.finish) for row in rows if row.token_ids == (token,)} == {text_and_finish}


@pytest.mark.parametrize("raw", [False, True])
def test_the_command_prints_what_transformers_generates(model, capsys, raw):
    directory, hf_model = model
    options = ["--max-tokens", "6", "--temperature", "0", *(["--raw"] if raw else [])]
    text = output(capsys, "generate", directory, "12 + 7", "-n", 2, *options)

    reader = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "12 + 7"}]
    prompt_text = "12 + 7" if raw else reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([reader(prompt_text, add_special_tokens=False)["input_ids"]])
    generated = hf_model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=1)[0]
    ids = generated[prompt.shape[1] :]
    words = reader.decode([i for i in ids if i != 1])
    ending = "ended by itself" if ids[-1] == 1 else "cut off"
    assert text == "".join(f"--- {i}, {len(ids)} tokens, {ending}\n{printable(words)}\n" for i in range(2))


DATED = "{{ strftime_now('%Y') }}{% if short %} short{% endif %}" + CHAT


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(template="5 + 3 = 8\n{prompt} ="),
        DataConfig(chat=True, template="{prompt} = ?", system_prompt="add", chat_template_kwargs={"short": True}),
    ],
)
def test_a_run_is_sampled_as_it_was_trained(model, tmp_path, monkeypatch, capsys, data):
    """Compare the prompt with that of a training row and with transformers, and the responses with transformers."""
    hf_model = model[1]
    shutil.copytree(model[0], tmp_path / "model")
    make_hf(tmp_path / "model", chat_template=DATED)
    (tmp_path / "template_date").write_text("1999-12-31\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12 + 7", "answer": "19"}\n')
    reader = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "1999 short<|user|>add</s><|user|>12 + 7 = ?</s><|assistant|>" if data.chat else "5 + 3 = 8\n12 + 7 ="
    prompt_ids = reader(text, add_special_tokens=False)["input_ids"]
    prompt = torch.tensor([prompt_ids])
    generated = hf_model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=1, pad_token_id=1)[0]
    response = generated[len(prompt_ids) :].tolist()
    assert 1 not in response
    stop = reader.decode(response[:3])
    length = next(i for i in range(7) if stop in reader.decode(response[:i]))
    assert 1 < length < 5  # the string ends the response, not its maximum length

    data = replace(data, train=(str(tmp_path / "rows.jsonl"),))
    rollout = RolloutConfig(temperature=1e-6, max_tokens=5, stop_strings=(stop,))
    config = asdict(Config(data=data, rollout=rollout))
    run_info.write(tmp_path, config, resume_step=None, command="", ranks=1, device="")
    tokenizer = load_tokenizer(tmp_path / "model", datetime.date(1999, 12, 31))
    [row] = load_sources(data, tokenizer, max_prompt_tokens=200, seed=0).train.prompts(start=0, count=1)
    assert list(row.token_ids) == prompt_ids

    prompts = []
    sample = Engine.sample

    def recorded(self, *args, **options):
        prompts.extend(args[0])
        return sample(self, *args, **options)

    monkeypatch.setattr(Engine, "sample", recorded)
    options = ([], ["--max-tokens", 1, "--temperature", 0, "-n", 2], ["--raw"])
    outputs = [output(capsys, "generate", tmp_path, "12 + 7", *arguments) for arguments in options]
    plain = reader("12 + 7", add_special_tokens=False)["input_ids"]
    assert [list(ids) for ids in prompts] == [prompt_ids, prompt_ids, plain]
    assert outputs[0] == f"--- 0, {length} tokens, ended by itself\n{printable(reader.decode(response[:length]))}\n"
    first = printable(reader.decode(response[:1]))
    assert outputs[1] == "".join(f"--- {i}, 1 tokens, cut off\n{first}\n" for i in range(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(), "/model: no such Hugging Face directory (a run writes its model at its end)"),
        (Config(environment=EnvironmentConfig(factory="calc.py:Calculator")), "samples without an environment"),
        (None, "run.json: holds no configuration of a run; give run.dir"),
    ],
)
def test_runs_that_cannot_be_sampled(tmp_path, capsys, config, message):
    run_info.write(tmp_path, asdict(config) if config else {}, resume_step=None, command="", ranks=1, device="")
    assert message in error_line(capsys, "generate", tmp_path, "1")


MESSAGES = [[{"role": "user", "content": "x"}]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "1"}, "give a list"),
        ({"prompts": ["1"], "n": 0}, "n = 0: must be finite and at least 1"),
        ({"prompts": ["1"], "top_p": 0.0}, "top_p = 0.0"),
        ({"prompts": [""]}, "the prompt has no tokens"),
        ({"prompts": [[{"role": "robot", "content": "x"}]]}, "unknown role 'robot'"),
        ({"prompts": ["1"], "max_tokens": 256}, "max_tokens = 256: must be below"),
        ({"prompts": ["1234"], "max_tokens": 255}, "leave room for a response"),
        ({"prompts": [[4, 5]], "max_tokens": 255}, "must be at most 1 token ids"),
        ({"prompts": [[300]]}, "must be at most 252 token ids from 0 to 299"),
        ({"prompts": ["1"], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: no prompt is a list of messages"),
        ({"prompts": MESSAGES, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a: "),
    ],
)
def test_errors_name_the_argument(model, arguments, message):
    with Engine.from_pretrained(model[0]) as engine, pytest.raises(UserError, match=message):
        engine.sample(**{"n": 2, "max_tokens": 4, **arguments})


def test_scores_are_those_of_the_verifier():
    rewards = score([r"so \boxed{1/2}", ["\\boxed{0.5}", r"\boxed{2}", "none"]], ["0.5", "1/2"])
    assert [rewards[0].reward, *(r.reward for r in rewards[1])] == [1.0, 1.0, 0.0, 0.0]
    assert rewards[1][2].status == "no_answer"
    with pytest.raises(UserError, match="no verifier is called 'maths'"):
        score(["1"], ["1"], verifier="maths")
    with pytest.raises(UserError, match="2 responses and 1 rows"):
        score(["1", "2"], ["1"])


def test_a_row_without_an_id_gets_its_index():
    """Error messages use the same name for a row as its id."""
    ids = []

    def record(response, row):
        ids.append(row["id"])
        return 1.0

    score(["a", "b"], ["1", {"answer": "2", "id": "mine"}], verifier=record)
    assert ids == ["rows[0]", "mine"]
    with pytest.raises(UserError, match=r"^rows\[0\]: answer must be a string"):
        score(["a"], [{"answer": [4]}], verifier=record)


def test_a_function_can_be_the_verifier():
    def half(response, row):
        if response == "raise":
            raise ValueError("oh")
        return {"reward": {row["columns"]["want"]: 0.5, "much": math.inf}.get(response, 0.0)}

    row = {"prompt": "p", "columns": {"want": "a"}}
    [rewards] = score([["a", "b", "raise", "much"]], [row], verifier=half)
    assert [r.reward for r in rewards] == [0.5, 0.0, 0.0, 0.0]
    assert [r.status for r in rewards] == ["ok", "ok", "error", "invalid"]
    with pytest.raises(UserError, match=r"must take \(response, row\)"):
        score(["a"], [row], verifier=lambda response: 1.0)
