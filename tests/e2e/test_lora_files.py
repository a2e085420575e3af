"""Files of runs with LoRA: checkpoints of adapters, run.dir/adapter as PEFT reads it, and conversions."""

from __future__ import annotations

import shutil

import psutil
import pytest
import torch
from e2e.runs import brorl, rows, start, train, wait_for
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

LORA = ["lora.rank=4", "lora.alpha=16", "optim.lr=1e-2"]
# The checkpoint after step 2 has a reference policy that was reset after step 1.
OPTIONS = [
    *LORA,
    *("train.steps=4", "train.checkpoint_every=2", "train.checkpoint_async=false", "evaluate.every=0"),
    *("algo.kl_coef=0.01", "reference.reset_every=1"),
]
TOKENS = torch.arange(48).view(4, 12) % 29 + 3


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def hf_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def peft_model(base, adapter):
    return PeftModel.from_pretrained(hf_model(base), adapter)


def weights(directory, name="model"):
    return load_file(directory / f"{name}.safetensors")


@pytest.fixture(scope="module")
def adapted(config, warm, tmp_path_factory):
    """The folder of a run on two processes with adapters."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    train(config, warm, directory, *OPTIONS)
    return directory


def test_peft_loads_the_adapter(adapted, warm):
    """PEFT's model equals the merged model in logits and greedy text, and it differs from the base model."""
    merged, adapter = hf_model(adapted / "model"), peft_model(warm, adapted / "adapter")
    assert torch.allclose(logits(adapter), logits(merged), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(hf_model(warm))).abs().max() > 1e-2
    texts = [m.generate(TOKENS[:, :4], do_sample=False, max_new_tokens=16).tolist() for m in (adapter, merged)]
    assert texts[0] == texts[1]


def test_a_checkpoint_becomes_an_adapter_and_a_merged_model(adapted, warm, tmp_path):
    """The last checkpoint has the weights of the end of the run."""
    last = adapted / "checkpoints/latest"
    assert brorl("convert", "to-peft", last, tmp_path / "adapter", "--config", warm).returncode == 0
    done = brorl("convert", "to-hf", last, tmp_path / "model", "--config", warm, "--verify")
    assert done.returncode == 0, done.stderr
    assert "logits equal those of" in done.stderr

    found, expected = (weights(d / "adapter", "adapter_model") for d in (tmp_path, adapted))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    merged, exported = weights(tmp_path / "model"), weights(adapted / "model")
    assert merged.keys() == exported.keys()
    assert all(torch.allclose(merged[name], tensor, rtol=0, atol=1e-6) for name, tensor in exported.items())


def test_a_killed_run_continues_bit_exactly(adapted, config, warm, tmp_path):
    """SIGKILL ends one rank after the checkpoint of step 2 and one more step."""
    process = start("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}", *OPTIONS)
    wait_for(process, "train 3/4")
    next(p for p in psutil.Process(process.pid).children() if f"run.dir={tmp_path}" in p.cmdline()).kill()
    process.communicate(timeout=60)
    assert "resumed from" in train(config, warm, tmp_path, *OPTIONS).stderr
    assert rows(tmp_path) == rows(adapted)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (adapted / name).read_bytes(), name


def test_a_checkpoint_holds_no_base_weights(adapted):
    """It has the adapters, those of the reference policy, and two moments of Adam."""
    elements = sum(tensor.numel() for tensor in weights(adapted / "adapter", "adapter_model").values())
    stored = FileSystemReader(adapted / "checkpoints/step_00000004").read_metadata().state_dict_metadata
    tensors = {key: found.size.numel() for key, found in stored.items() if isinstance(found, TensorStorageMetadata)}
    assert all(".lora." in key for key in tensors)
    assert sum(tensors.values()) == 4 * elements


@pytest.fixture
def other_base(warm, tmp_path):
    """The base model with one weight changed in its last bit."""
    directory = tmp_path / "other"
    shutil.copytree(warm, directory)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    return directory


def test_another_base_is_refused(adapted, config, other_base, tmp_path):
    command = ["train", config, f"model.path={other_base}", f"run.dir={adapted}", *OPTIONS, "train.steps=5"]
    found = adapted / "checkpoints/latest"
    convert = [["convert", to, found, tmp_path / to, "--config", other_base] for to in ("to-hf", "to-peft")]
    for given, words in [
        (command, "other base weights in model.path"),
        *((c, "is not the base model of") for c in convert),
    ]:
        done = brorl(*given)
        assert done.returncode == 2, done.stderr
        (line,) = [x for x in done.stderr.splitlines() if x.startswith("brorl: ")]
        assert words in line
        assert "sha256" in line


def test_conversions_that_need_something_else_are_refused(adapted, finished, warm, tmp_path):
    own, without = adapted / "checkpoints/latest", finished[0] / "checkpoints/latest"
    for direction, source, options, words in [
        ("to-hf", own, [], "holds only adapters: give the directory of the base model (--config)"),
        ("to-megatron", own, ["--config", warm], "holds only adapters: convert to-hf"),
        ("to-peft", without, ["--config", warm], "has no adapters"),
    ]:
        done = brorl("convert", direction, source, tmp_path / "out", *options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr
        assert not (tmp_path / "out").exists()


def test_supervised_training_moves_only_adapters(config, init, tmp_path):
    """Weights outside of the targets keep their bits, and the others differ from the base by the adapters' product."""
    options = ["lora.rank=2", 'lora.targets=["q_proj", "down_proj"]', "sft.steps=3"]
    done = brorl("sft", "--processes", "2", config, f"model.path={init}", f"run.dir={tmp_path}", *options)
    assert done.returncode == 0, done.stderr
    base, merged = weights(init), weights(tmp_path / "model")
    adapter = weights(tmp_path / "adapter", "adapter_model")
    for name, before in base.items():
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(merged[name], before), name
            continue
        a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
        assert b.abs().max() > 1e-4
        expected = before.double() + 32 / 2 * b.double() @ a.double()
        assert torch.allclose(merged[name].double(), expected, rtol=0, atol=1e-6), name
