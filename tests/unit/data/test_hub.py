"""Test names on the Hugging Face hub with a prepared cache and without a network."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from megatron_brorl.data.hub import data_file, model_directory
from megatron_brorl.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one model and one file of a data set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for repository, file in (("models--Own--tiny", "config.json"), ("datasets--own--rows", "main/train.parquet")):
        path = tmp_path / repository / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        (tmp_path / repository / "refs").mkdir()
        (tmp_path / repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_cached_files_are_found(cache):
    assert model_directory("Own/tiny") == cache / "models--Own--tiny" / "snapshots" / COMMIT
    assert data_file("hf://datasets/own/rows/main/train.parquet").read_text() == "{}"


def test_paths_are_not_looked_up_on_the_hub(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("Own/tiny").mkdir(parents=True)
    assert model_directory("Own/tiny") == Path("Own/tiny")  # an existing folder comes before the hub
    for name in ("/no/where", "a", "a/b/c", "."):
        assert model_directory(name) == Path(name)
    assert data_file("rows.jsonl") == tmp_path / "rows.jsonl"


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (model_directory, "Own/other", r"Own/other \(model\.path\): .* hf download Own/other$"),
        (data_file, "hf://datasets/own/rows/test.parquet", r"hf download --repo-type dataset own/rows test\.parquet$"),
        (data_file, "hf://own/rows", r"hf://own/rows: .*hf://datasets/OWNER/NAME/FILE"),
    ],
)
def test_a_missing_file_is_answered_with_the_command_that_downloads_it(cache, find, name, message):
    with pytest.raises(UserError, match=message):
        find(name)
