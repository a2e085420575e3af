"""Which files of a directory hold the weights: as transformers chooses them, and one line for what is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from e2e.runs import brorl
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.data.hub import model_directory
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.face.engine import Engine
from megatron_brorl.model_shape import read_shape
from megatron_brorl.models.hf_names import hf_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture twice, as one file and as shards of other values."""
    root = tmp_path_factory.mktemp("made")
    tiny.make_model(root / "one", "llama", False, seed=1)
    tiny.make_model(root / "other", "llama", False, seed=2).save_pretrained(root / "shards", max_shard_size="80KB")
    return root


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def reindex(directory: Path, **files: str) -> None:
    """Write other files for some tensors into the index; "" removes a tensor from it."""
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= {name.replace("__", "."): file for name, file in files.items()}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file}
    (directory / INDEX).write_text(json.dumps(index))


def index_next_to_one_file(one: Path, sharded: Path) -> Path:
    """A stale index whose shards are there."""
    for path in (*shards(sharded), sharded / INDEX):
        shutil.copy(path, one)
    return one


def index_without_shards(one: Path, sharded: Path) -> Path:
    shutil.copy(sharded / INDEX, one)
    return one


def broken_index(one: Path, sharded: Path) -> Path:
    (one / INDEX).write_text("{")
    return one


def shards_alone(one: Path, sharded: Path) -> Path:
    return sharded


def a_tensor_that_the_index_lacks(one: Path, sharded: Path) -> Path:
    reindex(sharded, model__norm__weight="")
    return sharded


def a_tensor_in_another_shard(one: Path, sharded: Path) -> Path:
    """The index is wrong about one tensor."""
    other = next(p.name for p in shards(sharded) if "model.norm.weight" not in load_file(p))
    reindex(sharded, model__norm__weight=other)
    return sharded


