"""The glossary against the code: every entry is written somewhere. Runs of other tests are held to it as well."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import glossary_faults

from megatron_brorl.boards import tag
from megatron_brorl.glossary.form import PLACES
from megatron_brorl.glossary.tables import OF_A_RUN, OF_A_STEP, OF_TIME, SECTIONS, find

PACKAGE = Path(__file__).parents[2] / "megatron_brorl"
# What writes figures, or has the fields that they are named by.
SOURCES = [
    *sorted((PACKAGE / "train").glob("*.py")),
    *(PACKAGE / folder / f"{name}.py" for folder, name in [("cli", "train"), ("algo", "estimators")]),
    *(PACKAGE / "theory" / f"{name}.py" for name in ("unsampled_mass", "token_level")),
]
EXAMPLES = {"k": "8", "h": "8", "phase": "train", "when": "after", "end": "low", "name": "x"}
EXAMPLES["side"] = "low"
NAMES = [f.name for section in SECTIONS for f in section.figures]


def words_and_templates() -> tuple[set[str], list[re.Pattern[str]]]:
    """Strings and names of fields in the sources, and what their f-strings match."""
    words, templates = set(), []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words.add(node.target.id)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else None for v in node.values]
                if any(part and re.search("[a-z]{3}", part) for part in parts):
                    templates.append(re.compile("".join("(.+)" if p is None else re.escape(p) for p in parts)))
    return words, templates


WORDS, TEMPLATES = words_and_templates()


def written(name: str) -> bool:
    """Whether the sources have this name, or an f-string with words of theirs that makes it."""
    if name in WORDS or name.isdigit():
        return True
    return any(found and all(map(written, found.groups())) for found in (t.fullmatch(name) for t in TEMPLATES))


def example(name: str) -> str:
    """A name as a run may have it."""
    return re.sub(r"\{(\w+)\}", lambda m: EXAMPLES[m[1]], name)


def test_what_the_glossary_has_is_written():
    """Part by part where it goes into an object; what a run names itself is not in the code."""
    parts = {name: [part for part in name.split(".") if part != "{name}"] for name in NAMES}
    assert [name for name in NAMES if not all(written(example(part)) for part in parts[name])] == []


def test_a_name_that_nobody_writes_would_be_found():
    assert written("pass_at_8")
    assert written("theory_hold_out/u_pos2_8_low")
    for stale in ("kept_shares", "theory_exact/unseen", "theory_hold_out/u_pos3_8", "ranks/trains_idle"):
        assert not written(stale), stale


def test_every_name_stands_once_and_for_itself():
    assert set(EXAMPLES) == set(PLACES)
    for sections in (OF_A_STEP, OF_TIME, OF_A_RUN):
        for section in sections:
            for figure in section.figures:
                name = example(figure.name)
                cells = (figure.name, figure.unit, figure.range, figure.meaning, figure.bad)
                assert not re.search(r"[|\n]", "".join(cells))  # of a table
                assert figure.meaning
                found = find(name, sections)
                assert found
                assert found[1].name == figure.name
                if section.group:
                    assert tag(name, section.timed).split("/")[0] == section.group


def test_faults_are_found():
    row = {
        "step": 0,
        "kept_share": 0.5,
        "lr": None,
        "nonfinite": ["lr"],
        "time": {"step": 1.0, "ranks/train_idle": 0.0},
    }
    assert glossary_faults.of_row(row) == []
    row |= {"kept_share": 1.5, "rewards": 1.0, "refit_again": 2.0, "time": {"reward": 1.0, "step": -1.0}}
    assert [fault.partition(":")[0] for fault in glossary_faults.of_row(row)] == [
        "kept_share = 1.5",
        "rewards",
        "refit_again = 2.0",
        "reward",
        "step = -1.0",
    ]
    summary = {"steps": 3, "before": None, "after": {"pass_at_1": {"mean": 2.0}, "by_task": {"a.b": 0.5}}, "more": {}}
    assert [fault.partition(":")[0] for fault in glossary_faults.of_summary(summary)] == [
        "after.pass_at_1.mean = 2.0",
        "more",
    ]
