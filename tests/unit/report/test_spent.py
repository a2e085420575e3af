"""Tables of what was spent, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import make_run

from megatron_brorl.report.content import content
from megatron_brorl.report.held_out import Evaluation
from megatron_brorl.report.run_files import RunFiles
from megatron_brorl.report.spent import checkpoints, generation, reached, times_to_target


def run_of(rows: list[dict], n: int = 16, dtype: str = "bf16") -> RunFiles:
    return RunFiles(Path("x"), rows, {}, {"rollout": {"n": n, "dtype": dtype}}, [], [])


def row(
    step: int, rollouts: float, kept: float | None, tokens: float, generate: float, whole: float, **time: float
) -> dict:
    times = {"generate": generate, "step": whole, **time}
    return {"step": step, "rollouts": rollouts, "kept_share": kept, "response_tokens": tokens, "time": times}


# Three steps: the second kept nothing and the third has no figure of kept groups (none closed).
ROWS = [
    row(0, 128.0, 0.5, 10.0, 2.0, 4.0, **{"kv_cache/rows": 64.0, "kv_cache/prompt_hits": 0.75}),
    row(1, 128.0, 0.0, 20.0, 4.0, 5.0, **{"kv_cache/rows": 32.0}),
    row(2, 64.0, None, 10.0, 2.0, 3.0, **{"kv_cache/prompt_hits": 0.0}),
]


def evaluated(steps: int, pass_at_1: float, pass_at_8: float | None = None) -> Evaluation:
    passes = {1: {"mean": pass_at_1, "low": pass_at_1 - 0.1, "high": pass_at_1 + 0.1}}
    return Evaluation(steps, {}, passes | ({} if pass_at_8 is None else {8: {"mean": pass_at_8}}), {})


def test_what_was_spent_by_each_evaluation():
    found = checkpoints(run_of(ROWS), [evaluated(0, 0.2), evaluated(2, 0.4, 0.7), evaluated(3, 0.5)])
    assert [(r["steps"], r["seconds"], r["rollouts"], r["kept"]) for r in found] == [
        (0, 0, 0, 0),
        (2, 9, 256, 64),
        (3, 12, 320, 64),
    ]
    assert found[1]["passes"] == [{"k": 1, "mean": 0.4, "low": pytest.approx(0.3), "high": 0.5}, {"k": 8, "mean": 0.7}]


def test_the_first_place_at_a_target():
    places, heights = [0.0, 10.0, 20.0, 40.0], [0.1, 0.3, 0.2, 0.6]
    assert reached(places, heights, 0.05) == 0.0  # from the start
    assert reached(places, heights, 0.2) == pytest.approx(5.0)
    assert reached(places, heights, 0.3) == 10.0  # and lost again
    assert reached(places, heights, 0.4) == pytest.approx(30.0)
    assert reached(places, heights, 0.6) == 40.0
    assert reached(places, heights, 0.61) is None
    assert reached([], [], 0.0) is None


def test_time_to_a_target():
    """The first run goes from 0.2 to 0.4 in 9 s, the second in 12 s to 0.3, the third has no evaluation."""
    first = checkpoints(run_of(ROWS), [evaluated(0, 0.2), evaluated(2, 0.4)])
    second = checkpoints(run_of(ROWS), [evaluated(0, 0.2), evaluated(3, 0.3)])
    found = times_to_target([first, second, []])
    assert [to and to["target"] for to in found] == [0.4, 0.3, None]
    assert found[0]["runs"] == [{"seconds": 9.0, "rollouts": 256.0}, None, None]
    # Half of the way of the first run: 4.5 of 9 s, 128 of 256 rollouts.
    assert found[1]["runs"] == [
        {"seconds": pytest.approx(4.5), "rollouts": pytest.approx(128)},
        {"seconds": 12.0, "rollouts": 320.0},
        None,
    ]


def test_generation_by_itself():
    found = generation(run_of(ROWS))
    assert found["rollouts_per_s"] == 320 / 8
    assert found["tokens_per_s"] == (1280 + 2560 + 640) / 8
    assert (found["end_to_end_per_s"], found["kept_per_s"], found["share_of_step"]) == (320 / 12, 64 / 12, 8 / 12)
    # 1,280 tokens in 20 turns and 2,560 in 80: 3,840 over 100 turns; bf16 reads 2 bytes for 2 operations per row.
    assert found["rows"] == pytest.approx(38.4)
    assert found["intensity"] == pytest.approx(38.4)
    assert generation(run_of(ROWS, dtype="fp32"))["intensity"] == pytest.approx(19.2)
    assert found["prompt_hits"] == pytest.approx(0.75 * 128 / 192)  # 64 rollouts that found nothing beside 128
    assert found["prompt_shared"] == 15 / 16


def test_what_is_not_known_is_left_open():
    assert generation(run_of([])) is None
    assert generation(run_of([row(0, 0.0, None, 0.0, 0.0, 1.0)])) is None
    bare = generation(RunFiles(Path("x"), [row(0, 64.0, 1.0, 10.0, 2.0, 3.0)], {}, {}, [], []))
    assert [bare[name] for name in ("rows", "intensity", "prompt_hits", "prompt_shared")] == [None] * 4


def test_a_comparison_has_them(tmp_path):
    """Of runs as `brorl train` leaves them: steps of 5, 6, 7 and 8 s, 6 groups each."""
    folders = [make_run(tmp_path / "a", n=32), make_run(tmp_path / "b", n=8, rates=(0.1, 0.9))]
    found, _, _ = content(folders)
    for run, n in zip(found["runs"], (32, 8), strict=True):
        table = run["checkpoints"]
        assert [(r["steps"], r["seconds"], r["rollouts"]) for r in table] == [
            (0, 0, 0),
            (2, 11, 12 * n),
            (4, 26, 24 * n),
        ]
        assert [r["passes"][0]["mean"] for r in table] == [e["passes"][0]["mean"] for e in run["evaluations"]]
        assert run["generation"]["rollouts_per_s"] == pytest.approx(24 * n / 8)  # sampling takes 2 s of each step
    ends = [run["checkpoints"][-1]["passes"][0]["mean"] for run in found["runs"]]
    assert [to["target"] for to in found["time_to"]] == ends
    assert found["time_to"][ends.index(max(ends))]["runs"][ends.index(min(ends))] is None
