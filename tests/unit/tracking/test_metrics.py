"""Test metrics.jsonl with crashes, resumed runs, NaN and full disks."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest
from full_disk import file_size_limit

from megatron_brorl.errors import UserError
from megatron_brorl.tracking.metrics import MetricsWriter, read_metrics
from megatron_brorl.tracking.trackers import open_trackers

SECONDS = {"step": 2.0, "generate": 1.5}


def _record(run: Path, steps: range, resume_step: int | None = None, offset: float = 0.0) -> None:
    with closing(MetricsWriter(run, resume_step=resume_step)) as metrics:
        for step in steps:
            metrics.write(step, {"reward": step / 10 + offset}, SECONDS)


def test_the_format_of_a_line(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.write(3, {"reward": 0.1, "kept": 7}, {"step": 2.5, "generate": 1.25})
        # The line is in the file before close() is called.
        expected = b'{"step": 3, "reward": 0.1, "kept": 7, "time": {"step": 2.5, "generate": 1.25}}\n'
        assert (tmp_path / "metrics.jsonl").read_bytes() == expected


def test_floats_come_back_bit_for_bit_and_others_are_null_and_listed(tmp_path: Path) -> None:
    values = {"third": 1 / 3, "tiny": 5e-324, "huge": math.nextafter(math.inf, 0), "minus_zero": -0.0, "whole": 2.0}
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.write(0, {"loss": math.nan, **values, "norm": math.inf}, {"step": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]
    assert {key: row[key].hex() for key in values} == {key: value.hex() for key, value in values.items()}
    assert list(row) == ["step", "loss", *values, "norm", "nonfinite", "time"]
    assert (row["loss"], row["norm"], row["nonfinite"]) == (None, None, ["loss", "norm"])


def test_a_resumed_run_drops_only_the_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _record(tmp_path, range(6))
    first_lines = path.read_bytes().splitlines(keepends=True)[:4]
    _record(tmp_path, range(4, 8), resume_step=4, offset=100.0)
    assert path.read_bytes().splitlines(keepends=True)[:4] == first_lines
    expected = [(step, step / 10 + (100.0 if step >= 4 else 0.0)) for step in range(8)]
    assert [(row["step"], row["reward"]) for row in read_metrics(path)] == expected
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", [b'{"step": 3, "rew', b"\x00\x00\x00\xff"])
def test_an_incomplete_last_line_is_skipped_and_removed_on_resume(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    _record(tmp_path, range(3))
    complete_lines = path.read_bytes()
    path.write_bytes(complete_lines + tail)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    _record(tmp_path, range(3, 4), resume_step=3)
    assert path.read_bytes().startswith(complete_lines)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_a_malformed_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: .*delete this line"):
        read_metrics(path)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        MetricsWriter(tmp_path, resume_step=2)
    assert path.read_text() == '{"step": 0}\n{"ste\n{"step": 2}\n'
    with pytest.raises(UserError, match="no such file"):
        read_metrics(tmp_path / "elsewhere.jsonl")


def test_a_new_run_renames_the_old_file(tmp_path: Path) -> None:
    for reward in (0.0, 1.0, 2.0):
        _record(tmp_path, range(1), offset=reward)
    rewards = {path.name: read_metrics(path)[0]["reward"] for path in tmp_path.iterdir()}
    assert rewards == {"metrics.1.jsonl": 0.0, "metrics.2.jsonl": 1.0, "metrics.jsonl": 2.0}


def test_a_full_disk_warns_once_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(tmp_path)) as metrics:
        metrics.write(0, {"reward": 0.0}, {})
        with file_size_limit(path.stat().st_size + 9):
            for step in (1, 2):
                metrics.write(step, {"reward": step / 10}, {})
                assert [row["step"] for row in read_metrics(path)] == [0]  # the incomplete line is skipped
        metrics.write(3, {"reward": 0.3}, {})
    assert [(row["step"], row["reward"]) for row in read_metrics(path)] == [(i, i / 10) for i in range(4)]
    assert path.read_bytes().count(b"\n") == 4
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {path}: File too large; training continues; ")


def test_tensorboard_purges_repeated_steps(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = open_trackers(["tensorboard"], tmp_path, resume_step=None, config={})
    with closing(MetricsWriter(tmp_path, trackers)) as metrics:
        for step in range(4):
            metrics.write(step, {"reward": float(step), "loss": math.nan}, {"generate": 1.5})
    trackers = open_trackers(["tensorboard"], tmp_path, resume_step=2, config={})
    with closing(MetricsWriter(tmp_path, trackers, resume_step=2)) as metrics:
        metrics.write(2, {"reward": 20.0}, {"generate": 2.5})
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/reward")] == [(1, 0.0), (2, 1.0), (3, 20.0)]
    assert [(e.step, e.value) for e in board.Scalars("time/generate")] == [(1, 1.5), (2, 1.5), (3, 2.5)]


class _Tracker:
    """A tracker that records its calls, or raises."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error
        self.calls: list[object] = []

    def log(self, step: int, metrics: object) -> None:
        if self.error:
            raise self.error
        self.calls.append((step, metrics))

    def close(self) -> None:
        self.calls.append("closed")


def test_a_broken_tracker_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, working = _Tracker("wandb", OSError(errno.ENOSPC, "No space left on device")), _Tracker("mlflow")
    with closing(MetricsWriter(tmp_path, [broken, working])) as metrics:
        metrics.write(0, {"reward": 0.0}, {"step": 2.0})
        metrics.write(1, {"reward": 0.5}, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    assert working.calls == [(1, {"reward/reward": 0.0, "time/step": 2.0}), (2, {"reward/reward": 0.5}), "closed"]
    assert broken.calls == []
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: run.log: wandb: [Errno 28] No space left on device")


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: .*make run\.dir a writable folder"):
        MetricsWriter(tmp_path / "file")
