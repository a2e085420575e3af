"""models/te.py cannot be imported without a GPU: its calls are read from the source and held against Megatron-Core."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import megatron_brorl

SOURCE = ast.parse((Path(megatron_brorl.__file__).parent / "models" / "te.py").read_text(encoding="utf-8"))
EXTENSION = "megatron.core.extensions.transformer_engine"


def _wrappers() -> dict[str, ast.ClassDef]:
    """Classes of Megatron's file about Transformer Engine, which itself needs it to be imported."""
    spec = importlib.util.find_spec(EXTENSION)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _imports() -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(SOURCE)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_imported_name_exists():
    wrappers = _wrappers()
    for module, name in _imports().values():
        if module == EXTENSION:
            assert name in wrappers
        elif module.startswith("megatron."):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
        assert not module.startswith("transformer_engine"), "Megatron-Core stands between"


def test_every_call_fits_its_signature():
    checked = set()
    for node in ast.walk(SOURCE):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        module, name = _imports().get(node.func.id, ("", ""))
        if module.startswith("megatron.") and module != EXTENSION:
            what = getattr(importlib.import_module(module), name)
            keywords = {k.arg: None for k in node.keywords if k.arg}
            inspect.signature(what).bind_partial(*[None for _ in node.args], **keywords)
            checked.add(name)
    assert checked == {
        "get_gpt_layer_with_transformer_engine_spec",
        "PackedSeqParams",
        "TransformerBlockSubmodules",
    }


def test_attention_is_called_as_megatron_s_wrapper_takes_it():
    """super().forward(q, k, v, mask, packed_seq_params=..., **kwargs) of TEDotProductAttention."""
    wrapper = _wrappers()["TEDotProductAttention"]
    forward = next(n for n in wrapper.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    names = [a.arg for a in forward.args.args]
    assert names[:5] == ["self", "query", "key", "value", "attention_mask"]
    calls = [n for n in ast.walk(SOURCE) if isinstance(n, ast.Call) and ast.unparse(n.func) == "super().forward"]
    assert len(calls) == 1
    given = {k.arg for k in calls[0].keywords if k.arg}
    assert given == {"packed_seq_params"}
    assert given <= set(names)
