"""`brorl metrics`: what it prints of the glossary."""

from __future__ import annotations

import pytest

from megatron_brorl.cli.main import main
from megatron_brorl.glossary.tables import SECTIONS


def said(capsys, *words, code=0):
    with pytest.raises(SystemExit) as ended:
        main(["metrics", *words])
    assert ended.value.code == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def names(text):
    return [line.split(" ")[0] for line in text.splitlines() if line and not line.startswith(" ") and "   (" in line]


def test_by_name_group_and_part_of_a_name(capsys):
    assert said(capsys, "response_tokens").splitlines()[1:5] == [
        "Rollouts: What was sampled, and what did not come through.",
        "response_tokens   (tokens, [0, rollout.max_tokens])",
        "    mean length of a response, the token that ended it included",
        "    bad: at the limit: responses are cut off; falling to a few: the model gives up reasoning",
    ]
    assert names(said(capsys, "pass_at_16")) == ["pass_at_{k}"]
    assert names(said(capsys, "time.ranks/train_idle", "kv_cache")) == [
        "ranks/{phase}_idle",
        "kv_cache/peak",
        "kv_cache/mean",
        "kv_cache/rows",
        "kv_cache/prompt_hits",
    ]
    assert names(said(capsys, "staleness")) == ["staleness_mean", "staleness_max"]
    everything = said(capsys)
    assert names(everything) == [figure.name for section in SECTIONS for figure in section.figures]
    assert "`" not in everything
    assert "](" not in everything


def test_a_figure_that_is_not_there(capsys):
    assert said(capsys, "kept_shares", code=2) == (
        "brorl: no figure is called 'kept_shares'; did you mean kept_share?\n"
    )
