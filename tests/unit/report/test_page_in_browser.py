"""The page in a real browser: every chart is drawn, text of a model is text, and nothing is fetched or reported."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest
from chromium import PROGRAM, Chromium
from made_run import HOSTILE, make_run

from megatron_brorl.report.page import page

pytestmark = pytest.mark.skipif(not PROGRAM, reason="no Chromium on this machine")
DRAWN = "[...document.querySelectorAll('.plot')].every((box) => box.querySelector('canvas'))"
DRAW_ALL = "drawers.forEach((draw, box) => { near.unobserve(box); draw(); })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def opened(browser, file, folders, width=1440):
    file.write_text(page(folders))
    browser.errors.clear()
    browser.requests.clear()
    browser.open(f"file://{file}", width)
    browser.value(DRAW_ALL)
    browser.wait(DRAWN)
    return browser


@pytest.mark.parametrize("width", [390, 1440])
def test_every_chart_is_drawn_and_text_of_a_model_is_text(browser, tmp_path, width):
    folder = make_run(tmp_path / "a")
    b = opened(browser, tmp_path / "page.html", [folder], width)
    b.wait("document.querySelectorAll('.card').length > 0")
    assert b.value("document.querySelectorAll('.plot').length") >= 17
    assert b.value("document.documentElement.scrollWidth") <= width
    assert {url for url in b.requests if not url.startswith(("data:", "blob:", "about:"))} == {
        f"file://{tmp_path}/page.html"
    }
    recorded = pq.read_table(folder / "rollouts" / "evaluation_000004.rollouts.00000.parquet").to_pylist()
    prompt = b.value("document.querySelector('#prompts-list [aria-selected] .id').textContent")
    own = [r["text"] for r in recorded if r["prompt_id"] == prompt]
    assert HOSTILE in own[0]
    texts = b.value("[...document.querySelectorAll('.card pre')].map((pre) => pre.textContent)")
    assert texts == [text.replace("\u202e", "\ufffd") for text in own]
    assert b.value("[window.broken, document.images.length, document.scripts.length]") == [None, 0, 3]
    assert b.errors == []


@pytest.mark.parametrize(
    ("options", "charts", "said"),
    [
        ([{"steps": 1, "evaluations": (0,), "ended": False}], 12, "the one evaluation, before the first step"),
        ([{"evaluations": (), "recorded": False, "record": False}], 12, "No rollouts are recorded"),
        ([{"steps": 0, "evaluations": (), "recorded": False, "ended": False}], 0, "No step is done yet"),
        ([{}, {"rates": (0.1, 0.9)}], 2, "None that is recorded."),
    ],
)
def test_missing_records_leave_no_empty_section(browser, tmp_path, options, charts, said):
    folders = [make_run(tmp_path / f"run{i}", **own) for i, own in enumerate(options)]
    b = opened(browser, tmp_path / "page.html", folders)
    assert b.value("document.querySelectorAll('.plot').length") >= charts
    assert not b.value("[...document.querySelectorAll('section')].some((s) => s.children.length < 2)")
    text = b.value("document.body.innerText")
    assert said in text
    assert not re.search(r"\b(NaN|nan|undefined|null|Infinity)\b", text)
    assert b.errors == []


def test_a_newly_solved_prompt_opens_its_rollouts(browser, tmp_path):
    b = opened(browser, tmp_path / "page.html", [make_run(tmp_path / "a", prompts=400, rates=(0.2, 0.8))])
    link = "document.querySelector('.moved .link')"
    b.value(f"{link}.click()")
    b.wait(f"document.querySelector('.pane h3')?.textContent === {link}.textContent")
    assert b.errors == []
