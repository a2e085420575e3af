"""Check that the package reads every configuration key, and that an example or a test sets it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_brorl
from megatron_brorl.config.load import keys, table_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(megatron_brorl.__file__).parent
ROOT = Path(__file__).parents[3]
LEAVES = [path for path, schema in keys().items() if table_of(schema) is None]


def read_attributes() -> set[str]:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "config"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def paths(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        inner, index = (value[0], "[]") if isinstance(value, list) and value else (value, "")
        yield prefix + name
        if isinstance(inner, dict):
            yield from paths(inner, f"{prefix}{name}{index}.")


def test_there_are_at_most_150_keys():
    assert len(LEAVES) <= 150


def test_the_package_reads_every_key():
    read = read_attributes()
    assert [path for path in LEAVES if path.rpartition(".")[2] not in read] == []


def test_an_example_or_a_test_sets_every_key():
    examples = [tomllib.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("examples/**/*.toml")]
    used = {path for table in examples for path in paths(table)}
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.sh")]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in files)

    def in_a_text(path: str) -> bool:
        name = re.escape(path.rpartition(".")[2])
        return re.search(rf'{re.escape(path)}\b|"{name}": |\b{name}=|\b{name} = ', texts) is not None

    assert [path for path in LEAVES if path not in used and not in_a_text(path)] == []
