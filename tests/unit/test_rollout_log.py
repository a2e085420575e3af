"""Test the files of recorded rollouts: merging ranks, resuming and damaged files."""

from __future__ import annotations

import pyarrow as pa
import pytest

from megatron_brorl import rollout_log
from megatron_brorl.errors import UserError
from megatron_brorl.rollout_log import GROUPS, ROLLOUTS, LogEntry, one_line, printable

STEP = LogEntry("step", 3)


def rows(*slots: tuple[int, int]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "group": group,
                "sibling": sibling,
                "text": "é\n\x1b",
                "parts": [("a", 1 / 3)],
                "token_ids": [sibling, 2**31 - 1],
                "log_probs": [-0.5, -1.0],
                "versions": [{"version": 7, "tokens": 2}],
            }
            for group, sibling in slots
        ],
        ROLLOUTS,
    )


def groups(*numbers: int) -> pa.Table:
    return pa.Table.from_pylist([{"group": n, "prompt_id": f"p/{n}", "right": n} for n in numbers], GROUPS)


def test_ranks_are_merged_bit_for_bit(tmp_path):
    rollout_log.write_rollouts(tmp_path, STEP, rank=1, rollouts=rows((0, 1), (2, 0)))
    rollout_log.write_rollouts(tmp_path, STEP, rank=0, rollouts=rows((2, 1), (0, 0)))
    rollout_log.write_groups(tmp_path, STEP, groups(2, 0))
    assert rollout_log.read_rollouts(tmp_path, STEP).to_pylist() == rows((0, 0), (0, 1), (2, 0), (2, 1)).to_pylist()
    assert rollout_log.read_groups(tmp_path, STEP).to_pylist() == groups(0, 2).to_pylist()
    assert rollout_log.entries(tmp_path) == [STEP]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    rollout_log.write_rollouts(tmp_path, STEP, rank=0, rollouts=rows((2, 1), (0, 0)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before  # and no other file is left


def test_a_step_without_recorded_rollouts_has_an_empty_table(tmp_path):
    rollout_log.write_groups(tmp_path, STEP, groups(1))
    assert rollout_log.read_rollouts(tmp_path, STEP).to_pylist() == []


def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path):
    """A run that resumes at step 4 drops the steps from 4 on and the evaluations after more than 4 steps."""
    folder = tmp_path / "rollouts"
    rollout_log.prepare_folder(folder, resume_step=None)
    for number in range(7):
        for kind in ("step", "evaluation"):
            rollout_log.write_groups(folder, LogEntry(kind, number), groups(0))
            rollout_log.write_rollouts(folder, LogEntry(kind, number), rank=5, rollouts=rows((0, 0)))
    (folder / ".step_000002.rollouts.00001.parquet.writing").write_bytes(b"half")  # left by a killed process
    rollout_log.prepare_folder(folder, resume_step=4)
    remaining = rollout_log.entries(folder)
    assert remaining == [*(LogEntry("step", n) for n in range(4)), *(LogEntry("evaluation", n) for n in range(5))]
    assert len(list(folder.iterdir())) == 2 * len(remaining)

    # A new run renames the folder and removes only the incomplete file of a killed process.
    (folder / ".step_000003.groups.parquet.writing").write_bytes(b"half")
    for aside in ("rollouts.1", "rollouts.2"):
        rollout_log.prepare_folder(folder, resume_step=None)
        assert list(folder.iterdir()) == []
        assert (tmp_path / aside).is_dir()
    assert rollout_log.entries(tmp_path / "rollouts.1") == remaining
    assert len(list((tmp_path / "rollouts.1").iterdir())) == 2 * len(remaining)


def test_unreadable_files_are_errors_of_one_line(tmp_path):
    def error(call) -> str:
        with pytest.raises(UserError) as e:
            call()
        assert "\n" not in str(e.value)
        return str(e.value)

    assert "holds no recorded rollouts; give the run.dir" in error(lambda: rollout_log.entries(tmp_path / "nowhere"))
    rollout_log.write_groups(tmp_path, STEP, groups(1))
    path = tmp_path / "step_000003.groups.parquet"
    intact = path.read_bytes()
    for damaged in (b"", b"text", intact[:-30], b"\0" * len(intact)):
        path.write_bytes(damaged)
        assert error(lambda: rollout_log.read_groups(tmp_path, STEP)).startswith(f"{path}: not a readable Parquet file")
    rollout_log.write_rollouts(tmp_path, STEP, rank=0, rollouts=groups(1))
    assert "step_000003.rollouts.00000.parquet: has other columns" in error(
        lambda: rollout_log.read_rollouts(tmp_path, STEP)
    )
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error(lambda: rollout_log.prepare_folder(tmp_path / "file" / "rollouts", 0))


def test_control_characters_of_a_response_are_replaced():
    hostile = "a\x1b[31mb\r\x07\u202ec\td\ne\x9b"
    assert printable(hostile) == "a\ufffd[31mb\ufffd\ufffd\ufffdc d\ne\ufffd"
    assert one_line(hostile) == "a\ufffd[31mb\ufffd\ufffd\ufffdc d e\ufffd"
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    short = one_line(text, max_chars=29)
    assert short == f"{text[:8]} ... {text[-16:]}"
    assert len(short) == 29
    assert one_line(text, max_chars=100) == one_line(text) == text
