"""Tests of Hugging Face directories: the choice of weight files, tensor names and shapes, and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_brorl.api.engine import Engine
from megatron_brorl.checkpoints import hugging_face, safetensors_files
from megatron_brorl.checkpoints.hugging_face import Checkpoint, open_checked
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import entries, hf_shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one architecture with different weights: one in a single file, one in shards."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_model(root / "one", "llama", tied=False, seed=1)
    tiny.make_model(root / "other", "llama", tied=False, seed=2).save_pretrained(root / "shards", max_shard_size="80KB")
    return root


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def reindex(directory: Path, files: dict[str, str]) -> None:
    """Change the index of a directory. files: names of files by tensor; "" removes the tensor from the index."""
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= files
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file}
    (directory / INDEX).write_text(json.dumps(index))


def index_next_to_one_file(one: Path, sharded: Path) -> Path:
    """Add a stale index with its shards."""
    for path in (*shards(sharded), sharded / INDEX):
        shutil.copy(path, one)
    return one


def a_tensor_that_the_index_lacks(one: Path, sharded: Path) -> Path:
    reindex(sharded, {"model.norm.weight": ""})
    return sharded


def a_tensor_in_another_shard(one: Path, sharded: Path) -> Path:
    """Let the index name the wrong shard for one tensor."""
    other = next(p.name for p in shards(sharded) if "model.norm.weight" not in load_file(p))
    reindex(sharded, {"model.norm.weight": other})
    return sharded


def copies(models: Path, tmp_path: Path) -> tuple[Path, Path]:
    return tuple(shutil.copytree(models / name, tmp_path / name) for name in ("one", "shards"))  # type: ignore[return-value]


@pytest.mark.parametrize("arrange", [index_next_to_one_file, a_tensor_that_the_index_lacks, a_tensor_in_another_shard])
def test_the_same_weights_are_loaded_as_by_transformers(models: Path, tmp_path: Path, arrange: Any) -> None:
    directory = arrange(*copies(models, tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    names = hf_shapes(read_shape(directory))
    checkpoint = Checkpoint(directory)
    checkpoint.check(names)
    assert set(names) == set(expected)
    for name in names:
        assert torch.equal(checkpoint.tensor(name), expected[name]), name


def a_tensor_in_two_shards(one: Path, sharded: Path) -> Path:
    first, second = shards(sharded)[:2]
    tensors = load_file(second)
    save(tensors | {"model.norm.weight": torch.ones(48)}, second)
    if "model.norm.weight" not in load_file(first):
        save(load_file(first) | {"model.norm.weight": torch.zeros(48)}, first)
    return sharded


def a_shard_is_gone(one: Path, sharded: Path) -> Path:
    shards(sharded)[1].unlink()
    return sharded


def pickled(one: Path, sharded: Path) -> Path:
    torch.save(load_file(one / WEIGHTS), one / "pytorch_model.bin")
    (one / WEIGHTS).unlink()
    return one


def an_index_entry_outside_the_folder(one: Path, sharded: Path) -> Path:
    reindex(sharded, {"model.norm.weight": "../one/model.safetensors"})
    return sharded


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (a_tensor_in_two_shards, r"model\.norm\.weight is stored in both model-0000"),
        (a_shard_is_gone, r"missing, but named in model\.safetensors\.index\.json"),
        (pickled, "save_pretrained"),
        (an_index_entry_outside_the_folder, r"model\.norm\.weight"),
    ],
)
def test_an_invalid_directory_is_reported(models: Path, tmp_path: Path, arrange: Any, message: str) -> None:
    directory = arrange(*copies(models, tmp_path))
    with pytest.raises(UserError, match=f"{directory}.*{message}"):
        Checkpoint(directory)


def test_quantized_weights_are_refused(models: Path, tmp_path: Path) -> None:
    one, _ = copies(models, tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(one / WEIGHTS)
    save(tensors | {name: tensors[name].to(torch.int8)}, one / WEIGHTS)
    with pytest.raises(UserError, match=rf"{name} is of type I8"):
        open_checked(one, read_shape(one))


def test_an_export_has_no_index_of_the_source(models: Path, tmp_path: Path) -> None:
    one, sharded = copies(models, tmp_path)
    (sharded / "pytorch_model.bin.index.json").write_text("{}")
    hugging_face.copy_companions(sharded, one)
    assert not list(one.glob("*.index.json"))


@pytest.mark.parametrize("is_file", [True, False])
def test_gguf_files_are_refused_with_advice(models: Path, tmp_path: Path, is_file: bool) -> None:
    """The file itself is given, or a folder with config and tokenizer next to it."""
    one = copies(models, tmp_path)[0]
    (one / WEIGHTS).unlink()
    (one / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    for use in (read_shape, load_tokenizer, Engine.from_pretrained):
        with pytest.raises(UserError, match=r"GGUF.*convert"):
            use(one / "model.gguf" if is_file else one)


def test_a_file_instead_of_a_directory_is_refused(models: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors: is a file; give the Hugging Face directory"):
        read_shape(models / "one" / WEIGHTS)
    for empty in ("", " "):
        with pytest.raises(UserError, match=r"model\.path is empty"):
            model_directory(empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_returns_whether_weights_changed(models: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    stored = load_file(models / "one" / WEIGHTS)

    def differs(changed: dict[str, torch.Tensor]) -> bool:
        tensors = {name: changed.get(name, tensor).to(dtype) for name, tensor in stored.items()}
        return hugging_face.save(tensors.items(), models / "one", tmp_path / "out", str(dtype).removeprefix("torch."))

    norm = stored["model.norm.weight"]
    assert not differs({})
    assert differs({"model.norm.weight": norm + 1})
    # A difference below the precision of the exported type does not count.
    assert differs({"model.norm.weight": norm + 2**-20}) == (dtype == torch.float32)


def test_a_large_model_is_written_in_shards(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "MAX_SHARD_BYTES", 50_000)
    tensors = load_file(models / "one" / WEIGHTS)
    out = tmp_path / "out"
    hugging_face.save(tensors.items(), models / "one", out, dtype="float32")
    written = [path.name for path in shards(out)]
    assert len(written) > 3
    assert written[0] == f"model-00001-of-{len(written):05d}.safetensors"
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"].values()) == set(written)
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_failed_save_leaves_the_old_directory(models: Path, tmp_path: Path) -> None:
    tensors = load_file(models / "one" / WEIGHTS)
    name = "model.norm.weight"

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensors[name]
        raise OSError("disk full")

    out = tmp_path / "out"
    hugging_face.save(tensors.items(), models / "one", out, dtype="float32")
    with pytest.raises(OSError, match="disk full"):
        hugging_face.save(broken(), models / "one", out, dtype="float32")
    assert torch.equal(load_file(out / WEIGHTS)[name], tensors[name])
    hugging_face.save(((n, 2 * tensor) for n, tensor in tensors.items()), models / "one", out, dtype="float32")
    assert torch.equal(load_file(out / WEIGHTS)[name], 2 * tensors[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    tiny.make_model(tmp_path, "llama", tied=False)
    shapes = hf_shapes(read_shape(tmp_path))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"1 tensors of config.json's model are missing, for example model.extra"):
        checkpoint.check({**shapes, "model.extra": (1,)})
    with pytest.raises(UserError, match=r"unknown tensor model\.norm\.weight"):
        checkpoint.check({n: s for n, s in shapes.items() if n != "model.norm.weight"})
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match="holds neither"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "dtype", "max_shard_size"), [("qwen2_moe", torch.float32, "5GB"), ("qwen3_moe", torch.bfloat16, "60KB")]
)
def test_both_forms_of_experts_are_read(tmp_path, family, dtype, max_shard_size):
    """transformers writes the experts of a layer in one tensor, or each expert in a tensor."""
    tiny.make_model(tmp_path / "first", family, tied=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False, max_shard_size=max_shard_size)
    expected = load_file(tmp_path / "each" / WEIGHTS)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in expected
    stacked = hugging_face.open_checked(tmp_path / "stacked", read_shape(tmp_path / "stacked"))
    assert stacked.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert all(torch.equal(stacked.tensor(name), tensor) for name, tensor in expected.items())
    tensors = ((name, stacked.tensor(name)) for name in expected)
    assert not hugging_face.save(tensors, stacked.directory, tmp_path / "out", str(dtype).removeprefix("torch."))
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == expected.keys()


STACKED = "model.layers.1.mlp.experts.down_proj"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {EXPERT: x[STACKED][2].clone()}, f"{EXPERT} is stored in both {WEIGHTS} and {WEIGHTS}"),
        (lambda x: {STACKED: x[STACKED][:7].clone()}, "1 tensors of config.json's model are missing, for example"),
        (lambda x: {STACKED: torch.cat((x[STACKED], x[STACKED]))}, "unknown tensor model.layers.1.mlp.experts.8."),
        (lambda x: {STACKED: x[STACKED].mT.contiguous()}, r"has shape \[32, 48\], config.json implies \[48, 32\]"),
        (lambda x: {STACKED: x[STACKED].flatten(0, 1)}, "8 tensors of config.json's model are missing"),
    ],
)
def test_stacked_experts_that_do_not_fit_are_refused(tmp_path, change, message):
    model = tiny.make_model(tmp_path / "first", "qwen3_moe", tied=False)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    path = tmp_path / "stacked" / WEIGHTS
    tensors = load_file(path)
    save(tensors | change(tensors), path)
    shape = read_shape(path.parent)
    with pytest.raises(UserError, match=message):
        list(map(hugging_face.open_checked(path.parent, shape).read, entries(shape, pp_size=1)))
