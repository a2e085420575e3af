"""Tests of engine processes: environment, versions, folders and shared memory."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from megatron_brorl.rollout.registry import ENGINES, graph_sizes
from megatron_brorl.rollout.remote import process
from megatron_brorl.rollout.remote.process import kill_group
from megatron_brorl.rollout.remote.protocol import EngineOptions

CREATE_SHARED_MEMORY = """
import os, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.ensure_running()
if not os.fork():
    memory = SharedMemory(create=True, size=64)
    print(memory.name, flush=True)
    if sys.argv[1] == "dead":
        os.kill(os.getpid(), 9)
input()
"""


@pytest.mark.parametrize("creator", ["alive", "dead"])
def test_shared_memory_of_a_killed_group_is_unlinked(creator):
    """This includes memory of a child that was killed before, so that no process maps it any more."""
    own_memory = SharedMemory(create=True, size=64)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", CREATE_SHARED_MEMORY, creator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as child:
            child_memory = Path("/dev/shm", child.stdout.readline().strip())
            assert child_memory.exists()
            processes = psutil.Process(child.pid).children(recursive=True)
            kill_group(child.pid)
        assert psutil.wait_procs(processes, timeout=20)[1] == []
        assert not child_memory.exists()
        assert Path("/dev/shm", own_memory.name).exists()
    finally:
        own_memory.close()
        own_memory.unlink()


def test_environment_has_no_variables_of_the_trainer(monkeypatch, tmp_path):
    dropped = {"SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "LOCAL_RANK", "MASTER_ADDR"}
    dropped |= {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
    for name in (*dropped, "KEPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    env = process.environment(tmp_path, [2, 3], {"ITS_OWN": "2"})
    assert not dropped & env.keys()
    assert (env["KEPT"], env["ITS_OWN"]) == ("1", "2")
    assert ENGINES["trtllm"].environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"  # Ray listens only on 127.0.0.1
    assert env["PYTHONPATH"] == f"{tmp_path}/code:/other"
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert process.environment(tmp_path, [2, 3], {})["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("engine", "old", "new"),
    [
        ("vllm", ["0.31.9", "0.4.1", "0.32.0rc1"], ["0.32", "0.32.0", "0.32.0+cpu", "0.33.1.dev5+g12ab", "1.0", "dev"]),
        ("trtllm", ["1.2.1", "1.3.0rc28", "1.3.0rc9"], ["1.3.0rc29", "1.3.0rc29.post1", "1.3.0", "1.4.0rc1"]),
    ],
)
def test_old_versions_are_refused(engine, old, new):
    kind = ENGINES[engine]
    for version in old:
        assert kind.too_old(version) == f"{kind.name} {version} is too old: install {kind.min_version} or newer"
    assert [kind.too_old(version) for version in new] == [""] * len(new)


def test_graph_sizes_pad_by_at_most_a_quarter():
    for rows in (1, 2, 3, 4, 5, 8, 31, 250, 257, 1024):
        sizes = graph_sizes(rows)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == rows
        for batch in range(33, rows + 1):
            assert min(s for s in sizes if s >= batch) <= 1.25 * batch
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_folders_of_dead_trainers_are_removed(tmp_path):
    dead_folder = tmp_path / f"{process.PREFIX}{2**22 + 1}-x"  # larger than any pid
    dead_folder.mkdir()
    (dead_folder / "weights_1").touch()
    folder = process.make_folder(str(tmp_path))
    second = process.make_folder(str(tmp_path))
    assert not dead_folder.exists()
    assert folder.is_dir()
    assert second != folder
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "code" / "megatron_brorl" / "types.py").samefile(Path(process.__file__).parents[2] / "types.py")


def test_the_reason_of_an_end_is_not_from_the_log_of_an_earlier_process(tmp_path):
    log = tmp_path / "rank_0.log"
    log.write_text("error of another day\n")
    options = EngineOptions("vllm", "", vocab=50, context=40, dtype="float32", max_rows=8, stop_ids=(2,), section={})
    engine = process.EngineProcess("true", tmp_path, options, [], log)
    try:
        engine._process.wait()
        assert engine.ended().endswith(f"{log}: empty")
    finally:
        engine.kill()
