"""User errors end with exit code 2 and one line that names the cause and the place."""

from __future__ import annotations

import fcntl

from e2e.runs import brorl, start


def test_the_launcher_reports_an_unknown_key_once(config):
    run = start("train", "--processes", "2", config, "rollout.nn=3")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert output.startswith("brorl: ")
    assert "unknown key rollout.nn" in output
    assert output.count("\n") == 1


def test_a_loss_that_fails_on_the_last_stage_is_reported_by_its_rank(config, init, tmp_path):
    """The other stage does not call the loss. The trial call before the run has six tokens."""
    file = tmp_path / "mine.py"
    file.write_text("def loss(log_probs, **_):\n    return -log_probs if len(log_probs) == 6 else log_probs[1:]\n")
    options = ("--processes", 2, "parallel.pipeline=2", "algo.dynamic_sampling=false", f"algo.policy_loss={file}:loss")
    done = brorl("train", config, f"model.path={init}", f"run.dir={tmp_path / 'run'}", *options)
    assert done.returncode in (1, 2)
    (line,) = [line for line in done.stderr.splitlines() if "mine.py" in line]
    assert line.startswith(f"brorl: algo.policy_loss = {file}:loss: returned torch.float32 [")
    assert "Traceback" not in done.stderr


def test_a_second_run_in_the_same_directory(config, init, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = f"run.dir={tmp_path / 'run'}"
        done = brorl("train", "--processes", "2", config, f"model.path={init}", run)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "another run is writing there" in done.stderr
