from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_brorl.data.prepare import files
from megatron_brorl.data.prepare.files import files_of, raw_rows, sha256
from megatron_brorl.errors import UserError

ROWS: list[dict[str, Any]] = [{"a": f"x{i}é\u2028", "b": {"c": [i, None]}} for i in range(700)]
NUMBERED = list(enumerate(ROWS, start=1))


def arrow_folder(path: Path, parts: int) -> Path:
    """As datasets' save_to_disk writes: streams, listed in state.json."""
    path.mkdir(parents=True)
    size = -(-len(ROWS) // parts)
    names = []
    for part in range(parts):
        table = pyarrow.Table.from_pylist(ROWS[part * size : (part + 1) * size])
        names.append(f"data-{part:05}-of-{parts:05}.arrow")
        with pyarrow.OSFile(str(path / names[-1]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


def test_every_form_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (tmp_path / "f.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    (tmp_path / "indented.json").write_text(json.dumps(ROWS, indent=2))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet", row_group_size=90)
    for name in ("f.jsonl", "lines.json", "list.json", "indented.json", "f.parquet"):
        assert list(raw_rows(tmp_path / name)) == NUMBERED, name
    monkeypatch.setattr(files, "_CHUNK", 7)  # rows longer than what is read at a time
    assert list(raw_rows(tmp_path / "list.json")) == NUMBERED

    (tmp_path / "f.csv").write_text('Question,Correct Answer\r\n"two\nlines, one",4\r\nx,"say ""y"""\r\n')
    assert [row for _, row in raw_rows(tmp_path / "f.csv")] == [
        {"Question": "two\nlines, one", "Correct Answer": "4"},
        {"Question": "x", "Correct Answer": 'say "y"'},
    ]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    folder = arrow_folder(tmp_path / "one" / "train", 3)
    found = files_of(folder)
    assert [path.name for path in found] == [f"data-{i:05}-of-00003.arrow" for i in range(3)]
    assert [row for path in found for _, row in raw_rows(path)] == ROWS
    (tmp_path / "one" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match=r"one: has the splits train; give the folder of one"):
        files_of(tmp_path / "one")
    with pytest.raises(UserError, match=r"without state\.json was not written by save_to_disk"):
        files_of(tmp_path)
    (folder / "state.json").write_text("[]")
    with pytest.raises(UserError, match=r"state\.json: does not list its _data_files"):
        files_of(folder)


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    for name, content, message in (
        ("f.jsonl", b'{"a": 1}\n{"a": \n', "f.jsonl:2: not valid JSON: "),
        ("f.json", b'[{"a": 1}, {"a": ', "f.json:2: not valid JSON: "),
        ("f.json", b'[{"a": 1}', "f.json:2: not valid JSON: "),
        ("f.jsonl", b"\xff\xfe", "f.jsonl: not UTF-8"),
        ("f.parquet", b"x", "f.parquet: not a valid .parquet file"),
        ("f.arrow", b"x", "f.arrow: not a valid .arrow file"),
        ("f.txt", b"x", "f.txt: unknown kind of data file; known: .jsonl, .json, .parquet, .arrow, .csv"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as e:
            list(raw_rows(tmp_path / name))
        assert str(e.value).startswith(f"{tmp_path}/{message}")
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="no such data file"):
        files_of(tmp_path / "none.jsonl")


def test_checksum(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # more than a part
    (tmp_path / "f").write_bytes(content)
    assert sha256(tmp_path / "f") == hashlib.sha256(content).hexdigest()
