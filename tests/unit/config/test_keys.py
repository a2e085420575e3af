"""No key of the configuration is dead."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_brorl
from megatron_brorl.config.schema import keys

PACKAGE = Path(megatron_brorl.__file__).parent


def test_every_key_is_read_outside_of_the_configuration():
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "config"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [key for key in keys() if key.rpartition(".")[2] not in read] == []
