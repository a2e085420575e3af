"""Every key of the configuration acts: changed, it changes a figure, a file, what a library is told, or is refused.

A key without a row in table.py fails. What a key should do is tested where that is done; here, that it does anything.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from keys.case import Place, configured, differences, seen, set_at
from keys.table import CASES
from unit.data.test_tokenizers import CHAT, make_hf

from megatron_brorl.config.describe import keys
from megatron_brorl.errors import UserError

LOOKS = sorted({case.look for case in CASES.values()}, key=lambda look: look.__name__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models, and files of rows."""
    where = tmp_path_factory.mktemp("keys")
    for name, hidden in (("model", 48), ("wider", 56)):
        sizes = {"vocab_size": 304, "bos_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 2, "hidden_size": hidden}
        tiny.make_model(where / name, "qwen2", True, **sizes)
        make_hf(where / name, chat_template="{{ greeting }}" + CHAT)
    sums = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "id": f"{a}/{b}"} for a in range(3) for b in range(4)]
    columns = {"solution": "12", "kind": "math", "info": {"a": 1}, "worked": "6 + 6 = 12"}
    for name, rows in {
        "train": sums,
        "held_out": [{"prompt": "9 + 9 =", "answer": "18", "id": "9/9"}],
        "other": [{"prompt": f"{a} - 1 =", "answer": str(a - 1), "id": f"{a}-"} for a in range(2, 6)],
        "columns": [{"question": f"{a} + 6", "key": f"k{a}", **columns} for a in range(4)],
        "both": [{"question": f"{a} + 6", "key": f"k{a}", **columns, **sums[a]} for a in range(4)],
    }.items():
        (where / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    many = "".join(json.dumps({**sums[0], "id": str(i)}) + "\n" for i in range(120))
    (where / "bad.jsonl").write_text("{\n" + many)
    (where / "slow.py").write_text("import time\ndef score(answer, row):\n    time.sleep(0.3)\n    return 1.0\n")
    return where


@pytest.fixture
def place(processes, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return Place(processes, monkeypatch, folder)


_SEEN: dict[tuple, tuple] = {}  # of the side that many keys have in common


def looked(case, values, place):
    name = (case.look, repr(sorted(values.items())))
    if name not in _SEEN:
        _SEEN[name] = seen(case.look, values, place)
    return _SEEN[name]


def test_every_key_has_a_row():
    assert sorted(CASES) == sorted(key.path for key in keys())


@pytest.mark.parametrize("key", CASES)
def test_a_key_acts(key, place):
    case, at = CASES[key], set_at(key)
    both = {**case.beside, **({at: case.before} if case.before is not None else {})}
    if at != key:  # nothing else differs between the two lists
        assert any(x.startswith(key.removeprefix(at)) for x in differences(case.before, case.after)), key
    (before, refused), (after, refused_then) = looked(case, both, place), looked(case, {**both, at: case.after}, place)
    if case.refused:
        assert bool(refused) != bool(refused_then), (refused, refused_then)
        assert case.refused in refused + refused_then
        return
    assert (refused, refused_then) == ("", "")
    assert before != after


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_a_look_sees_the_same_twice(look, place):
    """Else a key could seem to act that does not."""
    key, case = next((k, c) for k, c in CASES.items() if c.look is look)
    values = {**case.beside, **({set_at(key): case.before} if case.before is not None else {})}
    assert looked(case, values, place) == seen(look, values, place)


def test_the_table_sees_a_dead_key(place):
    """algo.tau_pos does nothing without algo.policy_loss = "sapo"."""
    look = CASES["algo.tau_pos"].look
    assert seen(look, {}, place) == seen(look, {"algo.tau_pos": 2.0}, place)


def test_a_table_is_read_as_a_file_is():
    with pytest.raises(UserError, match=r"unknown key rollout\.m"):
        configured({"rollout.m": 1})
    assert Path(configured({"run.dir": "there"}).run.dir) == Path("there")
