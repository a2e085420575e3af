"""Tests of checkpoint conversion: bit-exact weights for many shapes, and errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
from command_line import error_line, output
from conversions import (
    QWEN,
    SMALLER,
    assert_same_weights,
    flip_a_bit,
    names,
    peak_of_allocations,
    save_checkpoint,
    to_hf,
    to_megatron,
)
from full_disk import file_size_limit
from random_model import write_random_model
from safetensors.torch import load_file, save_file

from megatron_brorl.checkpoints import convert, hugging_face, safetensors_files
from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import LoraConfig, OptimConfig, ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import grid
from megatron_brorl.train.worker import StageOptions, Worker

TOOL = Path(__file__).parents[3] / "tools" / "convert_checkpoint.py"


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run tools/convert_checkpoint.py."""
    return forks.script(TOOL, *arguments)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SHAPES = {
    # (family, tied, overrides), tensor, pipeline
    "qkv bias, tied, padded vocabulary, two stages": (("qwen2", True, {}), 2, 2),
    "untied, vocabulary padded by three": (("qwen2", False, {"vocab_size": 101, "num_key_value_heads": 4}), 4, 1),
    "q and k norm, head size unlike hidden / heads": (("qwen3", False, {}), 2, 4),
    "llama 3 rope": (("llama", False, {"rope_parameters": LLAMA3}), 2, 1),
    "one kv head": (("llama", True, {"num_key_value_heads": 1}), 1, 2),
    **{family: ((family, True, {}), 2, 2) for family in tiny.FAMILIES},
    **{family: ((family, False, {}), 2, 2) for family in tiny.MIXTURES},
}
CASES = [
    pytest.param(*case, marks=() if i < 3 else pytest.mark.slow, id=n) for i, (n, case) in enumerate(SHAPES.items())
]


