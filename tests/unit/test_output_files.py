"""Check that commands that would overwrite their inputs end with one line and change no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import error_line

from megatron_brorl.cli.main import main
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object, rename_aside, write_json

LOG = '{"prompt_id": "1", "answer": "2", "reward": 1}\n'


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Return the content of a folder: the bytes of files, the targets of links, and None for folders."""
    return {
        p.relative_to(root).as_posix(): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in sorted(root.rglob("*"))
    }


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Create a run X with a model, an evaluation and data, and links to the model and the run."""
    for name in ("X/model/config.json", "X/model/rows.jsonl", "X/metrics.jsonl", "X/evaluation.jsonl", "other.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LOG)
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "X/model/run.toml").write_text("")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/model").symlink_to(tmp_path / "X/model")
    (tmp_path / "other").symlink_to("X")
    (tmp_path / "hard").mkdir()
    os.link(tmp_path / "other.jsonl", tmp_path / "hard/metrics.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {  # name -> (command line, part of the error)
    "the model": ("train run.toml run.dir=X model.path=X/model", "writes X/model, which would replace model.path"),
    "the model of a warm start": ("sft run.toml run.dir=X model.path=X/model", "`brorl sft` writes X/model"),
    "a link to the model": ("train run.toml run.dir=X model.path=linked/model", "writes X/model"),
    "a link to the run": ("sft run.toml run.dir=other model.path=X/model", "writes other/model"),
    "data in the model": ('train run.toml run.dir=X data.train=["X/model/rows.jsonl"]', "would replace data.train"),
    "data under another name": ('sft run.toml run.dir=hard data.train=["other.jsonl"]', "writes hard/metrics.jsonl"),
    "the configuration": ("train X/model/run.toml run.dir=X", "would replace the configuration = 'X/model/run.toml'"),
    "a benchmark": ("evaluate run.toml run.dir=X --benchmark X/evaluation.jsonl", "would replace evaluate.benchmarks"),
}


@pytest.mark.parametrize(("line", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_command_refuses_to_replace_its_inputs(root, capsys, line, message):
    before = tree(root)
    assert message in error_line(capsys, *line.split())
    assert tree(root) == before


@pytest.mark.parametrize(
    "line",
    [
        "evaluate run.toml run.dir=X model.path=X/model",  # it writes no model
        "train run.toml run.dir=X model.path=X/init",
        'train run.toml run.dir=X data.train=["X/train.jsonl"]',
    ],
)
def test_other_files_may_lie_in_run_dir(root, capsys, line):
    """Check that the commands do not report a replaced file; they fail only because their model does not exist."""
    (root / "X/model/config.json").unlink()
    with pytest.raises(SystemExit):
        main(line.split())
    assert "replace" not in capsys.readouterr().err


def test_a_conversion_refuses_to_replace_its_inputs(root, capsys):
    (root / "X/model/hf").mkdir()
    (root / "config").mkdir()
    for line, message in {
        "to-megatron X/model linked/model": "linked/model: would replace the source, X/model",
        "to-hf X/model config --config config": "config: would replace --config, config",
        "to-hf X/model X/model/hf": "X/model/hf: is part of the source, X/model",
    }.items():
        before = tree(root)
        assert message in error_line(capsys, "convert", *line.split(), "--overwrite")
        assert tree(root) == before


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path):
    write_json(tmp_path / "folder" / "x.json", {"a": [1.5, float("nan")], "b": (float("inf"),)})
    assert read_object(tmp_path / "folder" / "x.json") == {"a": [1.5, None], "b": [None]}
    with pytest.raises(UserError, match=r"x\.json/y\.json: cannot be written"):
        write_json(tmp_path / "folder" / "x.json" / "y.json", {})


@pytest.mark.parametrize(("text", "message"), [("[1]", "must hold a JSON object"), ("{", "not valid JSON")])
def test_other_json_is_a_user_error(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=rf"x\.json: {message}.*; copy it again"):
        read_object(tmp_path / "x.json")


def test_files_and_folders_are_renamed_to_the_first_free_number(tmp_path):
    for name in ("metrics.jsonl", "metrics.1.jsonl", "checkpoints"):
        (tmp_path / name).write_text("")
    assert rename_aside(tmp_path / "metrics.jsonl") == tmp_path / "metrics.2.jsonl"
    assert rename_aside(tmp_path / "checkpoints") == tmp_path / "checkpoints.1"


@pytest.mark.parametrize("target", ["folder", "other.jsonl/file", "name" * 100])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(root, target):
    (root / "folder").mkdir()
    before = tree(root)
    with pytest.raises(UserError, match="cannot be written"):
        write_json(root / target, {"a": 1})
    assert tree(root) == before


@pytest.mark.parametrize("line", ["run.dir={name}", "run.dir=X model.path={name}", "--processes 0", "--processes -1"])
def test_wrong_names_and_numbers_of_processes_end_with_one_line(root, capsys, line):
    before = tree(root)
    error_line(capsys, "train", "run.toml", *line.format(name="x" * 300).split())
    assert tree(root) == before
