"""The page in a real browser: what a model wrote is text, keys work, nothing is complained of, nothing is too wide."""

from __future__ import annotations

import re
import threading

import pyarrow.parquet as pq
import pytest
from chromium import PROGRAM, Chromium
from made_run import HOSTILE, make_run

from megatron_brorl.metrics import MetricsWriter
from megatron_brorl.report.content import content
from megatron_brorl.report.page import page
from megatron_brorl.report.server import open_server

pytestmark = pytest.mark.skipif(not PROGRAM, reason="no Chromium on this machine")

ALL_DRAWN = "drawn.forEach((draws, box) => { if (!views.has(box)) draws(); })"
SELECTED = "document.querySelector('#prompts-list [aria-selected] .id')?.textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "a")
    file = folder / "report.html"
    file.write_text(page([folder]))
    return folder, f"file://{file}"


@pytest.fixture
def opened(browser, run):
    def opened(width: int = 1440, scheme: str = "light", hash_: str = "") -> Chromium:
        browser.errors.clear()
        browser.open(run[1] + hash_, width, 900, scheme)
        browser.wait("document.querySelectorAll('.card').length > 0")
        return browser

    return opened


def test_what_a_model_wrote_is_text(opened, run):
    """Also where the markup comes in pieces of tokens."""
    b = opened()
    recorded = pq.read_table(run[0] / "rollouts" / "evaluation_000004.rollouts.00000.parquet").to_pylist()
    prompt = b.value(SELECTED)
    own = [r for r in recorded if r["prompt_id"] == prompt]
    texts = b.value("[...document.querySelectorAll('.card pre')].map((pre) => pre.textContent)")
    assert HOSTILE in own[0]["text"]
    assert texts == [r["text"].replace("\u202e", "\ufffd") + "\u25a0" for r in own]
    assert b.value("[window.broken, document.images.length, document.scripts.length]") == [None, 0, 3]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_every_chart_is_drawn(opened, run, width, scheme):
    opened(width, scheme).requests.clear()
    b = opened(width, scheme)
    b.value(ALL_DRAWN)
    b.wait("[...drawn.keys()].every((box) => box.querySelector('canvas'))")
    assert b.value("views.size") >= 18
    assert {url for url in b.requests if not url.startswith(("data:", "blob:", "about:"))} == {run[1]}  # itself alone
    assert b.value("document.documentElement.scrollWidth") <= width
    assert b.value(r"document.body.innerText.match(/\b(NaN|nan|undefined|null|Infinity)\b/)") is None
    assert b.errors == []


@pytest.mark.parametrize(
    ("options", "charts", "said"),
    [
        ([{"rates": (0.0, 0.0)}], 19, "No change beyond chance"),
        ([{"steps": 1, "evaluations": (0,), "ended": False}], 12, "One held-out evaluation so far"),
        ([{"evaluations": (), "recorded": False, "record": False}], 12, "No rollouts are recorded"),
        ([{"steps": 0, "evaluations": (), "recorded": False, "ended": False}], 0, "No step is done yet"),
        ([{}, {"rates": (0.8, 0.2)}], 2, "None: their configurations are the same."),
    ],
)
def test_whatever_is_missing_there_is_no_empty_panel(browser, tmp_path, options, charts, said):
    folders = [make_run(tmp_path / f"run{i}", **own) for i, own in enumerate(options)]
    file = tmp_path / "page.html"
    file.write_text(page(folders))
    browser.errors.clear()
    browser.open(f"file://{file}")
    browser.value(ALL_DRAWN)
    browser.wait("[...drawn.keys()].every((box) => box.querySelector('canvas'))")
    assert browser.value("document.querySelectorAll('.plot').length") >= charts
    assert not browser.value("[...document.querySelectorAll('section')].some((s) => s.children.length < 2)")
    text = browser.value("document.body.innerText")
    assert said in text
    assert not re.search(r"\b(NaN|nan|undefined|null|Infinity)\b", text)
    assert browser.errors == []


def test_what_two_runs_spent_is_on_their_page(browser, tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", rates=(0.1, 0.9))]
    file = tmp_path / "page.html"
    file.write_text(page(folders))
    browser.open(f"file://{file}")
    label = "[aria-label='Time to a target']"
    rows = f'[...document.querySelectorAll("{label} tr")].map((r) => [...r.children].map((c) => c.textContent))'
    found, _, _ = content(folders)
    wanted = [["end of", "pass@1", "a", "b"]]
    for name, to in zip("ab", found["time_to"], strict=True):
        held = ["never" if r is None else f"{r['seconds']:.0f} s, {r['rollouts']:,.0f} rollouts" for r in to["runs"]]
        wanted.append([name, f"{to['target']:.1%}", *held])
    assert browser.value(rows) == wanted
    assert "never" in wanted[2]
    # 24 groups of 32 in 4 steps of 2 s of sampling.
    alone = "[aria-label='Generation alone'] tbody tr"
    cells = f'[...document.querySelector("{alone}").children].map((c) => c.textContent)'
    assert browser.value(cells)[:3] == ["a", "32", "96"]
    # Tasks of both runs can be drawn over one another.
    select = "document.getElementById('compared')"
    browser.value(f"(s => {{ s.value = 'pass@1 of gcd'; s.dispatchEvent(new Event('change')); }})({select})")
    browser.value(ALL_DRAWN)
    browser.wait("document.querySelector('#comparison .charts').innerText.includes('pass@1 of gcd over steps')")
    assert browser.errors == []


def test_keys(opened):
    b = opened()
    names = b.value("[...document.querySelectorAll('#prompts-list .id')].map((e) => e.textContent)")
    begin = names.index(b.value(SELECTED))
    for key, place in (("j", begin + 1), ("j", begin + 2), ("k", begin + 1)):
        b.key(key)
        b.wait(f"{SELECTED} === {names[place]!r}")
    b.key("/")
    assert b.value("document.activeElement.id") == "search"
    b.key("1")  # typed, and no command
    b.wait(f"document.querySelectorAll('#prompts-list li').length === {sum('1' in name for name in names)}")
    b.key("Escape")
    b.key("l")
    b.wait("document.activeElement === document.querySelectorAll('.card')[0]")


def test_colours_and_theme(opened):
    b = opened(scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert b.value(paper) == "rgb(20, 23, 26)"
    b.value("document.getElementById('theme').click()")
    assert b.value(paper) == "rgb(255, 255, 255)"
    b = opened(hash_="#dark")
    assert b.value(paper) == "rgb(20, 23, 26)"

    # A training step has advantages: those above their group are told from those below.
    b.value("openPrompt('step', 3, document.querySelector('#prompts-list .id').textContent)")
    b.wait("document.querySelector('.facts')?.textContent.includes('advantage')")
    b.value(
        "(s => { s.value = 'advantage'; s.dispatchEvent(new Event('change')); })(document.getElementById('colours'))"
    )
    signs = b.value(
        "[...document.querySelectorAll('.card')].map((c) => [c.classList[1], c.querySelector('pre').dataset.sign])"
    )
    assert {tuple(s) for s in signs} == {("right", "plus"), ("wrong", "minus")}


def test_a_running_run_grows_on_the_page(browser, tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    server = open_server([folder], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        browser.errors.clear()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        assert "4 of 4 steps done" in browser.value("document.querySelector('.tiles').textContent")
        with MetricsWriter(folder, resume_step=4) as writer:
            writer.write(4, {"reward": 0.75}, {"step": 1.0})
        browser.wait("document.querySelector('.tiles').textContent.includes('5 of 4 steps done')")
        assert browser.errors == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
