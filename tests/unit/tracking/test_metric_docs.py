"""Test the documentation of metrics and `brorl metrics`. Tests of runs compare their metrics with it."""

from __future__ import annotations

import re

from command_line import error_line, output

from megatron_brorl.tracking.metric_docs import find, sections
from megatron_brorl.tracking.trackers import tag

EXAMPLES = {"k": "8", "h": "8", "phase": "train", "when": "after", "end": "low", "side": "low", "name": "x"}


def names(text):
    return [line.split(" ")[0] for line in text.splitlines() if line and not line.startswith(" ") and "   (" in line]


def test_every_metric_is_found_by_its_name():
    for section in sections():
        for metric in section.metrics:
            name = re.sub(r"\{(\w+)\}", lambda m: EXAMPLES[m[1]], metric.name)
            assert not re.search(r"[|\n]", "".join(vars(metric).values()))  # these would break a table of Markdown
            assert find(name, section.file) == (section, metric)
            if section.group:
                assert tag(name, section.file).split("/")[0] == section.group


def test_metrics_are_printed_by_name_group_and_part_of_a_name(capsys):
    assert output(capsys, "metrics", "response_tokens").splitlines()[1:3] == [
        "Rollouts: Sampled and lost rollouts.",
        "response_tokens   (tokens)",
    ]
    assert names(output(capsys, "metrics", "pass_at_16")) == ["pass_at_{k}"]
    assert names(output(capsys, "metrics", "time.ranks/train_idle", "evaluate"))[-1] == "ranks/{phase}_idle"
    assert names(output(capsys, "metrics", "staleness")) == ["staleness_mean", "staleness_max"]
    everything = output(capsys, "metrics")
    assert names(everything) == [metric.name for section in sections() for metric in section.metrics]
    assert "`" not in everything


def test_an_unknown_metric_is_answered_with_the_closest_name(capsys):
    assert "'kept_shares'; did you mean kept_share?" in error_line(capsys, "metrics", "kept_shares")
