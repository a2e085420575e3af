"""Recorded rollouts of several turns: columns, `brorl rollouts` and the HTML page."""

from __future__ import annotations

import base64
import json
import zlib

import pyarrow as pa
import torch
from unit.report.made_run import group, make_run

from megatron_brorl import rollout_log
from megatron_brorl.config.schema import Config, RewardConfig
from megatron_brorl.report import page as pages
from megatron_brorl.report.rollout_browser import print_prompt
from megatron_brorl.rollout_log import FOLDER, GROUPS, LogEntry
from megatron_brorl.train.recorder import Recorder
from megatron_brorl.types import Episode, Prompt, PromptGroup, Rollout, ScoredRollout, ScoreResult

STOP = 99
PIECES = {1: "<call>", 2: "add", 3: "</call>", 4: "7", 5: "<result>", 6: "</result>", 7: " = ", STOP: "</s>"}
# A call, its result, a turn that ends with the stop token, an observation, and the last turn.
TURNS = [("<call>add</call>", True), ("<result>7</result>", False), ("7", True), ("<result>", False), (" = 7", True)]
IDS = [1, 2, 3, 5, 4, 6, 4, STOP, 5, 7, 4, STOP]
SAMPLED = [True] * 3 + [False] * 3 + [True] * 2 + [False] + [True] * 3
CONFIG = Config(reward=RewardConfig(extract="full"))
ENTRY = LogEntry("evaluation", 4)


def scored(index: int, episode: Episode | None) -> ScoredRollout:
    rollout = Rollout(index, torch.tensor(IDS), torch.zeros(len(IDS)), "stop", ((0, len(IDS)),), episode)
    return ScoredRollout(0, rollout, float(index), bool(index), score=ScoreResult(float(index), "ok"))


def record(folder) -> list[dict]:
    """Record a rollout without an environment, and two with the same tokens and different masks."""
    one_turn = Episode(torch.tensor([True] * len(IDS)), 1)
    rollouts = [scored(0, None), scored(1, Episode(torch.tensor(SAMPLED), 3)), scored(2, one_turn)]
    groups = [PromptGroup(Prompt("p", "3 + 4", (8,), "7", "exact"), 0, 0)]
    recorder = Recorder(folder, CONFIG, lambda ids: "".join(PIECES[i] for i in ids), (STOP,), 0)
    table = recorder._table(rollouts, groups, torch.full((1, 3), float("nan")))
    rollout_log.write_rollouts(folder, ENTRY, 0, table)
    return rollout_log.read_rollouts(folder, ENTRY).to_pylist()


def test_turns_are_the_parts_of_the_mask(tmp_path):
    plain, turns, one = record(tmp_path)
    assert (plain["sampled"], plain["turns"]) == (None, None)
    assert turns["sampled"] == SAMPLED
    assert [(t["text"], t["sampled"]) for t in turns["turns"]] == TURNS
    whole = "<call>add</call><result>7</result>7</s><result> = 7"
    assert plain["text"] == turns["text"] == plain["answer"] == whole
    assert turns["answer"] == "= 7"  # of the last turn
    assert one["turns"] == [{"text": whole, "sampled": True}]
    assert [r["token_ids"] for r in (plain, turns, one)] == [IDS] * 3


def test_turns_are_shown_in_the_terminal(tmp_path, capsys):
    plain, turns, _ = record(tmp_path)
    print_prompt(ENTRY, group(0, [plain, turns], 2), [plain, turns])
    shown = capsys.readouterr().out.partition("--- right ")[2].splitlines()
    assert shown[0] == "(reward 1), sibling 1, 12 tokens, 3 turns, ended by itself"
    right = [f"[{'model' if sampled else 'environment'}]\n{text}" for text, sampled in TURNS]
    assert "\n".join(shown[1:]).partition("\n\n--- wrong ")[0] == "\n".join(right)
    assert shown[-1] == plain["text"]


def test_the_page_has_the_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "_vega", lambda: "")
    folder = make_run(tmp_path / "run", evaluations=(4,), steps=0)
    rollouts = record(folder / FOLDER)
    groups = pa.Table.from_pylist([group(0, rollouts, 3)], GROUPS)
    rollout_log.write_groups(folder / FOLDER, ENTRY, groups)
    html = pages.page([folder])
    content = json.loads(html.partition('id="content">')[2].partition("</script>")[0])["rollouts"]
    unit = json.loads(zlib.decompress(base64.b64decode(content["chunks"][content["where"]["0/0"]])))
    assert [r["turns"] for r in unit["rollouts"]] == [r["turns"] for r in rollouts]
    assert unit["rollouts"][1]["turns"][1] == {"text": "<result>7</result>", "sampled": False}
