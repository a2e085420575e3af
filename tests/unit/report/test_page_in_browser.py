"""Tests of the page in a browser: all charts are drawn, model text stays text, and the console has no error."""

from __future__ import annotations

import html
import re
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest
from made_run import HOSTILE, make_run

from megatron_brorl.report.page import page

PROGRAM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="no Chromium on this machine")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")


def opened(folder, runs):
    """Return the document after all scripts have run.

    The page draws a chart when a frame shows it near the screen: the window is high, and a screenshot needs a frame.
    """
    file = folder / "page.html"
    file.write_text(page(runs))
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--window-size=1440,15000"]
    command += ["--virtual-time-budget=20000", f"--screenshot={folder / 'page.png'}", "--dump-dom", f"file://{file}"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in process.stderr
    body = process.stdout.partition("<body>")[2].partition("<script")[0]
    assert body.count("<canvas") == body.count('class="plot')
    return body


def test_every_chart_is_drawn_and_model_text_stays_text(tmp_path):
    folder = make_run(tmp_path / "a")
    body = opened(tmp_path, [folder])
    assert body.count("<canvas") >= 15
    recorded = pq.read_table(folder / "rollouts" / "evaluation_000004.rollouts.00000.parquet").to_pylist()
    prompt = html.unescape(re.search(r'aria-selected="true".*?class="id">([^<]*)<', body)[1])
    shown = [r for r in recorded if r["prompt_id"] == prompt]
    expected = [text for r in shown for text in ([turn["text"] for turn in r["turns"] or ()] or [r["text"]])]
    assert HOSTILE in expected[0]
    cards = "".join(re.findall(r'class="card .*?</article>', body, re.S))
    texts = re.findall(r'<pre class="text[^>]*>([^<]*)</pre>', cards)
    assert [html.unescape(text) for text in texts] == [text.replace("\u202e", "\ufffd") for text in expected]
    assert "<img" not in body


def test_one_value_is_rounded_in_one_way(tmp_path):
    # 625 of 2,000 are 31.25%, a tie, which Python rounds to even. 1,371 are 68.55%, whose binary value is below 68.55.
    rights = [5] * 125 + [0] * 125, [8] * 171 + [3] + [0] * 78
    body = opened(tmp_path, [make_run(tmp_path / "a", prompts=250, samples=8, rights=rights)])
    assert "from 31.2% to 68.5%, +37.3 points (95% interval" in body
    assert [body.count(f">{start} (") for start in ("31.2%", "31.3%", "68.5%", "68.6%")] == [2, 0, 3, 0]


@pytest.mark.parametrize(
    ("options", "charts", "text"),
    [
        ([{"steps": 1, "evaluations": (0,), "ended": False}], 12, "the only evaluation, before the first step"),
        ([{"evaluations": (), "record_rollouts": False, "write_run_json": False}], 12, "No rollouts are recorded"),
        ([{"steps": 0, "evaluations": (), "record_rollouts": False, "ended": False}], 0, "No step is finished yet"),
        ([{}, {"rates": (0.1, 0.9), "rewards": (-3.0, -1.0)}], 2, ">mean reward<"),
        ([{"rates": (0.0, 0.0), "rewards": (-3.0, -1.0)}], 15, ">Held-out mean reward<"),
    ],
)
def test_missing_records_leave_no_empty_section(tmp_path, options, charts, text):
    body = opened(tmp_path, [make_run(tmp_path / f"run{i}", **changes) for i, changes in enumerate(options)])
    assert body.count("<canvas") >= charts
    assert not re.search(r"</h2></section>", body)
    assert text in body
    assert not re.search(r"\b(NaN|nan|undefined|null|Infinity)\b", re.sub(r"<[^>]*>", " ", body))
