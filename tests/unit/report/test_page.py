"""The page as a file: nothing in it may run but what it was made with; and as a server that follows a run."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import threading

import pytest
from made_run import HOSTILE, make_run

from megatron_brorl.errors import UserError
from megatron_brorl.metrics import MetricsWriter
from megatron_brorl.report import page as pages
from megatron_brorl.report.page import page
from megatron_brorl.report.server import open_server


@pytest.fixture
def no_vega(monkeypatch):
    """Vega takes two seconds to make, and these tests draw nothing."""
    monkeypatch.setattr(pages, "_vega", lambda: 'const vega = "</script><!--";')


def parts(html: str) -> tuple[dict, list[str]]:
    """Content, and the scripts that would run, as an HTML parser finds their ends."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', html, re.S)
    return json.loads(found[1]), scripts


def test_what_a_model_wrote_is_data(tmp_path, no_vega):
    folder = make_run(tmp_path / HOSTILE.replace("/", ""))
    html = page([folder])
    content, scripts = parts(html)
    assert content["runs"][0]["name"] == folder.name
    assert "<img" not in html
    assert html.count("<!--") == 0
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#39;", "'")
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';")
    assert "connect-src 'none'" in policy
    assert not re.search(r'(?:src|href)="(?!#)', html)  # nothing is fetched


def test_a_page_has_its_size(tmp_path, no_vega):
    """Without rollouts it is as large as it is; with them at most as large as it may be."""
    folder = make_run(tmp_path / "run", prompts=300, samples=16)
    least = len(page([folder], 0.001).encode())
    small, whole = (page([folder], megabytes) for megabytes in ((least + 20_000) / 1e6, 5))
    held = [parts(html)[0]["rollouts"]["held"]["rollouts"] for html in (small, whole)]
    assert least < len(small.encode()) <= least + 20_000 < len(whole.encode())
    assert 0 < held[0] < held[1] == parts(whole)[0]["rollouts"]["recorded"]["rollouts"]


def test_no_number_is_nan(tmp_path, no_vega):
    html = page([make_run(tmp_path / "run")])
    found = re.search(r'id="content">(.*?)</script>', html, re.S)[1]
    json.loads(found, parse_constant=lambda name: pytest.fail(name))


@pytest.fixture
def served(tmp_path, no_vega):
    folder = make_run(tmp_path / "run", ended=False)
    server = open_server([folder], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def get(port: int, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_a_running_run_is_followed(served):
    folder, port = served
    status, html, _ = get(port, "/")
    assert status == 200
    assert "connect-src &#39;self&#39;" in html
    status, text, headers = get(port, "/content")
    assert (status, json.loads(text)["runs"][0]["steps"]) == (200, 4)
    assert get(port, "/content", **{"If-None-Match": headers["ETag"]})[0] == 304
    with MetricsWriter(folder, resume_step=4) as writer:
        writer.write(4, {"reward": 0.75}, {"step": 1.0})
    status, text, _ = get(port, "/content", **{"If-None-Match": headers["ETag"]})
    assert (status, json.loads(text)["runs"][0]["curves"]["values"]["reward"][-1]) == (200, 0.75)


def test_others_learn_nothing(served):
    folder, port = served
    assert get(port, "/content", Host="evil.example")[0] == 403
    assert get(port, "/../run.json")[0] == 404
    (folder / "metrics.jsonl").write_text("damaged\nlines\n")
    status, text, _ = get(port, "/content")
    assert (status, "metrics.jsonl:1: not a JSON object" in text) == (503, True)


def test_a_port_in_use_is_one_line(served):
    folder, port = served
    with pytest.raises(UserError, match=rf"^--port {port}: is in use; give another, or 0 for any that is free$"):
        open_server([folder], port)
