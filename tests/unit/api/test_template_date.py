"""Check that a run, its resumption and evaluations in its folder use one date in the chat template."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
import tiny
from e2e.runs import brorl
from unit.api.test_train_api import even, without_time
from unit.data.test_tokenizers import make_hf

from megatron_brorl import StopTraining, UserError, train
from megatron_brorl.cli import run_folder
from megatron_brorl.data import tokenizers
from megatron_brorl.data.source import TEMPLATE_DATE

TEMPLATE = (
    "{{ strftime_now('%d %b %Y') }}{% if not enable_thinking %} /no_think{% endif %} "
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
FIRST, NEXT = datetime.date(2026, 1, 31), datetime.date(2026, 2, 1)
TOML = """
model.path = "{0}/model"
rollout = {{ n = 8, prompts = 2, max_tokens = 4 }}
reward = {{ workers = 1, cut_off_factor = 1.0 }}
train = {{ steps = 2, tokens_per_micro_batch = 256 }}
evaluate.samples = 2
run.log = []
[data]
train = ["{0}/rows.jsonl"]
held_out = ["{0}/rows.jsonl"]
chat = true
chat_template_kwargs = {{ enable_thinking = false }}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dated")
    tiny.make_model(folder / "model", "qwen2", tied=True, vocab_size=304, bos_token_id=0, eos_token_id=1)
    make_hf(folder / "model", chat_template=TEMPLATE)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(TOML.format(folder))
    return folder / "run.toml"


@pytest.fixture
def today(monkeypatch):
    """Return a function that sets the date of this process."""

    def set_date(day):
        clock = SimpleNamespace(date=SimpleNamespace(today=lambda: day))
        monkeypatch.setattr(tokenizers, "datetime", clock)

    return set_date


class Stopping:
    def on_step(self, step, metrics):
        raise StopTraining


def test_a_resumed_run_and_its_evaluation_use_the_date_of_the_first_start(config, tmp_path, today):
    uninterrupted, stopped = [f"run.dir={tmp_path / 'uninterrupted'}"], [f"run.dir={tmp_path / 'stopped'}"]
    today(FIRST)
    expected = train(config, overrides=uninterrupted, reward=even)
    assert not train(config, overrides=stopped, reward=even, callbacks=[Stopping()]).finished
    today(NEXT)
    resumed = train(config, overrides=stopped, reward=even)
    assert without_time(resumed.metrics) == without_time(expected.metrics)
    for step in (0, 1):
        prompts = resumed.groups(step)["prompt"].to_pylist()
        assert all(prompt.startswith("31 Jan 2026 /no_think ") for prompt in prompts if prompt)
    assert (tmp_path / "stopped" / TEMPLATE_DATE).read_text() == "2026-01-31\n"

    # An evaluation in the same folder uses the date of the run, and one elsewhere uses today's date.
    verifier = "data.verifier=exact"
    for name, date in (("stopped", FIRST), ("elsewhere", datetime.date.today())):
        process = brorl("evaluate", config, f"run.dir={tmp_path / name}", verifier)
        assert process.returncode == 0, process.stderr
        result = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert result["template_date"] in (str(date), str(datetime.date.today()))  # midnight may pass
        assert result["template_date"] == str(date) or name == "elsewhere"
        assert result["chat_template_kwargs"] == {"enable_thinking": False}
    compared = brorl("compare", tmp_path / "stopped", tmp_path / "elsewhere")
    assert compared.returncode == 0, compared.stderr
    assert "warning: the chat templates wrote other dates: 2026-01-31 and " in compared.stderr

    # Without the file the run cannot be resumed.
    (tmp_path / "stopped" / TEMPLATE_DATE).unlink()
    with pytest.raises(UserError, match=r"the date 2026-01-31 .*now 2026-02-01: write 2026-01-31 into run\.dir/"):
        train(config, overrides=[*stopped, "train.steps=3"], reward=even)


def test_a_damaged_date_file_is_an_error(tmp_path):
    assert run_folder.template_date(tmp_path) is None
    (tmp_path / TEMPLATE_DATE).write_text("2026-01-31\n")
    assert run_folder.template_date(tmp_path) == FIRST
    for wrong in (b"", b"yesterday", b"31.1.2026", b"\xff"):
        (tmp_path / TEMPLATE_DATE).write_bytes(wrong)
        with pytest.raises(UserError, match=rf"^{tmp_path}/template_date: must hold a date"):
            run_folder.template_date(tmp_path)


def test_ranks_that_start_on_different_days_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.collectives, "all_gather", lambda text: [text, str(NEXT)])
    with pytest.raises(UserError, match="ranks started on different days, 2026-01-31 and 2026-02-01"):
        run_folder.keep_template_date(tmp_path, FIRST, is_main_rank=True)
    assert not list(tmp_path.iterdir())
    run_folder.keep_template_date(tmp_path, date=None, is_main_rank=True)
    run_folder.keep_template_date(tmp_path, NEXT, is_main_rank=False)
    assert not list(tmp_path.iterdir())
    run_folder.keep_template_date(tmp_path, NEXT, is_main_rank=True)
    assert run_folder.template_date(tmp_path) == NEXT
