"""Tests of checkpoint folders, pointers and rotation, and of unrelated files next to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conversions import names, save_checkpoint

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.errors import UserError


@pytest.fixture
def save(actor_state, tmp_path):
    """A function that saves a step; by default the newest two are kept."""
    return lambda step, keep=2: save_checkpoint(tmp_path, step, actor_state, keep)


def files(root: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by path, and b"" instead of the large ones of Megatron."""
    return {
        p.relative_to(root).as_posix(): b"" if p.suffix in (".distcp", ".pt") else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def test_copies_stray_files_and_links_are_neither_loaded_nor_deleted(save, tmp_path, tmp_path_factory):
    first = save(2)
    copies = ["step_00000009.bak", "step_9", "step_000000009"]
    for name in copies:
        shutil.copytree(first, tmp_path / name)
    linked = tmp_path_factory.mktemp("linked")
    (tmp_path / "step_00000001").symlink_to(linked)
    for name in ("step_notes.txt", "step_00000000", ".step_00000004.writing", ".step_mine.writing"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".step_00000007.writing" / "x").mkdir(parents=True)
    before = [files(tmp_path / name) for name in copies]
    for step in (3, 4, 5):
        assert save(step) == checkpoint.find(tmp_path) == tmp_path / f"step_{step:08d}"
    strays = [*copies, ".step_mine.writing", "step_00000000", "step_00000001", "step_notes.txt"]
    assert names(tmp_path) == sorted([*strays, "latest", "step_00000004", "step_00000005"])
    assert [files(tmp_path / name) for name in copies] == before
    assert linked.is_dir()


def test_repair_completes_a_killed_save(save, tmp_path):
    """The new folder is complete, and the old one exists. The save was killed before or after it wrote `latest`."""
    save(1)
    for step, latest in ((2, None), (3, 2), (4, 4)):
        save(step)
        (tmp_path / "latest").unlink()  # None: killed in the first save of the run
        if latest is not None:
            (tmp_path / "latest").write_text(f"step_{latest:08d}\n")
        for name in (".latest.writing", ".best.writing", ".mine.writing"):
            (tmp_path / name).write_text("step_0")
        folders.repair(tmp_path, step, keep=1)
        assert names(tmp_path) == [".mine.writing", "latest", f"step_{step:08d}"]
        assert (tmp_path / "latest").read_text() == f"step_{step:08d}\n"


def test_a_pointer_to_no_checkpoint_protects_none_from_rotation(save, tmp_path):
    save(1, keep=1)
    (tmp_path / "best").write_text("step_0000001\n")  # seven digits instead of eight
    save(2, keep=1)
    assert names(tmp_path) == ["best", "latest", "step_00000002"]


def test_a_missing_newest_checkpoint_is_an_error(save, tmp_path):
    """A run must not silently continue from an older checkpoint than the one that `latest` names."""
    save(1)
    save(2).rename(tmp_path / "step_best")
    with pytest.raises(UserError, match=r"step_00000002: is missing; delete .*latest to continue from an older"):
        checkpoint.find(tmp_path)
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == tmp_path / "step_00000001"


def test_a_checkpoint_with_a_broken_run_json_is_damaged(save, tmp_path):
    file = save(1) / "run.json"
    file.write_text("{")
    with pytest.raises(UserError, match=r"step_00000001: run\.json is damaged"):
        checkpoint.find(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"step_00000001: run\.json is missing"):
        checkpoint.find(tmp_path)
