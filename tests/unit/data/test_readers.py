"""Check that all formats give the same rows, and that a key with null counts as a missing key."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_brorl.config.schema import ColumnsConfig, DataConfig
from megatron_brorl.data.chat import conversation
from megatron_brorl.data.prompts import Row, RowFormat, read_rows
from megatron_brorl.data.readers import parse_row, raw_rows, without_nulls
from megatron_brorl.errors import UserError

USER = {"role": "user", "content": "1+1"}
STDIN = {"tests": [{"input": "1 2", "output": "3"}]}
CALL = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}, {"args": [2, 2], "expected": 4}]}
POWERS = [{"args": [2], "kwargs": {"base": 3}, "expected": 8}, {"args": [2], "kwargs": {"top": 4}, "expected": 16}]
KWARGS = {"function": "power", "tests": POWERS}
NONE = {"function": "first", "tests": [{"args": [[]], "expected": None}, {"args": [[7]], "expected": 7}]}
ASSERTS = {"function": "add", "asserts": ["assert add(1, 2) == 3"]}
SUM = {"source_dataset": "chain_sum", "difficulty": {"terms": 2}}
GYM = {"source_dataset": "chain_sum", "entry": {"question": "1+1", "answer": "2", "metadata": SUM}}
IFEVAL = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "mode": "loose"}
WORDS = {
    "instruction_id_list": ["length_constraints:number_words", "detectable_format:number_bullet_lists"],
    "kwargs": [{"relation": "at least", "num_words": 3}, {"num_bullets": 2}],
    "min_words": 2,
    "all": True,
}


def rows(verifier: str, *metadata: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "verifier": verifier, "metadata": m} for i, m in enumerate(metadata)]


# Rows with different keys, so that Parquet adds keys with null to every row.
FILES: dict[str, list[dict[str, Any]]] = {
    "a function that returns None": rows("code", NONE, STDIN, ASSERTS),
    "keyword arguments of two names": rows("code", KWARGS),
    "all forms of code": rows("code", STDIN, ASSERTS, {**CALL, "tolerance": 1e-6}, {**STDIN, "language": "python"}),
    "instructions": rows("ifeval", IFEVAL, WORDS),
    "all verifiers": [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b", "verifier": "code", "metadata": STDIN},
        {"prompt": "c", "verifier": "code", "metadata": ASSERTS},
        {"prompt": "d", "verifier": "ifeval", "metadata": WORDS},
        {"prompt": "e", "verifier": "choice", "metadata": {"choices": ["a", "b"]}, "answer": "A"},
        {"prompt": "f", "verifier": "reasoning_gym", "metadata": GYM},
    ],
    "top-level keys": [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b", "answer": "2", "target": "so 2", "id": "x"},
        {"prompt": "c", "answer": "3", "metadata": {"k": 1}},
        {"prompt": "e", "target": "5"},
    ],
    "messages": [
        {"prompt": [USER], "answer": "2"},
        {"prompt": [{"role": "system", "content": "s"}, USER], "metadata": {"k": 1}, "target": "t"},
        {"prompt": [USER, {"role": "assistant", "content": "three"}]},
    ],
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    # from_pylist uses only the columns of the first row.
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pyarrow.parquet.write_table(table, path)
    return path


def content(parsed: list[Row]) -> list[tuple[Any, ...]]:
    """Return the content of rows without the name of their file."""
    return [(r.prompt, r.answer, r.target, r.verifier, r.id.split(":")[-1], r.metadata) for r in parsed]


@pytest.mark.parametrize("name", FILES)
def test_json_parquet_and_written_nulls_give_equal_rows(tmp_path, name):
    rows = FILES[name]
    expected = content(read_rows(jsonl(tmp_path / "f.jsonl", rows)))
    file = parquet(tmp_path / "f.parquet", rows)
    filled = pyarrow.parquet.read_table(file).to_pylist()
    assert content(read_rows(file)) == expected
    if name != "keyword arguments of two names":  # null in JSON is an argument there
        assert content(read_rows(jsonl(tmp_path / "g.jsonl", filled))) == expected

    # Metadata as a JSON string.
    strings = [{**row, "metadata": json.dumps(row.get("metadata"))} for row in rows]
    assert content(read_rows(parquet(tmp_path / "s.parquet", strings))) == expected


def test_types_of_arrow(tmp_path):
    """Maps, times and decimals become JSON values, and null in a column counts as a missing key."""
    lists = pyarrow.large_list(pyarrow.struct([("a", pyarrow.int8()), ("b", pyarrow.int8())]))
    types = {
        "map": pyarrow.map_(pyarrow.string(), pyarrow.int64()),
        "word": pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
        "time": pyarrow.timestamp("us"),
        "price": pyarrow.decimal128(6, 2),
        "list": lists,
    }
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    row = [[("x", 1), ("y", None)], "w", when, decimal.Decimal("2.50"), [{"a": 1, "b": None}, {"a": None, "b": 2}]]
    values = [dict(zip(types, row, strict=True)), dict.fromkeys(types), None]
    columns = {
        "prompt": pyarrow.array(["a", "b", "c"], pyarrow.large_string()),
        "answer": pyarrow.array(["1", "2", "1"]).dictionary_encode(),
        "verifier": pyarrow.nulls(3),
        "metadata": pyarrow.array(values, pyarrow.struct(types.items())),
        "extra": pyarrow.nulls(3, pyarrow.string()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "f.parquet")
    first = {"map": {"x": 1}, "word": "w", "time": "2026-01-02T03:04:05", "price": 2.5, "list": [{"a": 1}, {"b": 2}]}
    assert [row.metadata for row in read_rows(tmp_path / "f.parquet")] == [first, {}, {}]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": None, "answer": "1"}, "prompt"),
        (*rows("code", {"tests": None}), "metadata.tests"),
        (*rows("code", {"tests": [{"input": "1", "output": None}]}), "metadata.tests[0]"),
        (*rows("reasoning_gym", {**GYM, "entry": None}), "metadata.entry"),
        ({"prompt": [{"role": None, "content": "x"}], "answer": "1"}, "prompt[0]"),
    ],
)
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_null_in_place_of_a_needed_value_is_refused(tmp_path, row, key, kind):
    # A complete second row determines the types of the columns.
    prompt = [USER] if isinstance(row["prompt"], list) else "x"
    rows = [row, {"prompt": prompt, "answer": "1", "verifier": "exact"}]
    file = jsonl(tmp_path / "f.jsonl", rows) if kind == "json" else parquet(tmp_path / "f.parquet", rows)
    with pytest.raises(UserError, match=rf"^{file}:1: .*{re.escape(key)}"):
        read_rows(file)


def test_named_columns_may_hold_null(tmp_path):
    """Null counts as a missing value, but a column that does not exist is an error."""
    right = {"ground_truth": "1"}
    rows = [
        {"q": "a", "reward_model": right, "why": None, "metadata": STDIN, "verifier": "exact", "id": 1},
        {"q": "b", "reward_model": right, "why": "so 1", "metadata": None, "verifier": None, "id": None},
        {"q": "c", "reward_model": None, "why": None, "metadata": ASSERTS, "verifier": "code", "id": 3},
    ]
    names = ColumnsConfig(prompt="q", answer="reward_model.ground_truth", target="why")
    expected = [
        ("a", "1", None, "exact", "1", STDIN),
        ("b", "1", "so 1", "exact", "2", {}),
        ("c", None, None, "code", "3", ASSERTS),
    ]
    for file in (jsonl(tmp_path / "f.jsonl", rows), parquet(tmp_path / "f.parquet", rows)):
        assert content(read_rows(file, RowFormat(columns=names))) == expected
        for key, name, message in (
            ("target", "cot", r"data\.columns\.target = 'cot'"),
            ("answer", "reward_model.truth", r"data\.columns\.answer = 'reward_model\.truth'"),
        ):
            with pytest.raises(UserError, match=message):
                read_rows(file, RowFormat(columns=ColumnsConfig(prompt="q", **{key: name})))


def test_nulls_in_messages_are_removed(tmp_path):
    rows = [{"prompt": [{**USER, "name": None, "tool_calls": None}], "answer": "1"}]
    for file in (jsonl(tmp_path / "f.jsonl", rows), parquet(tmp_path / "f.parquet", rows)):
        (row,) = read_rows(file)
        assert conversation(row.prompt, DataConfig(chat=True), "") == [USER]


def test_arguments_of_functions_keep_their_nulls():
    """Removing null from the arguments of a function would change the test, for example a tree without children."""
    tree = {"value": 1, "left": None, "right": {"value": 2, "left": None}}
    row = {"function": "f", "tests": [{"args": [tree], "kwargs": {"root": None}, "expected": {"a": None}, "fn": None}]}
    kept = [{"args": [tree], "kwargs": {"root": None}, "expected": {"a": None}}]
    assert without_nulls({**row, "asserts": None}) == {"function": "f", "tests": kept}
    assert without_nulls(row, arrow=True)["tests"] == [
        {"args": [{"value": 1, "right": {"value": 2}}], "kwargs": {}, "expected": {}}
    ]
    gym = {"source_dataset": "t", "entry": {"metadata": {"seed": None}}, "config": {"size": None}}
    assert without_nulls(gym) == {"source_dataset": "t", "entry": {"metadata": {"seed": None}}, "config": {}}
    assert row["tests"][0]["fn"] is None  # the caller's own row is not changed


ROWS: list[dict[str, Any]] = [{"a": f"x{i}é\u2028", "b": {"c": [i, 1]}} for i in range(700)]


def test_rows_of_json_parquet_and_csv(tmp_path):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (tmp_path / "f.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=2))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet", row_group_size=90)
    for name in ("f.jsonl", "lines.json", "list.json", "f.parquet"):
        read = [(number, parse_row(raw, "")) for number, raw in raw_rows(tmp_path / name)]
        assert read == list(enumerate(ROWS, start=1)), name
    (tmp_path / "f.csv").write_text('Question,Correct Answer\r\n"two\nlines, one",4\r\nx,"say ""y"""\r\n')
    assert [row for _, row in raw_rows(tmp_path / "f.csv")] == [
        {"Question": "two\nlines, one", "Correct Answer": "4"},
        {"Question": "x", "Correct Answer": 'say "y"'},
    ]


def test_unreadable_files_are_errors_of_one_line(tmp_path):
    for name, content, message in (
        ("f.jsonl", b'{"a": 1}\n{"a": \n', "f.jsonl:2: not valid JSON"),
        ("f.json", b'[{"a": 1}, {"a": ', "f.json: not a valid .json file"),
        ("f.parquet", b"x", "f.parquet: not a valid .parquet file"),
        ("f.csv", b"a,b\n1,2\n1,2,3\n", "f.csv: not a valid .csv file: row 2 has more values than columns"),
        ("f.csv", b"\xff", "f.csv: not a valid .csv file"),
        ("f.txt", b"x", "f.txt: unknown kind of data file; use .jsonl, .json, .parquet, .csv"),
        ("none.jsonl", None, "none.jsonl: no such data file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            [parse_row(raw, f"{tmp_path / name}:{number}") for number, raw in raw_rows(tmp_path / name)]
        assert str(error.value).startswith(f"{tmp_path}/{message}")
        assert "\n" not in str(error.value)
