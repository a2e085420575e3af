"""Tests that the page runs only its own scripts and keeps to its size limit."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from made_run import HOSTILE, make_run

from megatron_brorl.report import page as pages
from megatron_brorl.report.page import page


@pytest.fixture(autouse=True)
def no_vega(monkeypatch):
    """Replace Vega, which takes two seconds to bundle. These tests draw nothing."""
    monkeypatch.setattr(pages, "_vega", lambda: 'const vega = "</script><!--";')


def parts(html: str) -> tuple[dict, list[str]]:
    """Return the content and the scripts, as an HTML parser delimits them."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    match = re.search(r'<script type="application/json" id="content">(.*?)</script>', html, re.S)
    return json.loads(match[1], parse_constant=lambda name: pytest.fail(name)), scripts


def test_model_text_cannot_become_markup(tmp_path):
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


def test_rollouts_fill_the_requested_size(tmp_path):
    folder = make_run(tmp_path / "run", prompts=300, samples=16)
    base_size = len(page([folder], megabytes=0.001).encode())
    small, large = (page([folder], megabytes) for megabytes in ((base_size + 20_000) / 1e6, 5))
    shown = [parts(html)[0]["rollouts"]["held"]["rollouts"] for html in (small, large)]
    assert base_size < len(small.encode()) <= base_size + 20_000 < len(large.encode())
    assert 0 < shown[0] < shown[1]
    assert shown[1] == parts(large)[0]["rollouts"]["recorded"]["rollouts"]
