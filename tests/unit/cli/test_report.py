"""Tests of the summary that `brorl report` prints."""

from __future__ import annotations

from contextlib import closing

import metric_faults
import pytest
from command_line import error_line, output

from megatron_brorl.cli.report import show
from megatron_brorl.files import write_json
from megatron_brorl.tracking.metrics import MetricsWriter


def test_the_summary_shows_missing_evaluations_and_findings(tmp_path, capsys):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"reward": 0.0}, {"step": 1.0})
    summary = {"steps": 1, "rollouts_per_prompt": 4, "held_out_prompts": 0, "job_seconds": 2.0, "peak_rss_mib": 3.0}
    summary |= dict.fromkeys(("before", "after", "pass_at_1_before", "pass_at_1_after"))
    summary |= {"findings": {"none right": "no response was right: take easier prompts"}}
    write_json(tmp_path / "summary.json", summary)
    lines = output(capsys, "report", tmp_path).splitlines()
    assert f"report   {tmp_path / 'report.html'} (" in lines[-2]
    assert "no response was right: take easier prompts" in (tmp_path / "report.html").read_text()
    assert lines[1:3] == ["pass@1 before  not measured", "pass@1 after   not measured"]
    assert lines[-1] == "warning: no response was right: take easier prompts"
    assert not [line for line in lines if "nan" in line or line.startswith("best")]

    best = {"best_checkpoint": {"step": 12, "metric": "pass_at_k", "value": 0.53125}}
    assert metric_faults.of_summary(summary | best) == []
    write_json(tmp_path / "summary.json", summary | best)
    lines = output(capsys, "report", tmp_path).splitlines()
    assert "best     after 12 steps, pass@k 0.5312: checkpoints/best" in lines

    for when, mean in (("before", 0.0625), ("after", 0.75)):
        interval = {"mean": mean, "low": 0.03125, "high": 0.8125}
        results = {"pass_at_1": interval, "mean_reward": interval, "pass_at_k": {"1": mean}}
        results |= {"by_task": {"gcd": interval, "with\ncarry": interval}}
        summary |= {when: results, f"pass_at_1_{when}": interval, f"mean_reward_{when}": interval}
    write_json(tmp_path / "summary.json", summary)
    show(tmp_path, page="page")
    assert "  with carry  6.2% (3.1 to 81.2) -> 75.0% (3.1 to 81.2)" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("nowhere", ("nowhere: ", "metrics.jsonl", "give the run.dir")),
        ("run run", ("give each run once",)),
        ("run --out run/metrics.jsonl", ("--out run/metrics.jsonl: ", ".html")),
        ("run --megabytes 0", ("--megabytes 0.0: must be above 0",)),
    ],
)
def test_user_errors_name_the_argument(tmp_path, monkeypatch, capsys, arguments, parts):
    monkeypatch.chdir(tmp_path)
    with closing(MetricsWriter(tmp_path / "run")):
        pass
    line = error_line(capsys, "report", *arguments.split())
    assert all(part in line for part in parts), line
