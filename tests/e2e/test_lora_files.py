"""Files of runs with LoRA: run.dir/adapter as PEFT reads it, and conversions. test_checkpoints.py resumes runs."""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch
from e2e.runs import brorl, reward_letters, train
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

LORA = ["lora.rank=4", "lora.alpha=16", "optim.lr=1e-2"]
# The checkpoint after step 2 has a reference policy that was reset after step 1.
OPTIONS = [
    *LORA,
    *("train.steps=4", "train.checkpoint_every=2", "data.held_out=[]"),
    *("algo.kl_coef=0.01", "reference.reset_every=1", "rollout.n=8"),
]
TOKENS = torch.arange(48).view(4, 12) % 29 + 3  # arbitrary ids


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def hf_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapted(config, init, tmp_path_factory):
    """The folder of a run on two processes with adapters."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    train(config, init, directory, *reward_letters(config), *OPTIONS)
    return directory


def test_peft_loads_the_adapter(adapted, init):
    """PEFT's model equals the merged model in logits and greedy text, and it differs from the base model."""
    merged = hf_model(adapted / "model")
    adapter = PeftModel.from_pretrained(hf_model(init), adapted / "adapter")
    assert torch.allclose(logits(adapter), logits(merged), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(hf_model(init))).abs().max() > 1e-2
    texts = [model.generate(TOKENS[:, :4], do_sample=False, max_new_tokens=16).tolist() for model in (adapter, merged)]
    assert texts[0] == texts[1]


def test_a_checkpoint_becomes_an_adapter_and_a_merged_model(adapted, init, tmp_path):
    """The last checkpoint holds the trained adapters, the reference's adapters, and two moments of Adam."""
    last = adapted / "checkpoints/latest"
    assert brorl("convert", "to-peft", last, tmp_path / "adapter", "--config", init).returncode == 0
    result = brorl("convert", "to-hf", last, tmp_path / "model", "--config", init, "--verify")
    assert result.returncode == 0, result.stderr
    assert "logits equal those of" in result.stderr

    converted, expected = (tiny.weights(folder / "adapter") for folder in (tmp_path, adapted))
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in expected.items())
    merged, exported = tiny.weights(tmp_path / "model"), tiny.weights(adapted / "model")
    assert merged.keys() == exported.keys()
    assert all(torch.allclose(merged[name], tensor, rtol=0, atol=1e-6) for name, tensor in exported.items())
    stored = FileSystemReader(adapted / "checkpoints/step_00000004").read_metadata().state_dict_metadata
    sizes = {key: entry.size.numel() for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    assert all(".lora." in key for key in sizes)
    assert sum(sizes.values()) == 4 * sum(tensor.numel() for tensor in expected.values())


def test_conversions_that_do_not_fit_are_refused(adapted, config, init, tmp_path):
    """The folder `other` has the base model with another last bit of one weight."""
    other = tmp_path / "other"
    latest = adapted / "checkpoints/latest"
    out = tmp_path / "out"
    shutil.copytree(init, other)
    assert brorl("convert", "to-megatron", init, tmp_path / "no_adapters").returncode == 0
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-4] ^= 1
    (other / "model.safetensors").write_bytes(data)
    options = [f"model.path={other}", f"run.dir={adapted}", *reward_letters(config), *OPTIONS, "train.steps=5"]
    for command, message in [
        (["train", config, *options], "other base weights in model.path"),
        (["convert", "to-hf", latest, out, "--config", other], "is not the base model of"),
        (["convert", "to-peft", latest, out, "--config", other], "is not the base model of"),
        (["convert", "to-hf", latest, out], "holds only adapters: give the directory of the base model (--config)"),
        (["convert", "to-megatron", latest, out, "--config", init], "holds only adapters: convert to-hf"),
        (["convert", "to-peft", tmp_path / "no_adapters", out, "--config", init], "has no adapters"),
    ]:
        result = brorl(*command)
        assert result.returncode == 2, result.stderr
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("brorl: ")]
        assert message in line
        assert not out.exists()


def test_supervised_training_moves_only_adapters(config, init, tmp_path):
    """Weights outside of the targets keep their bits. Targets differ from the base by the product of the adapters."""
    options = ["lora.rank=2", 'lora.targets=["q_proj", "down_proj"]', "sft.steps=3"]
    result = brorl("sft", "--processes", "2", config, f"model.path={init}", f"run.dir={tmp_path}", *options)
    assert result.returncode == 0, result.stderr
    base, merged = tiny.weights(init), tiny.weights(tmp_path / "model")
    adapter = tiny.weights(tmp_path / "adapter")
    for name, before in base.items():
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(merged[name], before), name
            continue
        a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
        assert b.abs().max() > 1e-4
        expected = before.double() + 32 / 2 * b.double() @ a.double()  # lora.alpha / lora.rank
        assert torch.allclose(merged[name].double(), expected, rtol=0, atol=1e-6), name
