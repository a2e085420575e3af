"""What a design declares: its hash, its faults, the runs that follow from it and their order."""

from __future__ import annotations

import itertools

import pytest
from made_study import DESIGNS, TOML, made, write
from study import order, processes, results
from study.command import check_unchanged, main, plan
from study.design import Bin, Budget, canonical, read, sha256
from study.end_points import Results
from study.warm_start import choose, split

from megatron_brorl.errors import UserError
from megatron_brorl.types import Prompt


def test_the_hash_is_of_what_is_declared(tmp_path):
    """Comments, order of keys, and defaults that are written down change nothing."""
    plain = made(tmp_path)
    other = (
        TOML.replace('question = "which?"\n', "# A comment.\norder_seed = 0\n")
        .replace("[[claims]]\nclaim", 'question = "which?"\n[[claims]]\nclaim')
        .replace("pool = 50\nsamples = 64", "samples = 64\npool = 50")
    )
    other = other.replace("seconds = 10.0", "seconds = 10\nrollouts = 0")
    assert sha256(made(tmp_path, other)) == sha256(plain)
    assert sha256(made(tmp_path, TOML.replace("lr = 1e-3", "lr = 1.1e-3", 1))) != sha256(plain)
    assert len(sha256(plain)) == 64


def test_a_changed_design_is_refused(tmp_path):
    design = made(tmp_path)
    check_unchanged(design, tmp_path / "runs")
    check_unchanged(design, tmp_path / "runs")
    changed = made(tmp_path, TOML.replace("trained = 8", "trained = 9"))
    with pytest.raises(UserError, match=r"the design has changed since its first run \(evaluation\)"):
        check_unchanged(changed, tmp_path / "runs")


def test_a_changed_design_is_one_line_of_the_command(tmp_path, monkeypatch, capsys):
    check_unchanged(made(tmp_path), tmp_path / "runs")
    path = write(tmp_path, TOML.replace("points = 2", "points = 3"))
    monkeypatch.setattr("sys.argv", ["run_study.py", str(path), str(tmp_path / "runs"), "--page"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the design has changed" in said


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("points = 2", "point = 2", "unknown key evaluation.point"),
        ("test = [1, 2, 3]", "test = [1, 9]", "share .9."),
        ("test = [1, 2, 3]", "test = [1, 1]", "counts once"),
        ("seconds = 10.0", "", "would not end"),
        ("least = 9", "least = 8", "hard and easy overlap"),
        ("most = 60", "most = 65", "within 0 to prompts.samples = 64"),
        ("k = 8", "k = 9", "trained at least k"),
        ('rate_of = "n64"', 'rate_of = "n32"', "'n32' is none of n8, n64, n8wide"),
        ('rate_of = "n64"', "", "give lr, or rate_of"),
        ('name = "n8wide"', 'name = "n8"', "declared twice"),
        ('after = "n64"', 'after = "n8wide"', "n8wide is not tested on easy"),
        ('bins = ["hard"]\n[[plateau]]', 'bins = ["medium"]\n[[plateau]]', "'medium' is none of hard, easy"),
        ("warm_starts = [1]", "warm_starts = [9]", "seeds of warm_starts.test alone"),
        ("[config.data]", "[config.optim]\nlr_for_rollouts = 64\n[config.data]", "rates are declared as they stand"),
    ],
)
def test_faults_are_named(tmp_path, before, after, message):
    assert before in TOML
    with pytest.raises(UserError, match=message) as refused:
        made(tmp_path, TOML.replace(before, after, 1))
    assert str(tmp_path / "made.toml") in str(refused.value)


def test_budgets_end_with_the_first():
    budget = Budget(seconds=10, tokens=1000)
    assert budget.used({"seconds": 5, "rollouts": 1e9, "tokens": 100}) == 0.5
    assert budget.used({"seconds": 5, "rollouts": 0, "tokens": 1200}) == 1.2


