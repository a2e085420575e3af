"""Every mistake of a user's ends in one line that says what and where, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from e2e.runs import brorl, by_launcher
from safetensors.torch import load_file, save_file

from megatron_brorl.model_shape import WEIGHTS

NO_FILES = ["data.train=[]", "data.held_out=[]"]
LINES = [
    '{"prompt": "1+1=", "answer": "2"}',
    '{"prompt": "1+2=", "answer": "3"}',
]


def fails(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("brorl: ")
    for part in parts:
        assert part in done.stderr


@pytest.fixture
def model(init, tmp_path):
    """A copy of the random model to break."""
    return shutil.copytree(init, tmp_path / "model")


def train(config, model, tmp_path, *overrides):
    return brorl("train", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", *overrides)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_unknown_key(config, model, tmp_path):
    fails(train(config, model, tmp_path, "rollout.nn=3"), "unknown key rollout.nn", str(config))
    assert not (tmp_path / "run").exists()


def test_unknown_key_is_told_once_by_the_launcher(config):
    fails(by_launcher("train", "--processes", "2", config, "rollout.nn=3"), "unknown key rollout.nn")


def test_one_rollout(config, model, tmp_path):
    fails(train(config, model, tmp_path, "rollout.n=1"), "rollout.n = 1: a group baseline needs at least 2")


def test_missing_model(config, tmp_path):
    fails(train(config, tmp_path / "nowhere", tmp_path), "nowhere: no such Hugging Face directory")


def test_a_stored_head_beside_a_tied_one(config, model, tmp_path):
    weights = load_file(model / WEIGHTS)
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, model / WEIGHTS)
    fails(train(config, model, tmp_path), f"{model}: stores a lm_head.weight", "tie_word_embeddings = true")


def test_unsupported_architecture(config, model, tmp_path):
    edit(model / "config.json", architectures=["MambaForCausalLM"])
    fails(train(config, model, tmp_path), "config.json: architecture 'MambaForCausalLM' is not supported")


def test_tokenizer_without_eos(config, model, tmp_path):
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc def ghi"] * 10), model_writer=out, vocab_size=13, eos_id=-1, minloglevel=2
    )
    (model / "tokenizer.model").write_bytes(out.getvalue())
    (model / "tokenizer.json").unlink()  # which would go first
    fails(train(config, model, tmp_path), "tokenizer.model", "end-of-sequence")


def test_tensor_parallel_does_not_divide_heads(config, model, tmp_path):
    run = f"run.dir={tmp_path / 'run'}"
    done = brorl("train", "--processes", "3", config, f"model.path={model}", run, "parallel.tensor=3")
    fails(done, "parallel.tensor = 3 does not divide num_attention_heads = 2")


def test_world_size_is_no_multiple(config, model, tmp_path):
    fails(
        train(config, model, tmp_path, "parallel.tensor=2"),
        "world size 1 is not a multiple of parallel.tensor x parallel.pipeline = 2 x 1",
    )


@pytest.mark.parametrize(
    ("third", "parts"),
    [
        ('{"prompt": "1+3=", "answer": ', ["JSON"]),
        ('["1+3=", "4"]', ["object"]),
        ('{"answer": "4"}', ["prompt"]),
        ('{"prompt": "1+3=", "answer": 4}', ["answer"]),
    ],
)
def test_malformed_row(config, model, tmp_path, third, parts):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*LINES, third]) + "\n")
    done = train(config, model, tmp_path, f'data.train=["{data}"]')
    fails(done, f"{data}:3", *parts)


def test_prompt_longer_than_the_context(config, model, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*LINES, json.dumps({"prompt": "1+" * 30 + "1=", "answer": "31"})]) + "\n")
    done = train(config, model, tmp_path, f'data.train=["{data}"]')
    fails(done, f"{data}:3", "26")  # context 32 - 6 response tokens


def test_loss_settings_that_make_no_sense(config, model, tmp_path):
    fails(train(config, model, tmp_path, "algo.dual_clip=1.1"), "algo.dual_clip = 1.1", "above 1 + algo.eps_high")
    done = train(config, model, tmp_path, "algo.aggregation=fixed")
    fails(done, "algo.aggregation_tokens = 0", "give the tokens per sequence")


def test_supervised_training_that_diverges_exports_nothing(config, model, tmp_path):
    """No rate at all is told before anything is built; a far too high one where the loss shows it."""
    command = ("sft", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", "sft.steps=3")
    fails(brorl(*command, "sft.lr=inf"), "sft.lr = inf: must be finite")
    done = brorl(*command, "sft.lr=1e29")
    assert done.returncode == 2
    assert "nothing is exported" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_with_nan_in_it(config, model, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors")
    fails(train(config, model, tmp_path), f"model.path = {model}: weights that are not finite: decoder.final_layernorm")


def test_unsafe_task(config, model, tmp_path):
    fails(
        train(config, model, tmp_path, *NO_FILES, 'data.tasks=[{name="simple_integration"}]'),
        "simple_integration",
        "eval",
    )


def test_tokenizer_larger_than_the_model(config, model, tmp_path):
    edit(model / "config.json", vocab_size=50)
    fails(train(config, model, tmp_path), "the tokenizer has", "vocab_size is 50")


def test_missing_weights(config, model, tmp_path):
    (model / "model.safetensors").unlink()
    fails(train(config, model, tmp_path), "holds neither model.safetensors nor")


def test_a_second_run_in_the_same_directory(config, model, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = f"run.dir={tmp_path / 'run'}"
        done = brorl("train", "--processes", "2", config, f"model.path={model}", run)
        fails(done, "another run is writing there")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(config, model, tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    fails(train(config, model, tmp_path), "make it a writable folder")


def test_report_of_nothing(tmp_path):
    fails(brorl("report", tmp_path), "holds no metrics.jsonl")
