"""Check that the package reads every configuration key, and that there are not more of them."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_brorl
from megatron_brorl.config.load import keys, table_of

PACKAGE = Path(megatron_brorl.__file__).parent
LEAVES = [path for path, schema in keys().items() if table_of(schema) is None]


def test_there_are_at_most_150_keys():
    assert len(LEAVES) <= 150


def test_the_package_reads_every_key():
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "config"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [path for path in LEAVES if path.rpartition(".")[2] not in read] == []
