"""Tests of the content of a report against values counted in the files of the run."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from made_run import TASKS, make_run

from megatron_brorl.algo.pass_at_k import pass_at_k
from megatron_brorl.config.schema import Config, EvaluateConfig
from megatron_brorl.report.content import (
    RecordedEvaluation,
    RecordedRun,
    change_of_run,
    checkpoints,
    content,
    curves,
    evaluations,
    first_reached,
    generation,
    meanings,
    read_run,
    times_to_target,
)
from megatron_brorl.report.findings import findings
from megatron_brorl.report.page import embed, select_siblings
from megatron_brorl.train.evaluate import PromptResult, summarize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a", prompts=40)


@pytest.fixture(scope="module")
def run(folder):
    return content([folder])[0]["runs"][0]


def groups(folder: Path, moment: str) -> list[dict]:
    return pq.read_table(folder / "rollouts" / f"{moment}.groups.parquet").to_pylist()


def test_curves_are_the_lines_of_metrics(folder, run):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curves = run["curves"]
    assert curves["every"] == 1
    assert curves["step"] == [row["step"] + 1 for row in rows]
    names = {name for row in rows for name in row} - {"step", "nonfinite", "time"}
    assert set(curves["values"]) == names | {f"time/{name}" for name in rows[0]["time"]}
    for name in names:
        recorded = [row.get(name) for row in rows]
        assert curves["values"][name] == [None if v is None else pytest.approx(v) for v in recorded]
    assert curves["values"]["grad_norm"][1] is None  # It was NaN.
    for name in rows[0]["time"]:
        assert curves["values"][f"time/{name}"] == pytest.approx([row["time"][name] for row in rows])
    assert curves["elapsed"] == pytest.approx([5, 11, 18, 26])


def test_metrics_are_explained(run):
    explained = meanings(list(run["curves"]["values"]))
    assert explained["kept_share"]["unit"]
    assert explained["time/generate"]["meaning"]
    assert set(run["curves"]["values"]) == set(explained)  # every metric is documented


def test_long_curves_are_means():
    rows = [{"step": i, "reward": float(i), "x": None, "time": {"step": 2.0}} for i in range(1001)]
    means = curves(rows, 400)
    assert means["every"] == 3
    assert means["step"] == [*range(3, 1001, 3), 1001]
    assert means["values"]["reward"] == [*(3.0 * i + 1 for i in range(333)), 999.5]
    assert means["elapsed"][-1] == 2002
    assert set(means["values"]) == {"reward", "time/step"}  # x has no values.


def test_pass_at_k_and_solved_and_lost_prompts(folder, run):
    before, after = (groups(folder, f"evaluation_00000{n}") for n in (0, 4))
    change = run["change"]
    assert (change["from"], change["to"], change["prompts"], change["samples"]) == (0, 4, 40, 4)
    assert [entry["k"] for entry in change["passes"]] == [1, 2, 4]
    for entry in change["passes"]:
        means = [sum(pass_at_k(4, g["right"], entry["k"]) for g in side) / 40 for side in (before, after)]
        assert [entry["before"], entry["after"]] == pytest.approx(means)
        assert entry["difference"]["mean"] == pytest.approx(means[1] - means[0])
        assert entry["difference"]["low"] < entry["difference"]["mean"] < entry["difference"]["high"]
    pairs = list(zip(before, after, strict=True))
    solved = {b["prompt_id"]: b["right"] for a, b in pairs if not a["right"] and b["right"]}
    lost = {a["prompt_id"]: a["right"] for a, b in pairs if a["right"] and not b["right"]}
    assert solved
    assert {entry["id"]: entry["right"] for entry in change["solved"]} == solved
    assert {entry["id"]: entry["right"] for entry in change["lost"]} == lost
    assert [entry["right"] for entry in change["solved"]] == sorted(solved.values(), reverse=True)


def test_pass_at_1_of_each_task_is_compared(folder, run):
    sides = [groups(folder, f"evaluation_00000{n}") for n in (0, 4)]
    tasks = run["change"]["tasks"]
    assert [(entry["task"], entry["prompts"]) for entry in tasks] == [(name, 20) for name in TASKS]
    for entry in tasks:
        before, after = (sum(g["right"] for g in side if g["task"] == entry["task"]) / (20 * 4) for side in sides)
        assert [entry["before"], entry["after"]] == pytest.approx([before, after])
        assert entry["difference"]["mean"] == pytest.approx(after - before)


def test_intervals_match_the_evaluation_of_the_run(folder):
    """train.evaluate computes the intervals of summary.json from its own counts."""
    for recorded in evaluations(read_run(folder)):
        rows = groups(folder, f"evaluation_{recorded.steps:06d}")
        prompts = [SimpleNamespace(id=g["prompt_id"], verifier="exact", task=g["task"]) for g in rows]
        answers = [
            PromptResult(p, i, g["rollouts"], g["right"], g["reward"], g["tokens"], [])
            for i, (p, g) in enumerate(zip(prompts, rows, strict=True))
        ]
        summary = summarize(answers, len(rows), EvaluateConfig(), seed=7)
        assert recorded.passes[1] == summary.pass_at_1.as_dict()
        assert {k: p["mean"] for k, p in recorded.passes.items()} == pytest.approx(summary.pass_at_k)
        assert recorded.tasks == {name: p.as_dict() for name, p in summary.by_task.items()}


def test_tasks_and_spread(folder, run):
    steps = [groups(folder, f"step_00000{n}") for n in range(4)]
    for name in TASKS:
        shares = [[g["right"] / 32 for g in rows if g["task"] == name] for rows in steps]
        assert run["by_task"]["tasks"][name] == pytest.approx([sum(v) / len(v) for v in shares])
    assert run["by_task"]["step"] == [1, 2, 3, 4]
    assert run["by_task"]["distinct"] == pytest.approx([sum(g["distinct"] for g in rows) / 6 for rows in steps])

    # Four samples of held-out prompts are counted one by one, 32 of training prompts in tenths.
    held_out = run["spread"]["evaluation"]
    assert held_out["numbers"] == [0, 4]
    assert (held_out["of"], held_out["bins"]) == (4, ["0", "1", "2", "3", "4"])
    for number, counts in zip(held_out["numbers"], held_out["counts"], strict=True):
        rights = [g["right"] for g in groups(folder, f"evaluation_00000{number}")]
        assert counts == [rights.count(i) for i in range(5)]
    trained = run["spread"]["step"]
    assert trained["numbers"] == [1, 4]
    for rows, counts in zip((steps[0], steps[3]), trained["counts"], strict=True):
        named = dict(zip(trained["bins"], counts, strict=True))
        assert sum(counts) == len(rows)
        assert named["30-40%"] == sum(0.3 <= g["right"] / 32 < 0.4 for g in rows)
        assert named["none"] == sum(g["right"] == 0 for g in rows)


HALF = [4] * 20 + [0] * 20  # right samples of 40 prompts with 4 samples each
NOTHING = {"steps": 0, "evaluations": (), "record_rollouts": False, "write_run_json": False, "ended": False}


@pytest.mark.parametrize(
    ("options", "tone", "headline"),
    [
        # pass@1 stays at 50%. In the third row it stays at 75% and pass@4 at 100%, but it changes in both tasks.
        ({"prompts": 40, "rights": ([2] * 40, HALF)}, "bad", "It got worse: pass@4 fell from 100.0% to 50.0%, -50.0"),
        ({"prompts": 40, "rights": ([1] * 40, HALF)}, "unclear", "Mixed result: pass@1 rose from 25.0% to 50.0%"),
        ({"prompts": 40, "rights": ([3] * 40, [4, 2] * 20)}, "unclear", "Mixed result: pass@1 (gcd) rose from 75.0%"),
        ({"rates": (0.0, 0.0), "rewards": (-3.0, -4.5)}, "bad", "It got worse: mean reward fell from -3 to -4.5, -1.5"),
        ({"rates": (0.0, 0.0), "rewards": (0.2, 0.6)}, "good", "It learned: mean reward rose from 0.2 to 0.6, +0.4"),
        ({"rates": (0.0, 0.0), "rewards": (2.0, 2.0)}, "unclear", "No change beyond chance: mean reward went from 2 "),
        ({"prompts": 40}, "good", "It learned: pass@1 rose from"),
        ({"rates": (0.5, 0.5), "evaluations": (0, 1)}, "unclear", "No change beyond chance: pass@1 went from"),
        ({"record_rollouts": False}, "unclear", "pass@1 went from"),
        ({"evaluations": ()}, "unclear", "Learning was not measured: there is no held-out"),
        ({"evaluations": (0,)}, "unclear", "Learning was not measured: the only evaluation"),
        ({"rates": (0.0, 0.0), "ended": False}, "bad", "No change beyond chance: pass@1 went from 0.0% to 0.0%"),
        (NOTHING, "unclear", "Learning was not measured"),
    ],
)
def test_verdicts(tmp_path, options, tone, headline):
    run = content([make_run(tmp_path / "run", **options)])[0]["runs"][0]
    assert run["verdict"]["tone"] == tone
    assert run["verdict"]["headline"].startswith(headline)
    if headline.endswith("from 0.0% to 0.0%"):
        assert "none right" in run["verdict"]["findings"][0]


def test_partial_rewards_are_compared_too(tmp_path):
    """The reward of every prompt rises by 0.4."""
    run = content([make_run(tmp_path / "a", prompts=40, rewards=(-0.2, 0.2))])[0]["runs"][0]
    assert run["verdict"]["headline"].startswith("It learned: pass@1 rose from")
    assert "mean reward rose from -0.2 to 0.2, +0.4 (95% interval +0.4 to +0.4)" in run["verdict"]["details"][0]
    assert run["change"]["reward"]["before"] == pytest.approx(-0.2)


def test_a_metric_that_fell_is_a_finding_with_the_answers_counted_in_the_files(tmp_path):
    folder = make_run(tmp_path, prompts=40, rights=([2] * 40, HALF))
    rows = [{"kept_share": 1.0, "entropy": entropy} for entropy in (0.75, 0.125)]
    changed = change_of_run(folder)
    sentences = findings(Config(), rows, before=None, after=None, weights_differ=True, changed=changed)
    sentence = sentences["got worse"]
    ends = [sum(g["distinct"] for g in groups(folder, f"evaluation_00000{n}")) / 40 for n in (0, 4)]
    assert "fell from 100.0% to 50.0%, -50.0 points (95% interval " in sentence
    assert "distinct answers per prompt {:.1f} -> {:.1f}; entropy 0.75 -> 0.125".format(*ends) in sentence


@pytest.mark.parametrize(("template", "shared"), [("{prompt}=", "4+4=8\n9+9=18\n"), ("1+1=2, {prompt}=", "")])
def test_the_list_of_prompts_shows_what_differs(tmp_path, template, shared):
    folder = make_run(tmp_path, prompts=3, evaluations=(0,))
    (folder / "run.json").write_text(json.dumps({"config": {"data": {"template": template}}, "starts": []}))
    table = pq.read_table(path := folder / "rollouts" / "evaluation_000000.groups.parquet")
    texts = [template.format(prompt=f"{shared}{i}+5") for i in range(3)]
    pq.write_table(table.set_column(table.column_names.index("prompt"), "prompt", [texts]), path)
    embedded = embed(read_run(folder), set(), 1_000_000)
    (listed,) = opened([embedded["chunks"][embedded["moments"][0]["list"]]])
    assert [g["excerpt"] for g in listed] == ["0+5=", "1+5=", "2+5="]


def test_several_runs_are_paired_by_prompt(tmp_path):
    folders = [make_run(tmp_path / "x" / "a", prompts=40), make_run(tmp_path / "y" / "a", prompts=40, rates=(0.3, 0.9))]
    page = content(folders)[0]
    assert [r["name"] for r in page["runs"]] == ["x/a", "y/a"]
    last = [groups(folder, "evaluation_000004") for folder in folders]
    gap = sum(b["right"] - a["right"] for a, b in zip(*last, strict=True)) / (40 * 4)
    assert page["against"][1]["passes"][0]["difference"]["mean"] == pytest.approx(gap)
    assert page["against"][0]["passes"][0]["difference"]["mean"] == 0


def opened(texts: list[str]) -> list:
    return [json.loads(zlib.decompress(base64.b64decode(text))) for text in texts]


def test_the_page_contains_the_recorded_rollouts(folder):
    run = read_run(folder)
    embedded = embed(run, set(), 1_000_000)
    chunks = opened(embedded["chunks"])
    assert (embedded["moments"][0]["kind"], embedded["moments"][0]["number"]) == ("evaluation", 4)
    assert embedded["held"] == embedded["recorded"]
    for index, moment in enumerate(embedded["moments"]):
        name = f"{moment['kind']}_{moment['number'] - (moment['kind'] == 'step'):06d}"  # Files count steps from 0.
        recorded = pq.read_table(folder / "rollouts" / f"{name}.rollouts.00000.parquet").to_pylist()
        assert [g["right"] for g in chunks[moment["list"]]] == [g["right"] for g in groups(folder, name)]
        for g in groups(folder, name):
            expected = [r for r in recorded if r["group"] == g["group"]]
            assert (f"{index}/{g['group']}" in embedded["where"]) == bool(expected)
            if expected:
                shown = chunks[embedded["where"][f"{index}/{g['group']}"]]["rollouts"]
                assert [(r["text"], r["turns"]) for r in shown] == [(r["text"], r["turns"]) for r in expected]
                advantages = [a and pytest.approx(a, rel=1e-3) for a in (r["advantage"] for r in expected)]
                assert [r["advantage"] for r in shown] == advantages


@pytest.mark.parametrize("max_bytes", [0, 700, 8000])
def test_rollouts_fit_into_the_size_limit(folder, max_bytes):
    """Newly solved prompts come first."""
    run = read_run(folder)
    solved = {p["id"] for p in content([folder])[0]["runs"][0]["change"]["solved"]}
    embedded = embed(run, solved, max_bytes)
    texts = [json.dumps(embedded[name], separators=(",", ":")) for name in ("chunks", "where", "moments")]
    assert sum(map(len, texts)) <= max_bytes + 6  # + 6: the brackets of the three texts
    assert embedded["held"]["rollouts"] <= embedded["recorded"]["rollouts"]
    if embedded["where"]:
        lists = opened([embedded["chunks"][m["list"]] for m in embedded["moments"]])
        first_group = next(iter(embedded["where"])).split("/")
        assert lists[int(first_group[0])][int(first_group[1])]["prompt_id"] in solved


def test_right_and_wrong_rollouts_are_selected():
    rollouts = [{"sibling": i, "right": i >= 29, "tokens": 10} for i in range(32)]
    assert [r["sibling"] for r in select_siblings(rollouts, 16)] == [*range(13), 29, 30, 31]
    assert [r["sibling"] for r in select_siblings(rollouts[:4], 16)] == [0, 1, 2, 3]
    assert [r["sibling"] for r in select_siblings(rollouts, 16, tokens=15)] == [0, 29]


def row(step: int, rollouts: float, kept: float | None, tokens: float, generate: float, total: float, **time: float):
    times = {"generate": generate, "step": total, **time}
    return {"step": step, "rollouts": rollouts, "kept_share": kept, "response_tokens": tokens, "time": times}


# The second step kept no group. In the third step no group closed.
ROWS = [
    row(0, rollouts=128.0, kept=0.5, tokens=10.0, generate=2.0, total=4.0, **{"kv_cache/prompt_hits": 0.75}),
    row(1, rollouts=128.0, kept=0.0, tokens=20.0, generate=4.0, total=5.0),
    row(2, rollouts=64.0, kept=None, tokens=10.0, generate=2.0, total=3.0, **{"kv_cache/prompt_hits": 0.0}),
]


def recorded_run(rows: list[dict]) -> RecordedRun:
    return RecordedRun(Path("x"), rows, summary={}, config={}, starts=[], moments=[])


def spent(*evaluated: tuple[int, float]) -> list[dict]:
    """Return the rows of `checkpoints` for ROWS and evaluations, which are given as (steps, pass@1)."""
    passes = [RecordedEvaluation(steps, {}, passes={1: {"mean": mean}}, tasks={}) for steps, mean in evaluated]
    return checkpoints(recorded_run(ROWS), passes)


def test_seconds_and_rollouts_before_each_evaluation():
    table = spent((0, 0.2), (2, 0.4), (3, 0.5))
    values = [(r["steps"], r["seconds"], r["rollouts"], r["kept"]) for r in table]
    assert values == [(0, 0, 0, 0), (2, 9, 256, 64), (3, 12, 320, 64)]


def test_time_to_a_target():
    seconds, values = [0.0, 10.0, 20.0, 40.0], [0.1, 0.3, 0.2, 0.6]
    targets = {0.05: 0.0, 0.2: 5.0, 0.3: 10.0, 0.4: 30.0, 0.6: 40.0}
    assert [first_reached(seconds, values, target) for target in targets] == pytest.approx([*targets.values()])
    assert first_reached(seconds, values, 0.61) is None
    # The first run goes from 0.2 to 0.4 in 9 s, the second in 12 s to 0.3, the third has no evaluation.
    times = times_to_target([spent((0, 0.2), (2, 0.4)), spent((0, 0.2), (3, 0.3)), []])
    assert [entry and entry["target"] for entry in times] == [0.4, 0.3, None]
    assert times[0]["runs"] == [{"seconds": 9.0, "rollouts": 256.0}, None, None]
    half = {"seconds": pytest.approx(4.5), "rollouts": pytest.approx(128)}
    assert times[1]["runs"] == [half, {"seconds": 12.0, "rollouts": 320.0}, None]


def test_generation_speed():
    speed = generation(recorded_run(ROWS))
    assert speed == {
        "rollouts_per_s": 320 / 8,
        "tokens_per_s": (1280 + 2560 + 640) / 8,
        "share_of_step": 8 / 12,
        "end_to_end_per_s": 320 / 12,
        "kept_per_s": 64 / 12,
        "prompt_hits": pytest.approx(0.75 * 128 / 192),
    }
    assert generation(recorded_run([])) is None