@pytest.mark.parametrize(("model", "tensor", "pipeline"), CASES)
def test_conversion_is_bit_exact_both_ways_and_logits_equal_transformers(tmp_path, model, tensor, pipeline):
    family, tied, overrides = model
    tiny.make_model(tmp_path / "hf", family, tied, **overrides)
    (tmp_path / ".a.writing" / "old").mkdir(parents=True)  # left by a killed conversion
    size = to_megatron(tmp_path / "hf", tmp_path / "a", tensor=tensor, pipeline=pipeline)
    to_megatron(tmp_path / "a", tmp_path / "b", tensor=1, pipeline=1)
    for name in ("a", "b"):
        assert to_hf(tmp_path / name, tmp_path / f"back-{name}") == size
        assert_same_weights(tmp_path / "hf", tmp_path / f"back-{name}")
        for file in ("config.json", "generation_config.json"):
            assert (tmp_path / f"back-{name}" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert names(tmp_path) == ["a", "b", "back-a", "back-b", "hf"]
    assert len(list((tmp_path / "a").glob("*.distcp"))) == tensor * pipeline
    assert size == sum(t.numel() * 4 for t in tiny.weights(tmp_path / "hf").values())
    gap = convert.verify(tmp_path / "hf", tmp_path / "a", read_shape(tmp_path / "hf"))
    assert gap < 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A sharded Hugging Face directory and the same model as a Megatron checkpoint."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_model(root / "one", "qwen2", tied=False).save_pretrained(root / "hf", max_shard_size="80KB")
    to_megatron(root / "hf", root / "megatron", tensor=2, pipeline=2)
    return root


@pytest.fixture
def copy(models, tmp_path):
    """A folder with copies of both models, which a test may damage."""
    for name in ("hf", "megatron"):
        shutil.copytree(models / name, tmp_path / name)
    return tmp_path


def test_the_command_verifies_and_shows_progress(models, tmp_path):
    process = tool("to-megatron", models / "hf", tmp_path / "m", "--tensor", "2", "--pipeline", "2", "--verify")
    assert process.returncode == 0, process.stderr
    assert re.search(r"^convert (\d+)/\1 ", process.stderr, re.M)
    assert f"{tmp_path / 'm'}: logits equal those of {models / 'hf'} within" in process.stderr
    process = tool("to-hf", tmp_path / "m", tmp_path / "back", "--verify")
    assert process.returncode == 0, process.stderr
    assert "within" in process.stderr
    assert_same_weights(models / "hf", tmp_path / "back")
    process = tool("to-hf", tmp_path / "m", tmp_path / "back")
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert re.search(rf"^brorl: {tmp_path / 'back'}: exists.*--overwrite", process.stderr)
    assert tool("to-hf", tmp_path / "m", tmp_path / "back", "--overwrite").returncode == 0


def test_a_failed_verification_names_the_target(models, tmp_path, monkeypatch, capsys):
    """The message does not name the temporary folder of the conversion."""
    logits = iter([torch.zeros(1), torch.ones(1)])
    monkeypatch.setattr(convert, "logits", lambda *_: next(logits))
    text = output(capsys, "convert", "to-megatron", models / "hf", tmp_path / "out", "--verify", code=2)
    assert f"brorl: {tmp_path / 'out'}: its logits differ from those of {models / 'hf'} by 1.00e+00" in text


def load_worker(directory: Path, processes: Any, **options: Any) -> Worker:
    ops = backend("fused", torch.device("cpu"))
    stage = StageOptions(tokens_per_micro_batch=100, ops=ops, **options)
    worker = Worker(read_shape(directory), processes, stage, OptimConfig())
    worker.load_hf(directory)
    return worker


LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [("qwen2", torch.float32, 1e-6), ("gemma3", torch.float32, 1e-6), ("qwen3", torch.bfloat16, 2**-8)],
)
def test_adapters_of_a_checkpoint_are_merged(tmp_path, family, dtype, tolerance):
    """Weights are merged within one rounding in the dtype of the run. convert.verify accepts them, but not the base."""
    base = tmp_path / "hf"
    tiny.make_model(base, family, tied=True)
    worker = load_worker(base, grid.build(ParallelConfig()), dtype=dtype, lora=LORA)  # convert.verify destroys it
    for name, parameter in worker.actor.named_parameters():
        if name.endswith(".b"):
            parameter.data.normal_(0, 0.1)
    inputs = {"base_weights": hugging_face.weights_sha256(base)}
    run = {"fingerprint": {"lora": dataclasses.asdict(LORA), "inputs": inputs}}
    saved = save_checkpoint(tmp_path, 1, ModelState(name="", module=worker.actor, optimizer=worker.optimizer), run=run)
    adapters = {name: tensor.double() for name, tensor in worker.adapter_tensors()}
    to_hf(saved, tmp_path / "back", config=base)

    merged, before = tiny.weights(tmp_path / "back"), tiny.weights(base)
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        expected = weight.to(dtype).double()
        if name.split(".")[-2] in LORA.targets and name.endswith("weight"):
            a, b = (adapters[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
            expected += 2 * b @ a  # 2 = alpha / rank
        assert merged[name].dtype == dtype
        assert ((merged[name].double() - expected).abs() <= tolerance * expected.abs() + 1e-7).all(), name

    source, shape, _ = convert.open_megatron(saved, base)
    convert.verify(saved, tmp_path / "back", shape, merged=source)
    with pytest.raises(UserError, match="its logits differ from those of"):
        convert.verify(saved, base, shape, merged=source)


def test_the_hash_of_a_sharded_model(models):
    shards = sorted((models / "hf").glob("*.safetensors"))
    expected = hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    assert hugging_face.weights_sha256(models / "hf") == expected


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def wrong_width(path: Path) -> None:
    edit(path, intermediate_size=96)


def mixed_types(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {n: t.bfloat16() if "k_proj.weight" in n else t for n, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


@pytest.mark.parametrize(
    ("file", "damage", "has_manifest", "message"),
    [
        ("hf/config.json", wrong_width, True, "gate_proj.weight has shape [88, 48], config.json implies [96, 48]"),
        ("hf", mixed_types, True, "differ in type (BF16, F32)"),
        ("megatron/__3_0.distcp", Path.unlink, True, "__3_0.distcp is missing"),
        ("megatron/__1_0.distcp", flip_a_bit, True, "__1_0.distcp is damaged"),
        ("megatron/__2_0.distcp", cut_file, False, "a file is missing or damaged"),
        ("megatron/.metadata", cut_file, False, ".metadata: not readable"),
        ("megatron/.metadata", Path.unlink, False, "not a Megatron distributed checkpoint"),
        ("megatron/hf/config.json", wrong_width, False, "mlp.linear_fc1.weight has shape"),
        ("megatron/hf", shutil.rmtree, False, "--config"),
    ],
)
def test_a_damaged_source_is_named_and_no_files_are_left(copy, file, damage, has_manifest, message):
    if not has_manifest:
        (copy / "megatron/manifest.json").unlink()
    damage(copy / file)
    source = copy / file.partition("/")[0]
    with pytest.raises(UserError, match=f"{source}.*{re.escape(message)}"):
        to_megatron(source, copy / "out", tensor=2, pipeline=1) if source.name == "hf" else to_hf(source, copy / "out")
    assert names(copy) == ["hf", "megatron"]


def test_a_full_disk_is_reported_in_one_line(copy):
    file = f"^{copy / 'out'}: cannot be written: File too large; free some space"
    with file_size_limit(100_000), pytest.raises(UserError, match=file):
        to_megatron(copy / "hf", copy / "out", tensor=1, pipeline=1)
    assert names(copy) == ["hf", "megatron"]


def test_a_training_checkpoint_becomes_a_hugging_face_directory(processes, tmp_path, capsys):
    """The checkpoint has an optimizer; config.json and the tokenizer come from the initial model."""
    tiny.make_model(tmp_path / "hf", "qwen3", tied=True)
    edit(tmp_path / "hf/config.json", dtype="bfloat16")  # published in bf16, trained in fp32
    worker = load_worker(tmp_path / "hf", processes)
    saved = save_checkpoint(tmp_path / "checkpoints", 1, ModelState("", worker.actor, worker.optimizer))
    to_hf(saved, tmp_path / "back", config=tmp_path / "hf")
    assert_same_weights(tmp_path / "hf", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"

    # A pointer can be given instead of the folder.
    (tmp_path / "checkpoints/best").write_text("step_00000001\npass_at_1 0.5\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/latest").write_text("nothing of ours\n")
    convert_to_hf = ("convert", "to-hf", "--config", tmp_path / "hf")
    for pointer in ("best", "latest"):
        output(capsys, *convert_to_hf, tmp_path / "checkpoints" / pointer, tmp_path / pointer)
        assert_same_weights(tmp_path / "hf", tmp_path / pointer)
    line = error_line(capsys, *convert_to_hf, tmp_path / "elsewhere/latest", tmp_path / "out")
    assert "elsewhere/latest: does not name a checkpoint" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tensor", "tied"), [(1, True), (2, False)])
def test_memory_is_bounded_by_the_largest_tensor_and_one_file(tmp_path, monkeypatch, tensor, tied):
    """Bytes allocated: at most three times the largest entry, and one output file of safetensors in addition."""
    config = QWEN | SMALLER
    config |= {"num_hidden_layers": 24, "hidden_size": 192, "vocab_size": 2001, "tie_word_embeddings": tied}
    write_random_model(config, tmp_path / "hf", seed=0, dtype=torch.bfloat16)
    largest = 2001 * 192 * 2  # bytes of the embedding
    total = sum(t.numel() * 2 for t in tiny.weights(tmp_path / "hf").values())
    assert total > 10 * largest
    source = tmp_path / "hf/model.safetensors"
    monkeypatch.setattr(safetensors_files, "MAX_SHARD_BYTES", largest)
    to_peak = peak_of_allocations(lambda: to_megatron(tmp_path / "hf", tmp_path / "megatron", tensor, 2), mapped=source)
    back_peak = peak_of_allocations(lambda: to_hf(tmp_path / "megatron", tmp_path / "back"), mapped=source)
    assert 0 < to_peak <= 3 * largest
    assert 0 < back_peak <= 3 * largest + safetensors_files.MAX_SHARD_BYTES
    assert_same_weights(tmp_path / "hf", tmp_path / "back")