def shards_of_other_names(one: Path, sharded: Path) -> Path:
    for i, path in enumerate(shards(sharded)):
        path.rename(sharded / f"part{i}.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {n: f"part{names.index(f)}.safetensors" for n, f in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    return sharded


def a_file_that_no_index_names(one: Path, sharded: Path) -> Path:
    shutil.copy(one / WEIGHTS, sharded / "older.safetensors")
    return sharded


def one_file_and_pickled_ones(one: Path, sharded: Path) -> Path:
    torch.save(load_file(one / WEIGHTS), one / "pytorch_model.bin")
    return one


READ = [
    index_next_to_one_file,
    index_without_shards,
    broken_index,
    shards_alone,
    a_tensor_that_the_index_lacks,
    a_tensor_in_another_shard,
    shards_of_other_names,
    a_file_that_no_index_names,
    one_file_and_pickled_ones,
]


def copies(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    return tuple(shutil.copytree(made / name, tmp_path / name) for name in ("one", "shards"))  # type: ignore[return-value]


@pytest.mark.parametrize("arrange", READ)
def test_weights_are_those_that_transformers_loads(made: Path, tmp_path: Path, arrange: Any) -> None:
    directory = arrange(*copies(made, tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    names, checkpoint = hf_shapes(read_shape(directory)), Checkpoint(directory)
    checkpoint.check(names)
    assert set(names) == set(expected)
    for name in names:
        assert torch.equal(checkpoint.tensor(name), expected[name]), name


def twice(one: Path, sharded: Path) -> Path:
    first, second = shards(sharded)[:2]
    tensors = load_file(second)
    save(tensors | {"model.norm.weight": torch.ones(48)}, second)
    if "model.norm.weight" not in load_file(first):
        save(load_file(first) | {"model.norm.weight": torch.zeros(48)}, first)
    return sharded


def a_shard_is_gone(one: Path, sharded: Path) -> Path:
    shards(sharded)[1].unlink()
    return sharded


def all_shards_are_gone(one: Path, sharded: Path) -> Path:
    for path in shards(sharded):
        path.unlink()
    return sharded


def no_index(one: Path, sharded: Path) -> Path:
    (sharded / INDEX).unlink()
    return sharded


def another_name(one: Path, sharded: Path) -> Path:
    (one / WEIGHTS).rename(one / "consolidated.safetensors")
    return one


def pickled(one: Path, sharded: Path) -> Path:
    torch.save(load_file(one / WEIGHTS), one / "pytorch_model.bin")
    (one / WEIGHTS).unlink()
    return one


def pickled_shards(one: Path, sharded: Path) -> Path:
    (one / WEIGHTS).rename(one / "pytorch_model-00001-of-00002.bin")
    (one / "pytorch_model.bin.index.json").write_text("{}")
    return one


def nothing(one: Path, sharded: Path) -> Path:
    (one / WEIGHTS).unlink()
    return one


def an_index_of_another_folder(one: Path, sharded: Path) -> Path:
    reindex(sharded, model__norm__weight="../one/model.safetensors")
    return sharded


REFUSED = [
    (twice, "model.norm.weight is stored in both model-0000"),
    (a_shard_is_gone, "missing, but named in model.safetensors.index.json"),
    (all_shards_are_gone, "missing, but named in model.safetensors.index.json"),
    (no_index, "only model-00001-of-0"),
    (another_name, "only consolidated.safetensors"),
    (pickled, "save_pretrained"),
    (pickled_shards, "save_pretrained"),
    (nothing, "holds neither model.safetensors nor model.safetensors.index.json"),
    (an_index_of_another_folder, "model.norm.weight"),
]


@pytest.mark.parametrize(("arrange", "message"), REFUSED)
def test_other_directories_end_in_one_line(made: Path, tmp_path: Path, arrange: Any, message: str) -> None:
    directory = arrange(*copies(made, tmp_path))
    with pytest.raises(UserError) as e:
        Checkpoint(directory)
    assert str(directory) in str(e.value)
    assert message in str(e.value)


def test_an_export_takes_no_index_along(made: Path, tmp_path: Path) -> None:
    """Neither safetensors' nor that of pickled weights, which would name files that the export does not have."""
    from megatron_brorl.checkpoints.hugging_face import copy_companions

    one, sharded = copies(made, tmp_path)
    (sharded / "pytorch_model.bin.index.json").write_text("{}")
    copy_companions(sharded, one)
    assert not list(one.glob("*.index.json"))


def gguf_file(path: Path) -> Path:
    path.write_bytes(b"GGUF" + bytes(100))
    return path


def a_gguf_file(one: Path) -> Path:
    return gguf_file(one.parent / "model-q4.gguf")


def a_gguf_file_of_another_name(one: Path) -> Path:
    return gguf_file(one.parent / "sha256-0123")


def a_folder_of_gguf(one: Path) -> Path:
    (one.parent / "gguf").mkdir()
    return gguf_file(one.parent / "gguf" / "model-00001-of-00002.GGUF").parent


def gguf_next_to_config_and_tokenizer(one: Path) -> Path:
    (one / WEIGHTS).unlink()
    return gguf_file(one / "model.gguf").parent


GGUF = [a_gguf_file, a_gguf_file_of_another_name, a_folder_of_gguf, gguf_next_to_config_and_tokenizer]


@pytest.mark.parametrize("arrange", GGUF)
def test_gguf_is_answered_wherever_a_model_is_given(made: Path, tmp_path: Path, arrange: Any) -> None:
    given = arrange(copies(made, tmp_path)[0])
    for use in (read_shape, load_tokenizer, Engine.from_pretrained):
        with pytest.raises(UserError, match=r"GGUF.*convert"):
            use(given)


def test_gguf_next_to_weights_that_are_read_is_left_alone(made: Path, tmp_path: Path) -> None:
    one, _ = copies(made, tmp_path)
    gguf_file(one / "model.gguf")
    assert read_shape(one).vocab == tiny.VOCAB


@pytest.mark.slow
def test_gguf_and_an_empty_path_in_commands(tmp_path: Path) -> None:
    """One line that names the file or the key, and exit code 2."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config, out = tmp_path / "run.toml", tmp_path / "out"
    config.write_text(f'[data]\ntrain = ["{tmp_path}/rows.jsonl"]\nheld_out = ["{tmp_path}/rows.jsonl"]\n')
    file = gguf_file(tmp_path / "m.gguf")
    runs = [[command, config, f"run.dir={out}"] for command in ("train", "evaluate", "sft")]
    runs.append(["train", config, f"run.dir={out}", "--dry-run"])
    tokenizer = ["data", "prepare", "custom", tmp_path / "rows.jsonl", "--prompt", "prompt", "--answer", "answer"]
    commands = [
        *([*run, f"model.path={file}"] for run in runs),
        ["doctor", config, f"model.path={file}"],
        ["convert", "to-megatron", file, out],
        ["convert", "to-hf", file, out],
        ["convert", "to-hf", tmp_path, out, "--config", file],
        [*tokenizer, "--out", tmp_path / "o.jsonl", "--tokenizer", file, "--max-prompt-tokens", "9"],
    ]
    for command in commands:
        done = brorl(*command)
        assert (done.returncode, "GGUF" in done.stderr, str(file) in done.stderr) == (2, True, True), done.stderr
    for run in (*runs, ["doctor", config]):
        done = brorl(*run, "model.path=")
        assert (done.returncode, "model.path is empty" in done.stderr) == (2, True), done.stderr


def test_a_file_in_the_place_of_a_directory(made: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors: is a file; give the Hugging Face directory"):
        read_shape(made / "one" / WEIGHTS)
    for empty in ("", " "):
        with pytest.raises(UserError, match=r"model\.path is empty"):
            model_directory(empty)
