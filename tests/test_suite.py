"""What pytest collects of the suite, and what `make test` keeps of a table of cases."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
from dist.layouts import covering

TESTS = Path(__file__).parent


def test_pytest_goes_into_every_folder_with_tests(pytestconfig):
    """Its default leaves out any folder called dist or build."""
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parent.parts}
    assert {"dist", "unit", "e2e"} <= folders
    assert not [f for f in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(f, pattern)]


@pytest.mark.parametrize(
    ("rows", "columns", "every"), [(8, 8, 0), (5, 8, 0), (7, 6, 3), (31, 2, 0), (1, 4, 0), (7, 6, 6)]
)
def test_every_layout_and_every_case_is_kept(rows, columns, every):
    pairs = covering([(i,) for i in range(rows)], range(columns), every)
    assert len({tuple(p.values) for p in pairs}) == len(pairs) == rows * columns
    kept = [p.values for p in pairs if not p.marks]
    assert {i for i, _ in kept} == set(range(rows))
    assert {j for _, j in kept} == set(range(columns))
    assert len(kept) < len(pairs) or min(rows, columns) == 1


def test_slow_cases_are_cases():
    """A test that is renamed leaves its line of slow.txt."""
    for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines():
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS.parent / file).read_text(encoding="utf-8"), line