def test_every_block_has_every_arm_in_an_order_of_its_own(tmp_path):
    """Pairs of a comparison are measured one after another, and no arm has a place of its own."""
    design = made(tmp_path)
    runs = order.testing(design, {"n8": 1e-3, "n64": 2e-3})
    assert len({run.name for run in runs}) == len(runs) == 3 * (3 + 2)
    blocks = [list(of) for _, of in itertools.groupby(runs, lambda run: (run.warm_start, run.bin))]
    assert len(blocks) == 6
    expected = {"hard": {"n8", "n64", "n8wide"}, "easy": {"n8", "n64"}}
    assert all({run.arm for run in block} == expected[block[0].bin] for block in blocks)
    assert len({tuple(run.arm for run in block) for block in blocks}) > 2
    assert {run.lr for run in runs if run.arm == "n8wide"} == {2e-3}

    # The order is the design's own: the same again, and another by another seed.
    assert order.testing(design, {"n8": 1e-3, "n64": 2e-3}) == runs
    other = made(tmp_path, "order_seed = 5\n" + TOML)
    assert order.testing(other, {"n8": 1e-3, "n64": 2e-3}) != runs
    tuned = order.tuning(design)
    assert sorted((run.arm, run.lr) for run in tuned) == [("n64", 1e-3), ("n64", 2e-3), ("n8", 5e-4), ("n8", 1e-3)]
    assert len({run.name for run in tuned}) == 4


def test_places_of_an_order_are_fair():
    """Over many seeds every arm is first in a block as often as any other."""
    design = read(DESIGNS / "smoke.toml")
    firsts = dict.fromkeys(("n8", "n64"), 0)
    for seed in range(400):
        object.__setattr__(design, "order_seed", seed)
        block = [run for run in order.testing(design, {"n8": 1, "n64": 1}) if (run.warm_start, run.bin) == (1, "easy")]
        firsts[block[0].arm] += 1
    assert abs(firsts["n8"] - 200) < 40  # four standard deviations


def prompt(number):
    return Prompt(f"p{number}", f"text {number}", (1,), "a", "exact", {})


def test_prompts_are_unseen_or_in_a_bin():
    prompts = [prompt(i) for i in range(40)]
    unseen, pool = split(prompts, 10)
    assert sorted(p.id for p in unseen + pool) == sorted(p.id for p in prompts)
    assert [p.id for p in split(prompts[::-1], 10)[0]] == [p.id for p in unseen]  # by their ids alone
    right = {p.id: i for i, p in enumerate(pool)}
    hard = choose(pool, right, Bin("hard", 3, 9), 4, "here")
    assert len({p.id for p in hard}) == 4
    assert all(3 <= right[p.id] <= 9 for p in hard)
    with pytest.raises(UserError, match=r"7 prompts of the pool are right 3 to 9 times \(bin hard\), 8 were asked"):
        choose(pool, right, Bin("hard", 3, 9), 8, "here")


@pytest.mark.parametrize("path", sorted(DESIGNS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_designs_can_be_run(path):
    """Every arm's configuration is one, and the plan counts what it says."""
    design = read(path)
    for arm in design.arms:
        design.run_config([f"rollout.n={arm.n}", f"rollout.prompts={arm.prompts}", *arm.overrides])
    for stage in design.warm_starts.stages:
        design.run_config(stage)
    assert sha256(design) in plan(design)
    assert canonical(read(path)) == canonical(design)


def test_one_study_at_a_time(tmp_path, monkeypatch):
    """Neither in a directory nor on a machine; the next may begin when it is over."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with processes.alone(tmp_path / "a"):
        with pytest.raises(UserError, match="another study runs here"), processes.alone(tmp_path / "b"):
            pass
        with pytest.raises(UserError, match="a: another study writes there"), processes.alone(tmp_path / "a"):
            pass
    with processes.alone(tmp_path / "b"):
        pass


def test_results_of_another_design_are_refused(tmp_path):
    from made_study import run_rows

    design = made(tmp_path)
    rows = run_rows(design, "test", "n8", "hard", 1, [(0, 0, [1]), (10, 100, [2])])
    results.write_run(tmp_path, rows[0]["run"], rows)
    assert results.is_done(tmp_path, rows[0]["run"])
    assert results.read_all(tmp_path, sha256(design)) == rows
    assert Results(rows).of(rows[0]["run"], "trained") == rows
    with pytest.raises(UserError, match="its rows are of design"):
        results.read_all(tmp_path, "0" * 64)
    results.path_of(tmp_path, "broken").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"broken.parquet: not a table of results"):
        results.read_all(tmp_path, sha256(design))
