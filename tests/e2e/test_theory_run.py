"""A run with the live mass balance in every second step."""

from __future__ import annotations

from e2e.runs import brorl, rows


def test_mass_balance_where_due(config, warm, tmp_path):
    options = ("theory.every=2", "theory.prompts=4", "evaluate.every=0", "train.steps=4")
    done = brorl(
        "train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}", *options, figures=True
    )
    assert done.returncode == 0, done.stderr
    found = [{k for k in line if k.startswith("theory_")} for line in rows(tmp_path)]
    assert [bool(names) for names in found] == [True, False, True, False]
    assert all(0 <= line.get("theory_exact/unsampled_mass", 0) <= 1 for line in rows(tmp_path))
    assert (tmp_path / "theory.png").stat().st_size > 10_000
    done = brorl("pass-rates", tmp_path)
    assert done.returncode == 0, done.stderr
